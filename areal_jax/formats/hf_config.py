"""Hugging Face's config.json, read into a ModelConfig and written from one.

Reads both spellings: transformers 4 (rope_theta, rope_scaling, torch_dtype) and transformers 5 (rope_parameters, dtype,
layer_types). A field that is absent has the default of transformers 5.23 for the family, see models/families.py. Used
by `hf_directory` and `hf_export`, and by app/ to know a model before its weights are read.
"""

from __future__ import annotations

import math
import os
import pathlib

from areal_jax import files
from areal_jax.formats.hf_fields import Fields, HfError, kind_fields, read_kinds, read_rotary_dim, rope_fields
from areal_jax.formats.hf_latent import latent_fields, latent_scale, read_latent
from areal_jax.models.families import EXPERT_COUNTS, FAMILIES, LAYERS_END, ExpertFields, ModelConfig
from areal_jax.models.layer_parts import ClampedSwiglu, DeltaNet, Experts, SigmoidRouter

CONFIG = 'config.json'
# composite models by model_type, whose text part alone is read
TEXT_OF = {'gemma3': 'gemma3_text', 'qwen3_5': 'qwen3_5_text', 'qwen3_5_moe': 'qwen3_5_moe_text'}
# what the models of some other types need
_MISSING = {
    'gemma4': 'head sizes that differ by layer, and layers that share their keys and values',
    'gemma4_text': 'head sizes that differ by layer, and layers that share their keys and values',
    'nemotron_h': 'state space layers (Mamba 2)',
    'glm_moe_dsa': 'sparse attention by an indexer over latent keys (DSA)',
    'kimi_linear': 'linear attention layers (KDA) and attention over latent keys (MLA)',
    'phi3': 'fused query, key and value projections, and longrope',
    'mistral3': 'the text part of this composite model, whose queries are scaled by their positions',
}

_DELTA_SIZES = {  # fields of config.json by those of DeltaNet
    'key_heads': 'linear_num_key_heads',
    'value_heads': 'linear_num_value_heads',
    'key_dim': 'linear_key_head_dim',
    'value_dim': 'linear_value_head_dim',
    'taps': 'linear_conv_kernel_dim',
}

# options of the computation with the only value that is supported; absent and null count as that value
_ONLY: dict[str, object] = {
    'hidden_act': 'silu',
    'mlp_bias': False,
    'partial_rotary_factor': 1.0,
    'rope_interleaved': False,
    'use_mrope': False,
    'pretraining_tp': 1,
    'quantization_config': None,
    # of other families: a model derived from one of them may have kept the field
    'rotary_pct': 1.0,
    'logit_scale': 1.0,
    'logits_scaling': 1.0,
    'embedding_multiplier': 1.0,
    'residual_multiplier': 1.0,
    'attention_multiplier': None,  # the scale of the scores itself, so that 1.0 is not neutral
    'query_pre_attn_scalar': None,
    'final_logit_softcapping': None,
    'attn_logit_softcapping': None,
    'dual_chunk_attention_config': None,
    'attention_chunk_size': None,
    'no_rope_layers': None,
    'use_bidirectional_attention': False,
    'clip_qkv': None,
    'is_causal': True,
    'n_routed_experts': 0,
    'n_shared_experts': 0,
    'shared_expert_intermediate_size': 0,
    'router_jitter_noise': 0.0,
}


def read_hf_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """The config of the model in a checkpoint directory.

    Raises HfError for a file that is absent or not a JSON object, an unknown architecture, a missing or ill-typed
    field, and an option that is not supported.
    """
    path = pathlib.Path(directory) / CONFIG
    fields = Fields(path, read_json(path))
    kind = fields.get('model_type')
    if isinstance(kind, str) and kind in _MISSING:
        raise HfError(f'{path}: model_type={kind!r} needs {_MISSING[kind]}, which is not supported')
    if not isinstance(kind, str) or kind not in FAMILIES.keys() | TEXT_OF.keys():
        raise fields.unsupported('model_type', kind, ', '.join([*FAMILIES, *TEXT_OF]))
    family = TEXT_OF.get(kind, kind)
    if kind in TEXT_OF:
        fields = _text_fields(fields, family)
    else:
        architectures = fields.get('architectures') or [FAMILIES[family].architecture]
        if architectures != [FAMILIES[family].architecture]:
            raise fields.unsupported('architectures', architectures, f'[{FAMILIES[family].architecture!r}]')
    for name, only in _only_values(family).items():
        if fields.get(name, only) != only:
            raise fields.unsupported(name, fields.get(name), repr(only))
    quantized = fields.get('quantization_config')
    if quantized is not None and (not isinstance(quantized, dict) or quantized.get('quant_method') != 'mxfp4'):
        raise fields.unsupported('quantization_config', quantized, "null, or quant_method 'mxfp4'")
    try:
        return _model_config(fields, family)
    except HfError:
        raise
    except ValueError as error:  # numbers that do not fit together
        raise HfError(f'{path}: {error}') from error


def _text_fields(fields: Fields, family: str) -> Fields:
    """The fields of the text part of a composite model; whether the head is tied is said by the whole."""
    text = fields.get('text_config', {})
    if not isinstance(text, dict) or text.get('model_type', family) != family:
        raise fields.unsupported('text_config', text, f'an object with model_type={family!r}')
    return Fields(fields.path, {**text, 'tie_word_embeddings': fields.get('tie_word_embeddings')})


def _only_values(family: str) -> dict[str, object]:
    """The fields that must have one value, with the value; a family reads some of these fields itself."""
    defaults = FAMILIES[family]
    only = dict(_ONLY)
    if not defaults.experts:
        only |= dict.fromkeys(EXPERT_COUNTS, 0)
    if defaults.unrotated_every:
        del only['no_rope_layers'], only['pretraining_tp']  # published files have the second, and it changes nothing
    if defaults.score_scalar is not None:
        only |= {'hidden_activation': 'gelu_pytorch_tanh'}
        for name in ('hidden_act', 'query_pre_attn_scalar', 'final_logit_softcapping'):
            del only[name]
    if defaults.experts and defaults.experts.swiglu:
        del only['quantization_config']
    if defaults.experts and defaults.experts.d_shared:
        del only['shared_expert_intermediate_size']
        if not defaults.experts.has_dense_layers:
            only |= {'norm_topk_prob': True, 'mlp_only_layers': [], 'decoder_sparse_step': 1}
    if defaults.experts and defaults.experts.sigmoid:
        for name in ('n_routed_experts', 'n_shared_experts'):
            del only[name]
        # of the older files, which name the kind of the router
        only |= {'topk_method': 'noaux_tc', 'scoring_func': 'sigmoid', 'moe_layer_freq': 1, 'ep_size': 1}
        only |= {'num_experts': 0}
    if defaults.rotary_fraction != 1.0:
        del only['partial_rotary_factor']
    if defaults.delta:
        only |= {'attention_bias': False, 'attn_output_gate': True, 'output_gate_type': 'swish'}
        only |= {'mamba_ssm_dtype': 'float32'}
    return only


def hf_config(config: ModelConfig, dtype: str = 'float32') -> dict[str, object]:
    """config.json of the model, for transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5.

    Raises HfError for a config that the family cannot have.
    """
    _require_expressible(config)
    fields = {
        'architectures': [FAMILIES[config.family].architecture],
        'model_type': config.family,
        'vocab_size': config.vocab_size,
        'hidden_size': config.d_model,
        **({'intermediate_size': config.d_ff} if _has_d_ff(config.family) else {}),
        'num_hidden_layers': config.n_layers,
        'num_attention_heads': config.n_heads,
        'num_key_value_heads': config.n_kv_heads,
        **({} if config.latent else {'head_dim': config.head_dim}),
        'hidden_act': 'silu',
        'rms_norm_eps': config.rms_eps,
        **rope_fields(config),
        'max_position_embeddings': config.context_tokens,
        'tie_word_embeddings': config.tie_embeddings,
        'bos_token_id': None,  # the tokenizer decides; if the ids were absent, transformers would use 1 and 2
        'eos_token_id': None,
        'torch_dtype': dtype,
        'dtype': dtype,
    }
    return fields | _family_fields(config)


def read_json(path: pathlib.Path) -> files.JsonObject:
    """The object in a file of a checkpoint directory; raises HfError."""
    try:
        return files.read_json(path, 'a checkpoint directory has it: copy it again')
    except files.FileError as error:
        raise HfError(str(error)) from error


def _model_config(fields: Fields, family: str) -> ModelConfig:
    defaults = FAMILIES[family]
    size = lambda name, **bounds: fields.integer(name, defaults.sizes.get(name), **bounds)
    n_layers = size('num_hidden_layers', end=LAYERS_END)
    n_heads = size('num_attention_heads')
    d_model = size('hidden_size')
    has_own = defaults.latent is not None or fields.get('head_dim', defaults.head_dim) is not None
    if not has_own and d_model % n_heads:
        raise HfError(
            f'{fields.path}: hidden_size={d_model} is not a multiple of num_attention_heads={n_heads}, and there is no '
            'head_dim'
        )
    n_kv_heads = n_heads if fields.is_null('num_key_value_heads') else defaults.n_kv_heads or n_heads
    latent = defaults.latent and read_latent(fields, defaults.latent)
    head_dim = latent.head_dim if latent else fields.integer('head_dim', defaults.head_dim or d_model // n_heads)
    rope, kinds = read_kinds(fields, family, n_layers)
    attention_bias = defaults.attention_bias.endswith('field') and fields.flag('attention_bias', defaults.biased)
    own = {'qkv_bias': True} if attention_bias else {}
    if defaults.qk_norm_field:
        own['qk_norm'] = fields.flag('use_qk_norm')
    return ModelConfig(
        vocab_size=size('vocab_size'),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.integer('num_key_value_heads', n_kv_heads),
        head_dim=head_dim,
        d_ff=_d_ff(fields, family),
        rope_theta=rope.theta,
        rms_eps=fields.number('rms_norm_eps', defaults.rms_eps),
        tie_embeddings=fields.flag('tie_word_embeddings', defaults.tie_embeddings),
        context_tokens=fields.integer('max_position_embeddings', defaults.context_tokens),
        family=family,
        output_bias=attention_bias and defaults.attention_bias == 'field',
        rope_scaling=rope.scaling,
        kinds=kinds,
        rotary_dim=latent.rotated_dim if latent else read_rotary_dim(fields, family, head_dim),
        latent=latent,
        delta=_delta(fields, family) if any(kind.mixer == 'delta' for kind in kinds) else None,
        experts=_experts(fields, family, n_layers),
        embedding_factor=math.sqrt(d_model) if defaults.scales_embedding else 1.0,
        score_scale=latent_scale(latent, rope.scaling) if latent else _score_scale(fields, family, head_dim),
        logit_cap=fields.optional_number('final_logit_softcapping') if defaults.score_scalar is not None else None,
        **defaults.switches | own,
    )


def _score_scale(fields: Fields, family: str, head_dim: int) -> float | None:
    if (default := FAMILIES[family].score_scalar) is None:
        return None
    scalar = fields.integer('query_pre_attn_scalar', default)
    return None if scalar == head_dim else scalar**-0.5


def _experts(fields: Fields, family: str, n_layers: int) -> Experts | None:
    if (names := FAMILIES[family].experts) is None:
        return None
    spellings = EXPERT_COUNTS if names.sigmoid is None else (names.count[0], EXPERT_COUNTS[1])
    given = {name: fields.get(name) for name in spellings if fields.get(name) is not None}
    if len(set(given.values())) > 1:
        both = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise HfError(f'{fields.path}: {both} are two numbers of experts: remove the wrong one')
    count = fields.integer(next(iter(given), names.count[0]), names.count[1])
    per_token = fields.integer('num_experts_per_tok', names.per_token)
    if per_token > count:
        raise HfError(f'{fields.path}: num_experts_per_tok={per_token} is more than the {count} experts')
    normalised = fields.flag('norm_topk_prob', names.normalises) if names.normalised is None else names.normalised
    dense = _dense_layers(fields, names, n_layers)
    swiglu = names.swiglu and ClampedSwiglu(
        fields.number('swiglu_limit', names.swiglu.limit), fields.number('swiglu_alpha', names.swiglu.alpha)
    )
    d_expert = fields.integer(*names.d_expert)
    shared = fields.integer(*names.d_shared) if names.d_shared else 0
    if names.shared is not None:
        shared = d_expert * fields.integer('n_shared_experts', names.shared)
    sigmoid = names.sigmoid and SigmoidRouter(
        fields.integer('n_group', names.sigmoid.groups),
        fields.integer('topk_group', names.sigmoid.kept_groups),
        fields.number('routed_scaling_factor', names.sigmoid.scale),
    )
    return Experts(count, per_token, d_expert, normalised, dense, swiglu, shared, sigmoid)


def _delta(fields: Fields, family: str) -> DeltaNet:
    default = FAMILIES[family].delta
    assert default is not None
    sizes = {size: fields.integer(name, getattr(default, size)) for size, name in _DELTA_SIZES.items()}
    if sizes['value_heads'] % sizes['key_heads']:
        raise HfError(
            f'{fields.path}: linear_num_value_heads={sizes["value_heads"]} is not a multiple of '
            f'linear_num_key_heads={sizes["key_heads"]}'
        )
    return DeltaNet(**sizes)


def _dense_layers(fields: Fields, names: ExpertFields, n_layers: int) -> tuple[int, ...]:
    """The first layers, or the layers in mlp_only_layers and all but each `decoder_sparse_step`-th."""
    if names.lists_dense and (kinds := fields.get('mlp_layer_types')) is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layers or not {'sparse'} <= {*kinds} <= {'dense', 'sparse'}:
            raise fields.unsupported('mlp_layer_types', kinds, f"{n_layers} entries of 'dense' or 'sparse'")
        return tuple(layer for layer, kind in enumerate(kinds) if kind == 'dense')
    if names.dense_first is not None:
        first = (
            names.dense_first
            if names.lists_dense
            else fields.integer('first_k_dense_replace', names.dense_first, least=0)
        )
        if first >= n_layers:
            raise HfError(f'{fields.path}: first_k_dense_replace={first} leaves no layer with experts')
        return tuple(range(first))
    if not names.has_dense_layers:
        return ()
    listed = fields.get('mlp_only_layers', [])
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < n_layers for layer in listed):
        raise HfError(
            f'{fields.path}: mlp_only_layers={listed!r} must be a list of layers, whose numbers are 0 to {n_layers - 1}'
        )
    step = fields.integer('decoder_sparse_step', 1)
    dense = tuple(layer for layer in range(n_layers) if layer in listed or (layer + 1) % step)
    if len(dense) == n_layers:
        raise HfError(f'{fields.path}: mlp_only_layers and decoder_sparse_step={step} leave no layer with experts')
    return dense


def _d_ff(fields: Fields, family: str) -> int:
    experts = FAMILIES[family].experts
    if experts and not experts.has_dense:
        return fields.integer(*experts.d_expert)
    return fields.integer(
        'intermediate_size', experts.d_ff if experts else FAMILIES[family].sizes.get('intermediate_size')
    )


def _has_d_ff(family: str) -> bool:
    """Whether the family's config.json has the width of an MLP that is no expert."""
    experts = FAMILIES[family].experts
    return experts is None or experts.has_dense


def _family_fields(config: ModelConfig) -> dict[str, object]:
    family = FAMILIES[config.family]
    fields: dict[str, object] = {'mlp_bias': False} if config.family in ('llama', 'smollm3') else {}
    if family.attention_bias.endswith('field'):
        fields['attention_bias'] = config.qkv_bias
    if family.qk_norm_field:
        fields['use_qk_norm'] = config.qk_norm
    if family.windows == 'listed':
        fields['pad_token_id'] = None  # the default of these may be beyond the vocabulary
    if family.score_scalar is not None:
        scale = config.score_scale
        fields |= {
            'hidden_activation': 'gelu_pytorch_tanh',
            'query_pre_attn_scalar': config.head_dim if scale is None else round(scale**-2),
            'final_logit_softcapping': config.logit_cap,
            'attn_logit_softcapping': None,
        }
        fields['use_bidirectional_attention'] = False
    if config.latent is not None:
        fields |= latent_fields(config.latent)
    if config.delta is not None:
        fields |= {name: getattr(config.delta, size) for size, name in _DELTA_SIZES.items()}
    return fields | kind_fields(config) | _expert_fields(config)


def _expert_fields(config: ModelConfig) -> dict[str, object]:
    names, experts = FAMILIES[config.family].experts, config.experts
    if names is None or experts is None:
        return {}
    fields: dict[str, object] = {
        names.count[0]: experts.count,
        'num_experts_per_tok': experts.per_token,
        names.d_expert[0]: experts.d_expert,
        'output_router_logits': False,
        'router_aux_loss_coef': 0.0,  # of supervised training in transformers; the value used for these is unknown
    }
    if experts.swiglu is not None:
        fields |= {'swiglu_limit': experts.swiglu.limit, 'swiglu_alpha': experts.swiglu.alpha}
    if names.d_shared is not None:
        fields[names.d_shared[0]] = experts.d_shared
    if names.shared is not None:
        fields['n_shared_experts'] = experts.d_shared // experts.d_expert
    if experts.sigmoid is not None:
        router = experts.sigmoid
        fields |= {'n_group': router.groups, 'topk_group': router.kept_groups, 'routed_scaling_factor': router.scale}
    if names.lists_dense:
        fields['mlp_layer_types'] = [
            'sparse' if config.has_experts(layer) else 'dense' for layer in range(config.n_layers)
        ]
    elif names.dense_first is not None:
        fields['first_k_dense_replace'] = len(experts.dense_layers)
    if names.normalised is None:
        fields['norm_topk_prob'] = experts.normalised
    if names.has_dense_layers:
        fields |= {'mlp_only_layers': list(experts.dense_layers), 'decoder_sparse_step': 1}
    return fields


def _require_expressible(config: ModelConfig) -> None:
    """Raises HfError for a config that the family's config.json cannot express."""
    family = FAMILIES[config.family]
    expected: dict[str, object] = {**family.switches, 'plain': False}
    del expected['qkv_bias']  # below
    expected['embedding_factor'] = math.sqrt(config.d_model) if family.scales_embedding else 1.0
    if (family.latent is None) != (config.latent is None):
        raise HfError(f'latent={config.latent} cannot be written for family={config.family!r}')
    if family.latent is not None:
        scale = config.latent and latent_scale(config.latent, config.rope_scaling)
        expected |= {'rotary_dim': config.rotary_dim, 'score_scale': scale, 'logit_cap': None}
    elif family.rotary_fraction == 1.0:
        expected['rotary_dim'] = None
    if family.score_scalar is None and family.latent is None:
        expected |= {'score_scale': None, 'logit_cap': None}
    if family.qk_norm_field:
        del expected['qk_norm']
    if family.attention_bias == 'field':
        expected['output_bias'] = config.qkv_bias
    elif family.attention_bias == 'qkv_field':
        expected['output_bias'] = False
    else:
        expected |= {'qkv_bias': family.attention_bias == 'qkv', 'output_bias': False}
    if config.experts is not None and family.experts is not None:
        if family.experts.normalised is not None and config.experts.normalised != family.experts.normalised:
            raise HfError(f'normalised={config.experts.normalised} cannot be written for family={config.family!r}')
        dense, shared = config.experts.dense_layers, family.experts.d_shared or family.experts.shared
        first = family.experts.dense_first is not None and not family.experts.lists_dense
        wrong = first and dense != tuple(range(len(dense)))
        if wrong or (dense and not family.experts.has_dense):
            raise HfError(f'dense layers {dense} cannot be written for family={config.family!r}')
        whole = family.experts.shared is None or config.experts.d_shared % config.experts.d_expert == 0
        if (config.experts.d_shared > 0) != (shared is not None) or not whole:
            raise HfError(f'd_shared={config.experts.d_shared} cannot be written for family={config.family!r}')
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise HfError(
                f'{name}={getattr(config, name)!r} cannot be written for family={config.family!r}, which has '
                f'{name}={value!r}: choose the family that has it'
            )
