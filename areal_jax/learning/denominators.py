"""Arrow 7, what the sum over the loss tokens of a minibatch is divided by. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.rows import PADDING
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup

DENOMINATORS = ('kept', 'all')


def denominator_weights(batch: PackedBatch, aggregation: str) -> tuple[np.ndarray, float]:
    """Weight of each loss token and the denominator of the minibatch, both from tokens before any rejection.

    'token_mean': every token 1, over the tokens. 'sequence_mean': every token 1 / (tokens of its trajectory), over the
    trajectories. Either way the loss is a weighted masked sum over the denominator.

    Returns:
      (float32 of the shape of `batch.trajectory_ids`, denominator).
    """
    real = batch.trajectory_ids != PADDING
    if aggregation == 'token_mean':
        return real.astype(np.float32), float(real.sum())
    if aggregation == 'sequence_mean':
        counts = np.bincount(batch.trajectory_ids[real], minlength=1)
        weights = np.where(real, 1.0 / np.maximum(counts[np.where(real, batch.trajectory_ids, 0)], 1), 0.0)
        return weights.astype(np.float32), float((counts > 0).sum())
    raise ValueError(f"loss.aggregation={aggregation!r} is unknown; use 'token_mean' or 'sequence_mean'")


def denominator_scale(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup], aggregation: str) -> float:
    """What a denominator of `denominator_weights` grows by where it counts all `groups`, not only the `kept` ones.

    The ratio of their loss tokens ('token_mean') or sequences ('sequence_mean'). Every minibatch grows by the same
    ratio, as if each had its share of the groups left out; a single one then has the denominator of all groups. Loss,
    'loss/value' and gradient norm are divided by it too. Returns 1 where no group is kept.
    """
    whole, part = (_count_loss(side, aggregation) for side in (groups, kept))
    return whole / part if part else 1.0


def _count_loss(groups: Sequence[TrajectoryGroup], aggregation: str) -> int:
    """Generated tokens, or sequences that have some."""
    counts = [
        sum(len(s.tokens) for s in t.segments if s.policy_version != NOT_GENERATED)
        for g in groups
        for t in g.trajectories
    ]
    return sum(counts) if aggregation == 'token_mean' else sum(n > 0 for n in counts)
