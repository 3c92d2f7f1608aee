"""What the engines did since the last update, counted from events for its metrics."""

from __future__ import annotations

from statistics import median
from typing import TypedDict

from areal_jax.events.schema import Event
from areal_jax.report.engine_work import RequestPauses
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Value


class EngineCountsState(TypedDict):
    """What a checkpoint keeps of EngineCounts."""

    counts: dict[str, int]
    pauses: list[float]
    waiting: dict[str, float]  # clock seconds of the swap, by request that has no token since


class EngineCounts:
    """Counts the events of training, one after the other, until `take`."""

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
        """The metrics since the last call."""
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
