"""The config of a run as its config.json holds it, which a user may have edited."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from areal_jax import files
from areal_jax.config.declarations import SECTIONS
from areal_jax.config.ranges import ConfigError

RESTORE = 'restore the file as the run wrote it'


def read_saved(path: pathlib.Path, fix: str = RESTORE) -> files.JsonObject:
    """The config in a file, nested by section; raises FileError, which ends with `fix`, for what no run has written."""
    values = files.read_json(path, fix)
    require_saved(values, str(path), fix)
    return values


def require_saved(values: Mapping[str, object], where: str, fix: str = RESTORE) -> None:
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
