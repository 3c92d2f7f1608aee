"""Hugging Face's config.json, read into a ModelConfig and written from one.

Reads both spellings: transformers 4 (rope_theta, rope_scaling, torch_dtype) and transformers 5 (rope_parameters, dtype,
layer_types). A field that is absent has the default of transformers 5.23 for the family, see models/families.py. Used
by `hf_directory` and `hf_export`, and by app/ to know a model before its weights are read.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.models.families import EXPERT_COUNTS, FAMILIES, Experts, Llama3Scaling, ModelConfig

CONFIG = 'config.json'
_FULL, _SLIDING = 'full_attention', 'sliding_attention'
_NO_WINDOW_LAYERS = 28  # max_window_layers of the Qwen families


class HfError(UserError, ValueError):
    """A checkpoint directory that cannot be used: the message names the file, the field or tensor, and the fix."""


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
    'clip_qkv': None,
    'is_causal': True,
    'n_routed_experts': 0,
    'n_shared_experts': 0,
    'shared_expert_intermediate_size': 0,
    'router_jitter_noise': 0.0,
}
_SIZE_END = 2**31  # sizes are int32
_LAYERS_END = 2**10  # more than any model has; an absurd number would run for hours


def read_hf_config(directory: str | os.PathLike[str]) -> ModelConfig:
    """The config of the model in a checkpoint directory.

    Raises HfError for a file that is absent or not a JSON object, an unknown architecture, a missing or ill-typed
    field, and an option that is not supported.
    """
    path = pathlib.Path(directory) / CONFIG
    fields = _Fields(path, read_json(path))
    family = fields.get('model_type')
    if not isinstance(family, str) or family not in FAMILIES:
        raise fields.unsupported('model_type', family, ', '.join(FAMILIES))
    architectures = fields.get('architectures') or [FAMILIES[family].architecture]
    if architectures != [FAMILIES[family].architecture]:
        raise fields.unsupported('architectures', architectures, f'[{FAMILIES[family].architecture!r}]')
    without_experts = {} if FAMILIES[family].experts else dict.fromkeys(EXPERT_COUNTS, 0)
    for name, only in {**_ONLY, **without_experts}.items():
        if fields.get(name, only) != only:
            raise fields.unsupported(name, fields.get(name), repr(only))
    try:
        return _model_config(fields, family)
    except HfError:
        raise
    except ValueError as error:  # numbers that do not fit together
        raise HfError(f'{path}: {error}') from error


def hf_config(config: ModelConfig, dtype: str = 'float32') -> dict[str, object]:
    """config.json of the model, for transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5.

    Raises HfError for a config that the family cannot have.
    """
    _require_expressible(config)
    rope: dict[str, object] = {'rope_type': 'default'}
    if (scaling := config.rope_scaling) is not None:
        rope = {
            'rope_type': 'llama3',
            'factor': scaling.factor,
            'low_freq_factor': scaling.low_frequency_factor,
            'high_freq_factor': scaling.high_frequency_factor,
            'original_max_position_embeddings': scaling.original_context_tokens,
        }
    fields = {
        'architectures': [FAMILIES[config.family].architecture],
        'model_type': config.family,
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
        'rope_scaling': rope if scaling else None,
        'rope_parameters': {**rope, 'rope_theta': config.rope_theta},
        'max_position_embeddings': config.context_tokens,
        'tie_word_embeddings': config.tie_embeddings,
        'bos_token_id': None,  # the tokenizer decides; if the ids were absent, transformers would use 1 and 2
        'eos_token_id': None,
        'torch_dtype': dtype,
        'dtype': dtype,
    }
    return fields | _family_fields(config)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file of a checkpoint directory; raises HfError."""
    try:
        return files.read_json(path, 'a checkpoint directory has it: copy it again')
    except files.FileError as error:
        raise HfError(str(error)) from error


class _Fields:
    """Fields of config.json by name; null counts as absent."""

    def __init__(self, path: pathlib.Path, fields: Mapping[str, object]):
        self.path, self._fields = path, fields

    def get(self, name: str, default: object = None) -> Any:  # any JSON value
        value = self._fields.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        return name in self._fields and self._fields[name] is None

    def integer(self, name: str, default: int | None = None, least: int = 1, end: int = _SIZE_END) -> int:
        value = self.get(name, default)
        if type(value) is not int or not least <= value < end:
            raise HfError(f'{self.path}: {name}={value!r} must be an integer of at least {least} and below {end}')
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # json reads NaN and Infinity
            raise HfError(f'{self.path}: {name}={value!r} must be a number above 0 and finite')
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if type(value) is not bool:
            raise HfError(f'{self.path}: {name}={value!r} must be true or false')
        return value

    def unsupported(self, name: str, value: object, supported: str) -> HfError:
        return HfError(f'{self.path}: {name}={value!r} is not supported; supported: {supported}')


def _model_config(fields: _Fields, family: str) -> ModelConfig:
    defaults = FAMILIES[family]
    n_layers = fields.integer('num_hidden_layers', end=_LAYERS_END)
    n_heads = fields.integer('num_attention_heads')
    d_model = fields.integer('hidden_size')
    if fields.get('head_dim', defaults.head_dim) is None and d_model % n_heads:
        raise HfError(
            f'{fields.path}: hidden_size={d_model} is not a multiple of num_attention_heads={n_heads}, and there is no '
            'head_dim'
        )
    n_kv_heads = n_heads if fields.is_null('num_key_value_heads') else defaults.n_kv_heads or n_heads
    rope_theta, rope_scaling = _rotary(fields, defaults.rope_theta)
    experts = _experts(fields, family, n_layers)
    window, first_window_layer = _window(fields, family, n_layers)
    attention_bias = defaults.attention_bias == 'field' and fields.flag('attention_bias')
    return ModelConfig(
        vocab_size=fields.integer('vocab_size'),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=fields.integer('num_key_value_heads', n_kv_heads),
        head_dim=fields.integer('head_dim', defaults.head_dim or d_model // n_heads),
        d_ff=_d_ff(fields, family),
        rope_theta=rope_theta,
        rms_eps=fields.number('rms_norm_eps', defaults.rms_eps),
        tie_embeddings=fields.flag('tie_word_embeddings'),
        context_tokens=fields.integer('max_position_embeddings', defaults.context_tokens),
        family=family,
        output_bias=attention_bias,
        rope_scaling=rope_scaling,
        sliding_window=window,
        first_window_layer=first_window_layer,
        experts=experts,
        **defaults.switches | ({'qkv_bias': True} if attention_bias else {}),
    )


def _experts(fields: _Fields, family: str, n_layers: int) -> Experts | None:
    if (names := FAMILIES[family].experts) is None:
        return None
    given = {name: fields.get(name) for name in EXPERT_COUNTS if fields.get(name) is not None}
    if len(set(given.values())) > 1:
        both = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise HfError(f'{fields.path}: {both} are two numbers of experts: remove the wrong one')
    count = fields.integer(next(iter(given), names.count[0]), names.count[1])
    per_token = fields.integer('num_experts_per_tok', names.per_token)
    if per_token > count:
        raise HfError(f'{fields.path}: num_experts_per_tok={per_token} is more than the {count} experts')
    normalised = fields.flag('norm_topk_prob') if names.normalised is None else names.normalised
    dense = _dense_layers(fields, n_layers) if names.has_dense_layers else ()
    return Experts(count, per_token, fields.integer(*names.d_expert), normalised, dense)


def _dense_layers(fields: _Fields, n_layers: int) -> tuple[int, ...]:
    """The layers in mlp_only_layers, and all but each `decoder_sparse_step`-th."""
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


def _d_ff(fields: _Fields, family: str) -> int:
    experts = FAMILIES[family].experts
    default = experts.d_ff or experts.d_expert[1] if experts else None
    return fields.integer('intermediate_size', default)


def _rotary(fields: _Fields, default_theta: float) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling); as in transformers, rope_scaling comes before rope_parameters and either before rope_theta."""
    name = 'rope_scaling' if fields.get('rope_scaling') else 'rope_parameters'
    rope = fields.get(name, {})
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise fields.unsupported(name, rope, 'one object for all layers')
    inner = _Fields(fields.path, {f'{name}.{key}': value for key, value in rope.items()})
    theta = inner.number(f'{name}.rope_theta', fields.number('rope_theta', default_theta))
    if inner.get(partial := f'{name}.partial_rotary_factor', 1.0) != 1.0:
        raise fields.unsupported(partial, inner.get(partial), '1.0')
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind == 'default':
        return theta, None
    if kind != 'llama3':
        raise fields.unsupported(f'{name}.rope_type', kind, "'default', 'llama3'")
    return theta, Llama3Scaling(
        factor=inner.number(f'{name}.factor'),
        low_frequency_factor=inner.number(f'{name}.low_freq_factor'),
        high_frequency_factor=inner.number(f'{name}.high_freq_factor'),
        original_context_tokens=inner.integer(
            f'{name}.original_max_position_embeddings', fields.get('max_position_embeddings')
        ),
    )


def _window(fields: _Fields, family: str, n_layers: int) -> tuple[int | None, int]:
    """(the window in tokens or None, the first layer that has it)."""
    size, first, windows, default = None, 0, FAMILIES[family].windows, FAMILIES[family].window
    if windows == 'none':
        if (value := fields.get('sliding_window')) is not None:
            raise fields.unsupported(
                'sliding_window', value, f'null, since transformers ignores it in a {family} model'
            )
    elif windows == 'all':
        size = _window_size(fields, default)
    elif fields.flag('use_sliding_window'):
        size = _window_size(fields, default)
        if windows == 'some' and size is not None:
            first = fields.integer('max_window_layers', _NO_WINDOW_LAYERS, least=0)
    if (types := fields.get('layer_types')) is not None:
        listed = _first_window_layer(fields, types, n_layers)
        if size is not None and windows == 'some':  # for other families transformers ignores the list
            first = listed
        elif listed != (n_layers if size is None else 0):
            raise fields.unsupported('layer_types', types, f'what a {family} model with sliding_window={size} computes')
    return (None, 0) if size is None or first >= n_layers else (size, first)


def _window_size(fields: _Fields, default: int | None) -> int | None:
    if fields.is_null('sliding_window') or fields.get('sliding_window', default) is None:
        return None
    return fields.integer('sliding_window', default)


def _first_window_layer(fields: _Fields, types: object, n_layers: int) -> int:
    first = types.count(_FULL) if isinstance(types, list) else 0
    if types != [_FULL] * first + [_SLIDING] * (n_layers - first):
        raise fields.unsupported(
            'layer_types', types, f'{n_layers} entries, first every {_FULL!r}, then every {_SLIDING!r}'
        )
    return first


def _family_fields(config: ModelConfig) -> dict[str, object]:
    family = FAMILIES[config.family]
    fields: dict[str, object] = {'mlp_bias': False} if config.family == 'llama' else {}
    if family.attention_bias == 'field':
        fields['attention_bias'] = config.qkv_bias
    if family.windows != 'none':
        fields['sliding_window'] = config.sliding_window
    if family.windows in ('flag', 'some'):
        fields['use_sliding_window'] = config.sliding_window is not None
    if family.windows == 'some':
        windowed = config.sliding_window is not None
        fields['max_window_layers'] = config.first_window_layer if windowed else config.n_layers
    return fields | _expert_fields(config)


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
    if names.normalised is None:
        fields['norm_topk_prob'] = experts.normalised
    if names.has_dense_layers:
        fields |= {'mlp_only_layers': list(experts.dense_layers), 'decoder_sparse_step': 1}
    return fields


def _require_expressible(config: ModelConfig) -> None:
    """Raises HfError for a config that the family's config.json cannot express."""
    family = FAMILIES[config.family]
    expected: dict[str, object] = {'qk_norm': family.qk_norm, 'whole_qk_norm': family.whole_qk_norm, 'plain': False}
    if family.attention_bias == 'field':
        expected['output_bias'] = config.qkv_bias
    else:
        expected |= {'qkv_bias': family.attention_bias == 'qkv', 'output_bias': False}
    if family.windows == 'none':
        expected['sliding_window'] = None
    if family.windows in ('all', 'flag') and config.sliding_window is not None:
        expected['first_window_layer'] = 0
    if config.experts is not None and family.experts is not None:
        if family.experts.normalised is not None and config.experts.normalised != family.experts.normalised:
            raise HfError(f'normalised={config.experts.normalised} cannot be written for family={config.family!r}')
        if config.experts.dense_layers and not family.experts.has_dense_layers:
            raise HfError(f'dense layers {config.experts.dense_layers} cannot be written for family={config.family!r}')
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise HfError(
                f'{name}={getattr(config, name)!r} cannot be written for family={config.family!r}, which has '
                f'{name}={value!r}: choose the family that has it'
            )
