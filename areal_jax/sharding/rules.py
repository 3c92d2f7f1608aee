"""From the logical axes of weights to the axes of the mesh, one table per strategy.

models/families.py declares the logical axes of each weight; callers pass them as WeightAxes. `cluster.strategy` chooses
the table.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from areal_jax.config.cluster import LEARNER, STRATEGY
from areal_jax.config.ranges import ConfigError
from areal_jax.sharding.rules import ROW_AXES
from areal_jax.types import Tree


@dataclasses.dataclass(frozen=True)
class WeightAxes:
    """What is known of a model's weights: their logical axes. Producer: models/weights.py."""

    by_path: Mapping[str, tuple[str, ...]]  # {'layers/*/attention/query/weight': ('embed', 'heads')}
    units: Mapping[
        str, int
    ]  # indivisible parts of a logical axis, {'heads': 32}; without an entry every index is one unit


_ANY = ('embed', 'mlp', 'vocab', 'heads', 'kv_heads')  # what fsdp may shard, best first
_SPLIT = ('heads', 'kv_heads', 'mlp', 'vocab')  # what tensor may shard: each part is computed without the others

_EXPERTS = {'expert': ('experts',)}  # the axis of the mesh exists for them, whatever else a strategy shards

# axis of the mesh -> logical axes that it may shard, best first; at most one of a leaf
STRATEGIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    'replicated': _EXPERTS,
    'fsdp': {**_EXPERTS, 'fsdp': _ANY},
    'tensor': {**_EXPERTS, 'tensor': _SPLIT},
    'fsdp_tensor': {**_EXPERTS, 'tensor': _SPLIT, 'fsdp': _ANY},
}


def param_shardings(params: Tree, axes: WeightAxes, mesh: Mesh, strategy: str) -> Tree:
    """The sharding of every leaf: a tree like `params`, whose leaves need a shape only.

    An axis whose parts do not divide evenly over the devices is not sharded.

    Raises ValueError for an unknown strategy, for an axis of the mesh that the strategy does not use, and for a path
    that `axes` does not have.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'{STRATEGY}={strategy!r} is unknown; use one of {", ".join(STRATEGIES)}')
    if mesh.shape['tensor'] > 1 and 'tensor' not in STRATEGIES[strategy]:
        raise ConfigError(
            f'{STRATEGY}={strategy!r} leaves tensor={mesh.shape["tensor"]} of {LEARNER} idle; use fsdp_tensor or '
            f'tensor, or {LEARNER} without tensor'
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
    """The axes of one leaf over the mesh: each axis of the mesh shards the best logical axis that it divides evenly.

    `parts` is the number of indivisible parts of each logical axis.
    """
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
    """The sharding of arrays [..., R, T]: rows over ROW_AXES, tokens over context, leading axes whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading_axes, ROW_AXES, 'context'))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def data_shards(mesh: Mesh) -> int:
    """Shards of a batch's rows: the rows of a micro-batch must be a multiple of this number."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def path_name(path: KeyPath) -> str:
    """'layers/0/attention/query/weight' of a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')
