"""Attention over blocks on CPUs, against numpy row by row: what is read, what is not, and where it is written."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rollout.decode.attention.loops import LoopAttention

ATTENTION = LoopAttention()
HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4
attend = jax.jit(ATTENTION.attend, static_argnums=4)
write = jax.jit(ATTENTION.write, donate_argnums=0)


class Sequences:
    """Rows of random keys and values in randomly chosen blocks; every other place of the cache is NaN."""

    def __init__(self, lengths, seed=0, dtype=np.float32, context=None):
        rng = np.random.default_rng(seed)
        self.lengths = np.asarray(lengths, np.int32)
        normal = lambda *shape: rng.normal(size=shape).astype(dtype)
        self.q = normal(len(lengths), HEADS, SIZE)
        self.k, self.v = ([normal(n, KV_HEADS, SIZE) for n in lengths] for _ in range(2))
        held = -(-self.lengths // BLOCK)
        self.free = int(held.sum())  # a block of no sequence
        chosen = iter(rng.permutation(self.free))
        width = -(-(context or max(lengths)) // BLOCK) or 1
        rows = [[next(chosen) for _ in range(n)] for n in held]
        self.tables = np.array([row + [self.free] * (width - len(row)) for row in rows], np.int32)
        empty = ATTENTION.empty(self.free + 1, KV_HEADS, BLOCK, SIZE, jnp.dtype(dtype))
        self.layer = jax.tree.map(lambda leaf: leaf * jnp.nan, empty)
        if sum(lengths):
            places = [(row[p // BLOCK], p % BLOCK) for row, n in zip(rows, lengths, strict=True) for p in range(n)]
            blocks, offsets = np.array(places, np.int32).T
            self.layer = write(self.layer, np.concatenate(self.k), np.concatenate(self.v), blocks, offsets)

    def attend(self, window=None):
        return np.asarray(attend(self.q, self.layer, self.tables, self.lengths, window), np.float32)

    def expected(self, row, window=None):
        """By numpy in float64."""
        first = 0 if window is None else max(0, int(self.lengths[row]) - window)
        k, v = (np.repeat(x[row][first:], HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (self.k, self.v))
        scores = np.einsum('hd,thd->ht', self.q[row].astype(np.float64), k) / SIZE**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.einsum('ht,thd->hd', weights / weights.sum(axis=1, keepdims=True), v)


@pytest.mark.parametrize('window', [None, 1, 3, 4, 6, 100])
@pytest.mark.parametrize('lengths', [[1], [4], [5, 4, 1], [9, 8, 7, 3, 2], [30, 13, 12, 8, 5, 4, 4, 1, 1, 1, 1, 1]])
def test_attention_is_over_the_positions_of_the_row_alone(lengths, window):
    rows = Sequences(lengths)  # all else is NaN
    found = rows.attend(window)
    for row in range(len(lengths)):
        np.testing.assert_allclose(found[row], rows.expected(row, window), atol=2e-6)


@pytest.mark.parametrize('lengths', [[7, 0, 0], [0, 0], [9, 9, 9, 5, 5, 0, 0, 0, 0, 0, 0, 0]])
@pytest.mark.parametrize('window', [None, 2])
def test_rows_of_padding_are_finite_and_disturb_nobody(lengths, window):
    rows = Sequences(lengths)
    found = rows.attend(window)
    assert np.isfinite(found).all()
    for row in np.flatnonzero(lengths):
        np.testing.assert_allclose(found[row], rows.expected(row, window), atol=2e-6)


def test_half_precision_keeps_its_dtype():
    rows = Sequences([9, 5, 2], dtype=jnp.bfloat16)
    assert attend(rows.q, rows.layer, rows.tables, rows.lengths, None).dtype == jnp.bfloat16
    for row in range(3):
        np.testing.assert_allclose(rows.attend()[row], rows.expected(row), atol=0.03)


@pytest.mark.parametrize('window', [None, 6])
@pytest.mark.parametrize('rows', [1, 2, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 32))])
def test_a_row_is_the_same_in_any_company_and_place(rows, window):
    # one row of 23 positions among others that are longer or shorter, at every place of the batch
    rng = np.random.default_rng(rows)
    found = []
    for place in range(rows):
        longer = np.sort(rng.integers(24, 60, place))[::-1]
        shorter = np.sort(rng.integers(0, 23, rows - place - 1))[::-1]
        batch = Sequences([*longer, 23, *shorter], seed=place, context=64)
        alone = Sequences([23], seed=99)  # its keys, values and query
        batch.q[place] = alone.q[0]
        blocks = batch.tables[place][np.arange(23) // BLOCK]
        batch.layer = write(batch.layer, alone.k[0], alone.v[0], blocks, np.arange(23, dtype=np.int32) % BLOCK)
        found.append(batch.attend(window)[place])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_read_and_copy_give_back_what_was_written():
    rows = Sequences([8, 8])
    k, v = ATTENTION.read(rows.layer, rows.tables[1])
    np.testing.assert_array_equal(k, rows.k[1])
    np.testing.assert_array_equal(v, rows.v[1])
    copied = jax.jit(ATTENTION.copy)(rows.layer, rows.tables[0], rows.tables[1])
    for block in rows.tables.T:  # block[0] of the first row, block[1] of the second
        for leaf, before in zip(copied, rows.layer, strict=True):
            np.testing.assert_array_equal(leaf[block[1]], before[block[0]])
            np.testing.assert_array_equal(leaf[block[0]], before[block[0]])


def test_positions_read_by_hand():
    # 12 rows: chunks of 4, 4 and 4 rows, whose longest hold 9, 4 and 1 positions: 3, 1 and 1 blocks of 4
    lengths = np.array([9, 5, 5, 5, 4, 4, 4, 4, 1, 1, 0, 0])
    assert ATTENTION.positions_read(lengths, 4) == 4 * 4 * (3 + 1 + 1)
    assert ATTENTION.positions_read(np.zeros(12, int), 4) == 0


# Memory.


def generate(layers, tables, lengths, q):
    """As a decode program: in every step each layer is written and read."""

    def step(_, carry):
        layers, lengths, q = carry
        blocks = jnp.take_along_axis(tables, lengths[:, None] // BLOCK, axis=1)[:, 0]
        after = []
        for layer in layers:
            k = v = q[:, :KV_HEADS]
            layer = ATTENTION.write(layer, k, v, blocks, lengths % BLOCK)
            q = q + ATTENTION.attend(q, layer, tables, lengths + 1, None)
            after.append(layer)
        return after, lengths + 1, q

    return jax.lax.fori_loop(0, 4, step, (layers, lengths, q))


def compiled(blocks, rows=32, width=16):
    layer = jax.eval_shape(lambda: ATTENTION.empty(blocks, KV_HEADS, BLOCK, SIZE, jnp.dtype('float32')))
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    q = jax.ShapeDtypeStruct((rows, HEADS, SIZE), jnp.float32)
    program = jax.jit(generate, donate_argnums=0)
    return program.lower([layer] * 2, ints(rows, width), ints(rows), q).compile()


def test_the_cache_is_written_in_place():
    blocks = 977  # a size that nothing else has
    text = compiled(blocks).as_text()
    shaped = re.findall(rf'= f32\[{blocks},\S* ([a-z-]+)\(', text)
    assert 'parameter' in shaped  # the pattern finds what has the shape of the cache
    assert 'copy' not in shaped


def test_memory_does_not_grow_with_the_cache_or_the_context():
    small, large = (compiled(blocks, width=width).memory_analysis() for blocks, width in ((1000, 16), (8000, 1024)))
    # beside the larger table, 32 x 1024 x 4 bytes
    assert large.temp_size_in_bytes - small.temp_size_in_bytes <= 32 * 1024 * 4
    assert large.temp_size_in_bytes < 0.25 * large.argument_size_in_bytes
