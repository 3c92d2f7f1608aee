"""The decoder in 8 bits: kernels against XLA's products, and that a token's numbers are its own, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import rank_tokens
from areal_jax.models.quantized import Int8Rows, Quantized, quantize, rank_logits
from areal_jax.models.weights import stack_layers
from areal_jax.native import compiled_library as library
from tests.diagonal import diagonal
from tests.models.test_decoder import VARIANTS, logits_of, scattered
from tests.models.test_native_layers import attend_with, make_batch
from tests.native import needs_kernels


def make(name, tokens, **changes):
    """(decoder, its published weights)."""
    decoder = Decoder(dataclasses.replace(VARIANTS[name], vocab_size=36, **changes), tokens=tokens)
    return decoder, scattered(decoder.init(5))


def relative(found, expected):
    """Root mean square of the difference, of that of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def step_of(decoder, params, read, rows):
    def step(tokens, positions, cache, temperature=None):
        heat = np.ones(len(tokens)) if temperature is None else temperature
        return jax.jit(decoder.step)(params, tokens, positions, cache, read, heat)

    return step


def test_a_number_differs_by_half_a_scale_at_most():
    x = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32)
    values, scales = quantize(jnp.asarray(x), axis=-1)
    assert np.abs(np.asarray(values)).max(axis=1).tolist() == [127] * 20
    assert np.all(np.abs(values * np.asarray(scales) - x) <= np.asarray(scales) * 0.5001)


def test_a_half_is_rounded_to_the_even_number():
    values, _ = quantize(jnp.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), axis=-1)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize('tokens', ['int8_rows', pytest.param('native_int8_rows', marks=needs_kernels)])
@pytest.mark.parametrize('name', VARIANTS)
def test_logits_are_near_those_of_the_published_weights(name, tokens):
    decoder, params = make(name, tokens)
    exact = Decoder(decoder.config)
    assert relative(logits_of(decoder)(decoder.prepare(params)), logits_of(exact)(params)) < 0.08


@needs_kernels
@pytest.mark.parametrize(('name', 'layers'), diagonal(VARIANTS, ('list', 'stacked')))
def test_kernels_of_layers_compute_what_xla_does(name, layers):
    xla, params = make(name, 'int8_rows')
    kernels = Decoder(xla.config, tokens='native_int8_rows', layers=layers)
    prepared = kernels.prepare(params if layers == 'list' else stack_layers(params))
    run = logits_of(kernels)
    text = run.lower(prepared).as_text()
    assert text.count(f'@{library.BYTE_PROJECT}') == text.count(f'@{library.BYTE_FINISH}') >= 1
    expected = logits_of(xla)(xla.prepare(params))
    # float32 between the products differs by rounding, which moves a few whole numbers by one
    assert relative(run(prepared), expected) < 0.01


@needs_kernels
@pytest.mark.parametrize(('name', 'rows'), diagonal(VARIANTS, (1, 8, 13)))
def test_a_step_computes_what_layers_do(name, rows):
    decoder, params = make(name, 'native_int8_rows')
    prepared = decoder.prepare(params)
    tokens, positions, cache, read = make_batch(decoder.config, rows)
    assert decoder.can_step(prepared)
    hidden, written = jax.jit(lambda p, c: decoder.hidden(p, tokens, positions, attend_with(read), c))(prepared, cache)
    found, logits, sums, _ = step_of(decoder, prepared, read, rows)(tokens, positions, cache)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(one, other)  # layers in parts have the bits of those in one kernel
    assert relative(logits, jax.jit(decoder.logits)(prepared, hidden)) < 0.01
    total = jax.nn.logsumexp(sums.logsumexp, axis=0)
    np.testing.assert_allclose(total, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(('name', 'tables'), [('tied', 0), ('everything', 1)])
def test_no_matrix_stays_in_float32(name, tables):
    decoder, params = make(name, 'int8_rows')
    prepared = decoder.prepare(params)
    is_matrix = lambda leaf: isinstance(leaf, Quantized)
    left = [leaf for leaf in jax.tree.leaves(prepared, is_leaf=is_matrix) if not is_matrix(leaf)]
    assert sum(leaf.ndim > 1 for leaf in left) == tables  # an embedding that is no head is looked up, not multiplied
    assert is_matrix(decoder.head(prepared))


def test_a_product_that_could_overflow_is_refused():
    with pytest.raises(ValueError, match='over 66312 features overflows; 66311 fit'):
        Int8Rows().stored(jnp.zeros((66312, 1)))


def test_ranks_of_logits_are_those_of_states_and_head():
    rng = np.random.default_rng(0)
    states, head = rng.normal(size=(7, 12)).astype(np.float32), rng.normal(size=(50, 12)).astype(np.float32)
    targets, heat = rng.integers(0, 50, 7).astype(np.int32), np.linspace(0.0, 2.0, 7).astype(np.float32)
    found = rank_logits(jnp.asarray(states @ head.T), targets, heat, 3)
    expected = rank_tokens(states, head, targets, heat, 3)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.largest, expected.largest, atol=1e-5)
