"""Denominators: what the sum over the loss tokens of a minibatch is divided by. numpy only.

They weight the tokens of a train step, and scale it for groups that were left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.packing.rows import PADDING
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup


def denominator_weights(batch: PackedBatch, aggregation: str) -> tuple[np.ndarray, float]:
    """Weight of each loss token and the denominator of the minibatch, both from tokens before any rejection.

    'token_mean': every token has weight 1, and the denominator is the number of tokens. 'sequence_mean': a token has
    weight 1 / (tokens of its trajectory), and the denominator is the number of trajectories. In both cases the loss is
    a weighted masked sum, divided by the denominator.

    Returns:
      (weights float32 [M, R, N], denominator).
    """
    real = batch.trajectory_ids != PADDING  # [M, R, N]
    if aggregation == 'token_mean':
        return real.astype(np.float32), float(real.sum())
    if aggregation == 'sequence_mean':
        counts = np.bincount(batch.trajectory_ids[real], minlength=1)  # [trajectories of the update]
        weights = np.where(real, 1.0 / np.maximum(counts[np.where(real, batch.trajectory_ids, 0)], 1), 0.0)
        return weights.astype(np.float32), float((counts > 0).sum())
    raise ValueError(f"loss.aggregation={aggregation!r} is unknown; use 'token_mean' or 'sequence_mean'")


def denominator_scale(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup], aggregation: str) -> float:
    """The factor for denominators that count all `groups` of the update, not only the `kept` ones.

    It is the ratio of the loss tokens of both ('token_mean') or of their sequences ('sequence_mean'). Every minibatch
    gets the same factor; if there is only one minibatch, its denominator is exactly the one of all groups. Loss,
    'loss/value' and gradient norm shrink by the factor. Returns 1 if no group is kept.
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
