"""Grouped products on TPUs by megablox, kernels of jax: gmm for rows, tgmm for the gradient of the matrices.

jax's own gradient has one tiling for all three products; each has its own here. A tile of rows holds rows of one group:
where a group begins inside of a tile, the tile is computed once more, so at most E - 1 tiles are.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

_LANES = 128
_ROWS = (512, 256, _LANES)  # of a tile
_REPEATED = 8  # tiles that may be computed twice are at most an eighth of all, where a smaller tile allows it
_BUDGET = 12 * 2**20  # bytes of a kernel's tiles; the compiler gives a kernel 16 MB and takes some itself
_MOST_DEPTH = 4096  # bytes of a row of a tile: if it has the whole depth, a group's matrix is read once


@dataclasses.dataclass(frozen=True)
class Megablox:
    """See products.Kernels; `interpret` runs the kernels on a CPU."""

    DTYPES: ClassVar = ('bfloat16', 'float32')
    interpret: bool = False

    def multiply_rows(
        self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        tile = tile_rows(len(rows), len(sizes))
        depth, width = matrices.shape[1:][::-1] if transposed else matrices.shape[1:]
        tiling = (tile, *_tile_product(tile, depth, width, rows.dtype.itemsize))
        y = gmm(
            _pad(rows, tile), matrices, sizes, preferred_element_type=rows.dtype, tiling=tiling,
            transpose_rhs=transposed, interpret=self.interpret,
        )  # fmt: skip
        return y[: len(rows)]

    def multiply_groups(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        tile = tile_rows(len(rows), len(sizes))
        tiling = (tile, *_tile_gradient(tile, rows.shape[1], others.shape[1], rows.dtype.itemsize))
        rows, others = _pad(rows, tile), _pad(others, tile)
        return tgmm(
            rows.T, others, sizes, preferred_element_type=rows.dtype, tiling=tiling, interpret=self.interpret
        )  # fmt: skip


def tile_rows(rows: int, groups: int) -> int:
    """Chooses the rows of a tile: many, but so that few tiles lie in two groups."""
    fits = (tile for tile in _ROWS if _REPEATED * (groups - 1) * tile <= rows)
    return next(fits, _LANES)


def _tile_product(tile: int, depth: int, width: int, itemsize: int) -> tuple[int, int]:
    """(depth, width) of the tile of a matrix: two buffers of each operand, and sums and their mask in 32 bits."""
    depth = _cut(depth, _MOST_DEPTH // itemsize)
    room = _BUDGET - 2 * itemsize * tile * depth
    return depth, _cut(width, room // (2 * itemsize * (depth + tile) + 8 * tile))


def _tile_gradient(tile: int, depth: int, width: int, itemsize: int) -> tuple[int, int]:
    """(depth, width) of a tile of the gradient, whose operands are masked in float32."""
    depth, row = _cut(depth, _MOST_DEPTH // 2 // itemsize), 2 * itemsize + 8
    room = _BUDGET - row * tile * depth
    return depth, _cut(width, room // (row * (depth + tile)))


def _cut(size: int, most: int) -> int:
    """The size of equal tiles of at most `most`: the whole, or a multiple of the lanes."""
    if size <= most:
        return size
    parts = -(-size // (most // _LANES * _LANES))
    return -(-size // (parts * _LANES)) * _LANES


def _pad(rows: jax.Array, tile: int) -> jax.Array:
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)))
