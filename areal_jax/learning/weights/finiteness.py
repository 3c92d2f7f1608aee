"""Refuses weights and optimizer state that hold NaN or infinity, with the same verdict on every process.

A learner checks before the first update, before a save and after a restore; an engine or server checks loaded weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.errors import UserError
from areal_jax.native.arrays import host_view, sum_words
from areal_jax.sharding.rules import path_name, replicated
from areal_jax.types import Tree


class NonFiniteError(UserError, ArithmeticError):
    """Numbers from which training cannot continue; the message names their place, their number and the fix."""


def require_finite(tree: Tree, mesh: Mesh, what: str, fix: str) -> None:
    """Raises NonFiniteError that names the first leaf with NaN or infinity, and the number of such values.

    The values are counted on the devices of `mesh`, which hold the leaves. A collective if the mesh spans processes:
    all must call it, and either all raise or none. If a leaf is not in the memory of the host, one small program is
    compiled for each shape; a single program over all leaves would take seconds to compile if layers are listed.

    Args:
      what: the source of the tree, the start of the message.
      fix: the end of the message.
    """
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = {path: leaf for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    count = _counter(mesh)
    # wait for each count before the next: on virtual CPU devices, collectives of concurrent programs block each other
    _refuse(leaves, {path: _count_here(leaf, count) for path, leaf in leaves.items()}, what, fix)


def require_finite_shards(tree: Tree, what: str, fix: str) -> None:
    """`require_finite` for arrays of this process alone. No collectives, so dispatches may run on the devices."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = {path: jnp.asarray(leaf) for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    parts = {
        path: [_count_here(shard.data, _count_shard) for shard in leaf.addressable_shards if shard.replica_id == 0]
        for path, leaf in leaves.items()
    }
    _refuse(leaves, {path: sum(counts) for path, counts in parts.items()}, what, fix)


def _count_here(leaf: jax.Array, count: jax.stages.Wrapped) -> int:
    """Counts the values that are not finite; runs no program if they are in the memory of the host."""
    view = host_view(leaf)
    found = None if view is None else sum_words(view)
    return int(jax.device_get(count(leaf))) if found is None else found[2]


def _refuse(leaves: Mapping[str, jax.Array], counts: Mapping[str, int], what: str, fix: str) -> None:
    """Raises NonFiniteError if a count is not 0; `counts` has the number of non-finite values by path."""
    wrong = {path: n for path, n in counts.items() if n}
    for path, n in wrong.items():
        others = f', and {len(wrong) - 1} other leaves have such values too' if len(wrong) > 1 else ''
        raise NonFiniteError(
            f'{what}: {n} of the {leaves[path].size} values of {path!r} are NaN or infinite{others}; {fix}'
        )


@functools.cache
def _counter(mesh: Mesh) -> jax.stages.Wrapped:
    """leaf -> int32 scalar on every device of the mesh: values that are not finite."""
    return jax.jit(_count, out_shardings=replicated(mesh))


def _count(leaf: jax.Array) -> jax.Array:
    counts = jnp.isnan(leaf).astype(jnp.int32), jnp.isinf(leaf).astype(jnp.int32)
    # two sums in one pass: XLA:CPU writes the summands of a single one to memory, which takes 10 times as long
    add = lambda totals, more: (totals[0] + more[0], totals[1] + more[1])
    return sum(jax.lax.reduce(counts, (np.int32(0),) * 2, add, tuple(range(leaf.ndim))))


_count_shard = jax.jit(_count)
