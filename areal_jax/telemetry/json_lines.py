"""Files of one JSON object a line, which survive the death of their writer."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax import files


def read_json_lines(path: pathlib.Path) -> list[dict[str, object]]:
    """`parse_json_lines` of a file; no file is an empty list."""
    return parse_json_lines(path.read_bytes(), str(path)) if path.exists() else []


def parse_json_lines(
    content: bytes, name: str, keep: Callable[[dict[str, object]], dict[str, object]] = lambda record: record
) -> list[dict[str, object]]:
    """One dict per line, what `keep` makes of it; a last line that its writer's death has cut off is left out.

    Raises:
        FileError: a line before the last is not a JSON object, or the last is complete and not an object; the message
            begins with `name` and the line.
    """
    if not content:
        return []
    lines = content.split(b'\n')
    ended = not lines[-1]
    lines = lines[:-1] if ended else lines
    records: list[dict[str, object]] = []
    for number, line in enumerate(lines, start=1):
        try:
            where = f'{name}: line {number} of {len(lines)}'
            records.append(keep(files.parse_object(line, where, 'restore or remove it')))
        except files.FileError:
            if number == len(lines) and _is_torn(line):
                break
            raise
    return records


def require_fields(
    path: pathlib.Path, number: int, record: Mapping[str, object], fields: Mapping[str, type | tuple[type, ...]]
) -> None:
    """Raises FileError where line `number` of the file lacks one of `fields` or has it with another type."""
    for name, kind in fields.items():
        if not isinstance(record.get(name), kind):
            found = f'has {name}={record[name]!r}' if name in record else f'has no {name!r}'
            raise files.FileError(f'{path}: line {number} {found}: it was edited or is of another program; remove it')


def rewrite_json_lines(path: pathlib.Path, records: Sequence[Mapping[str, object]]) -> None:
    """Replace the file by these records, all or nothing; no file stays no file."""
    if not path.exists():
        return
    files.write_text(path, ''.join(json.dumps(record) + '\n' for record in records))


def _is_torn(line: bytes) -> bool:
    """Whether the line can be the beginning of an object, as a writer leaves it that dies while it writes."""
    return line.lstrip()[:1] in (b'{', b'', b'\0')  # zeros: the file system had allocated the block, but not written it


def plain(value: object) -> Any:
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
