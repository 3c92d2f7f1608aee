"""Rewards of the answers of a group: checked, and shaped before advantages are made of them. numpy only."""

from __future__ import annotations

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.packing.rows import BatchError
from areal_jax.types import NOT_GENERATED, Trajectory, TrajectoryGroup

_LARGEST_REWARD = 1e30


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


def shape_rewards(group: TrajectoryGroup, choices: PolicyChoices) -> np.ndarray:
    """float64 [answers]: clip((r - penalty - bias) scale, ±clip) with the length penalty of `overlong_penalty`.

    The order is AReaL's (arXiv 2505.24298, section 7). Raises BatchError as `rewards_of`.
    """
    rewards = rewards_of(group)
    if choices.overlong_tokens:
        tokens = np.array([count_generated(t) for t in group.trajectories], np.float64)
        rewards = rewards - choices.overlong_penalty * overlong_share(
            tokens, choices.longest_answer, choices.overlong_tokens
        )
    if choices.reward_bias or choices.reward_scale != 1.0:
        rewards = (rewards - choices.reward_bias) * choices.reward_scale
    return rewards if choices.reward_clip is None else np.clip(rewards, -choices.reward_clip, choices.reward_clip)


def overlong_share(tokens: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """0 up to `longest - buffer` tokens, then rising to 1 at `longest`. DAPO, arXiv 2503.14476, equation 13."""
    return np.clip((tokens - (longest - buffer)) / buffer, 0.0, 1.0)


def count_generated(trajectory: Trajectory) -> int:
    """Tokens of an answer that the policy generated: those that may be trained."""
    return sum(len(segment.tokens) for segment in trajectory.segments if segment.policy_version != NOT_GENERATED)
