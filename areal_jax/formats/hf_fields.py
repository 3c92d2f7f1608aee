"""Fields of Hugging Face's config.json: their types, and the fields for windows and rotary positions of the layers.

Used by `hf_config`, which has the other fields. A file has one object of rotary fields, or one for each kind of layer.
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from areal_jax.errors import UserError
from areal_jax.models.families import DELTA, FAMILIES, LayerKind, ModelConfig
from areal_jax.models.ropes import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling

FULL, SLIDING, LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'
_PARTIAL = 'partial_rotary_factor'  # the part of a head that is rotated
_NO_WINDOW_LAYERS = 28  # max_window_layers of the Qwen families
_SIZE_END = 2**31  # sizes are int32
# kinds of rotary scaling whose frequencies change with the length that a sequence has reached
_BY_LENGTH = ('longrope', 'dynamic')


class HfError(UserError, ValueError):
    """A checkpoint directory that cannot be used: the message names the file, the field or tensor, and the fix."""


class Fields:
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

    def optional_number(self, name: str) -> float | None:
        """`number`, or None for a field that is absent or 0."""
        return self.number(name) if self.get(name, 0) != 0 else None

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise HfError(f'{self.path}: {name}={value!r} must be true or false')
        return value

    def unsupported(self, name: str, value: object, supported: str) -> HfError:
        return HfError(f'{self.path}: {name}={value!r} is not supported; supported: {supported}')


# Rotary positions.


def read_ropes(fields: Fields, family: str) -> tuple[Rope, Rope]:
    """(the rope of layers without a window, the rope of window layers)."""
    if FAMILIES[family].window_theta is not None:
        return _read_rope_by_kind(fields, family)
    rope = _read_one_rope(fields, family)
    return rope, rope


def _read_one_rope(fields: Fields, family: str) -> Rope:
    """As in transformers, rope_scaling comes before rope_parameters and either before rope_theta."""
    defaults = FAMILIES[family]
    name = 'rope_scaling' if fields.get('rope_scaling') else 'rope_parameters'
    rope = fields.get(name, {})
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise fields.unsupported(name, rope, 'one object for all layers')
    theta = fields.number('rope_theta', defaults.rope_theta)
    if fields.get(name) is None:
        return Rope(theta, defaults.rope_scaling)
    return _read_rope(fields, name, rope, theta, partial=defaults.rotary_fraction != 1.0)


def _read_rope_by_kind(fields: Fields, family: str) -> tuple[Rope, Rope]:
    """As in transformers, rope_scaling and rope_theta are for layers without a window."""
    defaults = FAMILIES[family]
    assert defaults.window_theta is not None
    rope = fields.get('rope_parameters', {FULL: {}, SLIDING: {}})
    if not isinstance(rope, dict) or not all(isinstance(rope.get(kind) or {}, dict) for kind in (FULL, SLIDING)):
        raise fields.unsupported('rope_parameters', rope, f'an object with {FULL} and {SLIDING}, an object each')
    if other := [key for key in rope if key not in (FULL, SLIDING)]:
        raise fields.unsupported(f'rope_parameters.{other[0]}', rope[other[0]], f'objects for {FULL} and {SLIDING}')
    scaling = fields.get('rope_scaling', {})
    if not isinstance(scaling, dict):
        raise fields.unsupported('rope_scaling', scaling, 'an object')
    own = {FULL: {**(rope.get(FULL) or {}), **scaling}, SLIDING: rope.get(SLIDING) or {}}
    for kind, of_kind in own.items():
        if of_kind.get('truncate', True) is not True:  # transformers 5.23 looks for it in the outer object alone
            raise fields.unsupported(f'rope_parameters.{kind}.truncate', of_kind['truncate'], 'True')
    theta = fields.number('rope_theta', defaults.rope_theta)
    # Gemma 3 has a field for window layers; of Olmo 3 transformers gives them the default
    window_theta = defaults.window_theta
    if defaults.score_scalar is not None:
        window_theta = fields.number('rope_local_base_freq', window_theta)
    return (
        _read_rope(fields, f'rope_parameters.{FULL}', own[FULL], theta),
        _read_rope(fields, f'rope_parameters.{SLIDING}', own[SLIDING], window_theta),
    )


def _read_rope(
    fields: Fields, name: str, rope: Mapping[str, object], default_theta: float, *, partial: bool = False
) -> Rope:
    """A rope; `partial` = the family may rotate a part of each head, which `read_rotary_dim` reads."""
    inner = Fields(fields.path, {f'{name}.{key}': value for key, value in rope.items()})
    theta = inner.number(f'{name}.rope_theta', default_theta)
    factor = f'{name}.{_PARTIAL}'
    if not partial and inner.get(factor, 1.0) != 1.0:
        raise fields.unsupported(factor, inner.get(factor), '1.0')
    kind = rope.get('rope_type', rope.get('type', 'default'))
    return Rope(theta, _read_scaling(fields, inner, name, kind))


def _read_scaling(fields: Fields, inner: Fields, name: str, kind: object) -> RopeScaling | None:
    if kind == 'default':
        return None
    if kind == 'linear':
        return LinearScaling(inner.number(f'{name}.factor'))
    if kind in _BY_LENGTH:
        raise HfError(
            f'{fields.path}: {name}.rope_type={kind!r} needs rotary frequencies that depend on the length reached, '
            'which are not supported: cached keys and packed training rows would have those of other lengths'
        )
    if kind not in ('llama3', 'yarn'):
        raise fields.unsupported(f'{name}.rope_type', kind, "'default', 'linear', 'llama3', 'yarn'")
    context = fields.get('max_position_embeddings')
    inside = inner.get(f'{name}.original_max_position_embeddings', context)
    original = fields.integer('original_max_position_embeddings', inside)
    if kind == 'llama3':
        return Llama3Scaling(
            factor=inner.number(f'{name}.factor'),
            low_frequency_factor=inner.number(f'{name}.low_freq_factor'),
            high_frequency_factor=inner.number(f'{name}.high_freq_factor'),
            original_context_tokens=original,
        )
    return YarnScaling(
        factor=inner.number(f'{name}.factor', context / original if type(context) is int else None),
        original_context_tokens=original,
        beta_fast=inner.optional_number(f'{name}.beta_fast') or 32.0,
        beta_slow=inner.optional_number(f'{name}.beta_slow') or 1.0,
        truncate=inner.flag(f'{name}.truncate', True),
        attention_factor=None
        if inner.get(f'{name}.attention_factor') is None
        else inner.number(f'{name}.attention_factor'),
        mscale=inner.optional_number(f'{name}.mscale'),
        mscale_all_dim=inner.optional_number(f'{name}.mscale_all_dim'),
    )


def read_rotary_dim(fields: Fields, family: str, head_dim: int) -> int | None:
    """The first numbers of a head, which are rotated; None = all."""
    if (default := FAMILIES[family].rotary_fraction) == 1.0:
        return None
    name, rope = _PARTIAL, fields.get('rope_scaling') or fields.get('rope_parameters', {})
    given = Fields(fields.path, {name: fields.get(name, 1.0 if fields.is_null(name) else default)})
    if rope.get(_PARTIAL) is not None:  # comes before the field at the top
        name = f'rope_parameters.{_PARTIAL}'
        given = Fields(fields.path, {name: rope[_PARTIAL]})
    rotated = int(head_dim * given.number(name))  # as transformers rounds
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise fields.unsupported(name, given.get(name), f'a part that is an even number of the {head_dim} of a head')
    return None if rotated == head_dim else rotated


def rope_fields(config: ModelConfig) -> dict[str, object]:
    """The rotary fields of a model, for transformers 4 and 5."""
    scaling = _scaling_fields(config.rope_scaling)
    fields: dict[str, object] = {'rope_theta': config.rope_theta}
    fields['rope_scaling'] = scaling if config.rope_scaling else None
    full: dict[str, object] = {**scaling, 'rope_theta': config.rope_theta}
    if FAMILIES[config.family].rotary_fraction != 1.0:
        factor = {_PARTIAL: _rotated_part(config.rotary_dim or config.head_dim, config.head_dim)}
        fields, full = fields | factor, full | factor
    if FAMILIES[config.family].window_theta is None:
        return {**fields, 'rope_parameters': full}
    window = _window_rope(config)
    if FAMILIES[config.family].score_scalar is not None:  # of Gemma
        fields['rope_local_base_freq'] = window.theta
    sliding = {**_scaling_fields(window.scaling), 'rope_theta': window.theta}
    return {**fields, 'rope_parameters': {FULL: full, SLIDING: sliding}}


def _rotated_part(rotated: int, head_dim: int) -> float:
    """The part of a head whose product with head_dim, rounded down, is the count of rotated numbers."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, 1.0)


def _window_rope(config: ModelConfig) -> Rope:
    """The rope of window layers, or of all layers if there are no window layers."""
    own = [config.rope_of(kind) for kind in config.kinds if kind.window is not None]
    return (own[0] if own else None) or Rope(config.rope_theta, config.rope_scaling)


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, object]:
    if scaling is None:
        return {'rope_type': 'default'}
    if isinstance(scaling, LinearScaling):
        return {'rope_type': 'linear', 'factor': scaling.factor}
    fields = {'factor': scaling.factor, 'original_max_position_embeddings': scaling.original_context_tokens}
    if isinstance(scaling, Llama3Scaling):
        bounds = {'low_freq_factor': scaling.low_frequency_factor, 'high_freq_factor': scaling.high_frequency_factor}
        return {'rope_type': 'llama3', **fields, **bounds}
    optional = ('attention_factor', 'mscale', 'mscale_all_dim')
    given = {name: getattr(scaling, name) for name in optional if getattr(scaling, name) is not None}
    bounds = {'beta_fast': scaling.beta_fast, 'beta_slow': scaling.beta_slow}
    if not scaling.truncate:  # a kind of layer lacks the field
        bounds['truncate'] = False
    return {'rope_type': 'yarn', **fields, **bounds, **given}


# Windows, layers without rotation, and layers with a gated delta net.


def read_kinds(fields: Fields, family: str, n_layers: int) -> tuple[Rope, tuple[LayerKind, ...]]:
    """(the rope of layers without a window, the kinds of the layers)."""
    rope, of_windows = read_ropes(fields, family)
    if FAMILIES[family].full_attention_every:
        return rope, _listed_mixers(fields, family, n_layers)
    if FAMILIES[family].windows == 'listed':
        rotates = _rotated_layers(fields, family, n_layers)
        windows = _listed_windows(fields, family, n_layers, rotates)
    else:
        rotates = [True] * n_layers
        size, first = _last_windows(fields, family, n_layers)
        windows = [None if layer < first else size for layer in range(n_layers)]
    other = None if of_windows == rope else of_windows
    kinds = (
        LayerKind(window, turns, other if window and turns else None)
        for window, turns in zip(windows, rotates, strict=True)
    )
    return rope, tuple(kinds)


def _listed_mixers(fields: Fields, family: str, n_layers: int) -> tuple[LayerKind, ...]:
    _refuse_window(fields, family)
    if (types := fields.get('layer_types')) is None:
        every = fields.integer('full_attention_interval', FAMILIES[family].full_attention_every)
        types = [LINEAR if number % every else FULL for number in range(1, n_layers + 1)]
    _require_types(fields, types, n_layers, LINEAR)
    return tuple(DELTA if kind == LINEAR else LayerKind() for kind in types)


def _require_types(fields: Fields, types: object, n_layers: int, other: str) -> None:
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in (FULL, other) for kind in types):
        raise fields.unsupported('layer_types', types, f'{n_layers} entries of {FULL!r} or {other!r}')


def _rotated_layers(fields: Fields, family: str, n_layers: int) -> list[bool]:
    every = FAMILIES[family].unrotated_every
    if not every:
        return [True] * n_layers
    if (listed := fields.get('no_rope_layers')) is None:
        every = fields.integer('no_rope_layer_interval', every)
        return [(layer + 1) % every != 0 for layer in range(n_layers)]
    if not isinstance(listed, list) or len(listed) < n_layers or any(turns not in (0, 1) for turns in listed):
        raise fields.unsupported('no_rope_layers', listed, f'{n_layers} entries of 1 (with rotary positions) or 0')
    return [turns == 1 for turns in listed[:n_layers]]


def _listed_windows(fields: Fields, family: str, n_layers: int, rotates: list[bool]) -> list[int | None]:
    defaults = FAMILIES[family]
    size = _window_size(fields, defaults.window)
    if defaults.unrotated_every and not fields.flag('use_sliding_window'):
        size = None
    if (types := fields.get('layer_types')) is not None:
        _require_types(fields, types, n_layers, SLIDING)
        slides = [kind == SLIDING for kind in types]
    elif defaults.full_every:
        every = fields.integer('sliding_window_pattern', defaults.full_every)
        slides = [(layer + 1) % every != 0 for layer in range(n_layers)]
    else:
        slides = [size is not None and not turns for turns in rotates]
    if any(slides) and size is None:
        raise HfError(f'{fields.path}: layer_types has {SLIDING!r}, and there is no sliding_window: name its tokens')
    return [size if slide else None for slide in slides]


def _last_windows(fields: Fields, family: str, n_layers: int) -> tuple[int | None, int]:
    """(the window in tokens or None, the first layer that has it)."""
    size, first, windows, default = None, 0, FAMILIES[family].windows, FAMILIES[family].window
    if windows == 'none':
        _refuse_window(fields, family)
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


def _refuse_window(fields: Fields, family: str) -> None:
    if (value := fields.get('sliding_window')) is not None:
        raise fields.unsupported('sliding_window', value, f'null, since transformers ignores it in a {family} model')


def _window_size(fields: Fields, default: int | None) -> int | None:
    if fields.is_null('sliding_window') or fields.get('sliding_window', default) is None:
        return None
    return fields.integer('sliding_window', default)


def _first_window_layer(fields: Fields, types: object, n_layers: int) -> int:
    first = types.count(FULL) if isinstance(types, list) else 0
    if types != [FULL] * first + [SLIDING] * (n_layers - first):
        raise fields.unsupported(
            'layer_types', types, f'{n_layers} entries, first every {FULL!r}, then every {SLIDING!r}'
        )
    return first


def kind_fields(config: ModelConfig) -> dict[str, object]:
    """The fields of windows, of layers without rotation and of layers with a gated delta net.

    Raises HfError for kinds of layers that the family's config.json cannot express.
    """
    family, windows = FAMILIES[config.family], [config.window(layer) for layer in range(config.n_layers)]
    sizes = sorted({window for window in windows if window is not None})
    size = sizes[0] if sizes else None
    _require_expressible(config, windows, sizes)
    fields: dict[str, object] = {}
    if family.windows != 'none':
        fields['sliding_window'] = size
    if family.windows in ('flag', 'some') or family.unrotated_every:
        fields['use_sliding_window'] = size is not None
    if family.windows == 'some':
        fields['max_window_layers'] = windows.count(None)
    if family.windows == 'listed':
        fields['layer_types'] = [FULL if window is None else SLIDING for window in windows]
    if family.full_attention_every:
        mixers = [config.mixer(layer) for layer in range(config.n_layers)]
        fields['layer_types'] = [LINEAR if mixer == 'delta' else FULL for mixer in mixers]
    if family.unrotated_every:
        fields['no_rope_layers'] = [int(config.kind(layer).rotates) for layer in range(config.n_layers)]
    return fields


def _require_expressible(config: ModelConfig, windows: list[int | None], sizes: list[int]) -> None:
    family = FAMILIES[config.family]
    refuse = lambda what: HfError(
        f'{what} cannot be written for family={config.family!r}: choose the family that has it'
    )
    if len(sizes) > 1 or (sizes and family.windows == 'none'):
        raise refuse(f'windows of {sizes} tokens')
    if family.delta is None and config.delta is not None:
        raise refuse('a layer with a gated delta net')
    if not family.unrotated_every and not all(kind.rotates for kind in config.kinds if kind.mixer == 'attention'):
        raise refuse('a layer without rotary positions')
    if family.windows != 'listed' and windows != [None] * windows.count(None) + sizes * (
        len(windows) - windows.count(None)
    ):
        raise refuse(f'windows={windows}')
    if family.windows in ('all', 'flag') and sizes and None in windows:
        raise refuse(f'windows={windows}')
    ropes = {kind.rope for kind in config.kinds if kind.window is not None}
    if len(ropes) > 1 or any(kind.rope for kind in config.kinds if kind.window is None):
        raise refuse('several ropes for layers of one kind')
    if ropes - {None} and family.window_theta is None:
        raise refuse('another rope for window layers')
