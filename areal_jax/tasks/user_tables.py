"""Reads rows of Parquet, CSV and TSV files and of JSON arrays as objects, as lines of JSON are read."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping

from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks.task import TaskError

Decode = Callable[[str], object]
Rows = Iterator[tuple[str, JsonObject]]  # ('FILE:LINE', row)
_PARQUET = b'PAR1'
_BEGINS_ARRAY = re.compile(rb'\[(\s*\n|\s*[]{])')  # of objects, or over several lines; [1] may be a wrong line
_SEPARATORS = {'.csv': ',', '.tsv': '\t'}
_ROWS = 1024  # of a Parquet file that are in memory at a time
_MOST_ARRAY_BYTES = 4 * 2**30  # a JSON array is parsed whole


def find_reader(path: pathlib.Path, head: bytes) -> Callable[[pathlib.Path, Decode], Rows] | None:
    """Returns the function that yields (place, value) of each row of a table; None for a file of lines.

    Args:
      head: the first bytes of the file, without a mark of UTF-8.
    """
    text = head.lstrip()
    if head.startswith(_PARQUET):
        return _read_parquet
    if path.suffix in _SEPARATORS and not text.startswith(b'{'):
        return _read_separated
    return _read_array if _BEGINS_ARRAY.match(text) else None


def _read_parquet(path: pathlib.Path, decode: Decode) -> Rows:
    """Yields rows; numbers go through `decode` as JSON, so that they are read like numbers of lines."""
    if importlib.util.find_spec('pyarrow') is None:
        raise TaskError(f'task.path={str(path)!r} is a Parquet file and needs pyarrow: {describe_install("hub")}')
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                parsed = decode(json.dumps(row, default=_as_json, ensure_ascii=False))
                assert isinstance(parsed, dict)
                yield f'{path}, row {number}', parsed
    except (pyarrow.ArrowException, OSError) as error:
        raise TaskError(
            f'task.path={str(path)!r} cannot be read as Parquet ({_line(error)}): get or write the file again'
        ) from error


def _as_json(value: object) -> str:
    """Returns a value that JSON lacks (a date, a decimal, bytes) as a text."""
    if isinstance(value, bytes):
        import base64  # here: scorer processes import this module, and answers must find as little as possible imported

        return base64.b64encode(value).decode()
    return str(value)


def _read_separated(path: pathlib.Path, decode: Decode) -> Rows:
    """Yields the rows of a table with a header line; every value is a text."""
    import csv  # here for the same reason as base64

    try:
        with path.open(encoding='utf-8-sig', newline='') as file:
            reader = csv.DictReader(file, delimiter=_SEPARATORS[path.suffix], strict=True)
            names = list(reader.fieldnames or ())
            if twice := {name for name in names if names.count(name) > 1}:
                raise TaskError(f'{path}:1: the column {min(twice)!r} stands twice: rename one of the two')
            for row in reader:
                if None in row or None in row.values():
                    held = len(names) + len(row.get(None) or ()) - sum(value is None for value in row.values())
                    raise TaskError(
                        f'{path}:{reader.line_num}: the row has {held} values, and the header {len(names)} names: '
                        'quote values that hold the separator'
                    )
                yield f'{path}:{reader.line_num}', row
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskError(
            f'task.path={str(path)!r} cannot be read as a table of {path.suffix[1:].upper()} ({_line(error)}): save it '
            'as UTF-8 with quoted values'
        ) from error


def _read_array(path: pathlib.Path, decode: Decode) -> Rows:
    if (size := path.stat().st_size) > _MOST_ARRAY_BYTES:
        raise TaskError(
            f"task.path={str(path)!r} is a JSON array of {size} bytes, and is read whole: jq -c '.[]' FILE > FILE.jsonl"
        )
    try:
        values = decode(path.read_text(encoding='utf-8-sig'))
    except (ValueError, RecursionError) as error:
        raise TaskError(f'task.path={str(path)!r} is not JSON ({_line(error)}): write the file again') from error
    assert isinstance(values, list)  # it begins with [
    for index, value in enumerate(values, start=1):
        place = f'{path}, element {index}'
        if not isinstance(value, dict):
            raise TaskError(f'{place}: expected a JSON object, got {repr(value)[:80]}')
        yield place, value


def rename_columns(row: JsonObject, columns: Mapping[str, str], place: str) -> JsonObject:
    """Returns the row with the values of `columns` under the names that the reader of the task knows.

    Args:
      columns: name of the task -> column of the file; 'reward_model.ground_truth' and 'prompt.0.content' look inside.

    Raises TaskError for a column that the row lacks.
    """
    if not columns:
        return row
    taken = {name: _look_up(row, column, f'task.columns.{name}={column!r}', place) for name, column in columns.items()}
    used = {column.partition('.')[0] for column in columns.values()}
    return {key: value for key, value in row.items() if key not in used and key not in taken} | taken


def _look_up(row: JsonObject, column: str, field: str, place: str) -> object:
    value: object = row
    for part in [column] if column in row else column.split('.'):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise TaskError(f'{place}: {field} is not there; the columns are {", ".join(sorted(row)[:12])}')
    return value


def _line(error: BaseException) -> str:
    return ' '.join(str(error).split())[:200]
