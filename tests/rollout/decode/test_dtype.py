"""Keys, values and activations have the dtype of the weights; log-probs are those of a forward in that dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from tests.rollout.decode.examples import DECODER, PROMPT, Decoding, backend, build, forward_logprobs, request, weights


@pytest.mark.parametrize('dtype', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_logprobs_are_those_of_a_forward_in_the_same_dtype_and_not_of_one_in_float32(dtype):
    decoding = Decoding(backend(dtype=dtype, attention='gather'), weights(0, dtype))
    decoding.start({0: request(0, prompt=[3]), 1: request(1, prompt=[9], temperature=0.7)})
    decoding.finish()
    assert {leaf.dtype for leaf in jax.tree.leaves(decoding.state)} == {jnp.dtype(dtype)}
    same, exact = differences(decoding, dtype)
    # both round at the same places; the order of sums may move one rounding, 2^-9 of a logit of size 1
    assert same < 2e-3
    assert exact > 8e-3


def test_attention_over_blocks_rounds_at_other_places_than_that_of_whole_sequences():
    # the weights of the softmax are rounded before they are divided by their sum, in packed rows and in loops over
    # blocks: the difference is that of bfloat16 itself, not more
    decoding = Decoding(backend(dtype='bfloat16'), weights(0, 'bfloat16'))
    decoding.start({0: request(0), 1: request(1, prompt=PROMPT[::-1], temperature=0.7)})
    decoding.decode(5)
    decoding.rebuild(0, 1)
    decoding.finish()
    same, exact = differences(decoding, 'bfloat16')
    assert same < exact < 0.5


def differences(decoding, dtype):
    """Largest difference of log-probs from those of a forward in the dtype and in float32."""
    largest = np.zeros(2)
    for name, sequence in decoding.sequences.items():
        about = sequence.tokens, len(sequence.request.prompt_tokens)
        temperature = sequence.request.sampling.temperature
        for i, params in enumerate((weights(0, dtype), weights(0))):
            expected = forward_logprobs(*about, params, temperature)
            largest[i] = max(largest[i], np.abs(decoding.logprobs(name) - expected).max())
    return largest


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
