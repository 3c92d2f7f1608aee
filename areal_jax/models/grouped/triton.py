"""Grouped products on GPUs as Pallas kernels (Triton lowering), for any compute capability, dtype and size.

A program of a product of rows owns a tile of rows of one group and some columns; a program of the gradient of the
matrices owns a part of one group's matrix. So programs never add to the same output. A tile begins where its group does
or a whole number of tiles later: there are at most N / tile + E of them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Ref = jax.Ref  # an array in memory, as Pallas passes it to a kernel
_ROWS, _WIDTH = 128, 128  # of a tile of rows, of a block of columns
_DEPTH_BYTES = 128  # of a step of a sum
_LEAST = 16  # side of a product on tensor cores


@dataclasses.dataclass(frozen=True)
class Triton:
    """See products.Kernels; `interpret` runs the kernels on a CPU."""

    interpret: bool = False

    def multiply_rows(
        self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        depth, width = rows.shape[1], matrices.shape[1 if transposed else 2]
        tiles, columns = _cut_tiles(sizes, len(rows)), _block(width, _WIDTH)
        step = _block(depth, _DEPTH_BYTES // rows.dtype.itemsize)
        return pl.pallas_call(
            functools.partial(_rows_kernel, columns=columns, step=step, transposed=transposed),
            grid=(len(tiles.group), pl.cdiv(width, columns)),
            out_shape=jax.ShapeDtypeStruct((len(rows), width), rows.dtype),
            compiler_params=_COMPILED,
            interpret=self.interpret,
            name='grouped_rows',
        )(*tiles, rows, matrices)

    def multiply_groups(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        depth, width = rows.shape[1], others.shape[1]
        high, wide = _block(depth, _WIDTH), _block(width, _WIDTH)
        step = max(_LEAST, _DEPTH_BYTES // 2 // rows.dtype.itemsize)
        ends = jnp.cumsum(sizes, dtype=jnp.int32)
        return pl.pallas_call(
            functools.partial(_groups_kernel, high=high, wide=wide, step=step),
            grid=(pl.cdiv(depth, high), pl.cdiv(width, wide), len(sizes)),
            out_shape=jax.ShapeDtypeStruct((len(sizes), depth, width), rows.dtype),
            compiler_params=_COMPILED,
            interpret=self.interpret,
            name='grouped_matrices',
        )(ends - sizes, ends, rows, others)


_COMPILED = triton.CompilerParams(num_warps=8, num_stages=3)


class _Tiles(NamedTuple):
    """The tiles of rows, int32 [tiles]; those that are too many are empty."""

    group: jax.Array
    first: jax.Array  # row
    end: jax.Array  # after the last row


def _cut_tiles(sizes: jax.Array, rows: int) -> _Tiles:
    needed = -(-sizes // _ROWS)
    before = jnp.cumsum(needed, dtype=jnp.int32) - needed
    tile = jnp.arange(rows // _ROWS + len(sizes), dtype=jnp.int32)
    group = (jnp.searchsorted(before, tile, side='right') - 1).astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    first = (ends - sizes)[group] + (tile - before[group]) * _ROWS
    return _Tiles(group, first, jnp.minimum(first + _ROWS, jnp.maximum(ends[group], first)))


def _rows_kernel(
    group_ref: Ref, first_ref: Ref, end_ref: Ref, rows_ref: Ref, matrices_ref: Ref, out_ref: Ref, *,
    columns: int, step: int, transposed: bool,
) -> None:  # fmt: skip
    tile = pl.program_id(0)
    group, first, end = group_ref[tile], first_ref[tile], end_ref[tile]
    depth, width = rows_ref.shape[1], out_ref.shape[1]
    own = first + jnp.arange(_ROWS, dtype=jnp.int32)
    out = pl.program_id(1) * columns + jnp.arange(columns, dtype=jnp.int32)
    row, column = jnp.minimum(own, rows_ref.shape[0] - 1), jnp.minimum(out, width - 1)

    @pl.when(first < end)
    def _() -> None:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            place = i * step + jnp.arange(step, dtype=jnp.int32)
            inside, within = place < depth, jnp.minimum(place, depth - 1)
            a = _read(rows_ref, (row[:, None], within[None, :]), inside[None, :])
            if transposed:
                b = _read(matrices_ref, (group, column[:, None], within[None, :]), inside[None, :])
            else:
                b = _read(matrices_ref, (group, within[:, None], column[None, :]), inside[:, None])
            return total + _dot(a, b, (1, 1 if transposed else 0))

        total = jax.lax.fori_loop(0, pl.cdiv(depth, step), add, jnp.zeros((_ROWS, columns), jnp.float32))
        kept = (own < end)[:, None] & (out < width)[None, :]
        triton.store(out_ref.at[own[:, None], out[None, :]], total.astype(out_ref.dtype), mask=kept)


def _groups_kernel(
    first_ref: Ref, end_ref: Ref, rows_ref: Ref, others_ref: Ref, out_ref: Ref, *, high: int, wide: int, step: int
) -> None:
    group = pl.program_id(2)
    first, end = first_ref[group], end_ref[group]
    _, depth, width = out_ref.shape
    down = pl.program_id(0) * high + jnp.arange(high, dtype=jnp.int32)
    across = pl.program_id(1) * wide + jnp.arange(wide, dtype=jnp.int32)
    line, column = jnp.minimum(down, depth - 1), jnp.minimum(across, width - 1)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        own = first + i * step + jnp.arange(step, dtype=jnp.int32)
        inside, row = (own < end)[:, None], jnp.minimum(own, rows_ref.shape[0] - 1)[:, None]
        a = _read(rows_ref, (row, line[None, :]), inside)
        b = _read(others_ref, (row, column[None, :]), inside)
        return total + _dot(a, b, (0, 0))

    total = jax.lax.fori_loop(0, pl.cdiv(end - first, step), add, jnp.zeros((high, wide), jnp.float32))
    kept = (down < depth)[:, None] & (across < width)[None, :]
    triton.store(out_ref.at[group, down[:, None], across[None, :]], total.astype(out_ref.dtype), mask=kept)


def _read(ref: Ref, index: tuple[jax.Array, ...], mask: jax.Array) -> jax.Array:
    """The elements where the mask is True, and 0 elsewhere."""
    shape = jnp.broadcast_shapes(*(i.shape for i in index))
    return triton.load(ref.at[index], mask=jnp.broadcast_to(mask, shape), other=0)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over one axis of each, float32; float32 inputs are not rounded to TF32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(a, b, dimensions, precision=highest, preferred_element_type=jnp.float32)


def _block(size: int, most: int) -> int:
    """A power of two, which Triton requires."""
    return min(most, max(_LEAST, pl.next_power_of_2(size)))
