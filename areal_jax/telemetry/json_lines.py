"""Beside the loop: files of one JSON object a line, which survive the death of their writer."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax import files
from areal_jax.errors import UserError


class LogError(UserError, ValueError):
    """A log that cannot be read, because a line of it was torn or edited; the message names file and line."""


def read_json_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """One dict a line. A last line torn by the death of its writer is left out; any other bad line is a LogError."""
    if not path.exists():
        return []
    lines = path.read_text(encoding='utf-8', errors='replace').rstrip('\n').split('\n')
    if lines == ['']:
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise LogError(f'{path}: line {number} of {len(lines)} is not JSON ({error}); remove it') from error
        if not isinstance(record, dict):
            raise LogError(f'{path}: line {number} of {len(lines)} is not a JSON object; remove it')
        records.append(record)
    return records


def require_fields(
    path: pathlib.Path, number: int, record: Mapping[str, Any], fields: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Raises LogError where line `number` of the file lacks one of `fields` or has it with another type."""
    for name, kind in fields.items():
        if not isinstance(record.get(name), kind):
            found = f'has {name}={record[name]!r}' if name in record else f'has no {name!r}'
            raise LogError(f'{path}: line {number} {found}: it was edited or is of another program; remove it')


def rewrite_json_lines(path: pathlib.Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by these records, all or nothing; no file stays no file."""
    if not path.exists():
        return
    files.write_text(path, ''.join(json.dumps(record) + '\n' for record in records))


def plain(value: Any) -> Any:
    """What JSON can hold: numpy scalars and arrays become numbers and lists, NaN and infinity become None."""
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
