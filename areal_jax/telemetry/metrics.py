"""Metrics of each update, appended to WORKDIR/metrics.jsonl and to TensorBoard, and read again for a report.

Written by app/run/observer.py and app/run/supervised.py, read by report/ and app/run/reports.py.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from areal_jax import files
from areal_jax.errors import show
from areal_jax.telemetry.metrics import (
    Line,
    TensorBoardWriter,
    Value,
    plain,
    read_json_lines,
    require_fields,
    rewrite_json_lines,
)
from areal_jax.telemetry.names import EVALUATION, EVALUATION_VERSION, HISTOGRAMS, METRICS, STEP

FILE = 'metrics.jsonl'
DIRECTORY = 'tensorboard'
Metric = TypeVar('Metric', bound=Value)
_LARGEST_COUNT = 1 << 63  # of tokens
_NUMBER = (int, float, type(None))  # null where it was not finite


class MetricsError(ValueError):
    """Two producers measure the same metric, which is a bug of this program."""


def merge(**producers: Mapping[str, Metric]) -> dict[str, Metric]:
    """The metrics of all producers, by the producers' names; raises MetricsError where two produce one metric."""
    values: dict[str, Metric] = {}
    source: dict[str, str] = {}
    for producer, metrics in producers.items():
        for name, value in metrics.items():
            if name in values:
                raise MetricsError(f'the metric {name!r} has two producers: {source[name]} and {producer}')
            values[name], source[name] = value, producer
    return values


class MetricsWriter:
    """One JSON object a line, flushed at once; numbers also go to TensorBoard, lists of counts as histograms.

    Metrics of an evaluation beside training are in TensorBoard at the version that they are of.
    """

    def __init__(self, workdir: pathlib.Path | str, tensorboard: bool):
        self.listeners: list[Callable[[int, Line], None]] = []  # called with the step and the row of each update
        self._workdir = pathlib.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._path = self._workdir / FILE
        self._use_tensorboard = tensorboard
        self._tensorboard: TensorBoardWriter | None = None
        self._purge_step: int | None = None
        rewrite_json_lines(self._path, read_metrics(self._path))  # the next line must not be appended to a torn one
        self._file = files.LineWriter(self._path)

    def write(self, step: int, metrics: Line) -> None:
        """Append the metrics of one update; numbers that are not finite become null."""
        values = {str(name): plain(value) for name, value in metrics.items() if name != STEP}
        self._file.write(json.dumps({STEP: int(step), **values}))
        if self._use_tensorboard:
            self._write_tensorboard(step, values)
        for listener in self.listeners:
            listener(step, values)

    def truncate(self, step: int) -> None:
        """Remove every update after `step`; a resumed run makes them again.

        Raises FileError where an update up to `step` is missing.
        """
        self._file.close()
        kept = [line for line in read_metrics(self._path) if _step(line) <= step]
        if len(kept) < step:
            raise files.FileError(
                f'{self._path} has {len(kept)} updates, the checkpoint was saved after {step}; restore the file as the '
                'run wrote it, or start anew in another --workdir'
            )
        rewrite_json_lines(self._path, kept)
        self._file = files.LineWriter(self._path)
        self._close_tensorboard()
        self._purge_step = step + 1

    def sync(self) -> None:
        """All lines until now are on the disk when this returns; from any thread."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()
        self._close_tensorboard()

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
    """The lines of a metrics.jsonl as dicts; a torn last line is left out, no file is an empty list.

    Raises FileError for a line that is no JSON object, holds what is no metric, or does not follow the update of
    the line before.
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
    """Numbers that are none are null in the file, and histograms hold counts."""
    if isinstance(value, list) and name in HISTOGRAMS:
        return all(type(entry) in (int, float) and 0 <= entry < _LARGEST_COUNT for entry in value)
    return not isinstance(value, float) or math.isfinite(value)


def _step(line: Line) -> int:
    return cast(int, line[STEP])


def _kind(name: str) -> type | tuple[type, ...]:
    if name in HISTOGRAMS:
        return list
    return _NUMBER if name in METRICS else (*_NUMBER, list)
