"""Under arrow 8: weights under the names of Hugging Face, one tensor a layer: the interchange form.

Publication to files, export and other servers speak it. Tensors there are [out, in], ours [in, out].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.errors import UserError
from areal_jax.models.decoder import Decoder, Params
from areal_jax.models.lora import is_adapter
from areal_jax.models.shape import ModelConfig
from areal_jax.sharding.rules import path_name

# part of a layer -> name inside a layer, in the order of the forward pass; norms are leaves, projections have them
_LAYER_PARTS = {
    ('attention_norm',): 'input_layernorm.weight',
    ('attention', 'query'): 'self_attn.q_proj',
    ('attention', 'key'): 'self_attn.k_proj',
    ('attention', 'value'): 'self_attn.v_proj',
    ('attention', 'query_norm'): 'self_attn.q_norm.weight',
    ('attention', 'key_norm'): 'self_attn.k_norm.weight',
    ('attention', 'output'): 'self_attn.o_proj',
    ('mlp_norm',): 'post_attention_layernorm.weight',
    ('mlp', 'gate'): 'mlp.gate_proj',
    ('mlp', 'up'): 'mlp.up_proj',
    ('mlp', 'down'): 'mlp.down_proj',
}
_LEAVES = ('weight', 'bias')  # of a projection


class WeightsError(UserError, ValueError):
    """Tensors that are not those of the model; the message names them."""


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """A tensor of the interchange form and the leaf it is."""

    name: str
    path: tuple[str, ...]  # ('layers', '0', 'attention', 'query', 'weight'), in list form
    shape: tuple[int, ...]  # as Hugging Face has it
    turned: bool  # whether it is the transpose of the leaf


def to_hf_names(params: Params, config: ModelConfig) -> dict[str, Any]:
    """{'model.layers.0.self_attn.q_proj.weight': [out, in], ...}, matrices as transposed views where numpy allows.

    `params` are in list form. A value head is left out: a causal language model of Hugging Face has none. Raises
    WeightsError for adapters that are not merged.
    """
    require_merged(params)
    return {tensor.name: _turned(leaf_at(params, tensor.path), tensor) for tensor in hf_tensors(config)}


def from_hf_names(tensors: Mapping[str, Any], config: ModelConfig) -> Params:
    """The nested dict of the same values, bit-equal to what `to_hf_names` was given; numpy leaves are contiguous.

    Raises WeightsError that names missing, surplus or wrongly shaped tensors.
    """
    require_tensors(tensors, config)
    params: Params = {}
    for tensor in hf_tensors(config):
        leaf = _turned(tensors[tensor.name], tensor)
        set_leaf(params, tensor.path, np.ascontiguousarray(leaf) if isinstance(leaf, np.ndarray) else leaf)
    return params


def _turned(values: Any, tensor: HfTensor) -> Any:
    """[in, out] <-> [out, in]."""
    return values.T if tensor.turned else values


@functools.lru_cache(maxsize=4)  # the channel of files asks at every publication
def hf_tensors(config: ModelConfig) -> tuple[HfTensor, ...]:
    """Every tensor of a causal language model, in the order of the forward pass; a value head is none of them."""
    return tuple(_list_tensors(config))


def _list_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    abstract = Decoder(config).abstract()
    for name, path in _list_names(config, abstract['layers']['0']):
        shape = leaf_at(abstract, path).shape
        turned = path[-1] == 'weight'  # vectors, embedding and head lie the same way on both sides
        yield HfTensor(name, path, shape[::-1] if turned else shape, turned)


def _list_names(config: ModelConfig, layer: Params) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield 'model.embed_tokens.weight', ('embedding',)
    for index in range(config.n_layers):
        for path, name in _LAYER_PARTS.items():
            place = ('layers', str(index), *path)
            part = functools.reduce(lambda node, key: node.get(key, {}), path, layer)
            if isinstance(part, dict):
                yield from ((f'model.layers.{index}.{name}.{leaf}', (*place, leaf)) for leaf in _LEAVES if leaf in part)
            else:
                yield f'model.layers.{index}.{name}', place
    yield 'model.norm.weight', ('final_norm',)
    if not config.tie_embeddings:
        yield 'lm_head.weight', ('head',)


def leaf_at(params: Params, path: tuple[str, ...]) -> Any:
    """The leaf at the end of a path through nested dicts."""
    return functools.reduce(lambda node, key: node[key], path, params)


def set_leaf(params: Params, path: tuple[str, ...], leaf: Any) -> None:
    """Puts the leaf at the end of a path, making the dicts on the way."""
    node = params
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = leaf


def require_merged(params: Params) -> None:
    """Raises WeightsError for weights whose adapters would be lost on the way."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if is_adapter(name := path_name(path)):
            raise WeightsError(f'{name} belongs to an adapter, which the interchange form lacks: merge_adapters first')


def require_tensors(tensors: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises WeightsError that names tensors (anything with a shape) that are missing, surplus or wrongly shaped."""
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
