"""Under arrow 7: from a parameter's path to logical axes, and from those to the mesh, one table per strategy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.ranges import ConfigError
from areal_jax.sharding.mesh import ROW_AXES

# first match of the path, with 'layers/3/' or 'layers/' taken off, wins; a leading axis of layers is never cut
LOGICAL_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r'embedding|head', ('vocab', 'embed')),
    (r'attention/query/weight', ('embed', 'heads')),
    (r'attention/(key|value)/weight', ('embed', 'kv_heads')),
    (r'attention/output/weight', ('heads', 'embed')),
    (r'mlp/(gate|up)/weight', ('embed', 'mlp')),
    (r'mlp/down/weight', ('mlp', 'embed')),
    (r'.*/lora_a', ('embed', 'rank')),
    (r'.*/lora_b', ('rank', 'embed')),
    (r'value_head|.*norm|.*/bias', ('features',)),  # vectors: cutting them saves nothing
)
_ANY = ('embed', 'mlp', 'vocab', 'heads', 'kv_heads')  # where fsdp may cut, best first
_SPLIT = ('heads', 'kv_heads', 'mlp', 'vocab')  # where tensor cuts: what is computed there stays there

# axis of the mesh -> logical axes it may cut, best first; at most one of a leaf
STRATEGIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    'replicated': {},
    'fsdp': {'fsdp': _ANY},
    'tensor': {'tensor': _SPLIT},
    'fsdp_tensor': {'tensor': _SPLIT, 'fsdp': _ANY},
}


def param_shardings(params: Any, mesh: Mesh, strategy: str, units: Mapping[str, int] | None = None) -> Any:
    """The sharding of every leaf: a tree like `params`, whose leaves need a shape only.

    `units` is how many indivisible parts a logical axis has ({'heads': 32, 'kv_heads': 8}); without an entry every
    index is one. An axis that does not divide evenly is not cut.

    Raises ValueError for an unknown strategy, an axis of the mesh that the strategy leaves idle, or a path that the
    table does not know.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'mesh.strategy={strategy!r} is unknown; use one of {", ".join(STRATEGIES)}')
    if mesh.shape['tensor'] > 1 and 'tensor' not in STRATEGIES[strategy]:
        raise ConfigError(
            f'mesh.strategy={strategy!r} leaves mesh.tensor={mesh.shape["tensor"]} idle; use fsdp_tensor, tensor, or '
            'mesh.tensor=1'
        )
    sizes = dict(units or {})

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        axes = logical_axes(path_name(path), len(leaf.shape))
        parts = {name: sizes.get(name, size) for name, size in zip(axes, leaf.shape, strict=True)}
        return NamedSharding(mesh, partition(axes, parts, mesh, strategy))

    return jax.tree_util.tree_map_with_path(sharding, params)


def logical_axes(path: str, n_axes: int) -> tuple[str, ...]:
    """('embed', 'heads') of 'layers/0/attention/query/weight'; 'layers' comes first where layers are stacked."""
    name = re.sub(r'^layers/(\d+/)?', '', path)
    for pattern, axes in LOGICAL_AXES:
        if re.fullmatch(pattern, name):
            if n_axes - len(axes) in (0, 1):
                return ('layers',) * (n_axes - len(axes)) + axes
            break
    raise ValueError(f'sharding/rules.py has no logical axes for the parameter {path!r} with {n_axes} axes')


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


def path_name(path: Any) -> str:
    """'layers/0/attention/query/weight' of a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')
