"""Counts events into the metrics of every update, and writes metrics and evaluation scores to the workdir."""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NotRequired, Protocol, TypedDict

from areal_jax import files, protocols
from areal_jax.config import TrackedConfig
from areal_jax.control.buffer import BY_REWARD
from areal_jax.control.controller import StepRecord
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import EvaluationBeside, Evaluator
from areal_jax.events.schema import Event
from areal_jax.labels import CODE, SCORED
from areal_jax.protocols import Clock, Generator, Pool, Verifier
from areal_jax.report.engine_work import RequestPauses
from areal_jax.telemetry import names
from areal_jax.telemetry.devices import DeviceRates, OptimizerAges
from areal_jax.telemetry.energy_accounting import EnergyAccount, EnergyState
from areal_jax.telemetry.facts import (
    DURING,
    EVALUATIONS,
    EvaluationScores,
    VersionScores,
    read_curve,
    read_scores,
    visible_only_share,
)
from areal_jax.telemetry.metrics import FILE, MetricsWriter, Value, merge, number, read_metrics
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.token_ledger import LedgerState, TokenLedger
from areal_jax.types import Prompt, TrajectoryGroup


class CodeChecksState(TypedDict):
    """The state of CodeChecks in a checkpoint."""

    labels: dict[str, int]
    sums: dict[str, float]


class CodeChecks:
    """Counts the labels of scored answers, and the time that the checks of code answers took."""

    def __init__(self, state: CodeChecksState | None = None):
        self._labels = collections.Counter(state['labels'] if state else {})
        self._sums = collections.defaultdict[str, float](float, state['sums'] if state else {})

    def note(self, event: Event) -> None:
        """Counts a reward or a check."""
        if event['kind'] == 'reward' and event['label'] in SCORED:
            self._labels[event['label']] += 1
        elif event['kind'] == 'check':
            taken = {'answers': 1, 'cpu_s': event['cpu_s'], 'wall_s': event['wall_s'], 'waiting': event['waiting']}
            for key, value in taken.items():
                self._sums[key] += value

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; empty if no answer was code."""
        checked, scored = self._sums['answers'], sum(self._labels.values())
        if not checked:
            return {}
        means = {names.CODE_CPU: 'cpu_s', names.CODE_WALL: 'wall_s', names.CODE_WAITING: 'waiting'}
        return {name: self._sums[key] / checked for name, key in means.items()} | {
            f'{names.CODE}{label}': self._labels[label] / max(scored, 1) for label in ('ok', *CODE)
        }

    def state(self) -> CodeChecksState:
        """Returns the state as JSON values."""
        return {'labels': dict(self._labels), 'sums': dict(self._sums)}


class SourceCountsState(TypedDict):
    """The state of SourceCounts in a checkpoint."""

    open: dict[str, str]  # by draw: the source of a group that is neither trained nor dropped
    drawn: dict[str, int]  # this and the next ones by source
    dropped: dict[str, int]
    filtered: dict[str, int]
    kept: dict[str, int]


class SourceCounts:
    """Counts the groups of each source of a mixture; without a mixture there is nothing to count."""

    def __init__(self, state: SourceCountsState | None = None):
        self._open = {int(draw): source for draw, source in state['open'].items()} if state else {}
        self._drawn = collections.Counter(state['drawn'] if state else {})  # since the start of the run
        # since the last update: for any reason, by task.filter, and into the buffer
        self._dropped = collections.Counter(state['dropped'] if state else {})
        self._filtered = collections.Counter(state['filtered'] if state else {})
        self._kept = collections.Counter(state['kept'] if state else {})

    def note(self, event: Event) -> None:
        """Counts a draw, and what becomes of its group."""
        if event['kind'] == 'draw' and (source := event.get('source')):
            self._open[event['draw']] = source
            self._drawn[source] += 1
        elif not self._open:
            return
        elif event['kind'] == 'buffer':
            self._kept[self._open[event['draw']]] += 1
        elif event['kind'] == 'drop':
            source = self._open.pop(event['draw'])
            self._dropped[source] += 1
            self._filtered[source] += event['reason'] in BY_REWARD
        elif event['kind'] == 'consume':
            for draw in event['draws']:
                del self._open[draw]

    def take(self, record: StepRecord) -> dict[str, Value]:
        """Returns the metrics of an update, and begins to count for the next one."""
        found: dict[str, Value] = {}
        split = self._split(record)
        trained = {source: _count_trained(record, groups) for source, groups in split.items()}
        for source, groups in split.items():
            own = _measure_groups(groups) | {
                names.SOURCE_DRAWN: self._drawn[source],
                names.SOURCE_DROPPED: self._dropped[source],
                names.SOURCE_TOKENS: trained[source],
            }
            judged = self._filtered[source] + self._kept[source]
            if record.filtered_rate is not None and judged:
                own[names.SOURCE_FILTERED_RATE] = self._filtered[source] / judged
            if sum(trained.values()):
                own[names.SOURCE_TOKEN_SHARE] = trained[source] / sum(trained.values())
            found |= {f'{names.SOURCE}{source}/{name}': value for name, value in own.items()}
        self._dropped, self._filtered, self._kept = (collections.Counter[str]() for _ in range(3))
        return found

    def state(self) -> SourceCountsState:
        """Returns the state as JSON values."""
        return {
            'open': {str(draw): source for draw, source in self._open.items()},
            'drawn': dict(self._drawn),
            'dropped': dict(self._dropped),
            'filtered': dict(self._filtered),
            'kept': dict(self._kept),
        }

    def _split(self, record: StepRecord) -> dict[str, list[TrajectoryGroup]]:
        """The groups of the batch by source; of every source that was drawn so far."""
        found: dict[str, list[TrajectoryGroup]] = {source: [] for source in sorted(self._drawn)}
        for group in record.groups:
            if source := group.trajectories[0].prompt.source:
                found[source].append(group)
        return found


def _measure_groups(groups: Sequence[TrajectoryGroup]) -> dict[str, Value]:
    heads = [row for group in groups for row in group.heads]
    counts: dict[str, Value] = {
        names.SOURCE_GROUPS: len(groups),
        names.SOURCE_EQUAL: sum(group.has_equal_rewards() for group in groups),
    }
    if not heads:
        return counts
    return counts | {
        names.SOURCE_REWARD: sum(row.reward for row in heads) / len(heads),
        names.SOURCE_LENGTH: _count_generated(groups) / len(heads),
    }


def _count_trained(record: StepRecord, groups: Sequence[TrajectoryGroup]) -> int:
    """Counts the tokens of the groups that the filter of equal rewards left, if it was on."""
    is_filtering = number(record.metrics, names.UPDATE_FILTERED) or 0
    return _count_generated([group for group in groups if not (is_filtering and group.has_equal_rewards())])


def _count_generated(groups: Sequence[TrajectoryGroup]) -> int:
    return sum(int(row.loss_mask.sum()) for group in groups for row in group.trajectories)


# Counts the engines' work since the last update, from events, for its metrics.


class EngineCountsState(TypedDict):
    """The state of EngineCounts in a checkpoint."""

    counts: dict[str, int]
    pauses: list[float]
    waiting: dict[str, float]  # clock seconds of the swap, by request that has had no token since


class EngineCounts:
    """Counts the events of training until `take` is called."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(('generated', 'prefilled', 'rebuilt', 'preempted', 'positions', 'read'), 0)
        self._pauses: list[float] = []  # seconds
        self._requests = RequestPauses()

    @property
    def generated(self) -> int:
        """Tokens decoded."""
        return self._counts['generated']

    def apply(self, event: Event) -> None:
        self._pauses += self._requests.apply(event)
        if event['kind'] == 'decode':
            self._counts['generated'] += event['tokens']
            self._counts['positions'] += event.get('positions', 0)
            self._counts['read'] += event.get('positions_read', 0)
        elif event['kind'] == 'receive':
            self._counts['generated'] += event['tokens']
        elif event['kind'] == 'prefill':
            rebuilt = event.get('rebuilt', 0)
            self._counts['prefilled'] += event['tokens'] - rebuilt
            self._counts['rebuilt'] += rebuilt
        elif event['kind'] == 'preempt':
            self._counts['preempted'] += 1

    def take(self) -> dict[str, Value]:
        """Returns the metrics since the last call."""
        counts, pauses = self._counts, self._pauses
        values: dict[str, Value] = {
            names.TOKENS_GENERATED: counts['generated'],
            names.TOKENS_PREFILLED: counts['prefilled'],
            names.TOKENS_REBUILT: counts['rebuilt'],
            names.PREEMPTIONS: counts['preempted'],
        }
        if counts['positions']:
            values[names.POSITIONS_READ] = counts['read'] / counts['positions']
        if pauses:
            values |= {names.REQUEST_PAUSE_MEDIAN: median(pauses), names.REQUEST_PAUSE_MAX: max(pauses)}
        self._counts, self._pauses = dict.fromkeys(counts, 0), []
        return values

    def state(self) -> EngineCountsState:
        return {'counts': dict(self._counts), 'pauses': list(self._pauses), 'waiting': dict(self._requests.since)}

    def restore(self, state: EngineCountsState) -> None:
        self._counts, self._pauses = dict(state['counts']), list(state['pauses'])
        self._requests = RequestPauses(state['waiting'])


# The metrics of every update, from its step record and the events since the last one.
#
# The controller calls `on_step`, the event log `on_event`. Metrics of the trained tokens come from the learner and are
# passed on; this module counts events of the loop.


class ObserverState(TypedDict):
    """The state of a StepObserver in a checkpoint."""

    last_time_s: float
    interruptions: int  # since the last update
    audited: int  # answers compared a second time since the last update
    disagreements: int  # of these
    checks: NotRequired[CodeChecksState]
    sources: NotRequired[SourceCountsState]
    engines: EngineCountsState  # since the last update
    ledger: NotRequired[LedgerState | None]  # None, or absent: an earlier part of the run kept no ledger
    optimizer_steps: NotRequired[list[float]]  # OptimizerAges.state
    energy: NotRequired[EnergyState | None]  # None, or absent: there was no account


class Compilations(Protocol):
    """Programs that this process has compiled since `reset`."""

    count: int

    def reset(self) -> None: ...


class StepObserver:
    """Counts events between steps and writes one line of metrics per update.

    The events of an evaluation do not count.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress | None,
        compilations: Compilations,
        cpu_seconds: Callable[[], float],
        first_time_s: float,
        rates: DeviceRates,
        energy: EnergyAccount | None = None,
    ):
        self._metrics, self._progress, self._compilations = metrics, progress, compilations
        self._cpu_seconds, self._last_time_s, self._rates = cpu_seconds, first_time_s, rates
        self._update_seconds: collections.deque[float] = collections.deque()  # of updates that are not published yet
        self._interruptions = self._compiled = self._audited = self._disagreements = 0
        self._checks = CodeChecks()
        self._sources = SourceCounts()
        self._engines = EngineCounts()
        self.ledger: TokenLedger | None = TokenLedger()
        self._optimizer_ages = OptimizerAges()
        self.energy = energy
        self._evaluating = False
        self._evaluations: list[Mapping[str, float]] = []  # of evaluations during training, not written yet
        self._cpu_at_first_admission: float | None = None
        self.cpu_seconds_in_window = 0.0

    def on_event(self, event: Event) -> None:
        self._sources.note(event)
        if self.ledger:
            self.ledger.apply(event)
        if self.energy:
            self.energy.apply(event)
        if event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
            self._last_time_s = event['time']
            if self._progress:
                self._progress.restart(event['time'])
        elif event['kind'] == 'run_done' and event['work'] == 'train':
            self._update_seconds.append(event['seconds'])
        elif not self._evaluating:
            self._count(event)

    def _count(self, event: Event) -> None:
        self._engines.apply(event)
        if event['kind'] == 'interrupt':
            self._interruptions += 1
        elif event['kind'] in ('reward', 'check'):
            self._checks.note(event)
        elif event['kind'] == 'audit':
            self._audited += 1
            self._disagreements += event['outcome'] == 'disagrees'
        elif event['kind'] == 'admit' and self._cpu_at_first_admission is None:
            self._cpu_at_first_admission = self._cpu_seconds()

    def on_step(self, record: StepRecord) -> None:
        if self._cpu_at_first_admission is not None:
            self.cpu_seconds_in_window = self._cpu_seconds() - self._cpu_at_first_admission
        compiled = self._compilations.count
        counted = self._counted(record)
        optional = {names.PUBLISH_PAUSE: record.publish_pause_s, names.FILTERED_RATE: record.filtered_rate}
        values = merge(
            learner=record.metrics,
            ages=self._optimizer_ages.note_update(record.step, record.metrics),
            ledger=self._balance(record),
            observer=counted,
            energy=self.energy.take(record.time_s, {**record.metrics, **counted}) if self.energy else {},
            update=self._rates.of_learner(record.metrics, self._take_update_seconds()),
            controller={
                names.TIME: record.time_s,
                names.BUFFER_GROUPS: record.buffered,
                **{f'{names.GROUPS_DROPPED}{reason}': count for reason, count in record.dropped.items()},
                **{f'{names.ADMISSION_HELD}{bound}': seconds for bound, seconds in record.held_s.items()},
                **{f'{names.IDLE_SLOTS}{bound}': seconds for bound, seconds in record.idle_slots_s.items()},
            },
            sources=self._sources.take(record),
            frictions={f'{names.FRICTION}{name}': value for name, value in record.frictions.items()},
            loop={name: value for name, value in optional.items() if value is not None},
            process={names.COMPILATIONS: compiled - self._compiled},
            evaluation=self._evaluations.pop(0) if self._evaluations else {},
        )
        self._metrics.write(record.step, values)
        if self._progress:
            self._progress.update(record.step, values)
        self._last_time_s, self._interruptions, self._compiled = record.time_s, 0, compiled
        self._audited = self._disagreements = 0
        self._checks = CodeChecks()

    def _balance(self, record: StepRecord) -> dict[str, Value]:
        if self.ledger is None:
            return {}
        self.ledger.note_update(record.step, record.metrics)
        return self.ledger.metrics()

    def set_rates(self, rates: DeviceRates) -> None:
        """Sets the rates after devices were moved."""
        self._rates = rates

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Keeps metrics of an evaluation during training for the next update's row that has no such metrics."""
        self._evaluations.append(values)

    def _take_update_seconds(self) -> float:
        """Returns the seconds of the update that was published last; updates end in the order of their publications."""
        return self._update_seconds.popleft() if self._update_seconds else 0.0

    def state(self) -> ObserverState:
        """Returns the state that the metrics of the next update need, as JSON values."""
        return {
            'last_time_s': self._last_time_s,
            'interruptions': self._interruptions,
            'audited': self._audited,
            'checks': self._checks.state(),
            'sources': self._sources.state(),
            'disagreements': self._disagreements,
            'engines': self._engines.state(),
            'ledger': self.ledger.state() if self.ledger else None,
            'optimizer_steps': self._optimizer_ages.state(),
            'energy': self.energy.state() if self.energy else None,
        }

    def restore(self, state: ObserverState) -> None:
        """Continues from the state in a checkpoint."""
        self._last_time_s = state['last_time_s']
        self._interruptions = state['interruptions']
        self._engines.restore(state['engines'])
        kept = state.get('ledger')
        if kept is None:
            self.ledger = None
        elif self.ledger:
            self.ledger.restore(kept)
        self._optimizer_ages = OptimizerAges(state.get('optimizer_steps', ()))
        if self.energy:
            self.energy.restore(state.get('energy'))
        self._checks = CodeChecks(state.get('checks'))
        self._sources = SourceCounts(state.get('sources'))
        self._audited, self._disagreements = state.get('audited', 0), state.get('disagreements', 0)

    def _counted(self, record: StepRecord) -> dict[str, Value]:
        seconds = max(record.time_s - self._last_time_s, 1e-9)
        known = number(record.metrics, names.UPDATE_TOKENS)
        trained = 0.0 if known is None else known
        labels = [row.label for group in record.groups for row in group.heads]
        audit: dict[str, Value] = {names.AUDIT_DISAGREEMENTS: self._disagreements} if self._audited else {}
        rate = self._engines.generated / seconds
        return {
            **audit,
            **self._checks.metrics(),
            **self._engines.take(),
            names.REWARD_UNPARSED: labels.count('unparsed') / max(len(labels), 1),
            names.GENERATE_RATE: rate,
            **self._rates.of_engines(rate),
            names.TRAIN_RATE: trained / seconds,
            names.TOKENS_TRAINED: trained,
            names.GROUPS_TRAINED: record.metrics.get(names.UPDATE_GROUPS, 0.0),
            names.INTERRUPTIONS: self._interruptions,
        }


# Scores of the evaluations before, after and during training: written to the workdir and printed.


class Scores:
    """The scores of one run by phase, 'before' and 'after', and by version.

    A resumed run also has its earlier attempts' scores, except for versions after `step`, which it evaluates again.
    """

    def __init__(self, workdir: pathlib.Path, *, resume: bool, step: int = 0):
        self._path = workdir / EVALUATIONS
        self._by_phase = read_scores(self._path) if resume else {}
        found = read_curve(self._path) if resume else []
        self._curve = {row.version: row for row in found if row.version <= step}
        if len(self._curve) < len(found):
            self._write()

    @property
    def curve(self) -> Sequence[VersionScores]:
        """The scores of the evaluations during training, by version."""
        return [self._curve[version] for version in sorted(self._curve)]

    def get(self, phase: str) -> EvaluationScores | None:
        return self._by_phase.get(phase)

    def add(self, phase: str, scores: EvaluationScores) -> None:
        """Writes the scores to WORKDIR/evaluations.json and prints their means."""
        self._by_phase[phase] = scores
        self._write()
        print(
            f'accuracy {phase}: sampled {mean_sampled(scores) or 0:.3f}, greedy {mean_greedy(scores):.3f}', flush=True
        )
        for source, own in scores.by_source().items():
            print(
                f'  {source}: sampled {mean_sampled(own) or 0:.3f}, greedy {mean_greedy(own):.3f} of '
                f'{len(own.greedy)} problems',
                flush=True,
            )

    def add_version(self, row: VersionScores) -> None:
        """Writes the row to WORKDIR/evaluations.json and prints its means."""
        self._curve[row.version] = row
        self._write()
        sampled = mean_sampled(row.scores)
        means = ('' if sampled is None else f'sampled {sampled:.3f}, ') + f'greedy {mean_greedy(row.scores):.3f}'
        print(f'accuracy of version {row.version}: {means} ({row.seconds:.1f} s beside training)', flush=True)

    def _write(self) -> None:
        known: files.JsonObject = {phase: scores.as_values() for phase, scores in self._by_phase.items()}
        if self._curve:
            known[DURING] = [row.as_row() for row in self.curve]
        files.write_json(self._path, known, indent=None)


def evaluation_row(scores: EvaluationScores | None, version: int) -> dict[str, float]:
    """Returns a version's scores as metrics, named as in evaluation during training; empty without scores."""
    if scores is None:
        return {}
    row: dict[str, float] = {names.EVALUATION_VERSION: version, names.GREEDY_ACCURACY: mean_greedy(scores)}
    known: dict[str, float | None] = {
        names.SAMPLED_ACCURACY: mean_sampled(scores),
        names.VISIBLE_ONLY_SHARE: visible_only_share(scores.labels),
    }
    for source, own in scores.by_source().items():
        row[f'{names.EVALUATION_OF}{source}/greedy_accuracy'] = mean_greedy(own)
        known[f'{names.EVALUATION_OF}{source}/sampled_accuracy'] = mean_sampled(own)
    return row | {name: value for name, value in known.items() if value is not None}


def mean_greedy(scores: EvaluationScores) -> float:
    return sum(scores.greedy) / len(scores.greedy)


def mean_sampled(scores: EvaluationScores) -> float | None:
    """Returns the mean score of sampled answers; None if no answer was sampled."""
    sampled = [score for row in scores.sampled for score in row]
    return sum(sampled) / len(sampled) if sampled else None


# Builds the evaluation during training, and writes its rows to file, metrics and terminal.


UNDER_WAY = 'evaluating'  # key of a checkpoint's state of the observer: the version that was being evaluated


def build_beside(
    config: TrackedConfig,
    *,
    pool: Pool,
    clock: Clock,
    supervisor: Supervisor,
    log: EventLog,
    verifier: Verifier,
    problems: Sequence[Prompt],
    make_evaluator: Callable[..., Evaluator],
    scores: Scores,
    observer: StepObserver,
    lost: protocols.Event | None = None,
) -> EvaluationBeside:
    """Builds the evaluation during training, on the first of `problems`, which the other evaluations use in full.

    `make_evaluator` lacks problems, pool, verifier, samples and version, which are set here. `lost`: see
    EvaluationBeside.
    """
    samples, few = config.evaluation.every_samples, problems[: config.evaluation.every_problems]

    def evaluator_of(at_version: Generator, version: int) -> Evaluator:
        return make_evaluator(problems=few, pool=at_version, verifier=verifier, samples=samples, version=version)

    def note(row: VersionScores) -> None:
        scores.add_version(row)
        observer.note_evaluation(evaluation_row(row.scores, row.version))

    return EvaluationBeside(
        every=config.evaluation.every,
        steps=config.run.steps,
        pool=pool,
        clock=clock,
        supervisor=supervisor,
        log=log,
        make_evaluator=evaluator_of,
        on_scores=note,
        say=functools.partial(print, flush=True),
        lost=lost,
    )


def restore_rows(workdir: pathlib.Path, scores: Scores, observer: StepObserver) -> None:
    """Gives the observer of a resumed run the earlier rows that no line of its metrics contains."""
    written = {line.get(names.EVALUATION_VERSION) for line in read_metrics(workdir / FILE)}
    for row in scores.curve:
        if row.version not in written:
            observer.note_evaluation(evaluation_row(row.scores, row.version))
