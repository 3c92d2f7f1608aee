"""A trace of some updates by jax's profiler, in WORKDIR/profile (telemetry.profile_steps)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import jax

from areal_jax.protocols import Learner
from areal_jax.types import TrajectoryGroup, Weights

DIRECTORY = 'profile'


class TracedLearner:
    """A learner whose updates `first` to `last` are in one trace, with all that the process does meanwhile.

    The trace begins with the first of these updates that this attempt makes, and ends after the last one, or at `close`
    where the run ends before it. Functions of Python are left out: recording each call would slow the host's loop.
    """

    def __init__(self, learner: Learner, first: int, last: int, directory: pathlib.Path):
        self._learner, self._first, self._last, self._directory = learner, first, last, directory
        self._recording = False

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        """See protocols.Learner; `version` + 1 is the number of the update."""
        number = version + 1
        if self._first <= number <= self._last and not self._recording:
            self._start()
        with jax.profiler.StepTraceAnnotation('update', step_num=number):
            metrics = self._learner.update(groups, version)
        if number == self._last:
            self.close()
        return metrics

    def publish(self, version: int) -> Weights:
        return self._learner.publish(version)

    def save(self) -> Weights:
        return self._learner.save()

    def restore(self, saved: Weights) -> None:
        self._learner.restore(saved)

    def close(self) -> None:
        """Writes the trace that is being recorded; nothing otherwise."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self._directory), profiler_options=options)
        self._recording = True
