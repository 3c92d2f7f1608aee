"""One run under launch.local, struck as planned and watched to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from checks.chaos_roles.plan import Strike, in_phase
from checks.chaos_roles.recovery import Baseline, find_return
from checks.chaos_roles.state import Mark, View
from checks.processes import Ending, RunningCommand, carries, find_marked, python

STEPS, EVERY, GROUPS = 12, 3, 8  # updates, updates between checkpoints, groups of an update
COMMAND_DEADLINE_S = 120.0
IN_ROLES, ALONE = 'hosts=2 x data=8', 'data=8'
_DEVICES = 8  # of a learner in one process
_RUN_S = 480.0  # a run that takes longer hangs
_LOOK_S, _CLOSE_LOOK_S = 0.02, 0.0005  # between two looks: while a phase of seconds, of milliseconds is waited for
_SHORT = ('staging', 'swap', 'sending')
_END_S = 60.0  # for the launcher to end after a kill
_SETTLE_S = 0.2  # for the log to say that a phase was over when the process was stopped
KEEPER = b'launch.keeper'  # its command line has that of the role
_FIELDS = {
    'rollout.server': 'own', 'publication.channel': 'files', 'cluster.engines': '2 x tensor=1',
    'learner.rows_per_microbatch': 8, 'rollout.prefill_buckets': (256,), 'evaluation.problems': 2,
    'evaluation.samples': 2, 'checkpoint.keep': 2, 'telemetry.tensorboard': False, 'telemetry.plots': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Record:
    """A run that has ended, or was cut off because the minutes were over."""

    workdir: pathlib.Path
    strikes: Sequence[Strike]  # those of the plan that were made, in this order
    missed: Sequence[Strike]  # whose phase was not met
    marks: Sequence[Mark]
    ending: Ending
    orphans: Sequence[str]
    is_cut: bool = False


def command_of(workdir: pathlib.Path, cache: pathlib.Path, learner: str = IN_ROLES, **fields: object) -> list[str]:
    """launch.local with the config of all runs here; `fields` with __ in the place of dots."""
    chosen = {**_FIELDS, 'cluster.learner': learner, 'run.steps': STEPS, 'checkpoint.every': EVERY}
    if 'hosts=' in learner:
        chosen['distributed.command_deadline_s'] = COMMAND_DEADLINE_S
    chosen |= {'run.compilation_cache': cache, **{name.replace('__', '.'): value for name, value in fields.items()}}
    overrides = [f'--config.{name}={value}' for name, value in chosen.items()]
    return python('-m', 'launch.local', '--config=configs/tiny_cpu.py', f'--workdir={workdir}', *overrides)


class WatchedRun:
    """A run under way; a context manager, at whose end no process of it is left.

    Args:
      directory: of the outputs of the launcher; the workdir is DIRECTORY/run.
      until_s: time.monotonic() at which it is cut off.
      devices: of each process of the learner.
      hangs_s: seconds of a run that hangs.
      environment: added to the environment of its processes.
    """

    def __init__(
        self,
        command: Callable[[pathlib.Path], list[str]],
        directory: pathlib.Path,
        until_s: float,
        *,
        devices: int = _DEVICES,
        hangs_s: float = _RUN_S,
        environment: Mapping[str, str] | None = None,
    ):
        self.workdir = directory / 'run'
        self.workdir.mkdir(parents=True)
        self.view = View(self.workdir)
        began_s = time.monotonic()
        self._until_s, self._hangs_s = until_s, began_s + hangs_s
        flags = f'--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}'
        given = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags, **(environment or {})}
        self._pids: dict[tuple[str, int], int] = {}  # by process and number of its start
        self._command = RunningCommand(command(self.workdir), directory, given)

    def __enter__(self) -> WatchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._command.__exit__()

    def carry_out(
        self, strikes: Sequence[Strike], steps: int, baseline: Baseline | None = None, *, in_order: bool = False
    ) -> Record:
        """Makes the strikes as their phases come, each when the run has recovered from the one before, to the end.

        Args:
          baseline: of an undisturbed run; needed for strikes.
          in_order: of `strikes`, else the one whose phase comes first is the next.
        """
        made, left = [], list(strikes)
        while left and (struck := self._strike_next(left[:1] if in_order else left, steps, baseline)) is not None:
            strike, pid = struck
            made.append(strike)
            left.remove(strike)
            self._await_return(strike, pid, steps)
        how = self._watch(lambda: False)
        if how == 'cut':
            self._command.send(signal.SIGKILL)
        ending = self._command.wait(_END_S if how != 'hangs' else 0.0)
        self.view.look()
        self.view.mark('end')
        orphans = [] if how == 'cut' else self._command.orphans()
        return Record(self.workdir, made, left, tuple(self.view.marks), ending, orphans, how == 'cut')

    def _watch(self, happened: Callable[[], bool], strikes: Sequence[Strike] = ()) -> str:
        """Looks until it has happened; 'happened', 'ended', 'cut' or 'hangs'. Finds the processes of the strikes."""
        look_s = _CLOSE_LOOK_S if any(strike.cell.phase in _SHORT for strike in strikes) else _LOOK_S
        due_s = 0.0
        while self._command.is_alive():
            now = time.monotonic()
            if now >= due_s:
                due_s = now + _LOOK_S
                self.view.look()
                for strike in strikes:
                    self._find(strike.process)
            else:
                self.view.look_at_loop()
            if happened():
                return 'happened'
            if now >= self._until_s:
                return 'cut'
            if now >= self._hangs_s:
                return 'hangs'
            time.sleep(look_s)
        return 'ended'

    # One strike.

    def _strike_next(self, left: Sequence[Strike], steps: int, baseline: Baseline | None) -> tuple[Strike, int] | None:
        """Makes the strike whose phase comes first, and says which process it met; None where the run ended before."""
        assert baseline is not None
        holds = lambda strike: self._start_of(strike.process) in self._pids and in_phase(strike, self.view.state, steps)
        while self._watch(lambda: any(map(holds, left)), left) == 'happened':
            strike = next(strike for strike in left if holds(strike))
            still = functools.partial(holds, strike)
            self._delay(strike.fraction * baseline.length_s(strike.cell.phase), still)
            pid = self._pids.get(self._start_of(strike.process))
            if pid is not None and self._stop_within(pid, strike, still):
                self.view.mark('struck', strike.process)
                if strike.cell.signal == signal.SIGKILL:
                    os.kill(pid, signal.SIGKILL)
                return strike, pid
        return None

    def _delay(self, seconds: float, holds: Callable[[], bool]) -> None:
        """Shorter where the phase is over before."""
        due_s = time.monotonic() + seconds
        if seconds:
            self._watch(lambda: time.monotonic() >= due_s or not holds())

    def _stop_within(self, pid: int, strike: Strike, holds: Callable[[], bool]) -> bool:
        """Stops the process, and lets it go on where the phase turns out to have been over by then."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            is_seen_late = strike.cell.phase == 'sending' or (
                strike.cell.phase in _SHORT and strike.cell.role == 'engine'
            )
            end_s = time.monotonic() + (_SETTLE_S if is_seen_late else 0)
            while True:
                self.view.look()
                if not holds():
                    os.kill(pid, signal.SIGCONT)
                    return False
                if time.monotonic() >= end_s:
                    return True
                time.sleep(_CLOSE_LOOK_S)
        return False

    def _start_of(self, process: str) -> tuple[str, int]:
        return process, self.view.state.starts.get(process, 0)

    def _find(self, process: str) -> None:
        """Notes the process that plays a role now, not its keeper."""
        start = self._start_of(process)
        if start in self._pids and carries(self._pids[start], self._command.mark):
            return
        self._pids.pop(start, None)
        role, index = process.split('-')
        words = {b'areal_jax.main_role', f'--role={role}'.encode(), f'--index={index}'.encode()}
        if start[1]:
            for pid in find_marked(self._command.mark, words, without={KEEPER}):
                self._pids[start] = pid

    def _await_return(self, strike: Strike, pid: int, steps: int) -> None:
        if self._watch(lambda: not carries(pid, self._command.mark)) == 'happened':
            self.view.mark('gone', strike.process)
            self._watch(lambda: find_return(strike, *split(self.view.marks), steps) is not None)


def split(marks: Sequence[Mark]) -> tuple[Sequence[Mark], Sequence[Mark]]:
    """Before the last strike, and from it on."""
    last = max(n for n, mark in enumerate(marks) if mark.what == 'struck')
    return marks[:last], marks[last:]
