"""Sections and fields of a config against the declared ones: unknown names, with the nearest known one, and types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ml_collections import config_dict

from areal_jax.config.declarations import SECTIONS
from areal_jax.config.near_names import find_field, find_flag
from areal_jax.config.ranges import ConfigError
from areal_jax.errors import ask_whether, suggest

_HINT = 'start from areal_jax.config.default_config() and set what differs'
_SEE = '; areal-config lists them'


def suggest_flag(flag: str, own: Iterable[str]) -> str:
    """'; did you mean --workdir?' for the --output_dir of another program; '' where none of `own` is near."""
    return ask_whether(find_flag(flag, own))


def unknown_field(path: str) -> ConfigError:
    """The error for 'rollout.slotz', or for a path that has no section or more than one dot."""
    section, _, field = path.partition('.')
    if section not in SECTIONS:
        near = ask_whether(find_field(path)) or suggest(section, SECTIONS)
        if not field:
            near = suggest(section, SECTIONS) or near
        return ConfigError(f'{path}: there is no section {section!r} in the config{near or _SEE}')
    return ConfigError(f'{path} is not a field of the config{ask_whether(find_field(path)) or _SEE}')


def require_declared(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a section or field that is missing or unknown, or whose value is of another type."""
    for section in config:
        if section not in SECTIONS:
            raise unknown_field(section)
    for section, fields in SECTIONS.items():
        if section not in config:
            raise ConfigError(f'the config has no section {section!r}: {_HINT}')
        values = config[section]
        if not isinstance(values, Mapping | config_dict.ConfigDict):
            raise ConfigError(f'{section}={values!r} must be a section with fields: {_HINT}')
        for name in values:
            if name not in fields:
                raise unknown_field(f'{section}.{name}')
        for name, field in fields.items():
            if name not in values:
                raise ConfigError(f'the config has no field {section}.{name}: {_HINT}')
            field.require_type(f'{section}.{name}', values[name])
