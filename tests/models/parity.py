"""Tiny checkpoints of every family, made of numpy alone: what config.json says, the weights, and texts of tokens.

Shared by the test, which runs them here, and by the recorder, which runs them in transformers; imports nothing of the
package, so that names and shapes of the tensors are said a second time.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Sequence
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
_FULL, _SLIDING, _LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'


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
    # a file of 2025, and one of transformers 5 with a dense layer and choices whose weights do not sum to 1
    'qwen3_moe': _config(
        'qwen3_moe', 'Qwen3MoeForCausalLM', head_dim=12, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        norm_topk_prob=True, rope_theta=1e6, torch_dtype='float32', decoder_sparse_step=1, mlp_only_layers=[],
    ),
    'qwen3_moe_mixed': _config(
        'qwen3_moe', 'Qwen3MoeForCausalLM', num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
        attention_bias=True, mlp_only_layers=[0], use_sliding_window=True, sliding_window=9, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e6},
    ),
    'mixtral': _config(
        'mixtral', 'MixtralForCausalLM', num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e6}, sliding_window=None,
    ),
    'olmoe': _config(
        'olmoe', 'OlmoeForCausalLM', num_experts=8, num_experts_per_tok=3, norm_topk_prob=False, clip_qkv=None,
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=10000.0, num_key_value_heads=4,
        pad_token_id=None,  # that of a padding token would have no gradient in torch
    ),
    # longer contexts by other frequencies
    'qwen3_yarn': _config(
        'qwen3', 'Qwen3ForCausalLM', head_dim=16, dtype='float32',
        rope_parameters={
            'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16,
            'beta_fast': 4.0, 'beta_slow': 1.0,
        },
    ),
    'llama_yarn': _config(
        'llama', 'LlamaForCausalLM', rope_theta=500.0, torch_dtype='float32', rms_norm_eps=1e-5,
        rope_scaling={
            'type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 16, 'attention_factor': 1.25,
            'beta_fast': 2.0, 'truncate': False,
        },
    ),
    'llama_linear': _config(
        'llama', 'LlamaForCausalLM', rope_theta=500.0, torch_dtype='float32',
        rope_scaling={'type': 'linear', 'factor': 4.0},
    ),
    # norms behind attention and MLP alone, windows in three of four layers, another rope for the fourth
    'olmo3': _config(
        'olmo3', 'Olmo3ForCausalLM', num_hidden_layers=4, sliding_window=7, dtype='float32', rms_norm_eps=1e-5,
        pad_token_id=None,
        rope_parameters={
            _SLIDING: {'rope_type': 'default', 'rope_theta': 5e5},
            _FULL: {
                'rope_type': 'yarn', 'rope_theta': 5e5, 'factor': 8.0, 'original_max_position_embeddings': 16,
                'beta_fast': 2.0, 'beta_slow': 0.1,
            },
        },
    ),
    # a layer without rotation, which alone has a window
    'smollm3': _config(
        'smollm3', 'SmolLM3ForCausalLM', num_hidden_layers=4, use_sliding_window=True, sliding_window=7,
        no_rope_layer_interval=4, rope_theta=5e6, torch_dtype='float32', pad_token_id=None,
    ),
    'gemma3': _config(
        'gemma3_text', 'Gemma3ForCausalLM', num_hidden_layers=7, head_dim=12, query_pre_attn_scalar=9, sliding_window=7,
        hidden_activation='gelu_pytorch_tanh', dtype='float32', pad_token_id=None,
        rope_parameters={
            _SLIDING: {'rope_type': 'default', 'rope_theta': 1e4},
            _FULL: {'rope_type': 'default', 'rope_theta': 1e6},
        },
    ),
    # fields of 2025, and a head of its own
    'gemma3_capped': _config(
        'gemma3_text', 'Gemma3ForCausalLM', num_hidden_layers=4, head_dim=12, query_pre_attn_scalar=12,
        sliding_window=7, sliding_window_pattern=3, hidden_activation='gelu_pytorch_tanh', torch_dtype='float32',
        pad_token_id=None, rope_theta=1e6, rope_local_base_freq=1e4,
        rope_scaling={'rope_type': 'linear', 'factor': 8.0},
        final_logit_softcapping=3.0, tie_word_embeddings=False,
    ),
    'gpt_oss': _config(
        'gpt_oss', 'GptOssForCausalLM', num_hidden_layers=4, head_dim=12, num_local_experts=8, num_experts_per_tok=3,
        intermediate_size=20, sliding_window=7, swiglu_limit=1.5, dtype='float32', rms_norm_eps=1e-5,
        rope_parameters={
            'rope_type': 'yarn', 'rope_theta': 150000.0, 'factor': 32.0, 'beta_fast': 4.0, 'beta_slow': 1.0,
            'truncate': False, 'original_max_position_embeddings': 16,
        },
    ),
    # sigmoid routers: groups, biases, norms of queries and keys, half of a head rotated; and none of these
    'glm4_moe': _config(
        'glm4_moe', 'Glm4MoeForCausalLM', num_hidden_layers=3, head_dim=12, use_qk_norm=True, attention_bias=True,
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, rms_norm_eps=1e-5,
        partial_rotary_factor=0.5, rope_theta=1e4, torch_dtype='float32', num_nextn_predict_layers=0,
    ),
    'glm4_moe_air': _config(
        'glm4_moe', 'Glm4MoeForCausalLM', n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
        first_k_dense_replace=0, norm_topk_prob=False, tie_word_embeddings=True, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e4, 'partial_rotary_factor': 1.0}, num_mtp_layers=0,
    ),
    # latent attention: queries through a latent, biases and YaRN with mscale; queries without a latent, values longer;
    # such queries with biases and YaRN as published
    'deepseek_v3': _config(
        'deepseek_v3', 'DeepseekV3ForCausalLM', num_hidden_layers=3, num_key_value_heads=4, attention_bias=True,
        q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=1, n_group=4, topk_group=2,
        routed_scaling_factor=2.5, norm_topk_prob=True, first_k_dense_replace=1, torch_dtype='float32',
        num_nextn_predict_layers=0, rope_theta=1e4, rms_norm_eps=1e-5,
        rope_scaling={
            'type': 'yarn', 'factor': 40.0, 'original_max_position_embeddings': 16, 'beta_fast': 32, 'beta_slow': 1,
            'mscale': 0.7, 'mscale_all_dim': 1.0,
        },
    ),
    'deepseek_v3_plain': _config(
        'deepseek_v3', 'DeepseekV3ForCausalLM', num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1, rope_interleave=False, dtype='float32',
        rope_parameters={'rope_type': 'default', 'rope_theta': 1e4}, num_mtp_layers=0, routed_scaling_factor=1.0,
    ),
    'deepseek_v3_yarn': _config(
        'deepseek_v3', 'DeepseekV3ForCausalLM', num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=20,
        attention_bias=True, qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=10, n_routed_experts=8,
        num_experts_per_tok=3, moe_intermediate_size=16, n_shared_experts=2, n_group=2, topk_group=1,
        routed_scaling_factor=2.446, norm_topk_prob=False, first_k_dense_replace=0, torch_dtype='float32',
        num_nextn_predict_layers=0, rope_theta=5e4, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_scaling={
            'type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 16, 'beta_fast': 4, 'beta_slow': 1,
            'mscale': 1.0, 'mscale_all_dim': 1.0,
        },
    ),
    'glm4_moe_lite': _config(
        'glm4_moe_lite', 'Glm4MoeLiteForCausalLM', num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=12,
        kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=16, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=20, mlp_layer_types=['dense', 'sparse', 'sparse'],
        dtype='float32', rope_parameters={'rope_type': 'default', 'rope_theta': 1e4}, rms_norm_eps=1e-3,
    ),
}  # fmt: skip
# Gated delta nets in three of four layers: two value heads a key head, a quarter of a head is rotated.
_DELTA = {
    'hidden_size': 64, 'num_hidden_layers': 4, 'head_dim': 32, 'linear_num_key_heads': 2, 'linear_num_value_heads': 4,
    'linear_key_head_dim': 8, 'linear_value_head_dim': 12, 'linear_conv_kernel_dim': 4, 'dtype': 'float32',
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4, 'partial_rotary_factor': 0.25},
}  # fmt: skip
_DELTA_EXPERTS = {
    'num_experts': 8, 'num_experts_per_tok': 3, 'moe_intermediate_size': 24, 'shared_expert_intermediate_size': 20,
}  # fmt: skip
HYBRIDS = {
    'qwen3_5': _config(
        'qwen3_5_text', 'Qwen3_5ForCausalLM', **_DELTA, tie_word_embeddings=True,
        layer_types=[_LINEAR, _FULL, _LINEAR, _LINEAR],
    ),
    'qwen3_5_moe': _config('qwen3_5_moe_text', 'Qwen3_5MoeForCausalLM', **_DELTA, **_DELTA_EXPERTS),
    'qwen3_next': _config(
        'qwen3_next', 'Qwen3NextForCausalLM', **_DELTA, **_DELTA_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1],
        decoder_sparse_step=1,
    ),
}  # fmt: skip
COMPOSITES = {  # (model_type, architecture) of the directories whose text part a hybrid is
    'qwen3_5': ('qwen3_5', 'Qwen3_5ForConditionalGeneration'),
    'qwen3_5_moe': ('qwen3_5_moe', 'Qwen3_5MoeForConditionalGeneration'),
}
ALL = CONFIGS | HYBRIDS
EXACT = (
    'qwen3_window',
    'qwen3_yarn',
    'llama_yarn',
    'llama_linear',
    'olmo3',
    'smollm3',
    'gemma3',
    'gemma3_capped',
    'gpt_oss',
    'glm4_moe',
    'glm4_moe_air',
    'deepseek_v3',
    'deepseek_v3_plain',
    'deepseek_v3_yarn',
    'glm4_moe_lite',
)  # of these the logits are recorded in float64 too
SIGMOID = tuple(name for name in EXACT if 'n_routed_experts' in CONFIGS[name])  # also with `foreign_routes`
_BIASED = {'qwen2': ('q', 'k', 'v'), 'gpt_oss': ('q', 'k', 'v', 'o')}  # whatever the file says
_NORMS = {  # of a layer, beside those of queries and keys
    'olmo3': ('post_attention_layernorm', 'post_feedforward_layernorm'),
    'gemma3_text': (
        'input_layernorm', 'post_attention_layernorm', 'pre_feedforward_layernorm', 'post_feedforward_layernorm',
    ),
}  # fmt: skip


def texts(name: str) -> list[np.ndarray]:
    """Two, int32."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return [random.integers(0, VOCABULARY, length, np.int32) for length in LENGTHS]


def foreign_routes(name: str) -> list[np.ndarray]:
    """Of each text, distinct experts drawn for every layer with experts and token, int32 [L, T, k]."""
    random, config = np.random.default_rng(zlib.crc32(name.encode()) + 2), ALL[name]
    layers = config['num_hidden_layers'] - len(_dense_layers(config))
    scores = [random.random((layers, length, config['n_routed_experts'])) for length in LENGTHS]
    return [np.argsort(one, axis=-1)[..., : config['num_experts_per_tok']].astype(np.int32) for one in scores]


def weights(name: str) -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names: norms away from 1, biases away from 0, attention away from uniform."""
    random = np.random.default_rng(zlib.crc32(name.encode()) + 1)
    tensors = {}
    for key, shape in shapes(ALL[name]).items():
        if '.linear_attn.' in key and not key.endswith('proj.weight') and len(shape) != 2:
            tensors[key] = _delta_weight(random, key, shape)
        elif key.endswith(('bias', 'sinks')):
            tensors[key] = random.normal(0, 0.5, shape).astype(np.float32)
        elif len(shape) == 2:
            tensors[key] = random.normal(0, 1.5 / np.sqrt(shape[1]), shape).astype(np.float32)
        elif len(shape) == 3:  # [E, in, out]
            tensors[key] = random.normal(0, 1 / np.sqrt(shape[1]), shape).astype(np.float32)
        elif name in HYBRIDS or ALL[name]['model_type'] == 'gemma3_text':  # of 1 + weight
            tensors[key] = random.uniform(-0.5, 1, shape).astype(np.float32)
        else:
            tensors[key] = random.uniform(0.5, 2, shape).astype(np.float32)
    return tensors


def _delta_weight(random: np.random.Generator, key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Taps, decays between 0.4 and 0.999 of a token, or the scale of the norm."""
    if key.endswith('conv1d.weight'):
        return random.normal(0, 0.75, shape).astype(np.float32)
    if key.endswith('A_log'):
        return np.log(random.uniform(0.01, 1, shape)).astype(np.float32)
    if key.endswith('dt_bias'):
        return random.normal(0, 0.5, shape).astype(np.float32)
    return random.uniform(0.5, 2, shape).astype(np.float32)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, ff, vocabulary = config['hidden_size'], config['intermediate_size'], config['vocab_size']
    head_dim = config.get('head_dim', d // config['num_attention_heads'])
    q, kv = config['num_attention_heads'] * head_dim, config['num_key_value_heads'] * head_dim
    found = {'model.embed_tokens.weight': (vocabulary, d), 'model.norm.weight': (d,)}
    ties = config['model_type'] in ('smollm3', 'gemma3_text')  # unless the file says otherwise
    if not config.get('tie_word_embeddings', ties):
        found['lm_head.weight'] = (vocabulary, d)
    kind = config['model_type']
    biased = _BIASED.get(kind) or (('q', 'k', 'v', 'o') if config.get('attention_bias') else ())
    biased = biased[:3] if kind == 'glm4_moe' else biased
    whole = kind in ('olmoe', 'olmo3')
    for layer in range(config['num_hidden_layers']):
        place = f'model.layers.{layer}.'
        if 'linear_key_head_dim' in config:
            found |= _hybrid_shapes(place, config, layer)
            continue
        if 'kv_lora_rank' in config:
            found |= _latent_shapes(f'{place}self_attn.', config)
        for part, (rows, columns) in (
            {} if 'kv_lora_rank' in config else {'q': (q, d), 'k': (kv, d), 'v': (kv, d), 'o': (d, q)}.items()
        ):
            found[f'{place}self_attn.{part}_proj.weight'] = (rows, columns)
            if part in biased:
                found[f'{place}self_attn.{part}_proj.bias'] = (rows,)
        for part, width in {'q': q, 'k': kv}.items():
            if kind in ('qwen3', 'qwen3_moe', 'olmoe', 'olmo3', 'gemma3_text') or config.get('use_qk_norm'):
                found[f'{place}self_attn.{part}_norm.weight'] = (width if whole else head_dim,)
        if kind == 'gpt_oss':
            found[f'{place}self_attn.sinks'] = (config['num_attention_heads'],)
        experts = config.get('num_experts') or config.get('num_local_experts') or config.get('n_routed_experts')
        if not experts or layer in _dense_layers(config):
            for part, shape in {'gate': (ff, d), 'up': (ff, d), 'down': (d, ff)}.items():
                found[f'{place}mlp.{part}_proj.weight'] = shape
        else:
            found |= (_fused_shapes if kind == 'gpt_oss' else _expert_shapes)(place, config, experts)
        for norm in _NORMS.get(kind, ('input_layernorm', 'post_attention_layernorm')):
            found[f'{place}{norm}.weight'] = (d,)
    return found


def _dense_layers(config: dict[str, Any]) -> Sequence[int]:
    if kinds := config.get('mlp_layer_types'):
        return [layer for layer, kind in enumerate(kinds) if kind == 'dense']
    return config.get('mlp_only_layers', range(config.get('first_k_dense_replace', 0)))


def _expert_shapes(place: str, config: dict[str, Any], experts: int) -> dict[str, tuple[int, ...]]:
    mixtral = config['model_type'] == 'mixtral'
    module = f'{place}block_sparse_moe.' if mixtral else f'{place}mlp.'
    names = ('w1', 'w3', 'w2') if mixtral else ('gate_proj', 'up_proj', 'down_proj')
    d, width = config['hidden_size'], config.get('moe_intermediate_size', config['intermediate_size'])
    found: dict[str, tuple[int, ...]] = {f'{module}gate.weight': (experts, d)}
    for expert in range(experts):
        for name, shape in zip(names, ((width, d), (width, d), (d, width)), strict=True):
            found[f'{module}experts.{expert}.{name}.weight'] = shape
    if 'n_routed_experts' in config:
        found[f'{module}gate.e_score_correction_bias'] = (experts,)
        width *= config.get('n_shared_experts', 1)
        found |= {f'{module}shared_experts.{part}_proj.weight': (width, d) for part in ('gate', 'up')}
        found[f'{module}shared_experts.down_proj.weight'] = (d, width)
    return found


def _latent_shapes(own: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads, rank, latent = (
        config[name] for name in ('hidden_size', 'num_attention_heads', 'q_lora_rank', 'kv_lora_rank')
    )
    plain, rotated, value = (config[name] for name in ('qk_nope_head_dim', 'qk_rope_head_dim', 'v_head_dim'))
    queries = heads * (plain + rotated)
    rows = {'q_a': (rank, d), 'q_b': (queries, rank)} if rank else {'q': (queries, d)}
    found: dict[str, tuple[int, ...]] = {f'{own}{name}_proj.weight': shape for name, shape in rows.items()}
    found |= {f'{own}q_a_layernorm.weight': (rank,)} if rank else {}
    found |= {
        f'{own}kv_a_proj_with_mqa.weight': (latent + rotated, d),
        f'{own}kv_a_layernorm.weight': (latent,),
        f'{own}kv_b_proj.weight': (heads * (plain + value), latent),
        f'{own}o_proj.weight': (d, heads * value),
    }
    biased = {'q_a_proj': rank} if rank else {}
    biased |= {'kv_a_proj_with_mqa': latent + rotated, 'o_proj': d}
    return found | (
        {f'{own}{name}.bias': (size,) for name, size in biased.items()} if config.get('attention_bias') else {}
    )


def _fused_shapes(place: str, config: dict[str, Any], experts: int) -> dict[str, tuple[int, ...]]:
    d, width, module = config['hidden_size'], config['intermediate_size'], f'{place}mlp.'
    return {
        f'{module}router.weight': (experts, d),
        f'{module}router.bias': (experts,),
        f'{module}experts.gate_up_proj': (experts, d, 2 * width),
        f'{module}experts.gate_up_proj_bias': (experts, 2 * width),
        f'{module}experts.down_proj': (experts, width, d),
        f'{module}experts.down_proj_bias': (experts, d),
    }


def _hybrid_shapes(place: str, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    d, ff, own = config['hidden_size'], config['intermediate_size'], f'{place}self_attn.'
    types = config.get('layer_types') or [_LINEAR, _LINEAR, _LINEAR, _FULL]
    q, kv = (config[name] * config['head_dim'] for name in ('num_attention_heads', 'num_key_value_heads'))
    found = {f'{place}{norm}.weight': (d,) for norm in ('input_layernorm', 'post_attention_layernorm')}
    if types[layer] == _FULL:
        found |= {f'{own}q_proj.weight': (2 * q, d), f'{own}o_proj.weight': (d, q)}
        found |= {f'{own}{part}_proj.weight': (kv, d) for part in 'kv'}
        found |= {f'{own}{part}_norm.weight': (config['head_dim'],) for part in 'qk'}
    else:
        found |= _delta_shapes(f'{place}linear_attn.', config)
    if 'num_experts' not in config or layer in config.get('mlp_only_layers', []):
        return found | {
            f'{place}mlp.{part}_proj.weight': (d, ff) if part == 'down' else (ff, d) for part in ('gate', 'up', 'down')
        }
    shared, module = config['shared_expert_intermediate_size'], f'{place}mlp.shared_expert'
    found |= {f'{module}.{part}_proj.weight': (shared, d) for part in ('gate', 'up')}
    found |= {f'{module}.down_proj.weight': (d, shared), f'{module}_gate.weight': (1, d)}
    return found | _expert_shapes(place, config, config['num_experts'])


def _delta_shapes(module: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, heads = config['hidden_size'], config['linear_num_value_heads']
    keys, values = (
        config['linear_num_key_heads'] * config['linear_key_head_dim'],
        heads * config['linear_value_head_dim'],
    )
    channels = 2 * keys + values
    found: dict[str, tuple[int, ...]] = {
        f'{module}conv1d.weight': (channels, 1, config['linear_conv_kernel_dim']),
        f'{module}A_log': (heads,),
        f'{module}dt_bias': (heads,),
        f'{module}norm.weight': (config['linear_value_head_dim'],),
        f'{module}out_proj.weight': (d, values),
    }
    if config['model_type'] == 'qwen3_next':
        return found | {
            f'{module}in_proj_qkvz.weight': (channels + values, d),
            f'{module}in_proj_ba.weight': (2 * heads, d),
        }
    rows = {'qkv': channels, 'z': values, 'b': heads, 'a': heads}
    return found | {f'{module}in_proj_{name}.weight': (count, d) for name, count in rows.items()}


def write(directory: pathlib.Path, name: str) -> None:
    """The checkpoint as a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights(name), directory / 'model.safetensors', metadata={'format': 'pt'})
    (directory / 'config.json').write_text(json.dumps(ALL[name]))


def write_composite(directory: pathlib.Path, name: str) -> None:
    """The hybrid as the text part of a composite directory, without the tensors of images."""
    directory.mkdir(parents=True, exist_ok=True)
    text = 'model.language_model.'
    tensors = {
        text + key.removeprefix('model.') if key.startswith('model.') else key: tensor
        for key, tensor in weights(name).items()
    }
    save_file(tensors, directory / 'model.safetensors', metadata={'format': 'pt'})
    model_type, architecture = COMPOSITES[name]
    fields = {
        'model_type': model_type,
        'architectures': [architecture],
        'text_config': ALL[name],
        'tie_word_embeddings': ALL[name].get('tie_word_embeddings', False),
    }
    (directory / 'config.json').write_text(json.dumps(fields))
