"""The runs that everything here happens to: small, with two checkpoints kept, one every third update."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from tests.chaos import logs
from tests.chaos.outcomes import Outcome
from tests.chaos.processes import RunningCommand, python

STEPS, EVERY = 30, 3
_QUICK = ('telemetry.plots=False', 'telemetry.tensorboard=False', 'checkpoint.keep=2')


@dataclasses.dataclass(frozen=True)
class Variant:
    """A config that is run; `exact`: a resumed run has the same weights as one that was never stopped."""

    name: str
    overrides: tuple[str, ...] = ()
    config: str = 'configs/tiny_cpu.py'
    steps: int = STEPS
    groups_per_update: int = 8
    exact: bool = False
    evaluation: tuple[str, ...] = ('evaluation.problems=2', 'evaluation.samples=2')  # of the asynchronous loop

    @property
    def is_supervised(self) -> bool:
        return 'sft' in self.config

    def arguments(self, workdir: pathlib.Path, *more: str, resume: bool = False, cache: pathlib.Path) -> list[str]:
        """Of main_train."""
        quick = _QUICK if not self.is_supervised else _QUICK[1:]
        fields = [f'run.steps={self.steps}', f'checkpoint.every={EVERY}', f'run.compilation_cache={cache}', *quick]
        if not self.is_supervised:
            fields += self.evaluation
        flags = [f'--config.{field}' for field in (*fields, *self.overrides, *more)]
        return [f'--config={self.config}', f'--workdir={workdir}', *flags, *(['--resume'] if resume else [])]


PROCESS_VERIFIER = Variant('verifier in a process', ('task.verifier=process',))
VIRTUAL = Variant('virtual clock', ('run.clock=virtual',), exact=True)
LOCK_STEP = Variant('lock-step', ('staleness.schedule=fixed(2)', 'task.verifier=process'))
VIRTUAL_LOCK_STEP = Variant(
    'lock-step, virtual clock', ('staleness.schedule=fixed(2)', 'run.clock=virtual'), exact=True
)
SUPERVISED = Variant('supervised', (), 'configs/sft_tiny.py', groups_per_update=32, exact=True)


class Ground:
    """Where the cases run: directories, the cache of compiled programs, weights to compare with."""

    def __init__(self, directory: pathlib.Path, seed: int):
        self.directory, self.seed = directory, seed
        self.cache = directory / 'compilation_cache'
        self.lifetime_s = 9.0  # of one whole run on this machine; measured by the first
        self.until = float('inf')  # time.monotonic() at which the share of the kind that runs is used up
        self.lock = threading.RLock()  # of what cases on several threads share: made once, by the first
        self._references: dict[str, str | None] = {}
        self._numbers = itertools.count(1)

    def fresh(self, name: str) -> pathlib.Path:
        """A new directory for a case; its run's workdir is `/run` below it."""
        directory = (
            self.directory / f'{next(self._numbers):04d}_{"".join(c if c.isalnum() else "_" for c in name)[:60]}'
        )
        directory.mkdir(parents=True)
        return directory

    def random(self, name: str) -> random.Random:
        """Draws of one case, the same for the same seed whatever ran before."""
        return random.Random(f'{self.seed} {name}')

    def start(self, variant: Variant, directory: pathlib.Path, *more: str, resume: bool = False) -> RunningCommand:
        """main_train with DIRECTORY/run as its workdir."""
        arguments = variant.arguments(directory / 'run', *more, resume=resume, cache=self.cache)
        return RunningCommand(python('-m', 'areal_jax.main_train', *arguments), directory)

    def check_finished(self, variant: Variant, workdir: pathlib.Path, *more: str) -> list[str]:
        """Violations in a run that has finished, the weights of an uninterrupted run included where they are exact."""
        has_events = not variant.is_supervised
        wrong = logs.check_finished(workdir, variant.steps, variant.groups_per_update, has_events=has_events)
        if variant.exact and not wrong:
            expected, found = self._reference(variant, *more), logs.weights_digest(workdir)
            if expected is None:
                wrong.append('the uninterrupted run to compare with did not finish')
            elif found != expected:
                wrong.append(f'weights {str(found)[:16]}, those of an uninterrupted run are {expected[:16]}')
        return wrong

    def _reference(self, variant: Variant, *more: str) -> str | None:
        key = f'{variant.name} {variant.steps} {more}'
        with self.lock:
            if key not in self._references:
                directory = self.fresh(f'reference {variant.name}')
                with self.start(variant, directory, *more) as run:
                    ending = run.wait()
                self._references[key] = logs.weights_digest(directory / 'run') if ending.exit_code == 0 else None
        return self._references[key]


class Case(Protocol):
    """Something that happens to a run. Each outcome is one thing that was tried."""

    @property
    def name(self) -> str: ...

    def run(self, ground: Ground) -> Iterator[Outcome]: ...


def seconds_since(began: float) -> float:
    return round(time.monotonic() - began, 2)
