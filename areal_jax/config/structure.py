"""Sections and fields of a config against the declared ones: unknown names, with the nearest known one, and types.

Also of one in the config.json of a run, which a user may have edited.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping

from ml_collections import config_dict

from areal_jax import files
from areal_jax.config.declarations import SECTIONS
from areal_jax.config.near_names import find_field, find_flag
from areal_jax.config.ranges import ConfigError
from areal_jax.errors import ask_whether, suggest

# fields that runs were saved without, and what these runs do: it stays so where one goes on, or is looked at
FORMER: Mapping[str, str] = {'model.ends': 'eos', 'model.template_date': 'off'}
_HINT = 'start from areal_jax.config.default_config() and set what differs'
_SEE = '; areal-config lists them'
_RESTORE = 'restore the file as the run wrote it'


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


def read_saved(path: pathlib.Path, fix: str = _RESTORE) -> files.JsonObject:
    """The config in a file, nested by section; raises FileError, which ends with `fix`, for what no run has written."""
    values = files.read_json(path, fix)
    require_saved(values, str(path), fix)
    return with_former(values)


def with_former(values: files.JsonObject) -> files.JsonObject:
    """A saved config with the fields of FORMER that its version did not have."""
    found = dict(values)
    for path, value in FORMER.items():
        section, _, name = path.partition('.')
        if section in found:
            found[section] = {name: value} | found[section]
    return found


def require_saved(values: Mapping[str, object], where: str, fix: str = _RESTORE) -> None:
    """Raises FileError, which begins with `where`, for a section that is none and a value of another type.

    Fields that are missing or unknown are of another version, and no fault.
    """
    for section, fields in values.items():
        if not isinstance(fields, dict):
            raise files.FileError(f'{where} has {section}={fields!r}, which is no section with fields; {fix}')
        for name, value in fields.items():
            field = SECTIONS.get(section, {}).get(name)
            if field is None:
                continue
            try:
                field.require_type(f'{section}.{name}', _as_given(value))
            except ConfigError as error:
                raise files.FileError(f'{where} is not of a run: {error}; {fix}') from error


def _as_given(value: object) -> object:
    """Tuples are lists in JSON, also those in options."""
    if isinstance(value, list):
        return tuple(map(_as_given, value))
    return {name: _as_given(inner) for name, inner in value.items()} if isinstance(value, dict) else value
