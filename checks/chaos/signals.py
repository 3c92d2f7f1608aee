"""SIGINT, SIGTERM and SIGHUP in every phase of a run, once and twice; the run then goes on with --resume to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping

from checks import logs
from checks.chaos.cases import LOCK_STEP, PROCESS_VERIFIER, SUPERVISED, Ground, Outcome, Variant, conclude
from checks.chaos.kills import is_reporting, is_saving, is_updating
from checks.processes import Ending, RunningCommand

KIND = 'signal'
STOPPED = 75
_QUIT_S = 10.0  # after a second signal
_STEPS = 12
_ATTEMPTS = 3  # to meet a short phase

Sight = Callable[[RunningCommand, pathlib.Path], bool]


def _is_importing(run: RunningCommand, workdir: pathlib.Path) -> bool:
    with contextlib.suppress(OSError):
        return 'jaxlib' in pathlib.Path(f'/proc/{run.pid}/maps').read_text()
    return False


def _is_building(run: RunningCommand, workdir: pathlib.Path) -> bool:
    return (workdir / 'config.json').exists()


def _is_compiling(run: RunningCommand, workdir: pathlib.Path) -> bool:
    """The build ends with the metrics, and the compilation with a line on stdout."""
    return (workdir / 'metrics.jsonl').exists() and 'compiled' not in run.stdout()


def _evaluates(times: int) -> Sight:
    def sight(run: RunningCommand, workdir: pathlib.Path) -> bool:
        with contextlib.suppress(OSError):
            starts = re.findall(r'"kind":"evaluate"[^\n]*"start"', (workdir / 'events.jsonl').read_text())
            return len(starts) >= times
        return False

    return sight


PHASES: Mapping[str, Sight] = {
    'start': lambda run, workdir: time.time_ns() - run.began_ns > 200e6,
    'import': _is_importing,
    'build': _is_building,
    'compilation': _is_compiling,
    'evaluation before': _evaluates(1),
    'loop': is_updating,
    'save': is_saving,
    'evaluation after': _evaluates(2),
    'report': is_reporting,
}
_LAST = ('evaluation after', 'report')  # the signal may come when all is done


@dataclasses.dataclass(frozen=True)
class SignalCase:
    """Signals, the first in a phase and the second 0.3 s later; then --resume."""

    variant: Variant
    phase: str
    signals: tuple[signal.Signals, ...]

    @property
    def name(self) -> str:
        names = ' and '.join(number.name for number in self.signals)
        return f'{self.variant.name}: {names} in {self.phase}'

    def run(self, ground: Ground) -> Iterator[Outcome]:
        began, more = time.monotonic(), self._more()
        for _ in range(_ATTEMPTS):
            directory = ground.fresh(self.name)
            with ground.start(self.variant, directory, *more) as run:
                met, ending, wrong = self._strike(run, directory / 'run')
            if met:
                break
        else:
            wrong = [f'the phase was not met in {_ATTEMPTS} runs; the last: {ending.violations((0,))}']
        if not wrong:
            newest, kept = logs.newest_update(directory / 'run'), logs.logs_with_updates(directory / 'run')
            resumed, again = ground.finish(self.variant, directory, (0,), *more, resume=True)
            wrong = [f'--resume: {violation}' for violation in again]
            if not wrong and newest != self.variant.steps:
                wrong = logs.check_resumed(resumed.stdout, newest)
                wrong += logs.check_kept_logs(directory / 'run', kept) if newest is None else []
            wrong = wrong or ground.check_finished(self.variant, directory / 'run', *more)
            ending = resumed if wrong else ending
        outcome = conclude(KIND, self.name, directory, began, ending, wrong)
        yield dataclasses.replace(outcome, trouble='') if self._may_die(ending) else outcome

    def _more(self) -> tuple[str, ...]:
        """Fields that make the phase long enough to be met."""
        if self.variant.is_supervised:
            return ()
        if 'evaluation' in self.phase:
            return ('evaluation.problems=4', 'evaluation.samples=200')
        return ('telemetry.plots=True',) if self.phase == 'report' else ()

    def _strike(self, run: RunningCommand, workdir: pathlib.Path) -> tuple[bool, Ending, list[str]]:
        """Whether the phase was met, how the run ended, and what was wrong with that."""
        if not run.wait_for(lambda: PHASES[self.phase](run, workdir)):
            return False, run.wait(), []
        for index, number in enumerate(self.signals):
            if index:
                run.sleep(0.3)
            # a terminal signals all processes of the foreground group, kill and schedulers one
            run.send(number, to_group=number != signal.SIGTERM)
        sent = time.monotonic()
        ending = run.wait()
        took, wrong = time.monotonic() - sent, run.orphans()
        if len(self.signals) > 1 and took > _QUIT_S:
            wrong.append(f'it took {took:.1f} s to quit after the second signal')
        if not self._may_die(ending):
            wrong += ending.violations((STOPPED, 0) if self.phase in _LAST else (STOPPED,))
        return True, ending, wrong

    def _may_die(self, ending: Ending) -> bool:
        """Before the first line of the program has run, the interpreter does what it does by default."""
        untouched = 'areal_jax' not in ending.stderr
        return self.phase == 'start' and ending.exit_code in [-number for number in self.signals] and untouched


def signal_cases() -> list[SignalCase]:
    """Each signal in each phase, and two signals where something is held up."""
    each = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    asynchronous = dataclasses.replace(PROCESS_VERIFIER, steps=_STEPS)
    supervised, lock_step = (dataclasses.replace(variant, steps=_STEPS) for variant in (SUPERVISED, LOCK_STEP))
    cases = [SignalCase(asynchronous, phase, (number,)) for phase in PHASES for number in each]
    cases += [SignalCase(supervised, phase, (number,)) for phase in ('build', 'loop', 'report') for number in each]
    cases += [SignalCase(lock_step, phase, (number,)) for phase in ('loop', 'save') for number in each]
    twice = ('import', 'compilation', 'evaluation before', 'loop', 'save', 'report')
    cases += [SignalCase(asynchronous, phase, (signal.SIGINT, signal.SIGINT)) for phase in twice]
    cases += [SignalCase(variant, 'loop', (signal.SIGINT, signal.SIGINT)) for variant in (supervised, lock_step)]
    cases += [SignalCase(asynchronous, phase, (signal.SIGTERM, signal.SIGINT)) for phase in ('loop', 'save')]
    return cases
