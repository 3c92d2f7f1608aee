"""A learner and a channel without weights: an update counts what a learner would report of its data."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.checkpoint.store import Follower
from areal_jax.learning.objective.counting import UpdatePrice, data_metrics
from areal_jax.telemetry import names
from areal_jax.types import NOT_GENERATED, PublishedWeights, TokenArrays, Trajectory, TrajectoryGroup, Weights

DIGEST = 'simulated'  # of the weights of every version


class UpdateShape(NamedTuple):
    """What an update of the learner is, as far as its counts depend on it."""

    optimizer_steps: int
    oldest_age: int | None  # tokens of a greater age are masked


class CountLearner:
    """Implements app.run.site.RunLearner.

    Args:
      price: which groups are trained, and how tokens are counted.
    """

    followers: Sequence[Follower] = ()

    def __init__(self, price: UpdatePrice, shape: UpdateShape):
        self._price, self._shape = price, shape

    def warm_up(self) -> int:
        return 0

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._price.tokens(groups)

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> None:
        return None

    def read_tokens(self, draws: Sequence[int]) -> list[list[TokenArrays]]:
        return [[] for _ in draws]

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        """The metrics of an update in which every optimizer step is applied."""
        kept = self._price.kept(groups)
        read = self._price.read(kept)
        everything, left = _count_ages(groups, version), _count_ages(kept, version)
        trained = {age: tokens for age, tokens in _count_ages(read, version).items() if self._is_trained(age)}
        masked = {age: tokens - trained.get(age, 0) for age, tokens in left.items()}
        filtered = {age: tokens - left[age] for age, tokens in everything.items()}
        total = sum(trained.values())
        metrics: dict[str, Any] = {
            **data_metrics(groups, kept),
            names.UPDATE_TOKENS: float(total),
            names.UPDATE_TRAJECTORIES: 0.0,
            names.TOKENS_MASKED: float(sum(masked.values())),
            names.TOKEN_AGE_HISTOGRAM: _list_by_age(trained),
            names.TRAINED_BY_AGE: _list_by_age(trained),
            names.FILTERED_BY_AGE: _list_by_age(filtered),
            names.MASKED_BY_AGE: _list_by_age(masked),
            names.UNUSED_BY_AGE: [],
            names.OPTIMIZER_STEPS: float(self._shape.optimizer_steps if total else 0),
            names.READ_TOKENS: float(self._price.tokens(groups)),
        }
        if total:
            versions = [count for row in _rows(read) if (count := self._count_versions(row, version))]
            metrics |= {
                names.TOKEN_AGE_MEAN: sum(age * tokens for age, tokens in trained.items()) / total,
                names.TOKEN_AGE_MAX: float(max(trained)),
                names.UPDATE_TRAJECTORIES: float(len(versions)),
                names.VERSIONS_MEAN: sum(versions) / len(versions),
                names.VERSIONS_MAX: float(max(versions)),
                names.STEPS_INSIDE_MEAN: (self._shape.optimizer_steps - 1) / 2,
                names.STEPS_INSIDE_MAX: float(self._shape.optimizer_steps - 1),
            }
        return metrics

    def publish(self, version: int) -> int:
        return version

    def save(self) -> dict[str, dict[str, np.ndarray]]:
        return {name: {'none': np.zeros(1, np.float32)} for name in ('params', 'optimizer')}

    def restore(self, saved: Weights) -> None:
        """There is nothing to restore."""

    def _is_trained(self, age: int) -> bool:
        return self._shape.oldest_age is None or age <= self._shape.oldest_age

    def _count_versions(self, row: Trajectory, version: int) -> int:
        """Policy versions among the trained tokens of a trajectory."""
        ages = {version - s.policy_version for s in row.segments if s.policy_version != NOT_GENERATED}
        return sum(map(self._is_trained, ages))


class CountChannel:
    """Implements protocols.Channel."""

    def transfer(self, version: int, copy: int) -> PublishedWeights:
        return PublishedWeights(version, DIGEST, copy)

    def receive(self, published: PublishedWeights) -> int:
        return published.version

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """There is nothing to release."""


def _rows(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [row for group in groups for row in group.trajectories]


def _count_ages(groups: Sequence[TrajectoryGroup], version: int) -> collections.Counter[int]:
    """Generated tokens by age."""
    ages: collections.Counter[int] = collections.Counter()
    for row in _rows(groups):
        for segment in row.segments:
            if segment.policy_version != NOT_GENERATED:
                ages[version - segment.policy_version] += len(segment.tokens)
    return ages


def _list_by_age(ages: Mapping[int, int]) -> list[float]:
    known = [age for age, tokens in ages.items() if tokens]
    return [float(ages.get(age, 0)) for age in range(max(known, default=-1) + 1)]
