"""Beside the loop: metrics of each update, appended to WORKDIR/metrics.jsonl and to TensorBoard."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax import files
from areal_jax.telemetry.json_lines import plain, read_json_lines, require_fields, rewrite_json_lines
from areal_jax.telemetry.names import METRICS, STEP, TOKEN_AGE_HISTOGRAM

FILE = 'metrics.jsonl'
DIRECTORY = 'tensorboard'
_NUMBER = (int, float, type(None))  # null where it was not finite


class MetricsError(ValueError):
    """Two producers measure one metric; a bug of this program."""


def merge(**producers: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of all producers, by the producers' names; raises MetricsError where two produce one metric."""
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for producer, metrics in producers.items():
        for name, value in metrics.items():
            if name in values:
                raise MetricsError(f'the metric {name!r} has two producers: {source[name]} and {producer}')
            values[name], source[name] = value, producer
    return values


class MetricsWriter:
    """One JSON object a line, flushed at once; numbers also go to TensorBoard, lists of counts as histograms."""

    def __init__(self, workdir: pathlib.Path | str, tensorboard: bool):
        self._workdir = pathlib.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._path = self._workdir / FILE
        self._use_tensorboard = tensorboard
        self._tensorboard: Any = None
        self._purge_step: int | None = None
        rewrite_json_lines(self._path, read_metrics(self._path))  # a torn last line would swallow the next one
        self._file = self._path.open('a', buffering=1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one update; numbers that are not finite become null."""
        values = {str(name): plain(value) for name, value in metrics.items() if name != STEP}
        self._file.write(json.dumps({STEP: int(step), **values}) + '\n')
        if self._use_tensorboard:
            self._write_tensorboard(step, values)

    def truncate(self, step: int) -> None:
        """Forget every update after `step`: a resumed run will make them again."""
        self._file.close()
        lines = read_metrics(self._path)
        for number, line in enumerate(lines, start=1):
            if not isinstance(line.get(STEP), int):
                raise files.FileError(f'{self._path}: line {number} has no whole number {STEP!r}; restore or remove it')
        rewrite_json_lines(self._path, [line for line in lines if line[STEP] <= step])
        self._file = self._path.open('a', buffering=1)
        self._close_tensorboard()
        self._purge_step = step + 1

    def close(self) -> None:
        self._file.close()
        self._close_tensorboard()

    def _write_tensorboard(self, step: int, values: Mapping[str, Any]) -> None:
        if self._tensorboard is None:
            import tensorboardX  # slow

            directory = str(self._workdir / DIRECTORY)
            suffix = f'.from_{self._purge_step or 0}'  # two files of one second must not share a name
            self._tensorboard = tensorboardX.SummaryWriter(
                directory, purge_step=self._purge_step, filename_suffix=suffix
            )
        for name, value in values.items():
            if isinstance(value, list):
                _write_histogram(self._tensorboard, name, value, step)
            elif isinstance(value, (int, float)):
                self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def _close_tensorboard(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


def read_metrics(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl as dicts; a torn last line is left out, no file is an empty list.

    Raises FileError for a line that is no JSON object, holds what is no metric, or is not of a later update than the
    line before.
    """
    path = pathlib.Path(path)
    lines = read_json_lines(path)
    last = 0
    for number, line in enumerate(lines, start=1):
        require_fields(path, number, line, {STEP: int} | {name: _kind(name) for name in line.keys() - {STEP}})
        if line[STEP] <= last:
            raise files.FileError(
                f'{path}: line {number} is of update {line[STEP]}, after one of update {last}; remove it'
            )
        last = line[STEP]
    return lines


def _kind(name: str) -> type | tuple[type, ...]:
    if name == TOKEN_AGE_HISTOGRAM:
        return list
    return _NUMBER if name in METRICS else (*_NUMBER, list)


def _write_histogram(tensorboard: Any, name: str, counts: list[float], step: int) -> None:
    """Counts by age 0, 1, 2, ... as a histogram with a bucket around every whole number."""
    if not counts or not sum(counts):
        return
    ages = range(len(counts))
    tensorboard.add_histogram_raw(
        name, min=0, max=len(counts) - 1, num=sum(counts), global_step=step,
        sum=sum(age * count for age, count in zip(ages, counts, strict=True)),
        sum_squares=sum(age * age * count for age, count in zip(ages, counts, strict=True)),
        bucket_limits=[age + 0.5 for age in ages], bucket_counts=counts,
    )  # fmt: skip
