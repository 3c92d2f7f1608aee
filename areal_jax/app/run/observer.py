"""The metrics of every update, from its step record and the events since the last one.

The controller calls `on_step`, the event log `on_event`. Metrics of the trained tokens come from the learner and are
passed on; this module counts events of the loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import NotRequired, Protocol, TypedDict

from areal_jax.app.run.code_checks import CodeChecks, CodeChecksState
from areal_jax.app.run.engine_counts import EngineCounts, EngineCountsState
from areal_jax.control.controller import StepRecord
from areal_jax.events.schema import Event
from areal_jax.telemetry import names
from areal_jax.telemetry.devices import DeviceRates, OptimizerAges
from areal_jax.telemetry.energy.accounting import EnergyAccount, EnergyState
from areal_jax.telemetry.metrics import MetricsWriter, Value, merge, number
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.token_ledger import LedgerState, TokenLedger


class ObserverState(TypedDict):
    """What a checkpoint keeps of a StepObserver."""

    last_time_s: float
    interruptions: int  # since the last update
    audited: int  # answers compared a second time since the last update
    disagreements: int  # of these
    checks: NotRequired[CodeChecksState]
    engines: EngineCountsState  # since the last update
    ledger: NotRequired[LedgerState | None]  # None, or absent: an earlier part of the run has kept none
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
        self._engines = EngineCounts()
        self.ledger: TokenLedger | None = TokenLedger()
        self._optimizer_ages = OptimizerAges()
        self.energy = energy
        self._evaluating = False
        self._evaluations: list[Mapping[str, float]] = []  # of evaluations beside training, not written yet
        self._cpu_at_first_admission: float | None = None
        self.cpu_seconds_in_window = 0.0

    def on_event(self, event: Event) -> None:
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
        """Devices were moved."""
        self._rates = rates

    def note_evaluation(self, values: Mapping[str, float]) -> None:
        """Metrics of an evaluation beside training: they go into the row of the next update that has none."""
        self._evaluations.append(values)

    def _take_update_seconds(self) -> float:
        """How long the update took that was published last; updates end in the order of their publications."""
        return self._update_seconds.popleft() if self._update_seconds else 0.0

    def state(self) -> ObserverState:
        """What the metrics of the next update need from before this instant, as JSON can hold it."""
        return {
            'last_time_s': self._last_time_s,
            'interruptions': self._interruptions,
            'audited': self._audited,
            'checks': self._checks.state(),
            'disagreements': self._disagreements,
            'engines': self._engines.state(),
            'ledger': self.ledger.state() if self.ledger else None,
            'optimizer_steps': self._optimizer_ages.state(),
            'energy': self.energy.state() if self.energy else None,
        }

    def restore(self, state: ObserverState) -> None:
        """Continue from the state in a checkpoint."""
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
