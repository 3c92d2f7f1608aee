"""Turns steps and events into metrics: what an update leaves on disk and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.app.compilations import CompilationCounter
from areal_jax.control.controller import StepRecord
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import MetricsWriter
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
        seconds = max(record.time_s - self._last_time_s, 1e-9)
        trained = record.metrics.get('update/trained_tokens', 0.0)
        compiled = self._compilations.count
        values = {
            **record.metrics,
            names.TIME: record.time_s,
            names.GENERATE_RATE: self._generated / seconds,
            names.TRAIN_RATE: trained / seconds,
            names.TOKENS_GENERATED: self._generated,
            names.TOKENS_TRAINED: trained,
            names.GROUPS_TRAINED: record.metrics.get('update/trained_groups', 0.0),
            names.BUFFER_GROUPS: record.buffered,
            names.INTERRUPTIONS: self._interruptions,
            names.PUBLISH_PAUSE: record.publish_pause_s,
            names.COMPILATIONS: compiled - self._compiled,
            **{f'{names.GROUPS_DROPPED}{reason}': count for reason, count in record.dropped.items()},
        }
        self._metrics.write(record.step, values)
        if self._progress:
            self._progress.update(record.step, values)
        self._last_time_s, self._generated, self._interruptions, self._compiled = record.time_s, 0, 0, compiled
