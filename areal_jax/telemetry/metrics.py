"""Metrics of each update, appended to WORKDIR/metrics.jsonl and to TensorBoard, and read back for a report.

The loads of experts, which are thousands of numbers, are in a file of their own.

Written by app/run/observer.py and app/run/own_site.py, read by report/ and app/run/reports.py.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from areal_jax import files
from areal_jax.errors import show
from areal_jax.telemetry.names import (
    EVALUATION,
    EVALUATION_VERSION,
    EXPERT_LOADS,
    EXPERT_LOADS_OF_AGE,
    HISTOGRAMS,
    METRICS,
    STEP,
)

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


def read_json_lines(path: pathlib.Path) -> list[dict[str, object]]:
    """Applies `parse_json_lines` to a file; [] without the file."""
    return parse_json_lines(path.read_bytes(), str(path)) if path.exists() else []


def parse_json_lines(
    content: bytes, name: str, keep: Callable[[dict[str, object]], dict[str, object]] = lambda record: record
) -> list[dict[str, object]]:
    """One dict per line, passed through `keep`; a last line torn by its writer's death is left out.

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
    """Raises FileError if line `number` of the file lacks one of `fields` or has it with another type."""
    for name, kind in fields.items():
        if not isinstance(record.get(name), kind):
            found = f'has {name}={record[name]!r}' if name in record else f'has no {name!r}'
            raise files.FileError(f'{path}: line {number} {found}: it was edited or is of another program; remove it')


def rewrite_json_lines(path: pathlib.Path, records: Sequence[Mapping[str, object]]) -> None:
    """Replaces the content of the file by these records, atomically; does nothing if there is no file."""
    if not path.exists():
        return
    files.write_text(path, ''.join(json.dumps(record) + '\n' for record in records))


def _is_torn(line: bytes) -> bool:
    """Whether the line can be the beginning of an object, as left by a writer that died while writing."""
    return line.lstrip()[:1] in (b'{', b'', b'\0')  # zeros: an allocated but unwritten block


def plain(value: object) -> Any:
    """Converts to JSON values: numpy scalars and arrays become numbers and lists, NaN and infinity become None."""
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# The values of metrics: numbers, lists of counts, None for a number that was not finite.


Value = float | Sequence[float] | None
Line = Mapping[str, Value]  # metrics of one update, by telemetry.names


def number(line: Line, name: str) -> float | None:
    """The metric; None if it is missing or was not finite. Raises TypeError for a list."""
    value = line.get(name)
    if isinstance(value, Sequence):
        raise TypeError(f'the metric {name!r} is {value!r}, where a number is expected')
    return value


def counts(line: Line, name: str) -> Sequence[float]:
    """The metric that is a list of counts; () if it is missing. Raises TypeError for a number."""
    value = line.get(name)
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise TypeError(f'the metric {name!r} is {value!r}, where a list is expected')
    return value


# Writes TensorBoard's event files in the thread of the caller.
#
# The writers of TensorBoard packages use a queue and a thread, which block when the disk is full.


class TensorBoardWriter:
    """One event file of TensorBoard; MetricsWriter opens it at the first value.

    Args:
      purge_step: TensorBoard ignores values at this step and later in earlier files of the directory; None = keeps all.
    """

    def __init__(self, directory: pathlib.Path, purge_step: int | None):
        from tensorboardX import summary  # slow
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2

        self._summary, self._events = summary, event_pb2
        directory.mkdir(parents=True, exist_ok=True)
        suffix = f'.from_{purge_step or 0}'  # two files of one second must not share a name
        self._path = directory
        self._writer: EventsWriter
        try:
            self._writer = EventsWriter(str(directory / 'events'), suffix)
            self._path = pathlib.Path(self._writer._file_name)
            if purge_step is not None:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._writer.write_event(event_pb2.Event(session_log=start, step=purge_step, wall_time=time.time()))
        except OSError as error:
            raise self._named(error) from None

    def write(self, step: int, values: Line) -> None:
        """Writes an update's numbers; counts by age 0, 1, ... as histograms. Raises OSError that names the file."""
        try:
            for name, value in values.items():
                if (summary := self._summarize(name, value)) is not None:
                    self._writer.write_event(self._events.Event(summary=summary, step=step, wall_time=time.time()))
            self._writer.flush()
        except OSError as error:
            raise self._named(error) from None

    def close(self) -> None:
        """Closes the file. Raises OSError if the rest cannot be written; the file is closed even then."""
        try:
            self._writer.close()
        except OSError as error:
            raise self._named(error) from None

    def _summarize(self, name: str, value: Value) -> object:
        if isinstance(value, (int, float)):
            return self._summary.scalar(name, value)
        if not isinstance(value, list) or not sum(value):
            return None
        ages = range(len(value))
        return self._summary.histogram_raw(
            name, min=0, max=len(value) - 1, num=sum(value),
            sum=sum(age * count for age, count in zip(ages, value, strict=True)),
            sum_squares=sum(age * age * count for age, count in zip(ages, value, strict=True)),
            bucket_limits=[age + 0.5 for age in ages], bucket_counts=value,
        )  # fmt: skip

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror or os.strerror(error.errno or 0), str(self._path))


FILE = 'metrics.jsonl'
LOADS = 'expert_loads.jsonl'
DIRECTORY = 'tensorboard'
Metric = TypeVar('Metric', bound=Value)
_LARGEST_COUNT = 1 << 63  # of tokens
_NUMBER = (int, float, type(None))  # null if it was not finite
_OF_EXPERTS = (EXPERT_LOADS, EXPERT_LOADS_OF_AGE)


class MetricsError(ValueError):
    """Two producers measure the same metric, which is a bug of this program."""


def merge(**producers: Mapping[str, Metric]) -> dict[str, Metric]:
    """Merges the metrics of producers, which are keyed by name; raises MetricsError if two produce the same metric."""
    values: dict[str, Metric] = {}
    source: dict[str, str] = {}
    for producer, metrics in producers.items():
        for name, value in metrics.items():
            if name in values:
                raise MetricsError(f'the metric {name!r} has two producers: {source[name]} and {producer}')
            values[name], source[name] = value, producer
    return values


class MetricsWriter:
    """Writes one JSON object per line, flushed at once, and numbers and histograms to TensorBoard.

    Metrics of an evaluation during training appear in TensorBoard at the evaluated version.
    """

    def __init__(self, workdir: pathlib.Path | str, tensorboard: bool):
        self.listeners: list[Callable[[int, Line], None]] = []  # called with the step and the row of each update
        self._workdir = pathlib.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._path = self._workdir / FILE
        self._use_tensorboard = tensorboard
        self._tensorboard: TensorBoardWriter | None = None
        self._purge_step: int | None = None
        self._loads_path = self._workdir / LOADS
        for path in (self._path, self._loads_path):
            rewrite_json_lines(path, read_metrics(path))  # the next line must not be appended to a torn one
        self._file = files.LineWriter(self._path)
        self._loads: files.LineWriter | None = None  # until the first loads

    def write(self, step: int, metrics: Line) -> None:
        """Appends the metrics of one update; numbers that are not finite become null."""
        values = {str(name): plain(value) for name, value in metrics.items() if name != STEP}
        loads = {name: values.pop(name) for name in [*values] if name.startswith(_OF_EXPERTS)}
        self._file.write(json.dumps({STEP: int(step), **values}))
        if loads or self._loads or self._loads_path.exists():  # then every update has a line
            self._loads = self._loads or files.LineWriter(self._loads_path)
            self._loads.write(json.dumps({STEP: int(step), **loads}))
        if self._use_tensorboard:
            self._write_tensorboard(step, values)
        for listener in self.listeners:
            listener(step, values)

    def truncate(self, step: int) -> None:
        """Removes every update after `step`; a resumed run makes them again.

        Raises FileError if an update up to `step` is missing.
        """
        self._close_files()
        kept = [line for line in read_metrics(self._path) if _step(line) <= step]
        if len(kept) < step:
            raise files.FileError(
                f'{self._path} has {len(kept)} updates, the checkpoint was saved after {step}; restore the file as the '
                'run wrote it, or start anew in another --workdir'
            )
        rewrite_json_lines(self._path, kept)
        rewrite_json_lines(self._loads_path, [line for line in read_metrics(self._loads_path) if _step(line) <= step])
        self._file = files.LineWriter(self._path)
        self._close_tensorboard()
        self._purge_step = step + 1

    def sync(self) -> None:
        """Returns when all lines so far are on the disk; callable from any thread."""
        self._file.sync()
        if self._loads:
            self._loads.sync()

    def close(self) -> None:
        self._close_files()
        self._close_tensorboard()

    def _close_files(self) -> None:
        self._file.close()
        if self._loads:
            self._loads.close()
            self._loads = None

    def _write_tensorboard(self, step: int, values: Line) -> None:
        if self._tensorboard is None:
            self._tensorboard = TensorBoardWriter(self._workdir / DIRECTORY, self._purge_step)
        version = values.get(EVALUATION_VERSION)
        ours = {name: value for name, value in values.items() if name.startswith(EVALUATION)}
        self._tensorboard.write(step, {name: value for name, value in values.items() if name not in ours})
        if isinstance(version, (int, float)):
            self._tensorboard.write(int(version), ours)

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            tensorboard, self._tensorboard = self._tensorboard, None
            tensorboard.close()


def read_metrics(path: pathlib.Path | str) -> list[Line]:
    """Reads a metrics.jsonl or expert_loads.jsonl as dicts; a torn last line is left out, and a missing file gives [].

    Raises FileError for a line that is not a JSON object, holds a value that is not a metric, or does not follow the
    update of the previous line.
    """
    path = pathlib.Path(path)
    lines = cast(list[Line], read_json_lines(path))
    for number, line in enumerate(lines, start=1):
        require_fields(path, number, line, {STEP: int} | {name: _kind(name) for name in line.keys() - {STEP}})
        for name, value in line.items():
            if not _is_sound(name, value):
                raise files.FileError(
                    f'{path}: line {number} has {name}={show(value)}, which is no metric: it was edited or is of '
                    'another program; remove it'
                )
        if number > 1 and line[STEP] != _step(lines[number - 2]) + 1:
            raise files.FileError(
                f'{path}: line {number} is of update {line[STEP]}, after one of update {lines[number - 2][STEP]}: '
                'lines were removed, added or moved; restore the file as the run wrote it'
            )
    return lines


def _is_sound(name: str, value: object) -> bool:
    """Whether the value is finite or null, and a histogram holds only counts."""
    if isinstance(value, list) and (name in HISTOGRAMS or name.startswith(_OF_EXPERTS)):
        return all(type(entry) in (int, float) and 0 <= entry < _LARGEST_COUNT for entry in value)
    return not isinstance(value, float) or math.isfinite(value)


def _step(line: Line) -> int:
    return cast(int, line[STEP])


def _kind(name: str) -> type | tuple[type, ...]:
    if name in HISTOGRAMS:
        return list
    return _NUMBER if name in METRICS else (*_NUMBER, list)
