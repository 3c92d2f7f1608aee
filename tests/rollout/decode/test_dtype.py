"""Keys, values and activations have the dtype of the weights; log-probs are those of a forward in that dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from tests.rollout.decode.examples import DECODER, Decoding, backend, build, forward_logprobs, request, weights


@pytest.mark.parametrize('dtype', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_logprobs_are_those_of_a_forward_in_the_same_dtype_and_not_of_one_in_float32(dtype):
    decoding = Decoding(backend(dtype=dtype), weights(0, dtype))
    # a prefix of 4 tokens, one of none, and a rebuild half way
    requests = {0: request(0), 1: request(1, prompt=[9], temperature=0.7)}
    decoding.start(requests)
    decoding.decode(5)
    decoding.rebuild(0, 1)
    decoding.finish()
    assert {leaf.dtype for leaf in jax.tree.leaves(decoding.state)} == {jnp.dtype(dtype)}
    from_float32 = 0.0
    for name, wanted in requests.items():
        about = decoding.tokens(name), len(wanted.prompt_tokens)
        temperature = wanted.sampling.temperature
        same = forward_logprobs(*about, weights(0, dtype), temperature)
        # both round at the same places; the order of sums may move one rounding, 2^-9 of a logit of size 1
        np.testing.assert_allclose(decoding.logprobs(name), same, atol=2e-3)
        exact = forward_logprobs(*about, weights(0), temperature)
        from_float32 = max(from_float32, np.abs(decoding.logprobs(name) - exact).max())
    assert from_float32 > 1e-2


def test_logprobs_are_float32_whatever_the_weights():
    decoding = Decoding(backend(dtype='bfloat16'), weights(0, 'bfloat16'))
    decoding.start({0: request()})
    logprobs = decoding.decode(5).logprobs[:, 0]
    assert logprobs.dtype == np.float32
    assert (logprobs.astype(jnp.bfloat16).astype(np.float32) != logprobs).any()  # finer than bfloat16


@pytest.mark.parametrize(('built', 'given'), [('float32', 'bfloat16'), ('bfloat16', 'float32')])
def test_weights_of_another_dtype_are_refused(built, given):
    one = backend(dtype=built)
    with pytest.raises(
        ValueError, match=f"weights have {given} at embedding, but the backend was built with dtype='{built}'"
    ):
        one.prepare(weights(0, given))
    mixed = weights(0, built) | {'final_norm': weights(0, given)['final_norm']}
    with pytest.raises(ValueError, match=f'weights have {given} at final_norm'):
        one.prepare(mixed)


@pytest.mark.parametrize(
    ('decoder', 'dtype', 'message'),
    [
        (DECODER, 'int8', r"dtype='int8' is unknown; use one of float32, bfloat16, float16"),
        (Decoder(DECODER.config, layers='stacked'), 'float32', "decoding needs a decoder with layers='list'"),
    ],
)
def test_what_cannot_decode_is_refused(decoder, dtype, message):
    with pytest.raises(ValueError, match=message):
        build(decoder, dtype=dtype)
