"""The table of a model's weights: the rows of its family (`families`) with the sizes of its config.

Read by `decoder` (abstract and initial weights), by formats/ (names and shapes in files) and, as WeightAxes, by
sharding/rules.py. Paths have '*' in place of the layer's number, so that every weight is listed once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import require_allowed
from areal_jax.config.fields import COUNT, ConfigError
from areal_jax.models.families import FAMILIES, LAYERS, ModelConfig, layers_of, letter_sizes, rows_of
from areal_jax.models.weight_rows import COMMON, FLOAT32_LEAVES, QWEN3_5, STATE_LEAVES, Init, Weight
from areal_jax.sharding.rules import WeightAxes, path_name
from areal_jax.types import Tree


def _projections(rows: Iterable[Weight]) -> tuple[str, ...]:
    """'query', 'key', ...: the names of the projections among the rows."""
    return tuple(dict.fromkeys(row.path.split('/')[-2] for row in rows if row.path.endswith('/weight')))


TARGETS = _projections(COMMON)
DELTA_TARGETS = tuple(name for name in _projections(QWEN3_5) if name not in TARGETS)  # only hybrids have them
LATENT_TARGETS = ('query_latent', 'latent')  # only models with latent attention have them
ADAPTERS = ('lora_a', 'lora_b')  # leaves A and B


@dataclasses.dataclass(frozen=True)
class Lora:
    """The projections that get adapters, and the adapters' rank and scale."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        COUNT.require('lora.rank', self.rank)
        require_allowed({'lora.alpha': self.alpha})
        known = (*TARGETS, *DELTA_TARGETS, *LATENT_TARGETS)
        if not self.targets or set(self.targets) - set(known):
            raise ConfigError(f'lora.targets={self.targets!r} must name some of {", ".join(known)} and nothing else')

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_float32(path: str) -> bool:
    """Whether a leaf 'layers/0/delta/log_rate' is float32 in every copy of the weights."""
    return path.rsplit('/', 1)[-1] in FLOAT32_LEAVES


def is_router_state(path: str) -> bool:
    """Whether a leaf 'layers/1/mlp/correction' is outside of the gradient, see weight_rows.STATE_LEAVES."""
    return path.rsplit('/', 1)[-1] in STATE_LEAVES


def leaf_dtype(path: str, dtype: str) -> str:
    """The dtype of a leaf in a copy of the weights in `dtype`."""
    return 'float32' if is_float32(path) else dtype


def shared_tensors(config: ModelConfig) -> dict[str, str]:
    """The names of the tensors of Hugging Face that several leaves share, by the paths of the leaves in list form."""
    shared = ((spec, spec.hf_name) for spec in weight_table(config).values() if spec.part is not None)
    return {at_layer(spec.path, layer): at_layer(name, layer) for spec, name in shared if name for layer in spec.layers}


def is_adapter(path: str) -> bool:
    """Whether a leaf 'layers/0/attention/query/lora_a' belongs to an adapter."""
    return path.rsplit('/', 1)[-1] in ADAPTERS


def attach_adapters(params: Tree, adapters: Tree) -> Tree:
    """`params` with the adapter leaves of `adapters` (a tree that has them, other leaves ignored)."""
    if not isinstance(adapters, dict):
        return params
    own = {name: leaf for name, leaf in adapters.items() if name in ADAPTERS}
    return {name: attach_adapters(value, adapters.get(name)) for name, value in params.items()} | own


def merge_adapters(params: Tree, lora: Lora) -> Tree:
    """The weights W + alpha / r A B without adapters, computed in float32, in either form of layers."""
    if not isinstance(params, dict):
        return params
    if ADAPTERS[0] not in params:
        return {name: merge_adapters(value, lora) for name, value in params.items()}
    a, b = (params[name].astype(jnp.float32) for name in ADAPTERS)
    weight = params['weight']
    merged = weight.astype(jnp.float32) + lora.scale * jnp.matmul(a, b, precision='highest')
    kept = {name: leaf for name, leaf in params.items() if name not in ADAPTERS}
    return kept | {'weight': merged.astype(weight.dtype)}


# The two forms of a tree of weights: one subtree per layer, or one subtree with all layers stacked.
#
# The list form is the interchange form: {'layers': {'0': {...}, '1': {...}}}. The stacked form has the same leaves with
# a leading axis of the layers that have them: {'layers': {...}}. The conversions change no bit. They take numpy and jax
# arrays, inside jax.jit and outside, and trees that contain a tree of weights (the moments of an optimizer).


FORMS = ('list', 'stacked')
_LAYERS = 'layers'


def stack_layers(tree: Tree) -> Tree:
    """Every {'layers': {'0': ..., '1': ...}} inside `tree` with its layers stacked."""
    return _convert(tree, lambda layers: _stack([layers[str(index)] for index in range(len(layers))]))


def unstack_layers(tree: Tree, n_layers: int, having: Mapping[str, tuple[int, ...]] | None = None) -> Tree:
    """The inverse of `stack_layers`; every layer gets a leaf that lacks the axis (a placeholder of an optimizer).

    `having` has, by the path in a layer, the layers that have a leaf, see `list_layers`; None = all have all.
    """
    having, every = having or {}, tuple(range(n_layers))

    def take(node: Tree, path: str, layer: int) -> Tree:
        if path not in having and isinstance(node, dict):
            below = ((name, take(value, f'{path}/{name}'.lstrip('/'), layer)) for name, value in node.items())
            return {name: value for name, value in below if value is not _ABSENT} or ({} if not node else _ABSENT)
        layers = having.get(path, every)
        if layer not in layers:
            return _ABSENT
        return jax.tree.map(lambda x: x[layers.index(layer)] if _has_layers(x, len(layers)) else x, node)

    def split(layers: Tree) -> dict[str, Tree]:
        return {str(layer): take(layers, '', layer) for layer in every}

    return _convert(tree, split)


def list_layers(config: ModelConfig, lora: Lora | None = None) -> dict[str, tuple[int, ...]]:
    """The layers that have each weight, by its path in a layer."""
    return {spec.path_in_layer: spec.layers for spec in weight_table(config, lora).values() if spec.in_layers}


_ABSENT = object()  # in place of what a layer lacks


def is_stacked(path: str) -> bool:
    """Whether 'layers/mlp/up/weight' is the path of a leaf with an axis of layers; false of 'layers/0/mlp_norm'."""
    return re.match(r'layers/(?!\d+/)', path) is not None


def _has_layers(leaf: Tree, n_layers: int) -> bool:
    return np.ndim(leaf) > 0 and np.shape(leaf)[0] == n_layers


def _stack(layers: Sequence[Tree]) -> Tree:
    if all(isinstance(layer, dict) for layer in layers):  # a layer may lack a leaf that others have
        names = dict.fromkeys(name for layer in layers for name in layer)
        return {name: _stack([layer[name] for layer in layers if name in layer]) for name in names}

    def join(*leaves: Tree) -> Tree:
        if isinstance(leaves[0], np.ndarray):
            return np.stack(leaves)
        # on a CPU numpy stacks without compiling a program for each shape
        return jnp.asarray(np.stack(leaves)) if all(_lies_on_cpu(leaf) for leaf in leaves) else jnp.stack(leaves)

    return jax.tree.map(join, *layers)


def _lies_on_cpu(leaf: jax.Array) -> bool:
    return not isinstance(leaf, jax.core.Tracer) and [device.platform for device in leaf.devices()] == ['cpu']


def _convert(tree: Tree, convert: Callable[[Tree], Tree]) -> Tree:
    """`tree` with every value under the key 'layers' converted, also inside of lists and tuples."""
    if isinstance(tree, dict):
        return {key: convert(value) if key == _LAYERS else _convert(value, convert) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, '_fields'):
        return type(tree)(*(_convert(value, convert) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_convert(value, convert) for value in tree)
    return tree


Params = dict[str, Tree]  # weights by name, nested: {'layers': {'0': {'attention': {'query': {'weight': array}}}}}
_OF_EXPERTS = ('gate', 'up', 'down')  # named by lora.targets
_Leaf = TypeVar('_Leaf')
Nested = Mapping[str, Union['WeightSpec', 'Nested']]  # specs by name, nested like the tree


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """A weight of one model; fields as in weight_rows.Weight, the shape in numbers."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    hf_name: str | None
    transposed: bool
    gguf_name: str | None
    layers: tuple[int, ...]  # the layers that have it, ascending; () = it is in no layer
    part: str | None = None

    @property
    def in_layers(self) -> bool:
        return self.path.startswith(LAYERS)

    @property
    def paths(self) -> list[str]:
        return [at_layer(self.path, layer) for layer in self.layers] if self.in_layers else [self.path]

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix [in, out] of a projection or an adapter; a table [V, d] is not, nor biases [E, d]."""
        return self.in_layers and self.path.rsplit('/', 1)[1] in ('weight', *ADAPTERS)

    @property
    def multiplies(self) -> bool:
        """Whether tokens are multiplied by it in a layer: a matrix, or one for each expert."""
        return self.is_matrix or (self.in_layers and self.init in (Init.MATRIX, Init.RESIDUAL))

    @property
    def stacked_path(self) -> str:
        """The path if layers are stacked: 'layers/mlp_norm' of 'layers/*/mlp_norm'."""
        return self.path.replace('*/', '', 1)

    @property
    def path_in_layer(self) -> str:
        """'attention/query/weight' of 'layers/*/attention/query/weight'."""
        return self.path.removeprefix(LAYERS)


@functools.lru_cache(maxsize=16)
def weight_table(config: ModelConfig, lora: Lora | None = None) -> Mapping[str, WeightSpec]:
    """Every weight of a model by its path, in the order of the forward pass; read-only.

    With `lora`, a projection that it targets is followed by its adapters.

    Raises ConfigError for adapters of experts, and of projections that the model does not have.
    """
    sizes = letter_sizes(config)
    rows = rows_of(config)
    if lora:
        if config.experts and (named := [name for name in lora.targets if name in _OF_EXPERTS]):
            raise ConfigError(
                f'lora.targets={lora.targets} names {named[0]!r}, and experts have no adapters: name projections of '
                'the attention alone'
            )
        if absent := [name for name in lora.targets if name not in _projections(rows)]:
            raise ConfigError(
                f'lora.targets={lora.targets} names {absent[0]!r}, which no layer of this {config.family} model has: '
                'remove it'
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
            row.part,
        )
        for row in rows
    )
    return types.MappingProxyType({spec.path: spec for spec in specs})


def logical_axes(config: ModelConfig) -> WeightAxes:
    """The logical axes of all weights that a model of this family can have, with adapters: for param_shardings."""
    rows = _with_adapters(FAMILIES[config.family].weights)
    units = {'heads': config.n_heads, 'kv_heads': config.n_kv_heads}
    if config.delta:
        units |= {'key_heads': config.delta.key_heads, 'value_heads': config.delta.value_heads}
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
    """`leaf_at`, or None if the tree lacks the leaf."""
    return functools.reduce(lambda node, key: None if node is None else node.get(key), path.split('/'), tree)


def map_matrices(table: Mapping[str, WeightSpec], params: Params, change: Callable[[jax.Array], jax.Array]) -> Params:
    """`params`, layers listed or stacked, with every matrix [..., in, out] replaced by `change(matrix)`."""
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
            yield Weight(a, f'{fan_in} r', 'embed rank', Init.MATRIX, layers=row.layers)
            yield Weight(b, f'r {fan_out}', 'rank embed', Init.ZEROS, layers=row.layers)


# Drawing of initial weights, from the table of weights.

_SMALL = 65536  # numbers of a leaf that is copied rather than given a program of its own


def complete(
    table: Mapping[str, WeightSpec], given: Params, n_layers: int, seed: int, scale: float, embedding_scale: float
) -> Params:
    """All weights of the table, in list form: leaves of `given` as they are, the others drawn."""
    key = jax.random.key(seed)
    leaves = []
    for spec in table.values():
        for path in spec.paths:
            leaf = find_leaf(given, path)
            own = scale * embedding_scale if spec.init is Init.LOOKUP else scale
            leaves.append((path, _draw(key, path, spec, n_layers, own) if leaf is None else leaf))
    return nest(leaves)


def _draw(key: jax.Array, path: str, spec: WeightSpec, n_layers: int, scale: float) -> jax.Array:
    if spec.init in (Init.ONES, Init.ZEROS):
        return jnp.asarray(np.full(spec.shape, float(spec.init is Init.ONES), np.float32))
    key = jax.random.fold_in(key, zlib.crc32(path.encode()))
    if spec.init is Init.LOG_RATE:
        return jnp.log(jax.random.uniform(key, spec.shape, jnp.float32, 1e-3, 16.0))
    if spec.init is Init.TAPS:
        deviation = 1 / math.sqrt(spec.shape[-1])
    else:
        deviation = scale / math.sqrt(spec.shape[1 if spec.init in (Init.TABLE, Init.LOOKUP) else -2])
    if spec.init is Init.RESIDUAL:
        deviation /= math.sqrt(2 * n_layers)  # so that the variance of the residual stream does not grow with depth
    count = math.prod(spec.shape)
    if count > _SMALL or isinstance(key, jax.core.Tracer):
        return _normal(key, spec.shape, deviation)
    # a number depends on its place alone, not on how many there are: small leaves have a program by power of two
    drawn = np.asarray(_normal(key, (1 << (count - 1).bit_length(),), deviation))
    return jnp.asarray(drawn[:count].reshape(spec.shape))


@functools.partial(jax.jit, static_argnums=1)  # one program per shape, not one per leaf
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * deviation
