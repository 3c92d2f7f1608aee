"""Tiny checkpoints of every family, made of numpy alone: what config.json says, the weights, and texts of tokens.

Shared by the test, which runs them here, and by the recorder, which runs them in transformers; imports nothing of the
package, so that names and shapes of the tensors are said a second time.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 48
LENGTHS = (29, 18)  # tokens of the two texts
NEW_TOKENS = 12
RECORDED = pathlib.Path(__file__).with_name('data') / 'parity.npz'

_SHAPE = {
    'vocab_size': VOCABULARY, 'hidden_size': 32, 'intermediate_size': 40, 'num_hidden_layers': 2,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'hidden_act': 'silu', 'max_position_embeddings': 128,
    'bos_token_id': None, 'eos_token_id': None,
}  # fmt: skip
_FULL, _SLIDING = 'full_attention', 'sliding_attention'


def _config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    return {**_SHAPE, 'model_type': model_type, 'architectures': [architecture], **fields}


CONFIGS = {
    # fields as transformers 4 writes them
    'llama2': _config(
        'llama', 'LlamaForCausalLM', rope_theta=10000.0, rms_norm_eps=1e-5, torch_dtype='float32', num_key_value_heads=4
    ),
    'llama3': _config(
        'llama', 'LlamaForCausalLM', rope_theta=500.0, head_dim=16, torch_dtype='float32',
        rope_scaling={
            'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 2.5,
            'original_max_position_embeddings': 16,  # both texts are longer
        },
    ),
    'llama_bias': _config(
        'llama', 'LlamaForCausalLM', attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-2
    ),
    'qwen2': _config(
        'qwen2', 'Qwen2ForCausalLM', tie_word_embeddings=True, rope_theta=1e6, use_sliding_window=False,
        sliding_window=7, max_window_layers=1, torch_dtype='bfloat16',
    ),
    'qwen2_window': _config(
        'qwen2', 'Qwen2ForCausalLM', use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    # fields as transformers 5 writes them
    'qwen3': _config(
        'qwen3', 'Qwen3ForCausalLM', head_dim=12, tie_word_embeddings=True, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e6}, layer_types=[_FULL] * 2,
    ),
    'qwen3_window': _config(
        'qwen3', 'Qwen3ForCausalLM', head_dim=12, attention_bias=True, dtype='float32', use_sliding_window=True,
        sliding_window=5, rope_parameters={'rope_type': 'default', 'rope_theta': 100.0},
        layer_types=[_FULL, _SLIDING],
    ),
    'mistral': _config(
        'mistral', 'MistralForCausalLM', head_dim=8, sliding_window=7, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1000.0},
    ),
    'mistral_full': _config('mistral', 'MistralForCausalLM', sliding_window=None, num_key_value_heads=1),
}  # fmt: skip


def texts(name: str) -> list[np.ndarray]:
    """Two, int32."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return [random.integers(0, VOCABULARY, length, np.int32) for length in LENGTHS]


def weights(name: str) -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names: norms away from 1, biases away from 0, attention away from uniform."""
    random = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    tensors = {}
    for key, shape in shapes(CONFIGS[name]).items():
        if len(shape) == 2:
            tensors[key] = random.normal(0, 1.5 / np.sqrt(shape[1]), shape).astype(np.float32)
        elif key.endswith('bias'):
            tensors[key] = random.normal(0, 0.5, shape).astype(np.float32)
        else:
            tensors[key] = random.uniform(0.5, 2, shape).astype(np.float32)
    return tensors


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, ff, vocabulary = config['hidden_size'], config['intermediate_size'], config['vocab_size']
    head_dim = config.get('head_dim', d // config['num_attention_heads'])
    q, kv = config['num_attention_heads'] * head_dim, config['num_key_value_heads'] * head_dim
    found = {'model.embed_tokens.weight': (vocabulary, d), 'model.norm.weight': (d,)}
    if not config.get('tie_word_embeddings'):
        found['lm_head.weight'] = (vocabulary, d)
    biased = ['q', 'k', 'v'] if config['model_type'] == 'qwen2' else ['q', 'k', 'v', 'o']
    if config['model_type'] != 'qwen2' and not config.get('attention_bias'):
        biased = []
    for layer in range(config['num_hidden_layers']):
        place = f'model.layers.{layer}.'
        for part, (rows, columns) in {'q': (q, d), 'k': (kv, d), 'v': (kv, d), 'o': (d, q)}.items():
            found[f'{place}self_attn.{part}_proj.weight'] = (rows, columns)
            if part in biased:
                found[f'{place}self_attn.{part}_proj.bias'] = (rows,)
        for part in ('q', 'k') if config['model_type'] == 'qwen3' else ():
            found[f'{place}self_attn.{part}_norm.weight'] = (head_dim,)
        for part, shape in {'gate': (ff, d), 'up': (ff, d), 'down': (d, ff)}.items():
            found[f'{place}mlp.{part}_proj.weight'] = shape
        for norm in ('input_layernorm', 'post_attention_layernorm'):
            found[f'{place}{norm}.weight'] = (d,)
    return found


def write(directory: pathlib.Path, name: str) -> None:
    """The checkpoint as a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(name), directory / 'model.safetensors', metadata={'format': 'pt'})
    (directory / 'config.json').write_text(json.dumps(CONFIGS[name]))
