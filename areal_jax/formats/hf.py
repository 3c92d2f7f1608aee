"""Weights under the names of Hugging Face, one tensor per layer, as its files have them.

`hf_directory` reads and `hf_export` writes directories with these names, and `gguf` converts to them. Names, shapes
and transposes come from the table of weights (models/weights.py): matrices there are [out, in], ours are [in, out].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params, WeightSpec, at_layer, is_adapter, leaf_at, nest, weight_table
from areal_jax.sharding.rules import path_name


class HasShape(Protocol):
    """An array, a tensor of a file, or the description of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class WeightsError(UserError, ValueError):
    """Tensors do not match the model; the message names them."""


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor in a file of Hugging Face, and the leaf that it holds."""

    name: str
    path: str  # of the leaf in list form, 'layers/0/attention/query/weight'
    stacked_path: str  # of the leaf in stacked form, 'layers/attention/query/weight'
    shape: tuple[int, ...]  # of the tensor in the file
    transposed: bool  # whether the tensor is the transpose of the leaf, or of the part of its expert
    layer: int | None = None  # None = it is in no layer
    expert: int | None = None  # the tensor is so deep in the first axis of the leaf in list form; None = it is the leaf

    def take_from(self, leaf: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """The tensor's values from its leaf in list form; those of numpy are views."""
        values = leaf if self.expert is None else leaf[self.expert]
        return values.T if self.transposed else values


def to_hf_names(params: Params, config: ModelConfig) -> dict[str, np.ndarray | jax.Array]:
    """{'model.layers.0.self_attn.q_proj.weight': [out, in], ...}; matrices of numpy are transposed views.

    `params` are in list form. Raises WeightsError for adapters that are not merged.
    """
    require_merged(params)
    return {tensor.name: tensor.take_from(leaf_at(params, tensor.path)) for tensor in hf_tensors(config)}


def from_hf_names(tensors: Mapping[str, np.ndarray | jax.Array], config: ModelConfig) -> Params:
    """The inverse of `to_hf_names`, bit for bit, as a nested dict.

    Matrices of numpy are transposed views, but experts are copied: a leaf holds those of a layer.

    Raises WeightsError that names missing, surplus or wrongly shaped tensors.
    """
    require_tensors(tensors, config)
    parts: dict[str, list[np.ndarray | jax.Array]] = {}
    experts = set()
    for tensor in hf_tensors(config):
        values = tensors[tensor.name]
        parts.setdefault(tensor.path, []).append(values.T if tensor.transposed else values)
        if tensor.expert is not None:
            experts.add(tensor.path)
    return nest((path, _join(values) if path in experts else values[0]) for path, values in parts.items())


def _join(experts: list[np.ndarray | jax.Array]) -> np.ndarray | jax.Array:
    """[E, in, out] of matrices [in, out]."""
    return (np if isinstance(experts[0], np.ndarray) else jnp).stack(experts)


@functools.lru_cache(maxsize=4)  # publication to files lists them for every version
def hf_tensors(config: ModelConfig) -> tuple[HfTensor, ...]:
    """Every tensor of a causal language model, in the order of the forward pass."""
    return tuple(_list_tensors(config))


def _list_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    specs = [spec for spec in weight_table(config).values() if spec.hf_name is not None]
    in_layers = [spec for spec in specs if spec.in_layers]
    for spec in specs:
        if not spec.in_layers:
            yield from _tensors(spec, None)
        elif spec is in_layers[0]:  # all layers take the place of the first row of a layer
            for layer in range(config.n_layers):
                yield from (tensor for row in in_layers if layer in row.layers for tensor in _tensors(row, layer))


def _tensors(spec: WeightSpec, layer: int | None) -> Iterator[HfTensor]:
    """Of a leaf: one, or one an expert."""
    assert spec.hf_name is not None
    path, name = (text if layer is None else at_layer(text, layer) for text in (spec.path, spec.hf_name))
    experts = range(spec.shape[0]) if '*' in name else [None]
    shape = spec.shape[1:] if '*' in name else spec.shape
    for expert in experts:
        own = name if expert is None else name.replace('*', str(expert))
        shaped = shape[::-1] if spec.transposed else shape
        yield HfTensor(own, path, spec.stacked_path, shaped, spec.transposed, layer, expert)


def require_merged(params: Params) -> None:
    """Raises WeightsError for weights with adapters, which files of Hugging Face cannot hold."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(name := path_name(path)):
            raise WeightsError(f'{name} belongs to an adapter, which the interchange form lacks: merge_adapters first')


def require_tensors(tensors: Mapping[str, HasShape], config: ModelConfig) -> None:
    """Raises WeightsError that names the tensors that are missing, surplus or wrongly shaped."""
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(config)}
    faults = [f'missing {name}' for name in shapes if name not in tensors]
    faults += [f'surplus {name}' for name in tensors if name not in shapes]
    faults += [
        f'{name} has shape {list(tensors[name].shape)} instead of {list(shape)}'
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if faults:
        more = f', and {len(faults) - 8} more' if len(faults) > 8 else ''
        raise WeightsError(f'these are not the weights of the model: {"; ".join(faults[:8])}{more}')
