"""Hands every row of metrics to a function of the user's own, in a thread of its own. Used by app/run.py.

    def function(row: Mapping[str, float], step: int, workdir: pathlib.Path) -> None

`row` has the metrics of one update that are finite numbers, by name; WORKDIR/config.json holds the config.
"""

from __future__ import annotations

import math
import pathlib
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from areal_jax import files
from areal_jax.errors import UserError
from areal_jax.plugins import Function, raising_user_error
from areal_jax.telemetry.names import STEP
from areal_jax.telemetry.values import Line

FIELD = 'telemetry.hook'
FILE = 'hook.json'  # in the workdir: the last step that the function was given
MOST_WAITING = 1000  # rows; one that comes then is left out
FLUSH_S = 20.0  # the end of the run waits so long for the rows that wait, and no longer: the function may hang


class HookFacts(TypedDict):
    """What became of the rows of one attempt; for the report."""

    calls: int
    failed: int  # calls that raised
    left_out: int  # rows that were not handed over: too many waited, or the run ended
    first_error: str


class MetricsHook:
    """Calls the function with one row after another; nothing of the run waits for it before the run ends.

    A call that raises is warned of once and counted, and the rows after it are handed over all the same: a tracker may
    be out of reach for a while. A step is handed over at most once in a workdir: a resumed run that makes an update
    again does not repeat its row. What an earlier attempt wrote and did not hand over comes first, so that a hook set
    at a resume gets all rows; another function begins at step 1.
    """

    def __init__(self, function: Function, spec: str, workdir: pathlib.Path):
        """`spec` is the text that names the function, for errors."""
        self._function, self._spec, self._workdir = function, spec, workdir
        self._last_step = _read_last_step(workdir / FILE, spec)
        self._waiting: queue.SimpleQueue[tuple[int, Line] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=FIELD, daemon=True)
        self._unsent: Sequence[Line] = ()
        self._closed = False
        self._calls = self._failed = self._left_out = 0
        self._first_error = ''

    def start(self, written: Sequence[Line]) -> None:
        """Starts the thread with those rows of metrics.jsonl that the function was not given."""
        self._unsent = written
        self._thread.start()

    def put(self, step: int, metrics: Line) -> None:
        """Hands over a row; returns at once."""
        if self._waiting.qsize() >= MOST_WAITING:
            self._left_out += 1
        else:
            self._waiting.put((step, metrics))

    def close(self) -> None:
        """Waits for the rows that wait, up to FLUSH_S; says how many were left out. Nothing the second time."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(FLUSH_S)
        if left := self._count_waiting():
            self._left_out += left
            print(
                f'warning: {FIELD}={self._spec} left out {left} rows: it took more than {FLUSH_S:.0f} s for them '
                f'at the end of the run; they are in {self._workdir}/metrics.jsonl',
                file=sys.stderr,
                flush=True,
            )

    def facts(self) -> HookFacts:
        return {
            'calls': self._calls, 'failed': self._failed, 'left_out': self._left_out, 'first_error': self._first_error,
        }  # fmt: skip

    def _work(self) -> None:
        for line in self._unsent:
            self._hand_over(cast(int, line[STEP]), line)
        self._unsent = ()
        while (row := self._waiting.get()) is not None:
            self._hand_over(*row)

    def _hand_over(self, step: int, metrics: Line) -> None:
        if step <= self._last_step:
            return
        try:
            with raising_user_error(self._spec, FIELD):
                self._function(_finite(metrics), step, self._workdir)
        except UserError as error:
            self._note_failure(str(error))
        self._calls, self._last_step = self._calls + 1, step
        try:
            files.write_json(self._workdir / FILE, {'hook': self._spec, 'last_step': step})
        except OSError as error:  # the run itself says that its disk is full
            self._note_failure(str(error))

    def _note_failure(self, sentence: str) -> None:
        self._failed += 1
        if self._failed > 1:
            return
        self._first_error = sentence
        print(f'warning: {sentence} (the run goes on; further failures are counted)', file=sys.stderr, flush=True)

    def _count_waiting(self) -> int:
        """Rows that the thread will not get to; empties the queue."""
        rows = 0
        while not self._waiting.empty():
            rows += self._waiting.get() is not None
        self._waiting.put(None)  # a call that returns later ends the thread
        return rows


def warn_of_hook(facts: Mapping[str, object]) -> str:
    """The sentence of a report on rows that did not arrive, '' where all did; `facts`: HookFacts, or empty."""
    failed, left_out = facts.get('failed', 0), facts.get('left_out', 0)
    if not failed and not left_out:
        return ''
    why = f' (the first: {facts["first_error"]})' if failed else ''
    return (
        f'{FIELD} failed for {failed} of {facts["calls"]} rows{why}, and {left_out} more were left out; metrics.jsonl '
        'has them all.'
    )


def _finite(metrics: Line) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and name != STEP}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _read_last_step(path: pathlib.Path, spec: str) -> int:
    """The last step that this function was given; 0 for none."""
    if not path.exists():
        return 0
    fix = 'remove it: the hook then gets all rows again'
    found = files.read_json(path, fix)
    if not isinstance(found.get('last_step'), int):
        raise files.FileError(f'{path} holds last_step={found.get("last_step")!r}, where a step is expected; {fix}')
    return found['last_step'] if found.get('hook') == spec else 0
