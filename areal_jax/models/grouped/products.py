"""Products of rows with the matrix of their group, and the kernels that compute them and both gradients.

    y[i] = rows[i] matrices[g]                           for the rows i of group g
    d_rows[i] = dy[i] transpose(matrices[g])
    d_matrices[g] = sum over its rows of transpose(rows[i]) dy[i]

Each group's rows follow one another: the first sizes[0] belong to group 0, the next sizes[1] to group 1. Rows after the
last group must be finite, and their results may hold anything. N rows, E groups, K and M sizes of a matrix.

`lax.ragged_dot` computes the same, but XLA for GPUs multiplies masked copies of all rows with every matrix, and XLA for
TPUs does so for the gradient of the matrices.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import jax

from areal_jax.models.attention.backends import describe_device
from areal_jax.models.grouped.megablox import Megablox
from areal_jax.models.grouped.mosaic import Mosaic
from areal_jax.models.grouped.triton import Triton


class Hardware(NamedTuple):
    """What the choice of kernels asks of a device."""

    platform: str
    capability: tuple[int, int] | None = None  # CUDA compute capability
    cores: int = 0  # streaming multiprocessors of a GPU; 0 = unknown

    @classmethod
    def of(cls, device: jax.Device) -> Hardware:
        """Describes a device, which may belong to a topology that is only described."""
        return cls(*describe_device(device), getattr(device, 'core_count', None) or 0)


class Kernels(Protocol):
    """Kernels of one kind of accelerator; hashable."""

    def multiply_rows(
        self, rows: jax.Array, matrices: jax.Array, sizes: jax.Array, *, transposed: bool = False
    ) -> jax.Array:
        """y [N, M] of rows [N, K] and matrices [E, K, M], or [E, M, K] that are `transposed`."""

    def multiply_groups(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        """The sums [E, K, M] over each group of transpose(rows[i]) others[i]; 0 for a group without rows."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(kernels: Kernels, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """y [N, M] in the dtype of rows [N, K] and matrices [E, K, M]; sizes int32 [E] with a sum of at most N."""
    return kernels.multiply_rows(rows, matrices, sizes)


def _multiply(
    kernels: Kernels, rows: jax.Array, matrices: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return kernels.multiply_rows(rows, matrices, sizes), (rows, matrices, sizes)


def _multiply_back(kernels: Kernels, kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, sizes = kept
    return kernels.multiply_rows(dy, matrices, sizes, transposed=True), kernels.multiply_groups(rows, dy, sizes), None


multiply.defvjp(_multiply, _multiply_back)


def kernels_for(hardware: Hardware, dtype: str, sizes: tuple[int, ...]) -> dict[str, Kernels]:
    """Returns the kernels that can be used by name, the fastest first.

    Args:
      dtype: of rows and matrices.
      sizes: of the matrices, each K and M.
    """
    if hardware.platform == 'tpu':
        return {'megablox': Megablox()} if dtype in Megablox.DTYPES else {}
    if hardware.platform != 'gpu':
        return {}
    found: dict[str, Kernels] = {}
    if hardware.capability == Mosaic.CAPABILITY and dtype in Mosaic.DTYPES and not any(n % Mosaic.STEP for n in sizes):
        found['mosaic'] = Mosaic(hardware.cores)
    return found | {'triton': Triton()}
