"""The learner of a run that keeps answers: hands some groups of every update to the writer. No jax here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from areal_jax.protocols import Learner
from areal_jax.telemetry.rollouts.writer import RolloutWriter
from areal_jax.types import TokenArrays, TrajectoryGroup, Weights

ReadTokens = Callable[[Sequence[int]], Sequence[Sequence[TokenArrays]]]  # RunLearner.read_tokens


def keep_rollouts(learner: Learner, read_tokens: ReadTokens, rollouts: RolloutWriter | None) -> Learner:
    """The learner itself where nothing is kept."""
    return learner if rollouts is None else _KeepingLearner(learner, read_tokens, rollouts)


class _KeepingLearner:
    """See protocols.Learner; what it hands over it changes by no bit."""

    def __init__(self, learner: Learner, read_tokens: ReadTokens, rollouts: RolloutWriter):
        self._learner, self._read_tokens, self._rollouts = learner, read_tokens, rollouts

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        metrics = self._learner.update(groups, version)
        kept = self._rollouts.select(groups)
        self._rollouts.put(version + 1, kept, self._read_tokens([group.draw for group in kept]))
        return metrics

    def publish(self, version: int) -> Weights:
        return self._learner.publish(version)

    def save(self) -> Weights:
        return self._learner.save()

    def restore(self, saved: Weights) -> None:
        self._learner.restore(saved)
