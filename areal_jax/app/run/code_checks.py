"""Counts of the checks of code between two updates, for the metrics."""

from __future__ import annotations

import collections
from typing import TypedDict

from areal_jax.events.schema import Event
from areal_jax.labels import CODE, SCORED
from areal_jax.telemetry import names


class CodeChecksState(TypedDict):
    """What a checkpoint keeps of CodeChecks."""

    labels: dict[str, int]
    sums: dict[str, float]


class CodeChecks:
    """The labels of scored answers, and what the checks of those with code took."""

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
        """Empty where no answer was code."""
        checked, scored = self._sums['answers'], sum(self._labels.values())
        if not checked:
            return {}
        means = {names.CODE_CPU: 'cpu_s', names.CODE_WALL: 'wall_s', names.CODE_WAITING: 'waiting'}
        return {name: self._sums[key] / checked for name, key in means.items()} | {
            f'{names.CODE}{label}': self._labels[label] / max(scored, 1) for label in ('ok', *CODE)
        }

    def state(self) -> CodeChecksState:
        """As JSON can hold it."""
        return {'labels': dict(self._labels), 'sums': dict(self._sums)}
