"""Under arrow 8: weights under the names of Hugging Face, one tensor a layer: the interchange form.

Publication to files, export and other servers speak it. Tensors there are [out, in], ours [in, out].
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from areal_jax.models.decoder import Decoder, Params
from areal_jax.models.shape import ModelConfig

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


class WeightsError(ValueError):
    """Tensors that are not those of the model; the message names them."""


def to_hf_names(params: Params, config: ModelConfig) -> dict[str, Any]:
    """{'model.layers.0.self_attn.q_proj.weight': [out, in], ...}, matrices as transposed views where numpy allows."""
    return {name: _turned(_leaf(params, path), path) for name, path in _names(config)}


def from_hf_names(tensors: Mapping[str, Any], config: ModelConfig) -> Params:
    """The nested dict of the same values, bit-equal to what `to_hf_names` was given; numpy leaves are contiguous.

    Raises WeightsError that names missing, surplus or wrongly shaped tensors.
    """
    _require_the_same(tensors, _hf_shapes(config))
    params: Params = {}
    for name, path in _names(config):
        leaf = _turned(tensors[name], path)
        node = params
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = np.ascontiguousarray(leaf) if isinstance(leaf, np.ndarray) else leaf
    return params


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of these weights, for transformers 4 (rope_theta, torch_dtype) and 5 (the others)."""
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'vocab_size': config.vocab_size,
        'hidden_size': config.d_model,
        'intermediate_size': config.d_ff,
        'num_hidden_layers': config.n_layers,
        'num_attention_heads': config.n_heads,
        'num_key_value_heads': config.n_kv_heads,
        'head_dim': config.head_dim,
        'hidden_act': 'silu',
        'rms_norm_eps': config.rms_eps,
        'rope_theta': config.rope_theta,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope_theta},
        'max_position_embeddings': config.context_tokens,
        'tie_word_embeddings': config.tie_embeddings,
        'attention_bias': False,
        'mlp_bias': False,
        'bos_token_id': None,  # the tokenizer's business; absent they would default to 1 and 2
        'eos_token_id': None,
        'torch_dtype': 'float32',
        'dtype': 'float32',
    }


@functools.lru_cache(maxsize=4)  # the channel of files asks at every publication
def _names(config: ModelConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(name, path) of every leaf, in the order of the forward pass."""
    return tuple(_list_names(config))


def _list_names(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    layer = Decoder(config).abstract()['layers']['0']
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
    if config.value_head:
        yield 'value_head.weight', ('value_head',)


@functools.lru_cache(maxsize=4)
def _hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    abstract = Decoder(config).abstract()
    shapes = {name: (_leaf(abstract, path).shape, path) for name, path in _names(config)}
    return {name: shape[::-1] if _is_matrix(path) else shape for name, (shape, path) in shapes.items()}


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    node: Any = params
    for key in path:
        node = node[key]
    return node


def _turned(tensor: Any, path: tuple[str, ...]) -> Any:
    """[in, out] <-> [out, in]; vectors, embedding and head lie the same way on both sides."""
    return tensor.T if _is_matrix(path) else tensor


def _is_matrix(path: tuple[str, ...]) -> bool:
    return path[-1] == 'weight'


def _require_the_same(tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
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
