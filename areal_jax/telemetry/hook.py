"""Hands every row of metrics to a function of the user's own, in a thread of its own.

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

MOST_WAITING = 1000  # rows; one that comes then is left out
FLUSH_S = 20.0  # the end of the run waits so long for all that is left, and no longer: the receiver may hang


class RowFacts(TypedDict):
    """What became of the rows of one attempt; for the report."""

    calls: int
    failed: int  # rows that the receiver did not take
    left_out: int  # rows that were not handed over: too many waited, or the run ended
    first_error: str


class RowThread(abc.ABC):
    """Hands over one row after another; nothing of the run waits for it before the run ends.

    A failure is warned of once and counted.

    Args:
      setting: what the receiver is, for errors: 'telemetry.hook=mine.py:log'.
      workdir: of the run; metrics.jsonl there has every row.
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
        """Starts the thread with rows that an earlier attempt wrote; those that it handed over are passed over."""
        self._unsent = written
        self._thread.start()

    def put(self, step: int, metrics: Line) -> None:
        """Hands over a row; returns at once."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._left_out += 1
        else:
            self._waiting.put((step, metrics))

    def drain(self) -> None:
        """Waits for the rows that wait, so that `facts` counts them; drain and close take FLUSH_S together."""
        if self._thread.is_alive():
            reached, began = threading.Event(), time.monotonic()
            self._waiting.put(reached)
            reached.wait(self._patience_s)
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - began))

    def close(self) -> None:
        """Waits for the rows that wait and says how many were left out. Nothing the second time."""
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
        """One row, in the thread; what the receiver raises is passed to `_note_failure`."""

    def _begin(self) -> None:  # noqa: B027
        """In the thread, before the first row."""

    def _end(self) -> None:  # noqa: B027
        """In the thread, after the last row."""

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
        """Says the first failure."""
        if self._first_error:
            return
        self._first_error = sentence
        print(f'warning: {sentence} (the run goes on; further failures are counted)', file=sys.stderr, flush=True)

    def _count_waiting(self) -> int:
        """Rows that the thread will not get to; empties the queue."""
        rows = 0
        while not self._waiting.empty():
            rows += isinstance(self._waiting.get(), tuple)
        self._waiting.put(None)  # a call that returns later ends the thread
        return rows


def warn_of_rows(field: str, facts: Mapping[str, object]) -> str:
    """The sentence of a report on rows that did not arrive, '' where all did; `facts`: RowFacts, or empty."""
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
    """What an earlier attempt noted in `path` of this receiver; empty where it noted none, or another receiver.

    Raises FileError, which ends with `fix`, for a file that is not whole.
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

    A call that raises is warned of once and counted, and the rows after it are handed over all the same: a tracker may
    be out of reach for a while. A step is handed over at most once in a workdir: a resumed run that makes an update
    again does not repeat its row. What an earlier attempt wrote and did not hand over comes first, so that a hook set
    at a resume gets all rows; another function begins at step 1.
    """

    def __init__(self, function: Function, spec: str, workdir: pathlib.Path):
        """`spec` is the text that names the function, for errors."""
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
        except OSError as error:  # the run itself says that its disk is full
            self._note_failure(str(error))
