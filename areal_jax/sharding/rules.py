"""Under arrow 7: rules from a parameter's path to the axes of the mesh, one table per strategy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.sharding.mesh import AXES

_SHARD = 'fsdp'  # the largest axis that the mesh axis 'fsdp' divides is cut over it
_REPLICATE = 'replicate'

# first match of the path 'a/b/c' wins; vectors (norm scales, biases) are always replicated: cutting them saves nothing
STRATEGIES: Mapping[str, tuple[tuple[str, str], ...]] = {
    'fsdp': ((r'.*', _SHARD),),
    'replicated': ((r'.*', _REPLICATE),),
}


def param_shardings(params: Any, mesh: Mesh, strategy: str) -> Any:
    """The sharding of every leaf: a tree like `params`, whose leaves need a shape only.

    Raises ValueError for an unknown strategy or a path that its table does not know.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f'mesh.strategy={strategy!r} is unknown; use one of {", ".join(sorted(STRATEGIES))}')

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        for pattern, rule in STRATEGIES[strategy]:
            if re.fullmatch(pattern, name):
                return NamedSharding(mesh, partition(leaf.shape, mesh) if rule == _SHARD else PartitionSpec())
        raise ValueError(f'mesh.strategy={strategy!r} has no rule for the parameter {name!r} of shape {leaf.shape}')

    return jax.tree_util.tree_map_with_path(sharding, params)


def partition(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Cuts the largest axis that the mesh axis 'fsdp' divides (the first of equals); no such axis: replicated."""
    shards = mesh.shape[_SHARD]
    divisible = [axis for axis, size in enumerate(shape) if size % shards == 0]
    if len(shape) < 2 or not divisible:
        return PartitionSpec()
    largest = max(divisible, key=lambda axis: (shape[axis], -axis))
    return PartitionSpec(*(_SHARD if axis == largest else None for axis in range(largest + 1)))


def row_sharding(mesh: Mesh, leading_axes: int = 0) -> NamedSharding:
    """Rows of a batch lie over all devices; `leading_axes` before the rows (micro-batches) are not cut."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading_axes, AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def data_shards(mesh: Mesh) -> int:
    """Devices over which rows lie: rows of a micro-batch must be a multiple of it."""
    return int(np.prod([mesh.shape[axis] for axis in AXES]))


def path_name(path: Any) -> str:
    """'layers/0/attention/query' of a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')
