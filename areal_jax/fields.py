"""The fields of a config against their declaration: names, types, and the nearest name for one that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax.errors import UserError
from areal_jax.ranges import ConfigError

_NAMES = {int: 'a whole number', float: 'a number', bool: 'True or False', str: 'text', tuple: 'a tuple'}
_HINT = 'start from areal_jax.config.default_config() and set what differs'


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean NAME?' with the nearest of the known names, '' where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f'; did you mean {near[0]}?' if near else ''


def unknown_field(path: str, declared: Mapping[str, Any], error: type[UserError] = ConfigError) -> UserError:
    """The error for 'rollout.slotz', or for a path that has no section or more than one dot."""
    section, _, field = path.partition('.')
    paths = [f'{name}.{key}' for name, fields in declared.items() for key in fields]
    elsewhere = [name for name in paths if name.endswith(f'.{field or section}')]
    if section not in declared:
        near = f'; did you mean {elsewhere[0]}?' if elsewhere and not field else ''
        near = near or suggest(path, paths if field else declared) or suggest(section, declared)
        return error(f'{path}: there is no section {section!r} in the config{near or "; see areal_jax/config.py"}')
    near = f'; did you mean {elsewhere[0]}?' if elsewhere else ''
    near = near or suggest(path, [name for name in paths if name.startswith(f'{section}.')])
    return error(f'{path} is not a field of the config{near or "; see areal_jax/config.py"}')


def require_declared(config: Mapping[str, Any], declared: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a section or field that is missing or unknown, or whose value is of another type."""
    for section in config:
        if section not in declared:
            raise unknown_field(section, declared)
    for section, fields in declared.items():
        if section not in config:
            raise ConfigError(f'the config has no section {section!r}: {_HINT}')
        values = config[section]
        if not isinstance(values, Mapping | config_dict.ConfigDict):
            raise ConfigError(f'{section}={values!r} must be a section with fields: {_HINT}')
        for field in values:
            if field not in fields:
                raise unknown_field(f'{section}.{field}', declared)
        for field, default in fields.items():
            if field not in values:
                raise ConfigError(f'the config has no field {section}.{field}: {_HINT}')
            _require_type(f'{section}.{field}', values[field], default, fields.get_type(field))


def describe_type(default: Any, kind: type) -> str:
    """'a whole number', 'a tuple of whole numbers', ... as the field with this default needs it."""
    if kind is not tuple:
        return _NAMES[kind]
    return 'a tuple of whole numbers' if _element(default) is int else 'a tuple of texts'


def _require_type(path: str, value: Any, default: Any, kind: type) -> None:
    if value is None and default is None:
        return
    elements = value if isinstance(value, tuple) and kind is tuple else ()
    if not _is(value, kind) or not all(_is(element, _element(default)) for element in elements):
        raise ConfigError(f'{path}={value!r} must be {describe_type(default, kind)}')
    for text in (value, *elements):
        if isinstance(text, str) and ('\0' in text or not _is_unicode(text)):
            raise ConfigError(f'{path}={text!r} must be text in UTF-8, without zero bytes')


def _element(default: tuple[Any, ...]) -> type:
    """The type of the elements of a tuple field; one that is empty by default holds texts."""
    return type(default[0]) if default else str


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
