"""Advantages: the rewards of a group become one number per trajectory. Used by learner.py. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from areal_jax.learning.rows import BatchError
from areal_jax.types import TrajectoryGroup

_LARGEST_REWARD = 1e30
_STD_FLOOR = 1e-4  # keeps the advantage finite where the rewards of a group hardly differ


def group_normalized(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-4) with the population's standard deviation (DeepSeekMath, arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + _STD_FLOOR)


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """r - mean: no division by the spread (Dr. GRPO, arXiv 2503.20783)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """r_i - mean of the others = n / (n - 1) * (r_i - mean) (RLOO, arXiv 2402.14740); needs n >= 2."""
    return (rewards - rewards.mean()) * (len(rewards) / (len(rewards) - 1))


ESTIMATORS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    'group': group_normalized,
    'group_mean': group_mean,
    'rloo': leave_one_out,
}


def rewards_of(group: TrajectoryGroup) -> np.ndarray:
    """float64 [trajectories of the group].

    Raises BatchError where a reward is not finite, or so large that its square is not: it would poison every
    trajectory of its group.
    """
    rewards = np.array([t.reward for t in group.trajectories], np.float64)
    wrong = ~(np.abs(rewards) <= _LARGEST_REWARD)  # NaN too
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise BatchError(
            f'draw {group.draw}, sample {group.trajectories[bad].sample}: reward is {rewards[bad]}; '
            f'verifiers must return finite numbers of at most {_LARGEST_REWARD:g}'
        )
    return rewards


def has_signal(group: TrajectoryGroup) -> bool:
    """False where all rewards are equal (a group of one included): every advantage would be 0.

    Raises BatchError as `rewards_of`.
    """
    rewards_of(group)
    return not group.has_equal_rewards()


def group_advantages(group: TrajectoryGroup, estimator: str) -> np.ndarray:
    """One advantage per trajectory, constant over its tokens: float32 [trajectories of the group].

    Groups may be partial. Equal rewards and a group of one give exactly 0, whatever the rounding of the mean.
    Raises ValueError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f'loss.advantage={estimator!r} is unknown; use one of {", ".join(sorted(ESTIMATORS))}')
    rewards = rewards_of(group)
    if not has_signal(group):
        return np.zeros(len(rewards), np.float32)
    return ESTIMATORS[estimator](rewards).astype(np.float32)
