"""Turns steps and events into metrics: what an update leaves on disk and on the terminal.

What concerns the trained tokens is measured by the learner and only passed on; the counters here are of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.app.compilations import CompilationCounter
from areal_jax.control.controller import StepRecord
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import MetricsWriter, merge
from areal_jax.telemetry.progress import Progress


class StepObserver:
    """Counts events between steps and writes one line of metrics per update.

    The events of an evaluation do not count.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        progress: Progress | None,
        compilations: CompilationCounter,
        cpu_seconds: Callable[[], float],
        first_time_s: float,
    ):
        self._metrics, self._progress, self._compilations = metrics, progress, compilations
        self._cpu_seconds, self._last_time_s = cpu_seconds, first_time_s
        self._generated = self._interruptions = self._compiled = 0
        self._evaluating = False
        self._cpu_at_first_admission: float | None = None
        self.cpu_seconds_in_window = 0.0

    def on_event(self, event: Mapping[str, Any]) -> None:
        kind = event['kind']
        if kind == 'evaluate':
            self._evaluating = event['mode'] == 'start'
            self._last_time_s = event['time']
            if self._progress:
                self._progress.restart(event['time'])
        elif self._evaluating:
            return
        elif kind == 'decode':
            self._generated += event['tokens']
        elif kind == 'interrupt':
            self._interruptions += 1
        elif kind == 'admit' and self._cpu_at_first_admission is None:
            self._cpu_at_first_admission = self._cpu_seconds()

    def on_step(self, record: StepRecord) -> None:
        if self._cpu_at_first_admission is not None:
            self.cpu_seconds_in_window = self._cpu_seconds() - self._cpu_at_first_admission
        compiled = self._compilations.count
        pause: dict[str, float] = (
            {} if record.publish_pause_s is None else {names.PUBLISH_PAUSE: record.publish_pause_s}
        )
        values = merge(
            learner=record.metrics,
            observer=self._counted(record),
            controller={
                names.TIME: record.time_s,
                names.BUFFER_GROUPS: record.buffered,
                **{f'{names.GROUPS_DROPPED}{reason}': count for reason, count in record.dropped.items()},
                **{f'{names.ADMISSION_HELD}{bound}': seconds for bound, seconds in record.held_s.items()},
            },
            engines=pause,
            process={names.COMPILATIONS: compiled - self._compiled},
        )
        self._metrics.write(record.step, values)
        if self._progress:
            self._progress.update(record.step, values)
        self._last_time_s, self._generated, self._interruptions, self._compiled = record.time_s, 0, 0, compiled

    def state(self) -> dict[str, Any]:
        """What the next update's metrics need from before this instant, JSON-able."""
        return {
            'last_time_s': self._last_time_s,
            'generated': self._generated,
            'interruptions': self._interruptions,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state` of the run that is resumed."""
        self._last_time_s = state['last_time_s']
        self._generated, self._interruptions = state['generated'], state['interruptions']

    def _counted(self, record: StepRecord) -> dict[str, Any]:
        seconds = max(record.time_s - self._last_time_s, 1e-9)
        trained = record.metrics.get(names.UPDATE_TOKENS, 0.0)
        return {
            names.GENERATE_RATE: self._generated / seconds,
            names.TRAIN_RATE: trained / seconds,
            names.TOKENS_GENERATED: self._generated,
            names.TOKENS_TRAINED: trained,
            names.GROUPS_TRAINED: record.metrics.get(names.UPDATE_GROUPS, 0.0),
            names.INTERRUPTIONS: self._interruptions,
        }
