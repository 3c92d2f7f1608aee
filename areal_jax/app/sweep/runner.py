"""Runs arms as processes, at most `jobs` at a time, until all have ended or the sweep is told to stop."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from areal_jax import files
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.sweep.arms import ArmState
from areal_jax.app.workdir.run_list import ENDED, LOG, STARTED, describe_code
from areal_jax.telemetry.progress import Bar, format_duration

_LOOK_S = 0.1  # between two polls of the processes
_SHOW_S = 2.0  # between two updates of the bar, which read files of the arms
_MOST_STARTS = 3  # of an arm that a signal ends, in all
_KILL_S = 10.0


class Job(Protocol):
    """The work of a process: an arm, or several."""

    @property
    def name(self) -> str: ...

    @property
    def workdir(self) -> pathlib.Path: ...

    def command(self, resume: bool) -> list[str]: ...


AnyJob = TypeVar('AnyJob', bound=Job)


@dataclasses.dataclass
class RunningArm(Generic[AnyJob]):
    """The process of an arm; its output is appended to output.log in the arm's workdir."""

    arm: AnyJob
    process: subprocess.Popen[bytes]
    began_s: float

    @classmethod
    def start(cls, arm: AnyJob, resume: bool) -> RunningArm[AnyJob]:
        """Starts the arm; with `resume` it continues from its newest checkpoint."""
        arm.workdir.mkdir(parents=True, exist_ok=True)
        with (arm.workdir / LOG).open('ab') as log:
            log.write(f'{STARTED}{shlex.join(arm.command(resume))}\n'.encode())
            log.flush()
            process = subprocess.Popen(
                [sys.executable, '-m', 'areal_jax.app.sweep.arm_process', str(os.getpid()), *arm.command(resume)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the sweep
            )
        return cls(arm, process, time.monotonic())

    def note_end(self, code: int) -> None:
        """Writes to the log how the process ended."""
        writer = files.LineWriter(self.arm.workdir / LOG)
        writer.write(f'{ENDED}{describe_code(code)}')
        writer.close()


class Runner(Generic[AnyJob]):
    """Runs arms; an arm that fails does not keep the others from running.

    An arm that a signal ended, for lack of memory for example, is restarted, up to _MOST_STARTS starts in all.

    Args:
      jobs: the number of arms that run at a time.
      read_state: returns the progress of an arm, from its files.
      measure: returns the share of an arm that is done, for the bar of a terminal.
    """

    def __init__(
        self,
        arms: Sequence[AnyJob],
        jobs: int,
        read_state: Callable[[AnyJob], ArmState],
        measure: Callable[[AnyJob], float] = lambda arm: 0.0,
    ):
        self._waiting = collections.deque(arms)
        self._starts = collections.Counter[str]()
        self._count, self._jobs = len(arms), jobs
        self._running: list[RunningArm[AnyJob]] = []
        self._read_state, self._measure = read_state, measure
        self._bar, self._shown_s = Bar(), 0.0
        self._stops: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
        self.is_stopping = False

    def run(self, interrupts: Interrupts) -> None:
        """Returns when every arm has ended; a stop signal is passed on to the arms, and no further arm is started."""
        with interrupts.deferred(self._stops.put, 'the arms finish the update under way, then save'):
            try:
                self._bar.begin(f'running {self._count} arms')
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._jobs:
                        self._start(self._waiting.popleft())
                    self._heed_stop()
                    self._look()
                    self._show()
            finally:
                self._bar.end()
                self._kill()

    def _start(self, arm: AnyJob) -> None:
        resume = self._read_state(arm).holds_updates
        self._starts[arm.name] += 1
        self._running.append(RunningArm.start(arm, resume))
        _say(f'[{len(self._starts)}/{self._count}] {arm.name} {"goes on" if resume else "starts"}')

    def _heed_stop(self) -> None:
        try:
            number = self._stops.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        self.is_stopping = True
        self._waiting.clear()
        for running in self._running:
            running.process.send_signal(number)

    def _look(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            running.note_end(code)
            arm, took = running.arm, format_duration(time.monotonic() - running.began_s)
            state = self._read_state(arm)
            if state.is_finished:
                _say(f'{arm.name} finished in {took}{f", but {state.reason}" if state.reason else ""}')
                continue
            _say(f'{arm.name} ended after {took}, {state.reason}; see {arm.workdir / LOG}')
            if code < 0 and not self.is_stopping and self._starts[arm.name] < _MOST_STARTS:
                self._waiting.append(arm)

    def _show(self) -> None:
        """Counts the ended arms, and the shares of the running ones, on the bar."""
        if self._bar.is_possible and time.monotonic() - self._shown_s > _SHOW_S:
            self._shown_s = time.monotonic()
            ended = self._count - len(self._waiting) - len(self._running)
            self._bar.count(ended + sum(self._measure(one.arm) for one in self._running), self._count, 'arms')

    def _kill(self) -> None:
        """Ends the processes that still run if this process fails."""
        for running in self._running:
            running.process.kill()
        for running in self._running:
            running.process.wait(_KILL_S)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no arm
        print(sentence, flush=True)
