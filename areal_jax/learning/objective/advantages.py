"""Advantages: the rewards of an update become one number per trajectory. numpy only.

The named estimators see one group at a time. An own one, loss.advantage='FILE.py:FUNCTION', sees a whole update:
function(rewards, groups) -> advantages, all [trajectories], where `groups` numbers the group of each trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from areal_jax.errors import UserError
from areal_jax.learning.packing.rows import BatchError
from areal_jax.plugins import is_own, load_function, raising_user_error
from areal_jax.types import TrajectoryGroup, concatenate

# float64 [n] rewards and int64 [n] numbers of groups, ascending from 0 -> [n] advantages
OwnEstimator: TypeAlias = Callable[[np.ndarray, np.ndarray], object]
Estimator: TypeAlias = Callable[[Sequence[TrajectoryGroup]], list[np.ndarray]]  # per group float32 [its trajectories]

_FIELD = 'loss.advantage'
_LARGEST_REWARD = 1e30
STD_FLOOR = 1e-4  # keeps the advantage finite where the rewards of a group hardly differ


def group_normalized(rewards: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-4) with the population's standard deviation (DeepSeekMath, arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + STD_FLOOR)


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


def make_estimator(name: str) -> Estimator:
    """The advantages of all groups of an update, by the name of an estimator or by an own function.

    An own function is loaded here, once. Raises UserError for one that cannot be loaded.
    """
    if not is_own(name):
        return lambda groups: [group_advantages(group, name) for group in groups]
    function = load_function(name, _FIELD)
    return lambda groups: own_advantages(groups, function, name)


def own_advantages(groups: Sequence[TrajectoryGroup], function: OwnEstimator, spec: str) -> list[np.ndarray]:
    """Per group float32 [its trajectories], from one call of an own function over all of them.

    Args:
      spec: names the function in errors.

    Raises UserError if the function raises, or returns another shape or a number that is not finite.
    """
    if not groups:
        return []
    sizes = [len(group.trajectories) for group in groups]
    rewards = concatenate([rewards_of(group) for group in groups], np.float64)
    with raising_user_error(spec, _FIELD):
        returned = function(rewards.copy(), np.repeat(np.arange(len(groups)), sizes))
        advantages = np.asarray(returned, np.float64)
    if advantages.shape != rewards.shape:
        raise UserError(
            f'{_FIELD}={spec}: it returned the shape {advantages.shape} for {len(rewards)} rewards of {len(groups)} '
            f'groups; it must return one advantage for each reward, the shape {rewards.shape}'
        )
    with np.errstate(over='ignore'):
        narrow = advantages.astype(np.float32)
    if not np.isfinite(narrow).all():
        bad = int(np.flatnonzero(~np.isfinite(narrow))[0])
        raise UserError(
            f'{_FIELD}={spec}: advantage {bad} is {advantages[bad]}, for the reward {rewards[bad]:g}; advantages must '
            'be finite in float32'
        )
    return np.split(narrow, np.cumsum(sizes)[:-1])
