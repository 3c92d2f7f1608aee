"""What a case of chaos gets and gives: small runs, with two checkpoints kept, one every third update; outcomes."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from checks import logs
from checks.processes import Ending, RunningCommand, python

STEPS, EVERY = 30, 3
_QUICK = ('telemetry.plots=False', 'telemetry.tensorboard=False', 'checkpoint.keep=2')
TROUBLES = ('abort', 'hang', 'traceback')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One case: whether everything that was checked held."""

    kind: str  # 'kill', 'signal', 'disk', ...
    case: str
    seconds: float
    exit_code: int | None  # of the last process of the case; negative: ended by that signal; None: it did not end
    detail: str = ''  # what did not hold; '' = everything held
    trouble: Literal['', 'abort', 'hang', 'traceback'] = ''
    directory: str = ''  # what the case left, kept where it failed

    @property
    def verdict(self) -> Literal['held', 'failed']:
        return 'failed' if self.detail or self.trouble else 'held'


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a kind ran."""

    ran: int
    minimum: int  # what a complete run covers; 0 = the cases of this kind could not be loaded

    @property
    def complete(self) -> bool:
        return self.ran >= self.minimum > 0


class Case(Protocol):
    """Something that happens to a run. Each outcome is one thing that was tried."""

    @property
    def name(self) -> str: ...

    def run(self, ground: Ground) -> Iterator[Outcome]: ...


def seconds_since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def conclude(
    kind: str, case: str, directory: pathlib.Path, began: float, ending: Ending, wrong: Sequence[str]
) -> Outcome:
    """The outcome of a case that began then; `ending` is that of its last process."""
    return Outcome(kind, case, seconds_since(began), ending.exit_code, '; '.join(wrong), ending.trouble, str(directory))


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

    def finish(
        self, variant: Variant, directory: pathlib.Path, allowed: Sequence[int], *more: str, resume: bool = False
    ) -> tuple[Ending, list[str]]:
        """Runs main_train to its end: how it ended, and what was wrong with that."""
        with self.start(variant, directory, *more, resume=resume) as run:
            return run.finish(allowed)

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


def count(outcomes: Sequence[Outcome], kind: str) -> dict[str, int]:
    """held, failed, aborts, hangs, tracebacks of one kind."""
    of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
    verdicts = collections.Counter(outcome.verdict for outcome in of_kind)
    troubles: collections.Counter[str] = collections.Counter(outcome.trouble for outcome in of_kind)
    return {'held': verdicts['held'], 'failed': verdicts['failed']} | {f'{name}s': troubles[name] for name in TROUBLES}


def table(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage]) -> str:
    """Markdown, a line per kind."""
    lines = [
        '| kind | covered | held | failed | aborts | hangs | unexpected tracebacks |',
        '|---|---|---|---|---|---|---|',
    ]
    for kind, covered in coverage.items():
        numbers = ' | '.join(str(number) for number in count(outcomes, kind).values())
        lines.append(f'| {kind} | {covered.ran} of {covered.minimum} | {numbers} |')
    return '\n'.join(lines)


def all_held(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage]) -> bool:
    """Whether every check held and at least one case of each kind ran."""
    return all(outcome.verdict == 'held' for outcome in outcomes) and all(c.ran > 0 for c in coverage.values())


def record(outcomes: Sequence[Outcome], coverage: Mapping[str, Coverage], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What --json writes."""
    return {
        **facts,
        'passed': all_held(outcomes, coverage),
        'complete': all(covered.complete for covered in coverage.values()),
        'kinds': {
            kind: {'ran': covered.ran, 'minimum': covered.minimum, **count(outcomes, kind)}
            for kind, covered in coverage.items()
        },
        'outcomes': [dataclasses.asdict(outcome) | {'verdict': outcome.verdict} for outcome in outcomes],
    }
