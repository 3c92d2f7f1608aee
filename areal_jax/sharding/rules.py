"""From the logical axes of weights to the axes of the mesh, one table per strategy.

The logical axes of a weight stand in its family's table (models/families.py) and come in as WeightAxes. The learner
and whoever loads weights use it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from areal_jax.ranges import ConfigError
from areal_jax.sharding.mesh import ROW_AXES
from areal_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class WeightAxes:
    """What is known of a model's weights: their logical axes. Producer: models/weights.py."""

    by_path: Mapping[str, tuple[str, ...]]  # {'layers/*/attention/query/weight': ('embed', 'heads')}
    units: Mapping[str, int]  # indivisible parts of a logical axis, {'heads': 32}; without an entry every index is one


_ANY = ('embed', 'mlp', 'vocab', 'heads', 'kv_heads')  # where fsdp may cut, best first
_SPLIT = ('heads', 'kv_heads', 'mlp', 'vocab')  # where tensor cuts: what is computed there stays there

# axis of the mesh -> logical axes it may cut, best first; at most one of a leaf
STRATEGIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    'replicated': {},
    'fsdp': {'fsdp': _ANY},
    'tensor': {'tensor': _SPLIT},
    'fsdp_tensor': {'tensor': _SPLIT, 'fsdp': _ANY},
}


def param_shardings(params: Tree, axes: WeightAxes, mesh: Mesh, strategy: str) -> Tree:
    """The sharding of every leaf: a tree like `params`, whose leaves need a shape only.

    An axis that does not divide evenly is not cut.

    Raises ValueError for an unknown strategy, an axis of the mesh that the strategy leaves idle, or a path that
    `axes` does not have.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'mesh.strategy={strategy!r} is unknown; use one of {", ".join(STRATEGIES)}')
    if mesh.shape['tensor'] > 1 and 'tensor' not in STRATEGIES[strategy]:
        raise ConfigError(
            f'mesh.strategy={strategy!r} leaves mesh.tensor={mesh.shape["tensor"]} idle; use fsdp_tensor, tensor, or '
            'mesh.tensor=1'
        )

    def sharding(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = axes_of(axes, path_name(path), len(leaf.shape))
        parts = {name: axes.units.get(name, size) for name, size in zip(names, leaf.shape, strict=True)}
        return NamedSharding(mesh, partition(names, parts, mesh, strategy))

    return jax.tree_util.tree_map_with_path(sharding, params)


def axes_of(axes: WeightAxes, path: str, n_axes: int) -> tuple[str, ...]:
    """('embed', 'heads') of 'layers/0/attention/query/weight'; 'layers' comes first where layers are stacked."""
    own = axes.by_path.get(re.sub(r'^layers/(\d+/)?', 'layers/*/', path))
    if own is None or n_axes - len(own) not in (0, 1):
        raise ValueError(f'the table of weights has no logical axes for the parameter {path!r} with {n_axes} axes')
    return ('layers',) * (n_axes - len(own)) + own


def partition(axes: tuple[str, ...], parts: Mapping[str, int], mesh: Mesh, strategy: str) -> PartitionSpec:
    """Cuts each leaf's best axis for every axis of the mesh that the strategy uses; `parts` must be a multiple."""
    placed: dict[str, str] = {}
    for mesh_axis, candidates in STRATEGIES[strategy].items():
        shards = mesh.shape[mesh_axis]
        for name in candidates:
            if shards > 1 and name in axes and name not in placed and parts[name] % shards == 0:
                placed[name] = mesh_axis
                break
    spec = [placed.get(name) for name in axes]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def row_sharding(mesh: Mesh, leading_axes: int = 0) -> NamedSharding:
    """Of arrays [..., R, T]: rows over data and fsdp, their tokens over context; leading axes are not cut."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading_axes, ROW_AXES, 'context'))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def data_shards(mesh: Mesh) -> int:
    """Groups of devices over which rows lie: rows of a micro-batch must be a multiple of it."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def path_name(path: KeyPath) -> str:
    """'layers/0/attention/query/weight' of a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')
