"""Aggregation: how the losses of tokens become one number, as a weight for each token and one denominator. numpy only.

The denominator counts the whole minibatch before any token is rejected, so a loss depends neither on packing nor on
micro-batches. B answers with loss tokens, P prompts, n tokens of an answer:

  token_mean     Σ L / Σ n                             DAPO, CISPO
  sequence_mean  (1/B) Σ_i (1/n_i) Σ_t L               GRPO, GSPO
  sequence_sum   (1/B) Σ_i Σ_t L                       RLOO; LUSPO with a geometric ratio
  constant       (1/B) Σ_i Σ_t L / C                   Dr. GRPO; C = loss.length_constant
  prompt_mean    (1/P) Σ_p Σ_{i in p} Σ_t L / Σ n_i    every prompt counts the same
  token_sum      Σ L
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.learning.packing.rows import PADDING
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup


class Counts(NamedTuple):
    """Loss tokens, and answers and prompts that have some."""

    tokens: int
    answers: int
    prompts: int


def token_weights(
    batch: PackedBatch, aggregation: str, length_constant: int = 1, prompts: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """Weight of each loss token and the denominator of the minibatch, both from tokens before any rejection.

    Args:
      length_constant: C of 'constant'.
      prompts: int [trajectories of the update], the number of each one's group; 'prompt_mean' alone needs it.

    Returns:
      (weights float32 [M, R, N], denominator); 0 at padding.

    Raises ValueError for an unknown aggregation.
    """
    real = batch.trajectory_ids != PADDING  # [M, R, N]
    ids = np.where(real, batch.trajectory_ids, 0)
    counts = np.bincount(batch.trajectory_ids[real], minlength=1)  # [trajectories of the update]
    if aggregation in ('sequence_mean', 'prompt_mean'):
        of_prompt = np.zeros(1, np.int64)
        if aggregation == 'prompt_mean':
            assert prompts is not None, 'prompt_mean needs the groups of the trajectories'
            of_prompt = np.bincount(prompts[: len(counts)], counts[: len(prompts)])
            shared = np.maximum(of_prompt, 1)[prompts[ids]] if real.any() else 1.0
        else:
            shared = np.maximum(counts[ids], 1)
        weights = np.where(real, 1.0 / shared, 0.0).astype(np.float32)
        counted = of_prompt if aggregation == 'prompt_mean' else counts
        return weights, float((counted > 0).sum())
    weights = real.astype(np.float32)
    if aggregation == 'constant':
        weights /= length_constant
    return weights, count_denominator(aggregation, Counts(int(real.sum()), int((counts > 0).sum()), 0))


def count_denominator(aggregation: str, counts: Counts) -> float:
    """What a sum over so many tokens, answers and prompts is divided by; raises ValueError for an unknown name."""
    denominators = {
        'token_mean': counts.tokens, 'sequence_mean': counts.answers, 'sequence_sum': counts.answers,
        'constant': counts.answers, 'prompt_mean': counts.prompts, 'token_sum': 1,
    }  # fmt: skip
    if aggregation not in denominators:
        raise ValueError(f'loss.aggregation={aggregation!r} is unknown; use one of {", ".join(denominators)}')
    return float(denominators[aggregation])


def denominator_scale(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup], aggregation: str) -> float:
    """The factor for denominators that count all `groups` of the update, not only the `kept` ones.

    It is the ratio of what `aggregation` counts in both. Every minibatch gets the same factor; if there is only one
    minibatch, its denominator is exactly the one of all groups. Loss, 'loss/value' and gradient norm shrink by the
    factor. Returns 1 if no group is kept.
    """
    whole, part = (count_denominator(aggregation, _count(side)) for side in (groups, kept))
    return whole / part if part else 1.0


def _count(groups: Sequence[TrajectoryGroup]) -> Counts:
    """Of generated tokens."""
    counts = [
        [sum(len(s.tokens) for s in t.segments if s.policy_version != NOT_GENERATED) for t in g.trajectories]
        for g in groups
    ]
    return Counts(
        sum(map(sum, counts)),
        sum(n > 0 for answers in counts for n in answers),
        sum(any(answers) for answers in counts),
    )
