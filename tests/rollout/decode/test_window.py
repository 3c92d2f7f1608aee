"""A decoder with sliding windows generates what the pass over whole packed sequences says of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention.backends import packed_attention
from tests.rollout.decode.examples import (
    DECODER,
    PARTLY_WINDOWED,
    PROMPT,
    WINDOWED,
    Decoding,
    backend,
    forward_logprobs,
    request,
    weights,
    whole_attention,
)


def as_the_learner_does(q, k, v, entry, window):
    ones, positions = jnp.ones(len(q), jnp.int32), jnp.arange(len(q))
    return packed_attention(q, k, v, ones, ones, scale=0.5, positions=positions, window=window), entry


# with a window in the second layer alone, layers of both kinds are seen
@pytest.mark.parametrize(
    'decoder',
    [
        pytest.param(WINDOWED, id='every layer', marks=pytest.mark.slow),
        pytest.param(PARTLY_WINDOWED, id='second layer'),
    ],
)
@pytest.mark.parametrize('attend', [whole_attention, as_the_learner_does], ids=['plain', 'packed'])
def test_logprobs_are_those_of_the_whole_pass_with_the_same_windows(decoder, attend):
    # windows of 4: the prompt of 9 exceeds one in the prefill, every answer does in decoding, and a rebuild in both
    decoding = Decoding(backend(decoder=decoder))
    requests = {0: request(0), 1: request(1, prompt=np.arange(10, 19), new=7), 2: request(2, prompt=[9])}
    decoding.start(requests)
    decoding.decode(5)
    decoding.rebuild(0, 2)
    decoding.finish()
    for name, wanted in requests.items():
        about = decoding.tokens(name), len(wanted.prompt_tokens)
        expected = forward_logprobs(*about, decoder=decoder, attend=attend)
        np.testing.assert_allclose(decoding.logprobs(name), expected, atol=1e-5)
        without = forward_logprobs(*about, decoder=DECODER)
        assert np.abs(decoding.logprobs(name) - without).max() > 0.05  # the window can be seen


def test_an_interruption_is_invisible_and_new_weights_need_a_rebuild():
    whole, interrupted = Decoding(backend(decoder=PARTLY_WINDOWED)), Decoding(backend(decoder=PARTLY_WINDOWED))
    for decoding in (whole, interrupted):
        decoding.start({0: request()})
        decoding.decode(5)
    interrupted.rebuild(0)
    whole.finish()
    interrupted.finish()
    assert interrupted.tokens(0) == whole.tokens(0)
    np.testing.assert_allclose(interrupted.logprobs(0), whole.logprobs(0), atol=1e-5)

    swapped = Decoding(backend(decoder=PARTLY_WINDOWED))
    swapped.start({0: request()})
    swapped.decode(5)
    swapped.params = swapped.backend.prepare(weights(1))
    swapped.rebuild(0)
    swapped.finish()
    expected = forward_logprobs(swapped.tokens(0), len(PROMPT), weights(1), decoder=PARTLY_WINDOWED)
    np.testing.assert_allclose(swapped.logprobs(0)[5:], expected[5:], atol=2e-5, rtol=1e-5)
