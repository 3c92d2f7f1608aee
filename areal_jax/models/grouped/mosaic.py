"""Grouped products on GPUs of compute capability 9.0 by the Mosaic kernels of jax, which use wgmma.

Its modules are imported on first use: the import takes half a second and more. The sizes of blocks were not tuned on a
device: they are those that jax's own search of the kernels begins with, larger ones where the memory allows.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

_DEPTH = 64  # of a step, in the pipeline of a block
_STEPS = 4  # of a pipeline at once
_ROWS = 128  # of a block
_REPEATED = 8  # blocks that may be computed twice are at most an eighth of all, where half the rows allow it


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """See products.Kernels; `cores` is the number of the device's streaming multiprocessors."""

    CAPABILITY: ClassVar = (9, 0)
    DTYPES: ClassVar = ('bfloat16', 'float16')
    STEP: ClassVar = _DEPTH  # divides the sizes of the matrices
    cores: int

    def multiply_rows(
        self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

        width = matrices.shape[1 if transposed else 2]
        return ragged_dot(
            rows, matrices, group_sizes=sizes, block_m=block_rows(len(rows), len(sizes)), block_n=_side(width),
            block_k=_DEPTH, max_concurrent_steps=_STEPS, grid_block_n=_together(width), transpose_rhs=transposed,
        )  # fmt: skip

    def multiply_groups(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        more = ((0, -len(rows) % _DEPTH), (0, 0))
        depth, width = rows.shape[1], others.shape[1]
        return _transposed_for(self.cores)(
            jnp.pad(rows, more), jnp.pad(others, more), group_sizes=sizes, block_m=_side(depth), block_n=_side(width),
            block_k=_DEPTH, max_concurrent_steps=_STEPS, grid_block_n=_together(width),
        )  # fmt: skip


def block_rows(rows: int, groups: int) -> int:
    """Chooses the rows of a block: many, but so that few blocks lie in two groups."""
    return _ROWS if _REPEATED * (groups - 1) * _ROWS <= rows else _ROWS // 2


def _side(size: int) -> int:
    return 128 if size % 128 == 0 else 64


def _together(width: int) -> int:
    """Blocks of a row of blocks that follow one another, so that they share what they read: all of them.

    One more than there are: for a number that divides theirs, jax computes a remainder by zero that it does not use,
    and XLA for CPUs, which the interpreter of the kernels needs, does not survive it.
    """
    return width // _side(width) + 1


def _transposed_for(cores: int) -> Callable[..., jax.Array]:
    """jax's kernel with one program for each of `cores`.

    It asks jax.devices() for this number, which are other devices if a program is compiled for a described topology. So
    the same code runs here with another answer to this question.
    """
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot as kernel

    device = types.SimpleNamespace(core_count=cores)
    asked = types.SimpleNamespace(**(vars(jax) | {'devices': lambda: [device]}))
    found = types.FunctionType(kernel.__code__, kernel.__globals__ | {'jax': asked}, kernel.__name__)
    found.__kwdefaults__ = kernel.__kwdefaults__
    return found
