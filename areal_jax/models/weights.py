"""The table of a model's weights: the rows of its family (`families`) with the sizes of its config.

Read by `decoder` (abstract and initial weights), by formats/ (names and shapes in files) and, as WeightAxes, by
sharding/rules.py. Paths have '*' in place of the layer's number, so that every weight is listed once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar, Union

import jax

from areal_jax.config.ranges import ConfigError
from areal_jax.models.families import FAMILIES, Init, Weight
from areal_jax.models.shape import LAYERS, ModelConfig, layers_of, letter_sizes, rows_of
from areal_jax.models.weights import ADAPTERS, Lora
from areal_jax.sharding.rules import WeightAxes, path_name
from areal_jax.types import Tree

Params = dict[str, Tree]  # weights by name, nested: {'layers': {'0': {'attention': {'query': {'weight': array}}}}}
_OF_EXPERTS = ('gate', 'up', 'down')
_Leaf = TypeVar('_Leaf')
Nested = Mapping[str, Union['WeightSpec', 'Nested']]  # specs by name, nested like the tree


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight of one model; fields as in families.Weight, the shape in numbers."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    hf_name: str | None
    transposed: bool
    gguf_name: str | None
    layers: tuple[int, ...]  # which have one of their own, ascending; () = it is in no layer

    @property
    def in_layers(self) -> bool:
        """Whether layers have one of their own each."""
        return self.path.startswith(LAYERS)

    @property
    def paths(self) -> list[str]:
        """Of the leaves in list form."""
        return [at_layer(self.path, layer) for layer in self.layers] if self.in_layers else [self.path]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix [in, out] of a projection or an adapter; a table [V, d] is not."""
        return self.in_layers and len(self.shape) == 2

    @property
    def stacked_path(self) -> str:
        """The path where layers are stacked: 'layers/mlp_norm' of 'layers/*/mlp_norm'."""
        return self.path.replace('*/', '', 1)

    @property
    def path_in_layer(self) -> str:
        """'attention/query/weight' of 'layers/*/attention/query/weight'."""
        return self.path.removeprefix(LAYERS)


@functools.lru_cache(maxsize=16)
def weight_table(config: ModelConfig, lora: Lora | None = None) -> Mapping[str, WeightSpec]:
    """Every weight of a model by its path, in the order of the forward pass; read-only.

    With `lora`, a projection that it targets is followed by its adapters.

    Raises ConfigError for adapters of experts.
    """
    sizes = letter_sizes(config)
    rows = rows_of(config)
    if lora:
        if config.experts and (named := [name for name in lora.targets if name in _OF_EXPERTS]):
            raise ConfigError(
                f'lora.targets={lora.targets} names {named[0]!r}, and experts have no adapters: name projections of '
                'the attention alone'
            )
        sizes['r'] = lora.rank
        rows = list(_with_adapters(rows, lora.targets))
    specs = (
        WeightSpec(
            row.path,
            tuple(sizes[letter] for letter in row.shape.split()),
            tuple(row.axes.split()),
            row.init,
            row.hf_name,
            row.transposed,
            row.gguf_name,
            layers_of(row, config),
        )
        for row in rows
    )
    return types.MappingProxyType({spec.path: spec for spec in specs})


def logical_axes(config: ModelConfig) -> WeightAxes:
    """The logical axes of whatever weights a model of this family can have, adapters included: for param_shardings."""
    rows = _with_adapters(FAMILIES[config.family].weights)
    units = {'heads': config.n_heads, 'kv_heads': config.n_kv_heads}
    return WeightAxes({row.path: tuple(row.axes.split()) for row in rows}, units)


def nest(leaves: Iterable[tuple[str, _Leaf]]) -> dict[str, _Leaf | dict]:
    """{'mlp': {'up': {'weight': leaf}}} of [('mlp/up/weight', leaf)]."""
    tree: dict = {}
    for path, leaf in leaves:
        *parents, name = path.split('/')
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = leaf
    return tree


def leaf_at(tree: Tree, path: str) -> Tree:
    """The leaf 'mlp/up/weight' of a nested dict; raises KeyError."""
    return functools.reduce(lambda node, key: node[key], path.split('/'), tree)


def find_leaf(tree: Tree, path: str) -> Tree | None:
    """`leaf_at`, or None where the tree lacks the leaf."""
    return functools.reduce(lambda node, key: None if node is None else node.get(key), path.split('/'), tree)


def map_matrices(table: Mapping[str, WeightSpec], params: Params, change: Callable[[jax.Array], jax.Array]) -> Params:
    """`params`, layers listed or stacked, with every matrix [..., in, out] replaced by `change` of it."""
    matrices = {path for spec in table.values() if spec.is_matrix for path in (spec.path, spec.stacked_path)}
    pattern = lambda path: re.sub(r'^layers/\d+/', LAYERS, path_name(path))
    leaf = lambda path, value: change(value) if pattern(path) in matrices else value
    return jax.tree_util.tree_map_with_path(leaf, params)


def at_layer(pattern: str, layer: int) -> str:
    """'layers/3/mlp_norm' of 'layers/*/mlp_norm'; names of Hugging Face likewise."""
    return pattern.replace('*', str(layer), 1)


def _with_adapters(rows: Iterable[Weight], targets: tuple[str, ...] | None = None) -> Iterator[Weight]:
    """The rows, and after each projection that `targets` names (None = all) its adapters A [in, r] and B [r, out]."""
    for row in rows:
        yield row
        *_, name, leaf = ('', *row.path.split('/'))
        if leaf == 'weight' and (targets is None or name in targets):
            parent, (fan_in, fan_out) = row.path.removesuffix('weight'), row.shape.split()
            a, b = (f'{parent}{name}' for name in ADAPTERS)
            yield Weight(a, f'{fan_in} r', 'embed rank', Init.MATRIX)
            yield Weight(b, f'r {fan_out}', 'rank embed', Init.ZEROS)
