"""What Python asks the kernels for: the same as numpy and jax, without a program of XLA; products in 8 bits."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from areal_jax.models import quantized
from areal_jax.models.quantized import Int8Rows, NativeColumns, NativeInt8Rows, quantize
from areal_jax.native.arrays import empty_aligned, host_view, pack_bytes, pack_panels, sum_words
from tests.native import needs_kernels

pytestmark = needs_kernels


@pytest.mark.parametrize('shape', [(8, 1), (16, 5), (24, 16), (40, 33)])
def test_panels_made_outside_a_program_are_those_of_one(shape):
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)  # [out, in]
    form = NativeColumns()
    for by_rows, given, store in ((True, matrix, form.stored_table), (False, matrix.T.copy(), form.stored)):
        packed = pack_panels(given, by_rows=by_rows)
        np.testing.assert_array_equal(packed, np.asarray(jax.jit(store)(jnp.asarray(given))))
        np.testing.assert_array_equal(packed, np.asarray(store(jnp.asarray(given))))


def test_the_form_for_decoding_is_on_the_device_of_the_weights():
    there = jax.devices()[1]
    assert NativeColumns().stored(jax.device_put(np.ones((4, 8), np.float32), there)).devices() == {there}


@pytest.mark.parametrize('dtype', ['float32', 'float16', ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_counted(dtype):
    values = np.linspace(-3, 3, 40_000).astype(dtype)
    values[[0, 7, -1]] = np.nan, np.inf, -np.inf
    assert sum_words(values)[2] == 3
    assert sum_words(values[8:-1])[2] == 0


def test_integers_are_always_finite():
    assert sum_words(np.full(9, -1, np.int32))[2] == 0


@pytest.mark.parametrize('dtype', ['float64', 'int64', ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_left_to_others(dtype):
    assert sum_words(np.ones(3, dtype)) is None


def test_what_does_not_lie_in_one_piece_has_no_view():
    mesh = jax.make_mesh((8,), ('x',))
    assert host_view(np.ones((3, 4)).T) is None
    assert host_view(jax.device_put(np.ones(8), jax.NamedSharding(mesh, jax.P('x')))) is None
    seen = []
    jax.jit(lambda x: (seen.append(host_view(x)), x)[1])(np.ones(3))
    assert seen == [None]


def test_jax_takes_aligned_memory_as_it_is():
    memory = empty_aligned((3, 5))
    assert jax.device_put(memory, jax.devices()[0]).unsafe_buffer_pointer() == memory.ctypes.data


# Products in 8 bits against whole numbers of numpy.


NATIVE = NativeInt8Rows()
WAYS = (0, 1, 2)  # this processor's, without VNNI, without AVX2
SIZES = [(1, 1), (16, 4), (24, 7), (96, 64), (200, 33), (49, 577)]  # out, in


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected_product(x, w):
    """Of x [T, in] and w [out, in]: sums of whole numbers in 64 bits, then what the kernel does in float32."""
    (tokens, heat), (rows, scales) = numpy_quantize(x), numpy_quantize(w)
    sums = tokens.astype(np.int64) @ rows.T.astype(np.int64)
    return sums.astype(np.int32).astype(np.float32) * (scales[:, 0] * heat)


def numpy_quantize(x):
    largest = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.float32(127) / np.maximum(largest, np.float32(1e-30))
    return np.rint(x * inverse).astype(np.int8), largest * np.float32(1 / 127)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('tokens', [1, 3, 4, 8, 13, 32])
@pytest.mark.parametrize(('rows', 'features'), SIZES)
def test_a_product_has_the_bits_of_exact_sums(rows, features, tokens, way):
    w, x = normal(1, rows, features), normal(2, tokens, features)
    found = quantized.byte_product(jnp.asarray(x), NATIVE.stored_table(jnp.asarray(w)), way=way)
    np.testing.assert_array_equal(found, expected_product(x, w))


@pytest.mark.parametrize('way', WAYS)
def test_the_largest_sums_are_not_cut_off(way):
    w, x = np.ones((16, 8192), np.float32), np.ones((8, 8192), np.float32)
    w[1::2], x[4:] = -1, -1
    found = quantized.byte_product(jnp.asarray(x), NATIVE.stored_table(jnp.asarray(w)), way=way)
    np.testing.assert_allclose(found, x @ w.T, rtol=1e-6)


@pytest.mark.parametrize(('rows', 'features'), SIZES[1:])  # XLA regroups the factors of a single number
def test_xla_computes_the_same_bits(rows, features):
    w, x = jnp.asarray(normal(1, features, rows)), jnp.asarray(normal(2, 5, features))
    [ours] = jax.jit(NATIVE.multiply)(x, NATIVE.stored(w))
    [theirs] = jax.jit(Int8Rows().multiply)(x, Int8Rows().stored(w))
    np.testing.assert_array_equal(ours, theirs)


def test_a_token_has_the_same_bits_in_any_company():
    w, x = NATIVE.stored(jnp.asarray(normal(1, 77, 136))), jnp.asarray(normal(2, 40, 77))
    whole = NATIVE.multiply(x, w)[0]
    for part in (slice(0, 1), slice(3, 8), slice(5, 17), slice(1, 40)):
        np.testing.assert_array_equal(NATIVE.multiply(x[part], w)[0], whole[part])


@pytest.mark.parametrize('by_rows', [False, True])
def test_panels_are_the_same_outside_and_inside_jit(by_rows):
    w = jnp.asarray(normal(3, 50, 37))
    stored = NATIVE.stored_table if by_rows else NATIVE.stored
    outside, inside = stored(w), jax.jit(stored)(w)
    assert outside.features == inside.features == (37 if by_rows else 50)
    for ours, theirs in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_panels_of_both_orders_of_axes_are_the_same():
    w = normal(4, 34, 50)
    for ours, theirs in zip(pack_bytes(w, by_rows=False), pack_bytes(w.T.copy(), by_rows=True), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_row_of_zeros_is_a_row_of_zeros():
    w, x = normal(1, 20, 8), normal(2, 3, 20)
    w[:, 2], x[1] = 0, 0
    [found] = NATIVE.multiply(jnp.asarray(x), NATIVE.stored(jnp.asarray(w)))
    assert not np.any(found[:, 2])
    assert not np.any(found[1])
    assert np.all(np.isfinite(found))


def test_a_number_that_is_none_shows_in_its_row_and_its_token():
    w, x = normal(1, 20, 8), normal(2, 3, 20)
    w[4, 2], x[1, 3] = np.nan, np.inf
    [found] = NATIVE.multiply(jnp.asarray(x), NATIVE.stored(jnp.asarray(w)))
    expected = np.zeros((3, 8), bool)
    expected[:, 2], expected[1] = True, True
    np.testing.assert_array_equal(~np.isfinite(found), expected)


@pytest.mark.parametrize('form', [Int8Rows(), NATIVE])
@pytest.mark.parametrize('tokens', [500, 504])
def test_a_table_is_looked_up_and_multiplied(form, tokens):
    table, ids = normal(1, tokens, 22), np.array([0, 15, 16, tokens - 1, 3])
    stored = form.stored_table(jnp.asarray(table))
    values, scales = quantize(jnp.asarray(table), axis=-1)
    np.testing.assert_array_equal(form.embed(stored, ids), (values.astype(jnp.float32) * scales)[ids])
    x = normal(2, 3, 22)
    np.testing.assert_array_equal(form.logits(jnp.asarray(x), stored), expected_product(x, table))
