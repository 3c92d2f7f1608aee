"""Arrow 7, seen from outside: what an update reports of its data beside the loss. numpy only.

A quantity that is not defined (the mean over no tokens) is absent from the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.advantages import rewards_of
from areal_jax.types import PackedBatch, TrajectoryGroup


def data_metrics(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards of all groups of the update; counts of those that stay after the filter."""
    metrics = {
        'update/groups': float(len(groups)),
        'update/trained_groups': float(len(kept)),
        'update/filtered_equal_rewards': float(len(groups) - len(kept)),
    }
    rewards = np.concatenate([np.zeros(0), *(rewards_of(g) for g in groups)])
    if len(rewards):
        metrics['reward/mean'] = float(rewards.mean())
        metrics['reward/std'] = float(rewards.std())
    return metrics


def age_metrics(batches: Sequence[PackedBatch], version: int) -> dict[str, float]:
    """Age of the trained tokens when the batch was formed: version - policy version; and tokens masked for their age.

    Raises ValueError for a token of a version that is not published yet.
    """
    real = np.concatenate([np.zeros(0, bool), *((b.trajectory_ids >= 0).ravel() for b in batches)])
    trained = np.concatenate([np.zeros(0, bool), *(b.loss_mask.ravel() for b in batches)])
    ages = version - np.concatenate([np.zeros(0, np.int32), *(b.policy_versions.ravel() for b in batches)])
    if (ages[real] < 0).any():
        newest = version - int(ages[real].min())
        raise ValueError(f'a token has policy version {newest}, but the update starts from version {version}')
    metrics = {
        'update/trained_tokens': float(trained.sum()),
        'staleness/masked_tokens': float((real & ~trained).sum()),
    }
    if trained.any():
        metrics['staleness/token_age_mean'] = float(ages[trained].mean())
        metrics['staleness/token_age_max'] = float(ages[trained].max())
    return metrics


def mismatch_metrics(batches: Sequence[PackedBatch], logprobs: Sequence[np.ndarray], version: int) -> dict[str, float]:
    """Engine against learner, |behavior - learner's log-prob|, over generated tokens of the current version.

    Args:
      logprobs: per batch float32 [M, R, N] of the weights of `version`, i.e. before the update.
    """
    differences = [np.zeros(0)]
    for batch, learned in zip(batches, logprobs, strict=True):
        current = (batch.trajectory_ids >= 0) & (batch.policy_versions == version)
        differences.append(np.abs(batch.behavior_logprobs.astype(np.float64) - learned)[current])
    all_differences = np.concatenate(differences)
    if not len(all_differences):
        return {'mismatch/n': 0.0}
    return {
        'mismatch/n': float(len(all_differences)),
        'mismatch/mean_abs': float(all_differences.mean()),
        'mismatch/max_abs': float(all_differences.max()),
        'mismatch/exact_share': float((all_differences == 0).mean()),
    }
