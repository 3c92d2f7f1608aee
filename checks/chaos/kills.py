"""kill -9 at random moments of a run, which goes on each time with --resume, until it has finished."""

from __future__ import annotations

import dataclasses
import pathlib
import random
import re
import signal
import time
from collections.abc import Callable, Iterator

from checks import logs
from checks.chaos.cases import (
    LOCK_STEP,
    PROCESS_VERIFIER,
    SUPERVISED,
    VIRTUAL,
    VIRTUAL_LOCK_STEP,
    Ground,
    Outcome,
    Variant,
    conclude,
)
from checks.processes import Ending, RunningCommand

KIND, CHAINS = 'kill', 'kill chain'
MINIMUM, MINIMUM_CHAINS = 100, 10  # kills, runs that were killed and then finished
_CHAINS = 1000  # more than fit into any number of minutes asked for: they fill what the other kinds leave
_PER_CHAIN = 10
_VARIANTS = (PROCESS_VERIFIER, VIRTUAL, LOCK_STEP, SUPERVISED, PROCESS_VERIFIER, VIRTUAL_LOCK_STEP)
_COMPILED, _UPDATE = re.compile(r'^compiled \d+', re.MULTILINE), re.compile(r'^step +\d+/', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: so long after something was seen; None = the start of the process."""

    name: str
    delay_s: float
    sight: Callable[[RunningCommand, pathlib.Path], bool] | None = None

    def come(self, run: RunningCommand, workdir: pathlib.Path) -> bool:
        """Waits for it; False when the run ends before."""
        if self.sight is not None and not run.wait_for(lambda: self.sight(run, workdir)):  # type: ignore[misc]
            return False
        return run.sleep(self.delay_s) if self.delay_s else run.is_alive()


def is_saving(run: RunningCommand, workdir: pathlib.Path) -> bool:
    return any((workdir / logs.CHECKPOINTS).glob('.step_*.partial'))


def is_updating(run: RunningCommand, workdir: pathlib.Path) -> bool:
    return bool(_UPDATE.search(run.stdout()))


def is_reporting(run: RunningCommand, workdir: pathlib.Path) -> bool:
    """facts.json, or without one the timeline or the export, was written by this process."""
    return any(_written_by(run, workdir / name) for name in ('facts.json', 'timeline.json', 'export', 'report.json'))


def draw_moment(rng: random.Random, lifetime_s: float) -> Moment:
    """Over the whole lifetime of a run, saves and the report more often than their share of it."""
    kind = rng.choices(('any', 'save', 'loop', 'report'), (5, 2, 2, 1))[0]
    if kind == 'save':
        return Moment('in a save', rng.uniform(0.0, 0.05), is_saving)
    if kind == 'loop':
        return Moment('in the loop', rng.uniform(0.0, 1.5), is_updating)
    if kind == 'report':
        return Moment('in the report', rng.uniform(0.0, 0.2), is_reporting)
    return Moment('at', rng.uniform(0.0, lifetime_s))


@dataclasses.dataclass(frozen=True)
class KillChain:
    """One run, killed up to ten times."""

    number: int

    @property
    def name(self) -> str:
        return f'chain {self.number}, {self.variant.name}'

    @property
    def variant(self) -> Variant:
        return _VARIANTS[self.number % len(_VARIANTS)]

    def run(self, ground: Ground) -> Iterator[Outcome]:
        """An outcome for every kill, and one for the run as it was at its end."""
        rng, directory = ground.random(self.name), ground.fresh(self.name)
        workdir, began = directory / 'run', time.monotonic()
        for kill in range(1, _PER_CHAIN + 1):
            if kill > 1 and time.monotonic() > ground.until:
                break
            outcome = self._kill(ground, directory, kill, draw_moment(rng, ground.lifetime_s))
            if outcome is None:
                break
            yield outcome
            if outcome.verdict == 'failed':  # nothing more can be learnt from this run
                return
        yield self._finish(ground, directory, workdir, began)

    def _kill(self, ground: Ground, directory: pathlib.Path, kill: int, moment: Moment) -> Outcome | None:
        """None when the run had finished before the moment came."""
        workdir, began = directory / 'run', time.monotonic()
        newest, kept = logs.newest_update(workdir), logs.logs_with_updates(workdir) if kill > 1 else []
        with ground.start(self.variant, directory, resume=kill > 1) as run:
            came = moment.come(run, workdir)
            run.send(signal.SIGKILL)
            ending = run.wait()
            wrong = run.orphans()
        if not came and ending.exit_code == 0 and not wrong:
            ground.lifetime_s = min(ground.lifetime_s, ending.seconds)  # moments after the end are wasted
            return None
        if ending.exit_code != -signal.SIGKILL:
            wrong += [f'it ended before the kill, a dead end: {violation}' for violation in ending.violations((0,))]
        if _COMPILED.search(ending.stdout):
            wrong += self._check_start(workdir, ending, newest, kept)
        after = logs.newest_update(workdir)
        if newest is not None and (after is None or after < newest):
            wrong.append(f'the newest checkpoint was of update {newest}, after the kill of {after}')
        name = f'{self.name}, kill {kill} {moment.name} {ending.seconds:.2f} s'
        return conclude(KIND, name, directory, began, ending, wrong)

    def _finish(self, ground: Ground, directory: pathlib.Path, workdir: pathlib.Path, began: float) -> Outcome:
        newest, kept = logs.newest_update(workdir), logs.logs_with_updates(workdir)
        ending, wrong = ground.finish(self.variant, directory, (0,), resume=True)
        if ending.exit_code == 0:
            wrong += self._check_start(workdir, ending, newest, kept)
            wrong += ground.check_finished(self.variant, workdir)
        return conclude(CHAINS, f'{self.name}, to the end', directory, began, ending, wrong)

    def _check_start(self, workdir: pathlib.Path, ending: Ending, newest: int | None, kept: list[str]) -> list[str]:
        """Where a resumed run went on, and whether one that had to start again kept its logs."""
        if newest == self.variant.steps:
            return []  # nothing was left to do: it need not say where it goes on
        return logs.check_resumed(ending.stdout, newest) + (logs.check_kept_logs(workdir, kept) if not newest else [])


def kill_chains() -> list[KillChain]:
    return [KillChain(number) for number in range(_CHAINS)]


def _written_by(run: RunningCommand, path: pathlib.Path) -> bool:
    try:
        return path.stat().st_mtime_ns > run.began_ns
    except FileNotFoundError:
        return False
