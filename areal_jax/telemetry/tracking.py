"""Feeds a tracker (trackers.py) with a run: config, rows, evaluations, end. Whatever it does, the run goes on.

Rows are sent in a thread, as in telemetry.hook. WORKDIR/tracker.json keeps the token by which a resumed run
finds itself in the tracker, and the last step sent.
"""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from areal_jax import files
from areal_jax.telemetry.hook import MOST_WAITING, RowFacts, RowThread, finite, read_progress
from areal_jax.telemetry.metrics import Line
from areal_jax.telemetry.trackers import TrackedRun, Tracker

FIELD = 'telemetry.tracker'
FILE = 'tracker.json'  # in the workdir
NOTHING_SENT = -1  # below the step of the evaluation before training, which is 0
_FIX = 'remove it: the run then begins anew in the tracker'
_MOST_ATTEMPTS = 3  # for a row, before it is given up: it may be the row that the tracker refuses


def read_token(workdir: pathlib.Path, kind: str, project: str) -> str:
    """The token of the run in this tracker and project, '' where it is not in it yet; raises FileError."""
    return str(read_progress(workdir / FILE, {'tracker': kind, 'project': project}, _FIX).get('token', ''))


class TrackerFeed(RowThread):
    """Sends one row after another, each once; first the rows of an earlier attempt that the tracker lacks.

    A row that the tracker does not take waits for the next one, so that a tracker out of reach for a while misses
    none. What it has not taken when the run ends is counted, and a resumed run sends it.
    """

    def __init__(self, tracker: Tracker, kind: str, run: TrackedRun):
        super().__init__(f'{FIELD}={kind}', run.workdir)
        self._tracker, self._kind, self._run = tracker, kind, run
        known = read_progress(run.workdir / FILE, self._receiver(), _FIX)
        self._last_step = int(known.get('last_step', NOTHING_SENT))
        self._begun = False
        self._pending: collections.deque[tuple[int, Line]] = collections.deque()
        self._attempts = 0  # for the first row that waits
        self._ending: tuple[str, int, Line, Mapping[str, float], Sequence[pathlib.Path]] | None = None

    def facts(self) -> RowFacts:
        return {**super().facts(), 'failed': self._failed + len(self._pending)}

    def stop(self) -> None:
        """Ends the run in the tracker as stopped: `--resume` goes on with it."""
        self._ending = ('stopped', 0, {}, {}, ())
        self.close()

    def finish(self, step: int, scores: Line, summary: Mapping[str, float], pages: Sequence[pathlib.Path]) -> None:
        """Ends the run in the tracker as finished.

        Args:
          step: the last update.
          scores: of the evaluation after training; may be empty.
          summary: the headline of the report.
          pages: the report itself; those that exist are sent.
        """
        self._ending = ('finished', step, scores, summary, [page for page in pages if page.exists()])
        self.close()

    def _begin(self) -> None:
        self._attempt(self._connect)

    def _hand_over(self, step: int, metrics: Line) -> None:
        if step <= self._last_step:
            return
        self._calls += 1
        self._pending.append((step, metrics))
        if len(self._pending) > MOST_WAITING:
            self._give_up()
        self._attempt(self._send)

    def _end(self) -> None:
        state, step, scores, summary, pages = self._ending or ('failed', 0, {}, {}, ())
        if self._pending:
            self._attempt(self._send)
        if not self._begun:
            return
        if scores:
            self._attempt(functools.partial(self._tracker.log, step, finite(scores)))
        self._attempt(functools.partial(self._tracker.end, state, summary, pages))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (Exception, SystemExit) as error:  # a tracker must not end a run
            first = next(iter(str(error).strip().splitlines()), '')
            self._warn(f'{self._setting}: {type(error).__name__}: {first}'.rstrip(': '))

    def _connect(self) -> None:
        self._note_progress()  # the token is on the disk before the tracker knows it
        beginning = self._tracker.begin(self._run)
        self._begun = True
        if beginning.last_step is not None:
            self._last_step = beginning.last_step
        print(f'{self._kind}: project {self._run.project}, {beginning.place}', flush=True)

    def _send(self) -> None:
        if not self._begun:
            self._connect()
        while self._pending:
            step, metrics = self._pending[0]
            if step > self._last_step:
                self._attempts += 1
                try:
                    self._tracker.log(step, finite(metrics))
                except BaseException:
                    if self._attempts >= _MOST_ATTEMPTS:
                        self._give_up()
                    raise
                self._last_step = step
            self._pending.popleft()
            self._attempts = 0
            self._note_progress()

    def _give_up(self) -> None:
        self._pending.popleft()
        self._failed, self._attempts = self._failed + 1, 0

    def _receiver(self) -> dict[str, object]:
        return {'tracker': self._kind, 'project': self._run.project}

    def _note_progress(self) -> None:
        noted = {**self._receiver(), 'token': self._run.token, 'last_step': self._last_step}
        files.write_json(self._workdir / FILE, noted)
