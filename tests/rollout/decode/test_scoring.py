"""Scoring passes against a plain forward pass of each sequence, and what is packed against one by one."""

import functools

import jax
import numpy as np
import pytest

from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.jax_backend import JaxScoring, Program
from areal_jax.rollout.scoring import ScoringRequest
from areal_jax.types import MOST_ALTERNATIVES
from tests.rollout.decode import examples
from tests.rollout.decode.examples import DECODER, PARTLY_WINDOWED, next_token_logits, weights

CONTEXT = 200
LENGTHS = (2, 9, 5)
ATTENTIONS = ['auto', 'gather']  # in C++ where there is a compiler, in XLA


def build(decoder=DECODER, context_tokens=CONTEXT, **changed):
    return examples.build(decoder, context_tokens=context_tokens, prefill_buckets=(8, 24), **changed)


@functools.cache
def scoring(attention='auto', decoder=DECODER, dtype='float32'):
    return JaxScoring(build(decoder, attention=attention, dtype=dtype))


@functools.cache
def prepared(attention='auto', decoder=DECODER, dtype='float32'):
    return build(decoder, attention=attention, dtype=dtype).prepare(weights(0, dtype))


def tokens_of(seed, length):
    return np.random.default_rng(seed).integers(0, 32, length).astype(np.int32)


def request(seed, length, first=1, k=1, temperature=1.0):
    temperatures = np.full(length - first, temperature, np.float32)
    return ScoringRequest(f'{seed}', tokens_of(seed, length), first, temperatures, k)


def score(requests, attention='auto', decoder=DECODER, dtype='float32'):
    backend = scoring(attention, decoder, dtype)
    program = backend.program_for([len(one.tokens) for one in requests], max(one.alternatives for one in requests))
    return backend.score(program, prepared(attention, decoder, dtype), requests)


def plain(tokens, temperature=1.0, decoder=DECODER):
    """Log-probs of the whole vocabulary behind every token but the last, by a forward pass of the sequence alone."""
    logits = np.asarray(next_token_logits(tokens, decoder=decoder), np.float64)[:-1] / temperature
    return np.asarray(jax.nn.log_softmax(logits))


@pytest.mark.parametrize('decoder', [DECODER, PARTLY_WINDOWED])
@pytest.mark.parametrize('attention', ATTENTIONS)
def test_scores_are_those_of_a_plain_forward_pass(attention, decoder):
    requests = [request(seed, length) for seed, length in enumerate(LENGTHS)]
    for one, found in zip(requests, score(requests, attention, decoder), strict=True):
        expected = plain(one.tokens, decoder=decoder)
        targets = np.take_along_axis(expected, one.tokens[1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(found.logprobs, targets, atol=2e-5)
        np.testing.assert_array_equal(found.ids[:, 0], expected.argmax(axis=1))
        np.testing.assert_allclose(found.largest[:, 0], expected.max(axis=1), atol=2e-5)


@pytest.mark.parametrize('attention', ATTENTIONS)
def test_alternatives_are_the_likeliest_in_order(attention):
    [found] = score([request(3, 12, k=MOST_ALTERNATIVES)], attention)
    expected = plain(tokens_of(3, 12))
    order = np.argsort(-expected, axis=1, kind='stable')[:, :MOST_ALTERNATIVES]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_allclose(found.largest, np.take_along_axis(expected, order, axis=1), atol=2e-5)
    own = found.ids == tokens_of(3, 12)[1:, None]
    assert own.any()
    np.testing.assert_array_equal(found.largest[own], found.logprobs[own.any(axis=1)])  # bit for bit


@pytest.mark.parametrize('attention', ATTENTIONS)
def test_packed_is_one_by_one(attention):
    requests = [request(seed, length, k=3) for seed, length in enumerate(LENGTHS)]
    together, alone = score(requests, attention), [score([one], attention)[0] for one in requests]
    exact = attention == 'auto' and library.is_available()
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        for a, b in ((one.logprobs, other.logprobs), (one.largest, other.largest)):
            np.testing.assert_allclose(a, b, atol=0 if exact else 1e-5)


def test_only_what_is_asked_for_is_scored_at_its_temperature():
    tokens = tokens_of(7, 10)
    temperatures = np.array([1.0, 0.0, 0.5], np.float32)  # 0 counts as 1
    [found] = score([ScoringRequest('a', tokens, 7, temperatures, 0)])
    expected = [plain(tokens, t)[i - 1, tokens[i]] for i, t in ((7, 1.0), (8, 1.0), (9, 0.5))]
    np.testing.assert_allclose(found.logprobs, expected, atol=2e-5)
    assert found.ids.shape == found.largest.shape == (3, 0)


def test_a_sequence_as_long_as_the_context_is_scored():
    [found] = score([request(1, CONTEXT)])
    assert found.logprobs.shape == (CONTEXT - 1,)
    assert scoring().program_for([CONTEXT + 2], 1) is None


def test_shapes_come_from_a_declared_list():
    backend = JaxScoring(build(context_tokens=2000))
    assert backend.declared == tuple(Program(n, k) for k in (1, 20) for n in (256, 1024, 2000))
    assert backend.program_for([200, 50], 1) == Program(256, 1)
    assert backend.program_for([200, 60], 2) == Program(1024, 20)
    assert backend.program_for([1500], 0) == Program(2000, 1)
    assert backend.program_for([1000, 25], 0) is None  # not both in one row: decoding waits for it
    assert backend.programs == 0


def test_a_program_is_compiled_once():
    backend = JaxScoring(build())
    program = backend.program_for([5], 1)
    assert not backend.is_compiled(program)
    for seed in range(3):
        backend.score(program, prepared(), [request(seed, 5)])
    assert (backend.is_compiled(program), backend.programs) == (True, 1)


def test_scores_of_bfloat16_are_float32():
    [found] = score([request(2, 12, k=2)], dtype='bfloat16')
    assert (found.logprobs.dtype, found.largest.dtype) == (np.float32, np.float32)
    targets = np.take_along_axis(plain(tokens_of(2, 12)), tokens_of(2, 12)[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(found.logprobs, targets, atol=0.3)


def test_heads_over_two_devices_give_the_same():
    if jax.local_device_count() < 2:
        pytest.skip('needs two devices')
    backend = build(devices=jax.local_devices()[:2])
    over_two = JaxScoring(backend)
    one = request(4, 12, k=3)
    program = over_two.program_for([12], 3)
    [found] = over_two.score(program, backend.prepare(weights()), [one])
    [expected] = score([one])
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)
