"""Hands every row of metrics to a user's function, in a separate thread.

    def function(row: Mapping[str, float], step: int, workdir: pathlib.Path) -> None

`row` has the metrics of one update that are finite numbers, by name; WORKDIR/config.json holds the config.
"""

from __future__ import annotations

import abc
import math
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.plugins import Function, raising_user_error
from areal_jax.telemetry.metrics import Line
from areal_jax.telemetry.names import STEP

MOST_WAITING = 1000  # rows; further rows are left out
FLUSH_S = 20.0  # longest wait of the end of the run for the remaining rows: the receiver may hang


class RowFacts(TypedDict):
    """Counts of the rows of one attempt; for the report."""

    calls: int
    failed: int  # rows that the receiver did not take
    left_out: int  # rows that were not handed over: too many waited, or the run ended
    first_error: str


class RowThread(abc.ABC):
    """Hands over one row after another; the run waits for it only at its end.

    The first failure is printed as a warning; all are counted.

    Args:
      setting: the config field of the receiver, for errors: 'telemetry.hook=mine.py:log'.
      workdir: the run's; its metrics.jsonl has every row.
    """

    def __init__(self, setting: str, workdir: pathlib.Path):
        self._setting, self._workdir = setting, workdir
        self._waiting: queue.SimpleQueue[tuple[int, Line] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=setting, daemon=True)
        self._unsent: Sequence[Line] = ()
        self._closed = False
        self._patience_s = FLUSH_S
        self._calls = self._failed = self._left_out = 0
        self._first_error = ''

    def start(self, written: Sequence[Line]) -> None:
        """Starts the thread with the rows that earlier attempts wrote; rows handed over before are skipped."""
        self._unsent = written
        self._thread.start()

    def put(self, step: int, metrics: Line) -> None:
        """Hands over a row; returns at once."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._left_out += 1
        else:
            self._waiting.put((step, metrics))

    def drain(self) -> None:
        """Waits for the queued rows, so that `facts` counts them; drain and close take at most FLUSH_S together."""
        if self._thread.is_alive():
            reached, began = threading.Event(), time.monotonic()
            self._waiting.put(reached)
            reached.wait(self._patience_s)
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))

    def close(self) -> None:
        """Waits for the queued rows and warns of rows left out. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(self._patience_s)
        if left := self._count_waiting():
            self._left_out += left
            print(
                f'warning: {self._setting} left out {left} rows: it took more than {FLUSH_S:.0f} s for them '
                f'at the end of the run; they are in {self._workdir}/metrics.jsonl',
                file=sys.stderr,
                flush=True,
            )

    def facts(self) -> RowFacts:
        return {
            'calls': self._calls, 'failed': self._failed, 'left_out': self._left_out, 'first_error': self._first_error,
        }  # fmt: skip

    @abc.abstractmethod
    def _hand_over(self, step: int, metrics: Line) -> None:
        """Hands over one row, in the thread; passes the receiver's exceptions to `_note_failure`."""

    def _begin(self) -> None:  # noqa: B027
        """Called in the thread before the first row."""

    def _end(self) -> None:  # noqa: B027
        """Called in the thread after the last row."""

    def _work(self) -> None:
        self._begin()
        for line in self._unsent:
            self._hand_over(cast(int, line[STEP]), line)
        self._unsent = ()
        while (item := self._waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._hand_over(*item)
        self._end()

    def _note_failure(self, sentence: str) -> None:
        self._failed += 1
        self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        """Prints the first failure only."""
        if self._first_error:
            return
        self._first_error = sentence
        print(f'warning: {sentence} (the run goes on; further failures are counted)', file=sys.stderr, flush=True)

    def _count_waiting(self) -> int:
        """Counts the rows that the thread will not reach, and empties the queue."""
        rows = 0
        while not self._waiting.empty():
            rows += isinstance(self._waiting.get(), tuple)
        self._waiting.put(None)  # a call that returns later ends the thread
        return rows


def warn_of_rows(field: str, facts: Mapping[str, object]) -> str:
    """The sentence of a report on rows that did not arrive; '' if all did. `facts`: RowFacts, or empty."""
    failed, left_out = facts.get('failed', 0), facts.get('left_out', 0)
    if not failed and not left_out:
        return ''
    why = f' (the first: {facts["first_error"]})' if failed else ''
    return (
        f'{field} failed for {failed} of {facts["calls"]} rows{why}, and {left_out} more were left out; metrics.jsonl '
        'has them all.'
    )


def finite(metrics: Line) -> dict[str, float]:
    """The metrics that are finite numbers, without the step."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != STEP}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def read_progress(path: pathlib.Path, receiver: Mapping[str, object], fix: str) -> files.JsonObject:
    """Reads an earlier attempt's notes on this receiver from `path`; {} without notes, or for another receiver.

    Raises FileError, which ends with `fix`, for an incomplete file.
    """
    if not path.exists():
        return {}
    found = files.read_json(path, fix)
    if not isinstance(found.get('last_step'), int):
        raise files.FileError(f'{path} holds last_step={found.get("last_step")!r}, where a step is expected; {fix}')
    return found if all(found.get(name) == value for name, value in receiver.items()) else {}


FIELD = 'telemetry.hook'
FILE = 'hook.json'  # in the workdir: the last step that the function was given
_FIX = 'remove it: the hook then gets all rows again'


class MetricsHook(RowThread):
    """Calls the function with one row after another.

    A call that raises is counted, the first one with a warning, and later rows are still handed over: a tracker may be
    out of reach for a while. A step is handed over at most once in a workdir: a resumed run that repeats an update
    does not repeat its row. Rows that an earlier attempt wrote and did not hand over come first, so a hook set at a
    resume gets all rows; another function begins at step 1.
    """

    def __init__(self, function: Function, spec: str, workdir: pathlib.Path):
        """`spec` names the function in errors."""
        super().__init__(f'{FIELD}={spec}', workdir)
        self._function, self._spec = function, spec
        self._last_step = int(read_progress(workdir / FILE, {'hook': spec}, _FIX).get('last_step', 0))

    def _hand_over(self, step: int, metrics: Line) -> None:
        if step <= self._last_step:
            return
        try:
            with raising_user_error(self._spec, FIELD):
                self._function(finite(metrics), step, self._workdir)
        except UserError as error:
            self._note_failure(str(error))
        self._calls, self._last_step = self._calls + 1, step
        try:
            files.write_json(self._workdir / FILE, {'hook': self._spec, 'last_step': step})
        except OSError as error:  # the run itself reports a full disk
            self._note_failure(str(error))
