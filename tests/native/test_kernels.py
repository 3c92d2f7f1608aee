"""The kernels against numpy, and that a number depends on its own row and column alone, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.quantized import Columns, NativeColumns
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention.choose import NativeAttention
from tests.native import needs_kernels

pytestmark = needs_kernels
NATIVE = NativeColumns()


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@jax.jit
def multiply(x, *matrices):
    return NATIVE.multiply(x, *matrices)


# Products.


@pytest.mark.parametrize('columns', [1, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 100])
@pytest.mark.parametrize(('rows', 'features'), [(8, 1), (24, 7), (96, 64), (104, 64), (216, 33)])
def test_a_product_is_that_of_numpy(rows, features, columns):
    w, x = normal(1, rows, features), normal(2, features, columns)
    [found] = multiply(x, NATIVE.stored_table(w))
    np.testing.assert_allclose(found, w.astype(np.float64) @ x, atol=2e-5)


def test_several_matrices_in_one_call_give_the_bits_of_several_calls():
    x, matrices = normal(0, 48, 16), [normal(i, rows, 48) for i, rows in enumerate((104, 32, 13, 200))]
    stored = [NATIVE.stored_table(matrix) for matrix in matrices]
    together = multiply(x, *stored)
    for found, matrix, one in zip(together, matrices, stored, strict=True):
        assert found.shape == (len(matrix), 16)
        np.testing.assert_array_equal(found, multiply(x, one)[0])


def test_a_column_has_the_same_bits_among_any_number_of_columns():
    w, x = NATIVE.stored_table(normal(1, 136, 77)), normal(2, 77, 200)
    [whole] = multiply(x, w)
    for columns in (1, 3, 8, 16, 24, 32, 40, 48, 71, 96):
        np.testing.assert_array_equal(multiply(x[:, :columns], w)[0], whole[:, :columns])


def test_a_matrix_that_has_no_panels_goes_to_xla():
    w, x = NATIVE.stored_table(normal(1, 17, 8)), normal(2, 8, 12)
    assert library.MULTIPLY not in jax.jit(NATIVE.multiply).lower(x, w).as_text()
    np.testing.assert_array_equal(multiply(x, w)[0], jax.jit(Columns().multiply)(x, w)[0])


def test_other_dtypes_go_to_xla():
    w, x = NATIVE.stored_table(jnp.ones((16, 8), jnp.bfloat16)), jnp.ones((8, 16), jnp.bfloat16)
    assert library.MULTIPLY not in jax.jit(NATIVE.multiply).lower(x, w).as_text()
    assert NATIVE.logits(x, w).dtype == jnp.float32


@pytest.mark.parametrize('tokens', [500, 504])
def test_a_table_is_looked_up_and_multiplied_as_by_columns(tokens):
    x, table = normal(0, 24, 8), normal(1, tokens, 24)
    stored, ids = NATIVE.stored_table(table), np.array([0, 7, 8, tokens - 1, 3])
    np.testing.assert_array_equal(NATIVE.embed(stored, ids), Columns().embed(table, ids))
    np.testing.assert_allclose(NATIVE.logits(x, stored), Columns().logits(x, table), atol=1e-5)


# Attention. tests/rollout/decode/attention/test_cache_check.py compares values with float64.


def make_rows(lengths, block_tokens, heads=6, kv_heads=2, size=64):
    """(attention, q, layer, tables, lengths): rows in blocks of their own, by descending length."""
    attention = NativeAttention()
    width = -(-max(lengths) // block_tokens)
    blocks = len(lengths) * width
    layer = tuple(jnp.asarray(normal(seed, blocks, block_tokens, kv_heads, size)) for seed in (1, 2))
    tables = np.random.default_rng(3).permutation(blocks).reshape(len(lengths), width).astype(np.int32)
    return attention, normal(4, len(lengths), heads, size), layer, tables, np.array(lengths, np.int32)


@pytest.mark.parametrize('window', [None, 5])
def test_a_row_has_the_same_bits_alone_and_in_company(window):
    attention, q, layer, tables, lengths = make_rows([300, 129, 64, 63, 17, 1], block_tokens=16)
    attend = jax.jit(attention.attend, static_argnums=4)
    together = np.asarray(attend(q, layer, tables, lengths, window))
    for row in range(len(lengths)):
        alone = attend(q[[row]], layer, tables[[row]], lengths[[row]], window)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize('window', [None, 5, 40])
@pytest.mark.parametrize('size', [64, 40])
def test_rows_that_share_a_table_have_the_bits_of_rows_alone(size, window):
    attention, q, layer, tables, _ = make_rows([100] * 23, block_tokens=16, size=size)
    # pieces of 9, 1 and 11 tokens, in which no multiple of the rows that read together ends, and two rows of padding
    lengths = np.array([*range(1, 10), 100, *range(60, 71), 0, 0], np.int32)
    table = np.repeat([3, 0, 7, 0], [9, 1, 11, 2])
    found = jax.jit(attention.attend_pieces, static_argnums=5)(
        q, layer, tables.ravel(), table * tables.shape[1], lengths, window
    )
    attend = jax.jit(attention.attend, static_argnums=4)
    for row, length in enumerate(lengths):
        alone = attend(q[[row]], layer, tables[table[[row]]], lengths[[row]], window)
        np.testing.assert_array_equal(found[row], alone[0])
        assert np.any(found[row]) == (length > 0)


@pytest.mark.parametrize('size', [64, 128, 40])
def test_blocks_of_any_length_give_the_same_attention(size):
    attention, q, layer, tables, lengths = make_rows([96, 50, 7], block_tokens=96, size=size)
    attend = jax.jit(attention.attend, static_argnums=4)
    whole = attend(q, layer, tables, lengths, None)
    for block_tokens in (1, 8, 32):
        parts = 96 // block_tokens
        cut = tuple(side.reshape(-1, block_tokens, *side.shape[2:]) for side in layer)
        finer = (tables[:, :, None] * parts + np.arange(parts)).reshape(len(lengths), -1).astype(np.int32)
        np.testing.assert_allclose(attend(q, cut, finer, lengths, None), whole, atol=2e-6)


def test_scores_far_apart_keep_their_softmax():
    """Positions beyond the range of exp have a weight of next to nothing, and the largest score decides."""
    attention = NativeAttention()
    q = np.full((1, 1, 64), 40, np.float32)
    k = np.zeros((1, 4, 1, 64), np.float32)
    k[0, :, 0] = np.array([-40, 0, 40, 20])[:, None]
    v = np.arange(4, dtype=np.float32)[None, :, None, None] * np.ones((1, 4, 1, 64), np.float32)
    out = attention.attend(q, (k, v), np.zeros((1, 1), np.int32), np.array([4], np.int32), None)
    np.testing.assert_allclose(out, 2.0)


def test_positions_read_are_those_that_rows_see():
    assert NativeAttention().positions_read(jnp.array([100, 3, 0]), 64) == 103


def test_tokens_are_written_in_place():
    attention = NativeAttention()
    layer = attention.empty(5, 2, 4, 8, jnp.dtype('float32'))
    write = jax.jit(attention.write, donate_argnums=0)
    k, v = normal(0, 7, 2, 8), normal(1, 7, 2, 8)
    blocks, offsets = np.array([4, 0, 0, 3, 1, 1, 2], np.int32), np.array([0, 3, 1, 2, 0, 1, 3], np.int32)
    compiled = write.lower(layer, k, v, blocks, offsets).compile()
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    for side, given in zip(write(layer, k, v, blocks, offsets), (k, v), strict=True):
        expected = np.zeros((5, 4, 2, 8), np.float32)
        expected[blocks, offsets] = given
        np.testing.assert_array_equal(side, expected)
