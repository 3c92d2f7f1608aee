"""A decoder with sliding windows generates what the pass over whole packed sequences says of it."""

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention.backends import packed_attention
from tests.rollout.decode.examples import (
    DECODER,
    PARTLY_WINDOWED,
    WINDOWED,
    Decoding,
    backend,
    forward_logprobs,
    request,
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
