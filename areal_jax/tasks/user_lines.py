"""Files of JSON lines that a user wrote: read line by line, every fault named by file and line."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator

from areal_jax.files import JsonObject
from areal_jax.tasks.task import TaskError
from areal_jax.tasks.user_lines import HEAD_BYTES, describe_other_format

_LONGEST_LINE = 16 * 2**20  # bytes: bounds memory; a prompt of that length fits no model
_BYTE_ORDER_MARK = b'\xef\xbb\xbf'


def read_objects(
    path: str | pathlib.Path, decode: Callable[[str], object] = json.loads
) -> Iterator[tuple[str, JsonObject]]:
    """('FILE:LINE', object) of each line that is not blank; `decode` makes a value of JSON, or raises ValueError.

    Raises TaskError for a file that cannot be read, is of another format or has no such line, and, naming the line, for
    one that is not UTF-8, too long, or no JSON object.
    """
    empty = True
    for number, line in enumerate(_read_lines(path), start=1):
        place = f'{path}:{number}'
        if len(line) > _LONGEST_LINE:
            raise TaskError(f'{place}: the line has more than {_LONGEST_LINE >> 20} MiB; give one JSON object a line')
        if text := _decode(line, place).strip():
            empty = False
            yield place, _parse(text, place, decode)
    if empty:
        raise TaskError(f'task.path={str(path)!r} has no line: give one JSON object a line')


def require_text(value: object, name: str, place: str, *, may_be_blank: bool = False) -> str:
    """The value, if it is a text with something in it; raises TaskError that names it."""
    if not isinstance(value, str) or not (value.strip() or may_be_blank):
        raise TaskError(f'{place}: {name}={_shorten(value)} must be a text that is not empty')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TaskError(
            f'{place}: {name} has {value[error.start]!r} at character {error.start}, half of a surrogate pair: write '
            'the whole character'
        ) from error
    return value


def _read_lines(path: str | pathlib.Path) -> Iterator[bytes]:
    """Lines end at a line feed alone: a JSON string may hold the other line ends of Unicode as they are."""
    try:
        with pathlib.Path(path).open('rb') as file:
            if file.peek(3)[:3] == _BYTE_ORDER_MARK:
                file.read(3)
            if other := describe_other_format(file.peek(HEAD_BYTES)[:HEAD_BYTES], str(path)):
                raise TaskError(f'task.path={str(path)!r} {other}')
            while line := file.readline(_LONGEST_LINE + 1):
                yield line
    except TaskError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL byte
        reason = getattr(error, 'strerror', None) or error
        raise TaskError(f'task.path={str(path)!r} cannot be read ({reason}): give a file of JSON lines') from error


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode('utf-8')
    except UnicodeDecodeError as error:
        raise TaskError(
            f'{place}: not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}; save the file as UTF-8'
        ) from error


def _parse(text: str, place: str, decode: Callable[[str], object]) -> JsonObject:
    try:
        row = decode(text)
    except ValueError as error:
        raise TaskError(f'{place}: not JSON ({error}), got {text[:80]!r}') from error
    except RecursionError as error:
        raise TaskError(f'{place}: the JSON is nested too deep, got {text[:80]!r}') from error
    if not isinstance(row, dict):
        raise TaskError(f'{place}: expected a JSON object, got {text[:80]!r}')
    return row


def _shorten(value: object) -> str:
    text = f'a {type(value).__name__}' if isinstance(value, list | dict) else repr(value)
    return f'{text[:80]}...' if len(text) > 80 else text
