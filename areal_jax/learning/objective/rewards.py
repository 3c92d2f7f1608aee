"""Rewards of the episodes of a group: checked, and shaped before advantages are made of them. numpy only."""

from __future__ import annotations

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.packing.rows import BatchError
from areal_jax.types import NOT_GENERATED, Trajectory, TrajectoryGroup

_LARGEST_REWARD = 1e30


def rewards_of(group: TrajectoryGroup) -> np.ndarray:
    """float64 [episodes of the group].

    Raises BatchError where a reward is not finite, or so large that its square is not: it would poison every
    trajectory of its group.
    """
    rewards = np.array([t.reward for t in group.heads], np.float64)
    wrong = ~(np.abs(rewards) <= _LARGEST_REWARD)  # NaN too
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise BatchError(
            f'draw {group.draw}, sample {group.heads[bad].sample}: reward is {rewards[bad]}; '
            f'verifiers must return finite numbers of at most {_LARGEST_REWARD:g}'
        )
    return rewards


def has_signal(group: TrajectoryGroup) -> bool:
    """False where all rewards are equal (a group of one included): every advantage would be 0.

    Raises BatchError as `rewards_of`.
    """
    rewards_of(group)
    return not group.has_equal_rewards()


def shape_rewards(group: TrajectoryGroup, choices: PolicyChoices) -> np.ndarray:
    """float64 [episodes]: clip((r - penalty - bias) scale, ±clip) with the length penalty of `overlong_penalty`.

    The order is AReaL's (arXiv 2505.24298, section 7). Raises BatchError as `rewards_of`.
    """
    rewards = rewards_of(group)
    if choices.overlong_tokens:
        tokens = sum_rows(group, count_generated_of_rows(group))
        rewards = rewards - choices.overlong_penalty * overlong_share(
            tokens, choices.longest_answer, choices.overlong_tokens
        )
    if choices.reward_bias or choices.reward_scale != 1.0:
        rewards = (rewards - choices.reward_bias) * choices.reward_scale
    return rewards if choices.reward_clip is None else np.clip(rewards, -choices.reward_clip, choices.reward_clip)


def overlong_share(tokens: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """0 up to `longest - buffer` tokens, then rising to 1 at `longest`. DAPO, arXiv 2503.14476, equation 13."""
    return np.clip((tokens - (longest - buffer)) / buffer, 0.0, 1.0)


def count_generated_of_rows(group: TrajectoryGroup) -> np.ndarray:
    """float64 [rows of the group], see `count_generated`."""
    return np.array([count_generated(t) for t in group.trajectories], np.float64)


def sum_rows(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    """float64 [rows of the group] -> [episodes]; where each has one row the values themselves, bit for bit."""
    sizes = [len(rows) for rows in group.episodes]
    return values if len(sizes) == len(values) else np.add.reduceat(values, np.cumsum([0, *sizes[:-1]]))


def to_rows(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    """[episodes of the group] -> [rows]: each row has the value of its episode."""
    return np.repeat(values, [len(rows) for rows in group.episodes])


def count_generated(trajectory: Trajectory) -> int:
    """Tokens of a row that the policy generated in it: those that may be trained."""
    return sum(len(segment.tokens) for segment in trajectory.segments if segment.policy_version != NOT_GENERATED)
