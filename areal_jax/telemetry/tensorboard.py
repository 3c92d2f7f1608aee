"""Writes TensorBoard's event files in the thread of the caller.

The writers of TensorBoard packages use a queue and a thread, which block when the disk is full.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import TYPE_CHECKING

from areal_jax.telemetry.metrics import Line, Value

if TYPE_CHECKING:
    from tensorboardX.event_file_writer import EventsWriter


class TensorBoardWriter:
    """One event file, made at the first value.

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
        """Numbers of one update; lists of counts by age 0, 1, ... as histograms. Raises OSError that names the file."""
        try:
            for name, value in values.items():
                if (summary := self._summarize(name, value)) is not None:
                    self._writer.write_event(self._events.Event(summary=summary, step=step, wall_time=time.time()))
            self._writer.flush()
        except OSError as error:
            raise self._named(error) from None

    def close(self) -> None:
        """Raises OSError where the rest cannot be written; the file is closed then as well."""
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
