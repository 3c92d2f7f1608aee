"""Forms of config.json as they are published, and what transformers reads from each: recorded by this program.

python -m tests.formats.config_forms      (torch==2.13.0, transformers==5.23.0)
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

RECORDED = pathlib.Path(__file__).with_name('data') / 'config_forms.json'
_FULL, _SLIDING, _LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'

_QWEN3 = {
    'architectures': ['Qwen3ForCausalLM'], 'attention_bias': False, 'head_dim': 128, 'hidden_act': 'silu',
    'hidden_size': 4096, 'intermediate_size': 12288, 'max_position_embeddings': 40960, 'max_window_layers': 36,
    'model_type': 'qwen3', 'num_attention_heads': 32, 'num_hidden_layers': 36, 'num_key_value_heads': 8,
    'rms_norm_eps': 1e-06, 'rope_scaling': None, 'rope_theta': 1000000, 'sliding_window': None,
    'tie_word_embeddings': False, 'torch_dtype': 'bfloat16', 'use_sliding_window': False, 'vocab_size': 151936,
}  # fmt: skip
_GEMMA3_TEXT = {
    'hidden_size': 2560, 'intermediate_size': 10240, 'model_type': 'gemma3_text', 'num_hidden_layers': 34,
    'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, 'sliding_window': 1024,
}  # fmt: skip
_QWEN3_5_TEXT = {
    'attention_bias': False, 'attention_dropout': 0.0, 'attn_output_gate': True, 'dtype': 'bfloat16',
    'eos_token_id': 248044, 'full_attention_interval': 4, 'head_dim': 256, 'hidden_act': 'silu', 'hidden_size': 5120,
    'initializer_range': 0.02, 'intermediate_size': 17408, 'layer_types': [*[_LINEAR] * 3, _FULL] * 16,
    'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 128, 'linear_num_key_heads': 16, 'linear_num_value_heads': 48,
    'linear_value_head_dim': 128, 'mamba_ssm_dtype': 'float32', 'max_position_embeddings': 262144,
    'mlp_only_layers': [], 'model_type': 'qwen3_5_text', 'mtp_num_hidden_layers': 1,
    'mtp_use_dedicated_embeddings': False, 'num_attention_heads': 24, 'num_hidden_layers': 64, 'num_key_value_heads': 4,
    'output_gate_type': 'swish', 'rms_norm_eps': 1e-06, 'use_cache': True, 'vocab_size': 248320,
    'rope_parameters': {
        'mrope_interleaved': True, 'mrope_section': [11, 11, 10], 'partial_rotary_factor': 0.25,
        'rope_theta': 10000000, 'rope_type': 'default',
    },
}  # fmt: skip
_QWEN3_NEXT = {
    'architectures': ['Qwen3NextForCausalLM'], 'model_type': 'qwen3_next', 'attention_bias': False,
    'decoder_sparse_step': 1, 'full_attention_interval': 4, 'head_dim': 256, 'hidden_act': 'silu', 'hidden_size': 2048,
    'intermediate_size': 5120, 'linear_conv_kernel_dim': 4, 'linear_key_head_dim': 128, 'linear_num_key_heads': 16,
    'linear_num_value_heads': 32, 'linear_value_head_dim': 128, 'max_position_embeddings': 262144,
    'mlp_only_layers': [], 'moe_intermediate_size': 512, 'norm_topk_prob': True, 'num_attention_heads': 16,
    'num_experts': 512, 'num_experts_per_tok': 10, 'num_hidden_layers': 48, 'num_key_value_heads': 2,
    'output_router_logits': False, 'partial_rotary_factor': 0.25, 'rms_norm_eps': 1e-06, 'rope_scaling': None,
    'rope_theta': 10000000, 'router_aux_loss_coef': 0.001, 'shared_expert_intermediate_size': 512,
    'tie_word_embeddings': False, 'torch_dtype': 'bfloat16', 'use_sliding_window': False, 'vocab_size': 151936,
}  # fmt: skip
_GLM = {
    'architectures': ['Glm4MoeForCausalLM'], 'attention_bias': True, 'attention_dropout': 0.0,
    'first_k_dense_replace': 3, 'head_dim': 128, 'hidden_act': 'silu', 'hidden_size': 5120, 'intermediate_size': 12288,
    'max_position_embeddings': 131072, 'model_type': 'glm4_moe', 'moe_intermediate_size': 1536, 'n_group': 1,
    'n_routed_experts': 160, 'n_shared_experts': 1, 'norm_topk_prob': True, 'num_attention_heads': 96,
    'num_experts_per_tok': 8, 'num_hidden_layers': 92, 'num_key_value_heads': 8, 'num_nextn_predict_layers': 1,
    'partial_rotary_factor': 0.5, 'rms_norm_eps': 1e-05, 'rope_scaling': None, 'rope_theta': 1000000,
    'routed_scaling_factor': 2.5, 'tie_word_embeddings': False, 'topk_group': 1, 'torch_dtype': 'bfloat16',
    'use_cache': True, 'use_qk_norm': True, 'vocab_size': 151552,
}  # fmt: skip
_DEEPSEEK = {
    'architectures': ['DeepseekV3ForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0, 'ep_size': 1,
    'first_k_dense_replace': 3, 'hidden_act': 'silu', 'hidden_size': 7168, 'intermediate_size': 18432,
    'kv_lora_rank': 512, 'max_position_embeddings': 163840, 'model_type': 'deepseek_v3', 'moe_intermediate_size': 2048,
    'moe_layer_freq': 1, 'n_group': 8, 'n_routed_experts': 256, 'n_shared_experts': 1, 'norm_topk_prob': True,
    'num_attention_heads': 128, 'num_experts_per_tok': 8, 'num_hidden_layers': 61, 'num_key_value_heads': 128,
    'num_nextn_predict_layers': 1, 'q_lora_rank': 1536, 'qk_nope_head_dim': 128, 'qk_rope_head_dim': 64,
    'rms_norm_eps': 1e-06, 'rope_theta': 10000, 'routed_scaling_factor': 2.5, 'scoring_func': 'sigmoid',
    'rope_scaling': {
        'beta_fast': 32, 'beta_slow': 1, 'factor': 40, 'mscale': 1.0, 'mscale_all_dim': 1.0,
        'original_max_position_embeddings': 4096, 'type': 'yarn',
    },
    'tie_word_embeddings': False, 'topk_group': 4, 'topk_method': 'noaux_tc', 'torch_dtype': 'bfloat16',
    'use_cache': True, 'v_head_dim': 128, 'vocab_size': 129280,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    'qwen2': {
        'architectures': ['Qwen2ForCausalLM'], 'hidden_act': 'silu', 'hidden_size': 1536, 'intermediate_size': 8960,
        'max_position_embeddings': 131072, 'max_window_layers': 21, 'model_type': 'qwen2', 'num_attention_heads': 12,
        'num_hidden_layers': 28, 'num_key_value_heads': 2, 'rms_norm_eps': 1e-06, 'rope_theta': 1000000,
        'sliding_window': 131072, 'tie_word_embeddings': True, 'use_mrope': False, 'use_sliding_window': False,
        'vocab_size': 151936,
    },
    'qwen3': _QWEN3,
    'qwen3_yarn': _QWEN3 | {
        'max_position_embeddings': 131072,
        'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32768},
    },
    'llama_yarn': {
        'architectures': ['LlamaForCausalLM'], 'attention_bias': False, 'hidden_act': 'silu', 'hidden_size': 4096,
        'intermediate_size': 11008, 'max_position_embeddings': 131072, 'model_type': 'llama', 'num_attention_heads': 32,
        'num_hidden_layers': 32, 'num_key_value_heads': 32, 'rms_norm_eps': 1e-05, 'rope_theta': 10000.0,
        'rope_scaling': {
            'type': 'yarn', 'factor': 32.0, 'original_max_position_embeddings': 4096, 'finetuned': True,
            'attention_factor': 1.25, 'beta_fast': 16, 'beta_slow': 2,
        },
        'tie_word_embeddings': False, 'vocab_size': 32000,
    },
    'qwen3_moe': {
        'architectures': ['Qwen3MoeForCausalLM'], 'attention_bias': False, 'decoder_sparse_step': 1, 'head_dim': 128,
        'hidden_act': 'silu', 'hidden_size': 2048, 'intermediate_size': 6144, 'max_position_embeddings': 40960,
        'max_window_layers': 48, 'mlp_only_layers': [], 'model_type': 'qwen3_moe', 'moe_intermediate_size': 768,
        'norm_topk_prob': True, 'num_attention_heads': 32, 'num_experts': 128, 'num_experts_per_tok': 8,
        'num_hidden_layers': 48, 'num_key_value_heads': 4, 'rms_norm_eps': 1e-06, 'rope_scaling': None,
        'rope_theta': 1000000.0, 'sliding_window': None, 'tie_word_embeddings': False, 'use_sliding_window': False,
        'vocab_size': 151936,
    },
    'gemma3_text': {
        '_sliding_window_pattern': 6, 'architectures': ['Gemma3ForCausalLM'], 'attention_bias': False,
        'attn_logit_softcapping': None, 'final_logit_softcapping': None, 'head_dim': 256,
        'hidden_activation': 'gelu_pytorch_tanh', 'hidden_size': 640, 'intermediate_size': 2048,
        'layer_types': ([_SLIDING] * 5 + [_FULL]) * 3, 'max_position_embeddings': 32768, 'model_type': 'gemma3_text',
        'num_attention_heads': 4, 'num_hidden_layers': 18, 'num_key_value_heads': 1, 'query_pre_attn_scalar': 256,
        'rms_norm_eps': 1e-06, 'rope_local_base_freq': 10000.0, 'rope_scaling': None, 'rope_theta': 1000000.0,
        'sliding_window': 512, 'torch_dtype': 'bfloat16', 'use_bidirectional_attention': False, 'vocab_size': 262144,
    },
    'gemma3': {
        'architectures': ['Gemma3ForConditionalGeneration'], 'boi_token_index': 255999, 'eoi_token_index': 256000,
        'eos_token_id': [1, 106], 'image_token_index': 262144, 'mm_tokens_per_image': 256, 'model_type': 'gemma3',
        'text_config': _GEMMA3_TEXT, 'torch_dtype': 'bfloat16',
        'vision_config': {
            'hidden_size': 1152, 'image_size': 896, 'intermediate_size': 4304, 'model_type': 'siglip_vision_model',
            'num_attention_heads': 16, 'num_hidden_layers': 27, 'patch_size': 14, 'vision_use_head': False,
        },
    },
    'gemma3_27b': {
        'architectures': ['Gemma3ForConditionalGeneration'], 'model_type': 'gemma3',
        'text_config': {
            'head_dim': 128, 'hidden_size': 5376, 'intermediate_size': 21504, 'model_type': 'gemma3_text',
            'num_attention_heads': 32, 'num_hidden_layers': 62, 'num_key_value_heads': 16, 'query_pre_attn_scalar': 168,
            'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, 'sliding_window': 1024,
        },
        'vision_config': {'model_type': 'siglip_vision_model', 'hidden_size': 1152},
    },
    'gpt_oss': {
        'architectures': ['GptOssForCausalLM'], 'attention_bias': True, 'attention_dropout': 0.0,
        'eos_token_id': 200002, 'experts_per_token': 4, 'head_dim': 64, 'hidden_act': 'silu', 'hidden_size': 2880,
        'initial_context_length': 4096, 'intermediate_size': 2880, 'layer_types': [_SLIDING, _FULL] * 12,
        'max_position_embeddings': 131072, 'model_type': 'gpt_oss', 'num_attention_heads': 64,
        'num_experts_per_tok': 4, 'num_hidden_layers': 24, 'num_key_value_heads': 8, 'num_local_experts': 32,
        'output_router_logits': False, 'pad_token_id': 199999,
        'quantization_config': {'quant_method': 'mxfp4', 'modules_to_not_convert': ['lm_head']}, 'rms_norm_eps': 1e-05,
        'rope_scaling': {
            'beta_fast': 32.0, 'beta_slow': 1.0, 'factor': 32.0, 'original_max_position_embeddings': 4096,
            'rope_type': 'yarn', 'truncate': False,
        },
        'rope_theta': 150000, 'router_aux_loss_coef': 0.9, 'sliding_window': 128, 'swiglu_limit': 7.0,
        'tie_word_embeddings': False, 'use_cache': True, 'vocab_size': 201088,
    },
    'olmo3': {
        'architectures': ['Olmo3ForCausalLM'], 'attention_bias': False, 'attention_dropout': 0.0,
        'eos_token_id': 100257, 'hidden_act': 'silu', 'hidden_size': 4096, 'intermediate_size': 11008,
        'layer_types': ([_SLIDING] * 3 + [_FULL]) * 8, 'max_position_embeddings': 65536, 'model_type': 'olmo3',
        'num_attention_heads': 32, 'num_hidden_layers': 32, 'num_key_value_heads': 32, 'pad_token_id': 100277,
        'rms_norm_eps': 1e-06,
        'rope_scaling': {
            'attention_factor': 1.2079441541679836, 'beta_fast': 32, 'beta_slow': 1, 'factor': 8.0,
            'original_max_position_embeddings': 8192, 'rope_type': 'yarn',
        },
        'rope_theta': 500000, 'sliding_window': 4096, 'tie_word_embeddings': False, 'vocab_size': 100278,
    },
    'olmo3_defaults': {
        'architectures': ['Olmo3ForCausalLM'], 'model_type': 'olmo3', 'hidden_size': 4096, 'intermediate_size': 11008,
        'num_attention_heads': 32, 'num_hidden_layers': 32, 'vocab_size': 50304, 'rope_theta': 10000.0,
    },
    'smollm3': {
        'architectures': ['SmolLM3ForCausalLM'], 'attention_bias': False, 'bos_token_id': None, 'eos_token_id': 128012,
        'hidden_act': 'silu', 'hidden_size': 2048, 'intermediate_size': 11008, 'layer_types': [_FULL] * 36,
        'max_position_embeddings': 65536, 'max_window_layers': 28, 'mlp_bias': False, 'model_type': 'smollm3',
        'no_rope_layer_interval': 4, 'no_rope_layers': [1, 1, 1, 0] * 9, 'num_attention_heads': 16,
        'num_hidden_layers': 36, 'num_key_value_heads': 4, 'pretraining_tp': 2, 'rms_norm_eps': 1e-06,
        'rope_scaling': None, 'rope_theta': 5000000.0, 'sliding_window': None, 'use_sliding_window': False,
        'vocab_size': 128256,
    },
    'smollm3_windows': {
        'architectures': ['SmolLM3ForCausalLM'], 'model_type': 'smollm3', 'hidden_size': 2048,
        'intermediate_size': 11008, 'num_attention_heads': 16, 'num_hidden_layers': 8, 'vocab_size': 128256,
        'no_rope_layer_interval': 2, 'use_sliding_window': True, 'sliding_window': 1024,
    },
    'qwen3_5': {
        'architectures': ['Qwen3_5ForConditionalGeneration'], 'image_token_id': 248056, 'model_type': 'qwen3_5',
        'text_config': _QWEN3_5_TEXT, 'tie_word_embeddings': False, 'vision_config': {'model_type': 'qwen3_5'},
    },
    'qwen3_5_text': {  # of the smallest model
        'architectures': ['Qwen3_5ForCausalLM'], 'model_type': 'qwen3_5_text', 'full_attention_interval': 3,
        'hidden_size': 1024, 'intermediate_size': 3584, 'linear_num_value_heads': 16, 'num_attention_heads': 8,
        'num_hidden_layers': 23, 'num_key_value_heads': 2, 'rope_theta': 10000000, 'tie_word_embeddings': True,
    },
    'qwen3_5_yarn': {
        'architectures': ['Qwen3_5ForCausalLM'], 'model_type': 'qwen3_5_text', 'partial_rotary_factor': 0.5,
        'rope_scaling': {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 262144},
        'rope_theta': 1e7,
    },
    'qwen3_5_whole_heads': {
        'architectures': ['Qwen3_5ForCausalLM'], 'model_type': 'qwen3_5_text', 'partial_rotary_factor': 0.5,
        'rope_parameters': {'rope_theta': 1e6, 'partial_rotary_factor': 1.0}, 'layer_types': [_FULL] * 32,
    },
    'qwen3_5_defaults': {'model_type': 'qwen3_5_text'},
    'qwen3_5_moe': {
        'architectures': ['Qwen3_5MoeForConditionalGeneration'], 'model_type': 'qwen3_5_moe',
        'text_config': {
            'attn_output_gate': True, 'head_dim': 256, 'hidden_size': 2048, 'linear_num_value_heads': 32,
            'max_position_embeddings': 262144, 'model_type': 'qwen3_5_moe_text', 'moe_intermediate_size': 512,
            'mtp_num_hidden_layers': 1, 'num_attention_heads': 16, 'num_experts': 256, 'num_experts_per_tok': 8,
            'num_hidden_layers': 40, 'num_key_value_heads': 2, 'shared_expert_intermediate_size': 512,
            'rope_parameters': {'partial_rotary_factor': 0.25, 'rope_theta': 10000000, 'rope_type': 'default'},
        },
        'vision_config': {'model_type': 'qwen3_5_moe_vision'},
    },
    'qwen3_5_moe_defaults': {'model_type': 'qwen3_5_moe_text'},
    'qwen3_next': _QWEN3_NEXT,
    'qwen3_next_dense_layers': _QWEN3_NEXT | {
        'mlp_only_layers': [0], 'decoder_sparse_step': 2, 'norm_topk_prob': False, 'num_hidden_layers': 12,
        'layer_types': [*[_LINEAR] * 5, _FULL] * 2,
    },
    'qwen3_next_defaults': {'model_type': 'qwen3_next'},
    'glm4_moe': _GLM,
    'glm4_moe_air': {  # without norms of queries and keys
        **{name: value for name, value in _GLM.items() if name != 'use_qk_norm'},
        'first_k_dense_replace': 1, 'hidden_size': 4096, 'intermediate_size': 10944, 'moe_intermediate_size': 1408,
        'n_routed_experts': 128, 'num_hidden_layers': 46, 'routed_scaling_factor': 1.0,
    },
    'glm4_moe_groups': {
        'model_type': 'glm4_moe', 'num_local_experts': 64, 'n_group': 8, 'topk_group': 4, 'n_shared_experts': 2,
        'norm_topk_prob': False, 'first_k_dense_replace': 0, 'num_hidden_layers': 4, 'topk_method': 'noaux_tc',
        'scoring_func': 'sigmoid', 'moe_layer_freq': 1, 'ep_size': 1,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e5, 'partial_rotary_factor': 0.25},
        'num_attention_heads': 64,
    },
    'deepseek_v3': _DEEPSEEK,
    'deepseek_v3_moonlight': {  # without a latent of the queries
        **_DEEPSEEK, 'first_k_dense_replace': 1, 'hidden_size': 2048, 'intermediate_size': 11264, 'n_group': 1,
        'moe_intermediate_size': 1408, 'n_routed_experts': 64, 'n_shared_experts': 2, 'num_attention_heads': 16,
        'num_experts_per_tok': 6, 'num_hidden_layers': 27, 'num_key_value_heads': 16, 'q_lora_rank': None,
        'rope_scaling': None, 'rope_theta': 50000.0, 'routed_scaling_factor': 2.446, 'topk_group': 1,
        'vocab_size': 163840, 'attention_bias': True,
    },
    'deepseek_v3_defaults': {'model_type': 'deepseek_v3'},
    'glm4_moe_lite': {
        'architectures': ['Glm4MoeLiteForCausalLM'], 'attention_bias': False, 'hidden_act': 'silu', 'hidden_size': 2048,
        'intermediate_size': 10240, 'kv_lora_rank': 512, 'max_position_embeddings': 202752,
        'model_type': 'glm4_moe_lite', 'moe_intermediate_size': 1536, 'n_group': 1, 'n_routed_experts': 64,
        'n_shared_experts': 1, 'norm_topk_prob': True, 'num_attention_heads': 20, 'num_experts_per_tok': 4,
        'num_hidden_layers': 47, 'num_key_value_heads': 20, 'num_nextn_predict_layers': 1, 'q_lora_rank': 768,
        'qk_nope_head_dim': 192, 'qk_rope_head_dim': 64, 'rms_norm_eps': 1e-05, 'rope_scaling': None,
        'rope_theta': 1000000, 'routed_scaling_factor': 1.8, 'tie_word_embeddings': False, 'topk_group': 1,
        'topk_method': 'noaux_tc', 'v_head_dim': 256, 'vocab_size': 154880,
        'mlp_layer_types': ['dense'] * 2 + ['sparse'] * 45,
    },
    'glm4_moe_lite_defaults': {'model_type': 'glm4_moe_lite'},
    'glm4_moe_defaults': {'model_type': 'glm4_moe', 'head_dim': 128},
}  # fmt: skip


def read_by_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers reads, in words of its own; frequencies as its rotary module has them."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / 'config.json').write_text(json.dumps(fields))
        whole = transformers.AutoConfig.from_pretrained(folder)
    config = whole.get_text_config()
    model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    module = sys.modules[model.__module__]
    rotary = next(c for name, c in vars(module).items() if name.endswith('RotaryEmbedding') and 'Vision' not in name)
    rotary = rotary(config)
    types = getattr(config, 'layer_types', None) or [_FULL] * config.num_hidden_layers
    ropes = {}
    for kind in dict.fromkeys(types):
        own = f'{kind}_' if hasattr(rotary, f'{kind}_inv_freq') else ''
        scale = getattr(rotary, f'{own}attention_scaling')
        ropes[kind] = {'frequencies': getattr(rotary, f'{own}inv_freq').tolist(), 'magnitude': scale}
    turns = getattr(config, 'no_rope_layers', None) or [1] * len(types)
    names = (
        'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers', 'num_attention_heads',
        'num_key_value_heads', 'rms_norm_eps', 'max_position_embeddings', 'attention_bias', 'hidden_act',
        'hidden_activation', 'query_pre_attn_scalar', 'final_logit_softcapping', 'num_local_experts', 'num_experts',
        'num_experts_per_tok', 'moe_intermediate_size', 'norm_topk_prob', 'swiglu_limit', 'swiglu_alpha',
    )  # fmt: skip
    return {
        **{name: getattr(config, name, None) for name in names},
        'head_dim': getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads,
        'tie_word_embeddings': whole.tie_word_embeddings,
        'windows': [getattr(config, 'sliding_window', None) if kind == _SLIDING else None for kind in types],
        'rotates': [bool(turn) and kind != _LINEAR for turn, kind in zip(turns, types, strict=True)],
        'ropes': [ropes[kind] for kind in types][: len(types)],
        **_read_hybrid(config, types),
        **_read_sigmoid(config, module),
    }


def _read_hybrid(config: Any, types: list[str]) -> dict[str, Any]:
    """The fields of models with gated delta nets; {} for others."""
    if not hasattr(config, 'linear_num_key_heads'):
        return {}
    names = ('num_key_heads', 'num_value_heads', 'key_head_dim', 'value_head_dim', 'conv_kernel_dim')
    return {
        'delta': [getattr(config, f'linear_{name}') for name in names],
        'delta_layers': [layer for layer, kind in enumerate(types) if kind == _LINEAR],
        'shared_expert': getattr(config, 'shared_expert_intermediate_size', 0),
        'sparse': [getattr(config, 'mlp_only_layers', []), getattr(config, 'decoder_sparse_step', 1)],
    }


def _read_sigmoid(config: Any, module: Any) -> dict[str, Any]:
    """The fields of models with sigmoid routers; {} for others. `module` has the model's class."""
    if not hasattr(config, 'n_routed_experts'):
        return {}
    names = ('n_group', 'topk_group', 'routed_scaling_factor', 'first_k_dense_replace', 'use_qk_norm')
    shared = config.moe_intermediate_size * config.n_shared_experts
    if hasattr(config, 'kv_lora_rank'):
        names = ('n_group', 'topk_group', 'routed_scaling_factor')
        kinds = getattr(config, 'mlp_layer_types', None)
        layers = range(config.num_hidden_layers)
        dense = [i for i in layers if (i < config.first_k_dense_replace if kinds is None else kinds[i] == 'dense')]
        return {
            'sigmoid': [getattr(config, name, None) for name in names],
            'dense': dense,
            'shared_expert': shared,
            'latent': [
                config.kv_lora_rank,
                config.qk_nope_head_dim,
                config.qk_rope_head_dim,
                config.v_head_dim,
                config.q_lora_rank or 0,
                config.rope_interleave,
            ],
            'scale': module.yarn_apply_mscale(config.rope_parameters, config.qk_head_dim**-0.5),
        }
    return {'sigmoid': [getattr(config, name, None) for name in names], 'shared_expert': shared}


def main() -> None:
    RECORDED.parent.mkdir(exist_ok=True)
    found = {name: read_by_transformers(fields) for name, fields in FORMS.items()}
    for one in found.values():  # most layers have equal ropes: written once
        kinds = []
        one['rope_of_layer'] = []
        for rope in one.pop('ropes'):
            kinds += [] if rope in kinds else [rope]
            one['rope_of_layer'].append(kinds.index(rope))
        one['ropes'] = kinds
    RECORDED.write_text(json.dumps(found, indent=None, sort_keys=True).replace('}, "', '},\n"') + '\n')


if __name__ == '__main__':
    main()
