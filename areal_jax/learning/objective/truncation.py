"""Tokens drawn from a part of the softmax only (rollout.top_k, rollout.top_p): refused, or trained and measured.

The learner's log-probs and `behavior_logprobs` are taken from the full softmax, but the engine drew from the part that
top-k or top-p kept, of mass Z. The ratio to the policy that acted therefore has a factor of Z per token, which the loss
leaves out. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.config.ranges import ConfigError
from areal_jax.types import NOT_GENERATED, Segment, TrajectoryGroup


def require_full_softmax(groups: Sequence[TrajectoryGroup]) -> None:
    """Raises ConfigError where a token was drawn from a cut softmax."""
    for group in groups:
        for trajectory in group.trajectories:
            if any(_is_cut(segment) for segment in trajectory.segments):
                raise ConfigError(
                    f"loss.truncated_sampling='refuse', but {trajectory.engine} drew draw {group.draw}, sample "
                    f'{trajectory.sample} from a cut softmax: set rollout.top_k=0 and rollout.top_p=1, or accept the '
                    "bias with loss.truncated_sampling='full_softmax'"
                )


def kept_mass_metrics(groups: Sequence[TrajectoryGroup], oldest_version: int | None) -> dict[str, float]:
    """Mean and minimum of the mass Z = exp(behavior - sampling log-prob) over the trained tokens; {} without a cut.

    Args:
      groups: those that are trained.
      oldest_version: tokens generated before it are not trained; None = all are.
    """
    oldest = NOT_GENERATED + 1 if oldest_version is None else max(oldest_version, NOT_GENERATED + 1)
    segments = [s for g in groups for t in g.trajectories for s in t.segments if s.policy_version >= oldest]
    if not any(map(_is_cut, segments)):
        return {}
    drawn = np.concatenate([SAMPLING_LOGPROBS.of(s.columns, s.behavior_logprobs) for s in segments])
    mass = np.exp(np.concatenate([s.behavior_logprobs for s in segments]).astype(np.float64) - drawn)
    return {'sampling/kept_mass_mean': float(mass.mean()), 'sampling/kept_mass_min': float(mass.min())}


def _is_cut(segment: Segment) -> bool:
    return SAMPLING_LOGPROBS.name in segment.columns
