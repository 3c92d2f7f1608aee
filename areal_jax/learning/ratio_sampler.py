"""Measures the split of the importance ratio in every update, on a sample of its answers.

ratio_split.py has the arithmetic, weight_ring.py the weights of earlier versions. It only reads the state of the
learner: an update trains the same weights with it and without it, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from areal_jax.learning.diagnostics.ratio_split import is_sampled, measure_split
from areal_jax.learning.diagnostics.weight_ring import WeightRing
from areal_jax.learning.learner_state import LearnerState
from areal_jax.learning.passes import Passes
from areal_jax.learning.programs import CompiledPrograms
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.update import Trained
from areal_jax.telemetry import names
from areal_jax.types import PackedBatch, Trajectory, TrajectoryGroup, Tree


class RatioSampler:
    """Keeps the weights of published versions, and scores sampled answers under them after each update.

    Args:
      weights: described, as Passes.working gives them.

    Raises ConfigError where the ring does not hold one version.
    """

    def __init__(
        self, settings: LearnerSettings, passes: Passes, layout: RowLayout, programs: CompiledPrograms, weights: Tree
    ):
        self._settings, self._passes, self._layout, self._programs = settings, passes, layout, programs
        self._ring = WeightRing(settings.diagnostics.ring_bytes, weights)
        self._keep_s = 0.0  # wall seconds since the last update

    def keep(self, version: int, state: LearnerState) -> None:
        """Keeps the weights of `state`, which are version `version`."""
        began_s = time.perf_counter()
        self._ring.add(version, self._passes.working(state))
        self._keep_s += time.perf_counter() - began_s

    def require(self, version: int, state: LearnerState) -> None:
        """As `keep`, where the version was not published by this learner."""
        if version not in self._ring.versions:
            self.keep(version, state)

    def forget(self) -> None:
        """The learner takes other weights: versions kept so far are of another history."""
        self._ring.clear()

    def measure(
        self,
        kept: Sequence[TrajectoryGroup],
        batches: Sequence[PackedBatch],
        trained: Trained,
        state: LearnerState,
        version: int,
        update_s: float,
    ) -> dict[str, float]:
        """The metrics of the split.

        Args:
          kept: the groups that were packed; `trained` is what the update from `version` did with them.
          update_s: wall seconds of the update.
        """
        began_s = time.perf_counter()

        def score(groups: Sequence[TrajectoryGroup], versions: Sequence[int]) -> np.ndarray:
            return self._score(groups, versions, state)

        def score_routing(groups: Sequence[TrajectoryGroup], versions: Sequence[int]) -> np.ndarray:
            replayed, live = (self._score(groups, versions, state, follows) for follows in (True, False))
            return replayed - live

        metrics = measure_split(
            kept,
            batches,
            trained.policy_logprobs(batches),
            version=version,
            held=self._ring.versions,
            is_chosen=self._is_chosen,
            score=score,
            score_routing=score_routing if self._layout.inputs else None,
        )
        seconds, self._keep_s = self._keep_s + time.perf_counter() - began_s, 0.0
        share = seconds / max(update_s + seconds, 1e-9)
        return metrics | {str(names.RATIO_SECONDS): seconds, str(names.RATIO_SHARE): share}

    def _is_chosen(self, trajectory: Trajectory) -> bool:
        settings = self._settings
        return is_sampled(settings.seed, trajectory.prompt.draw, trajectory.sample, settings.diagnostics.ratio_sample)

    def _score(
        self,
        groups: Sequence[TrajectoryGroup],
        versions: Sequence[int],
        state: LearnerState,
        follows: bool | None = None,
    ) -> np.ndarray:
        """float32 [versions, generated tokens]. The rows are packed once, so that equal weights give equal floats.

        `follows` as of Passes.logprobs.
        """
        ones = [np.ones(len(group.trajectories), np.float32) for group in groups]
        (batch,), _ = self._layout.pack(groups, ones, n_minibatches=1)
        places = np.flatnonzero(batch.loss_mask)
        places = places[np.argsort(batch.trajectory_ids.ravel()[places], kind='stable')]
        shardings = self._programs.definitions.params
        scored = []
        for version in versions:
            weights = self._ring.read(version, shardings)
            scored.append(self._passes.logprobs(weights, state.frozen, batch, version, follows).ravel()[places])
        return np.stack(scored)
