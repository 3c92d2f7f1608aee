"""The arms of each stage of a study, made from its plan; the rate of later stages comes from the sweep of the rate."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from absl import flags
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.command_line import CommandLine, CommandLineError, call_in_file, parse_train_command
from areal_jax.app.process.ending import Interrupts
from areal_jax.app.sweep.arms import (
    TRAINER,
    Arm,
    ArmState,
    Runner,
    make_arms,
    note_sweep,
    read_state,
    require_same_sweep,
)
from areal_jax.app.sweep.endpoints import read_record
from areal_jax.app.workdir.run_list import LOG, read_end
from areal_jax.errors import ExitCode, UserError
from areal_jax.report.report import FILE as REPORT
from areal_jax.studies.arms import arm as arms_of
from areal_jax.studies.plan import Overrides, Plan
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import read_metrics

LIST = 'arms.json'  # in the directory of a job: {'arms': {name: arguments of main_train}}
SCORE = 'score.json'  # in the workdir of a run
PROGRAMS = 'programs'  # directory of the jobs, inside the study's


@dataclasses.dataclass(frozen=True)
class Program:
    """Arms that one process trains together."""

    name: str
    workdir: pathlib.Path  # of the job; each arm has a separate one
    arms: tuple[Arm, ...]
    module = 'areal_jax.studies.train_program'

    def command(self, resume: bool) -> list[str]:
        """Returns the command that runs the program; an interrupted program starts from the beginning."""
        return [sys.executable, '-m', self.module, str(self.workdir / LIST)]

    def write_list(self) -> None:
        """Writes the list of arms that the process reads."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        files.write_json(self.workdir / LIST, {'arms': {arm.name: list(arm.arguments) for arm in self.arms}})

    def read_state(self) -> ArmState:
        """Reads the state of all its arms: finished once all are."""
        states = [read_state(arm) for arm in self.arms]
        updates, finished = min(state.updates for state in states), all(state.is_finished for state in states)
        reason = '' if finished else read_end(self.workdir / LOG)
        return ArmState(updates, finished, False, finished, reason)


@dataclasses.dataclass(frozen=True)
class Scoring(Program):
    """Scores the final weights of single runs that have finished."""

    module = 'areal_jax.studies.score_runs'

    def read_state(self) -> ArmState:
        finished = all((arm.workdir / SCORE).exists() for arm in self.arms)
        return ArmState(0, finished, False, finished, '' if finished else read_end(self.workdir / LOG))


def make_programs(stage: str, arms: Sequence[Arm], workdir: pathlib.Path) -> list[Program]:
    """Makes programs whose arms all have one lag, so that no program generates batches that it does not train.

    Raises ConfigError, naming arm and field, for an arm that no program can train.
    """
    by_lag: dict[str, list[Arm]] = {}
    for arm in arms:
        by_lag.setdefault(arm.config.staleness.schedule, []).append(arm)
    programs = []
    for schedule, members in by_lag.items():
        named = {arm.name: arm for arm in members}
        for number, part in enumerate(arms_of.partition([arms_of.Arm(arm.name, arm.config) for arm in members])):
            name = f'{stage}_lag{schedule.removeprefix("fixed(").replace("(", "").removesuffix(")")}_{number}'
            programs.append(Program(name, workdir / PROGRAMS / name, tuple(named[arm.name] for arm in part)))
    return programs


def read_list(path: pathlib.Path) -> dict[str, tuple[pathlib.Path, config_dict.ConfigDict]]:
    """Reads (workdir, config) of each arm of a job, by name; raises UserError for a damaged or invalid list."""
    found = {}
    for name, arguments in files.read_json(path, 'start the study again, which writes it').get('arms', {}).items():
        values = flags.FlagValues()
        flags.DEFINE_string('workdir', None, '', flag_values=values)
        config = parse_train_command([TRAINER, *arguments], values).config
        found[name] = pathlib.Path(values.workdir), config
    return found


CONTROLS, KNEE, PILOT, LOCK_STEP, NATURAL = STAGES = ('controls', 'knee', 'pilot', 'lock_step', 'natural')
KNOWN, ZERO_RATE, SAME_A, SAME_B, SHUFFLED = 'known', 'zero_rate', 'same_a', 'same_b', 'shuffled'
RATE = 'optimizer.learning_rate'
Rates = Mapping[str, float]  # learning rate of each method


@dataclasses.dataclass(frozen=True)
class Factors:
    """The values that distinguish an arm of a study from the others."""

    stage: str
    method: str
    seed: int
    lag: int | None = None  # of a lock-step arm
    eta: float | None = None  # of a natural one
    rate: float | None = None  # None = as in the config
    factor: float = 1.0  # rate / knee
    variant: str = ''  # of a control, or of the natural part

    @property
    def name(self) -> str:
        """The name of the arm, and of its directory inside the stage's directory."""
        where = f'lag{self.lag}' if self.lag is not None else f'eta{self.eta:g}'
        rate = '' if self.rate is None else f'_rate{self.rate:.3g}'
        return f'{self.variant and self.variant + "_"}{where}_{self.method}{rate}_seed{self.seed}'


@dataclasses.dataclass(frozen=True)
class Stage:
    """Arms that run before the arms of the next stage."""

    name: str
    arms: Mapping[Factors, Arm]
    programs: tuple[Program, ...]
    runs: tuple[Arm, ...]


class StageMaker:
    """Makes the stages of a plan; all arms get the fields that `command` sets."""

    def __init__(self, command: CommandLine, plan: Plan, workdir: pathlib.Path):
        self._command, self._plan, self._workdir = command, plan, workdir

    def make(self, name: str, rates: Rates) -> Stage:
        """Makes one of STAGES; the first two need no rates. Raises UserError for an arm that cannot run, naming it."""
        listed = {CONTROLS: self._controls, KNEE: self._knee}.get(name)
        named = {PILOT: self._pilot, LOCK_STEP: self._lock_step, NATURAL: self._natural}.get(name)
        return self.build(name, dict(listed() if listed else named(rates) if named else ()))

    def build(self, name: str, wanted: Mapping[Factors, Overrides]) -> Stage:
        """Makes a stage of the `wanted` arms. Raises UserError for an arm that cannot run, naming it."""
        named = {factors.name: overrides for factors, overrides in wanted.items()}
        built = make_arms(self._command, named, self._workdir / name)
        arms = dict(zip(wanted, built, strict=True))
        together = [arm for factors, arm in arms.items() if factors.lag is not None]
        alone = tuple(arm for factors, arm in arms.items() if factors.lag is None)
        return Stage(name, arms, tuple(make_programs(name, together, self._workdir)), alone)

    def scoring(self, stage: Stage) -> Scoring:
        """Makes the job that scores the finished runs of a stage."""
        name = f'{stage.name}_scores'
        finished = tuple(arm for arm in stage.runs if read_state(arm).is_finished)
        return Scoring(name, self._workdir / PROGRAMS / name, finished)

    def _together(self, factors: Factors, more: Overrides | None = None) -> tuple[Factors, Overrides]:
        """Makes (factors, overrides) of a lock-step arm."""
        part = self._plan.lock_step
        own: Overrides = {'staleness.schedule': f'fixed({factors.lag})', 'run.seed': factors.seed}
        rate: Overrides = {} if factors.rate is None else {RATE: factors.rate}
        return factors, {**part.common, **part.methods[factors.method], **(more or {}), **own, **rate}

    def _alone(self, factors: Factors, more: Overrides | None = None) -> tuple[Factors, Overrides]:
        """Makes (factors, overrides) of a natural run."""
        part = self._plan.natural
        assert factors.eta is not None
        own: Overrides = {'staleness.eta': factors.eta, 'run.seed': factors.seed}
        rate: Overrides = {} if factors.rate is None else {RATE: factors.rate}
        method = self._plan.lock_step.methods[factors.method]
        return factors, {**part.common, **method, **(more or {}), **own, **rate}

    def _controls(self) -> Iterable[tuple[Factors, Overrides]]:
        plan, method = self._plan.controls, self._plan.natural.variant_method
        for lag in plan.known_bounds:
            for seed in plan.known_seeds:
                yield self._together(Factors(CONTROLS, plan.known_method, seed, lag, variant=KNOWN), plan.known)
        yield self._together(Factors(CONTROLS, method, 0, plan.same_lag, rate=0.0, variant=ZERO_RATE))
        for variant in (SAME_A, SAME_B):
            yield self._together(Factors(CONTROLS, method, 0, plan.same_lag, variant=variant))
            yield self._alone(Factors(CONTROLS, method, 0, eta=plan.same_eta, variant=variant))
        shuffled = Factors(CONTROLS, method, 0, eta=plan.same_eta, variant=SHUFFLED)
        yield self._alone(shuffled, plan.shuffled)

    def _knee(self) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        for method in dict.fromkeys(part.rate_from.values()):
            for rate in part.rates:
                for seed in part.knee_seeds:
                    yield self._together(Factors(KNEE, method, seed, part.lags[0], rate=rate))

    def _pilot(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        for method in part.methods:
            for lag in (part.lags[0], part.pilot_lag):
                for seed in part.pilot_seeds:
                    yield self._together(Factors(PILOT, method, seed, lag, rate=rates[method]))

    def _lock_step(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.lock_step
        sides: Sequence[tuple[float, Sequence[int]]] = [(1.0, part.seeds)]
        sides = [*sides, *((factor, part.side_seeds) for factor in part.side_factors)]
        for lag in part.lags:
            for method in part.methods:
                for factor, seeds in sides:
                    for seed in seeds:
                        rate = rates[method] * factor
                        yield self._together(Factors(LOCK_STEP, method, seed, lag, rate=rate, factor=factor))

    def _natural(self, rates: Rates) -> Iterable[tuple[Factors, Overrides]]:
        part = self._plan.natural
        for eta in part.etas:
            for method in part.methods:
                for seed in part.seeds:
                    yield self._alone(Factors(NATURAL, method, seed, eta=eta, rate=rates[method]))
        for variant, overrides in part.variants.items():
            method = part.variant_method
            for seed in part.seeds:
                factors = Factors(NATURAL, method, seed, eta=part.variant_eta, rate=rates[method], variant=variant)
                yield self._alone(factors, overrides)


# The results of a study's arms as numbers: scores, curves, ages, throughput.


@dataclasses.dataclass(frozen=True)
class Record:
    """One arm, and its numbers if it has finished; None for a number that it lacks."""

    factors: Factors
    state: ArmState
    score: float | None = None  # of the final weights
    curve: Sequence[float] = ()  # share of right places in the batch of each update
    tokens_per_second: float | None = None  # trained, by the clock
    age: float | None = None  # mean over the trained tokens, versions
    oldest: float | None = None
    weights: str = ''  # SHA-256
    initial_weights: str = ''  # of lock-step arms
    mismatch: float | None = None  # RMS, nats
    drift: float | None = None  # RMS, nats
    split_cost: float | None = None  # share of the update's seconds spent on measuring these two

    @property
    def area(self) -> float | None:
        """Mean of the curve."""
        return statistics.fmean(self.curve) if self.curve else None

    def window(self, first: int, end: int) -> float | None:
        """Mean of the curve over the updates from `first` to `end` - 1, counted from 0."""
        part = self.curve[first:end]
        return statistics.fmean(part) if part else None


Records: TypeAlias = Sequence[Record]


def read_records(arms: Mapping[Factors, Arm], programs: Iterable[Program] = ()) -> list[Record]:
    """Reads the records of all arms, finished or not; a damaged file makes its arm unfinished.

    An arm that gives no reason gets the reason of its program.
    """
    reasons = {arm.workdir: program.read_state().reason for program in programs for arm in program.arms}
    return [_read(factors, arm, reasons.get(arm.workdir, '')) for factors, arm in arms.items()]


def select(records: Iterable[Record], **wanted: object) -> list[Record]:
    """Selects the finished arms whose factors have the `wanted` values: select(records, stage='knee', lag=0)."""
    has = lambda record: all(getattr(record.factors, name) == value for name, value in wanted.items())
    return [record for record in records if record.score is not None and has(record)]


def by_seed(records: Iterable[Record], read: Callable[[Record], float | None]) -> dict[int, float]:
    """One number of each record, by seed; records without that number are left out."""
    found = {record.factors.seed: read(record) for record in records}
    return {seed: value for seed, value in found.items() if value is not None}


def _read(factors: Factors, arm: Arm, reason: str) -> Record:
    state = read_state(arm)
    if not state.is_finished:
        return Record(factors, dataclasses.replace(state, reason=state.reason or reason))
    try:
        return _read_finished(factors, arm, state)
    except UserError as error:
        return Record(factors, dataclasses.replace(state, is_finished=False, reason=str(error)))


def _read_finished(factors: Factors, arm: Arm, state: ArmState) -> Record:
    report = files.read_json(arm.workdir / REPORT)
    score = report.get('score')
    if score is None and (arm.workdir / SCORE).exists():
        score = files.read_json(arm.workdir / SCORE)['score']
    if score is None or not math.isfinite(score):
        return Record(factors, dataclasses.replace(state, is_finished=False, reason='its final weights have no score'))
    record = read_record(read_metrics(arm.workdir / METRICS), report)
    # a batch of answers that cannot end has a reward of at most A / (A + 1)
    unit = (arm.config.task.length + 1) / arm.config.task.length if arm.config.rollout.ignore_eos else 1.0
    split = report.get('ratio_split') or {}
    parts = split.get('parts', {})
    return Record(
        factors,
        state,
        score=score,
        curve=tuple(value * unit for value in record.reward.values),
        tokens_per_second=record.tokens / record.seconds if record.seconds else None,
        age=report['token_age']['mean'],
        oldest=report['token_age']['max'],
        weights=str(report.get('weights_sha256') or ''),
        initial_weights=str(report.get('initial_weights_sha256') or ''),
        mismatch=parts.get('mismatch', {}).get('rms'),
        drift=parts.get('drift', {}).get('rms'),
        split_cost=split.get('share'),
    )


# A sweep that trains its arms as programs of many arms: its config file has get_programs(), not get_sweep().


SCORES = 'scores.md'  # in the directory of the sweep
_PARTS = 4  # of a name: row, column, table, seed
_PURPOSE = "which returns {'full': arms, 'quick': arms}, arms as {'ROW.COLUMN.TABLE.SEED': {'section.field': value}}"


class ProgramSweep:
    """A sweep in its directory, in the form 'full' or 'quick'; `jobs` are programs at a time.

    Raises UserError for an arm that cannot run, or that no program can train, and for a directory that does not belong
    to this sweep.
    """

    def __init__(self, command: CommandLine, form: str, workdir: pathlib.Path, jobs: int):
        self._source, self._workdir, self._jobs = command.source, workdir, jobs
        self.arms = _read_arms(command, form, workdir)
        self._programs = make_programs('sweep', self.arms, workdir)
        require_same_sweep(workdir, self._source, self.arms)

    def print_commands(self) -> None:
        """Prints the commands of the programs that have not finished, one a line."""
        for program in self._programs:
            if not program.read_state().is_finished:
                print(shlex.join(program.command(False)))

    def run(self, interrupts: Interrupts) -> int:
        """Trains the programs that have not finished and writes the scores; returns the exit code.

        Raises UserError for arms that failed, after all others have run.
        """
        note_sweep(self._workdir, self._source, self.arms)
        pending = [program for program in self._programs if not program.read_state().is_finished]
        for program in pending:
            program.write_list()
        runner = Runner(pending, self._jobs, self._workdir, lambda program: program.read_state())
        runner.run(interrupts)
        files.write_text(self._workdir / SCORES, render_scores(_read_scores(self.arms)))
        print(self._workdir / SCORES, flush=True)
        if runner.is_stopping:
            print('stopped; the same command goes on')
            return ExitCode.STOPPED
        if failed := [program for program in self._programs if not program.read_state().is_finished]:
            reason = failed[0].read_state().reason
            raise UserError(f'{len(failed)} programs have not finished, the first {failed[0].name} ({reason})')
        return ExitCode.FINISHED


def render_scores(scores: Mapping[str, float]) -> str:
    """Renders the final weights' scores as Markdown: median and range over the seeds, by the names of the arms."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for name, score in scores.items():
        row, column, table, _ = name.split('.')
        found.setdefault(table, {}).setdefault((row, column), []).append(score)
    return '\n\n'.join('\n'.join(_render_table(table, cells)) for table, cells in found.items()) + '\n'


def _render_table(table: str, cells: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[str]:
    rows, columns = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))
    yield f'| {table} | {" | ".join(columns)} |'
    yield f'| --- |{" --- |" * len(columns)}'
    for row in rows:
        yield f'| {row} | {" | ".join(_render(cells.get((row, column), ())) for column in columns)} |'


def _render(scores: Sequence[float]) -> str:
    """Formats scores as '0.95 (0.91 to 0.97)'; a single score alone, no scores as ''."""
    if len(scores) < 2:
        return ''.join(f'{score:.2f}' for score in scores)
    return f'{statistics.median(scores):.2f} ({min(scores):.2f} to {max(scores):.2f})'


def _read_scores(arms: Sequence[Arm]) -> dict[str, float]:
    """Reads the scores of the finished arms."""
    finished = [arm for arm in arms if read_state(arm).is_finished]
    return {arm.name: files.read_json(arm.workdir / REPORT)['score'] for arm in finished}


def _read_arms(command: CommandLine, form: str, workdir: pathlib.Path) -> list[Arm]:
    forms = call_in_file(command.source, 'get_programs', _PURPOSE)
    found = forms.get(form) if isinstance(forms, Mapping) else None
    if not isinstance(found, Mapping) or not found:
        raise CommandLineError(f'--config={command.source}: get_programs() must be a function {_PURPOSE}')
    if wrong := [name for name in found if not isinstance(name, str) or name.count('.') != _PARTS - 1]:
        raise CommandLineError(
            f'--config={command.source}: the arm {wrong[0]!r} has no name of the form ROW.COLUMN.TABLE.SEED'
        )
    return make_arms(command, found, workdir)
