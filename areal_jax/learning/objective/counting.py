"""Counts for an update: groups that train something, tokens that it reads, weights and denominators. numpy only.

A controller without a learner counts too, to price an update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.config.fields import ConfigError
from areal_jax.learning.packed_rows import PADDING, BatchError
from areal_jax.learning.packing import count_tokens
from areal_jax.types import NOT_GENERATED, PackedBatch, Segment, Trajectory, TrajectoryGroup

_LARGEST_REWARD = 1e30


def rewards_of(group: TrajectoryGroup) -> np.ndarray:
    """float64 [episodes of the group].

    Raises BatchError for a reward that is not finite, or so large that its square is not: it would spoil every
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
    """False if all rewards are equal (a group of one included): every advantage would be 0.

    Raises BatchError as `rewards_of`.
    """
    rewards_of(group)
    return not group.has_equal_rewards()


def data_metrics(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards of all groups of the update, and how many groups the filter of equal rewards keeps and removes."""
    metrics = {
        'update/groups': float(len(groups)),
        'update/trained_groups': float(len(kept)),
        'update/filtered_equal_rewards': float(len(groups) - len(kept)),
    }
    rewards = np.hstack([np.zeros(0), *map(rewards_of, groups)])
    if len(rewards):
        metrics['reward/mean'] = float(rewards.mean())
        metrics['reward/std'] = float(rewards.std())
    return metrics


def count_generated(trajectory: Trajectory) -> int:
    """The number of tokens of a row that the policy generated there: the ones that may be trained."""
    return sum(len(segment.tokens) for segment in trajectory.segments if segment.policy_version != NOT_GENERATED)


# Tokens drawn from a part of the softmax only (rollout.top_k, rollout.top_p): refused, or trained and measured.
#
# The learner's log-probs and `behavior_logprobs` are of the full softmax, but the engine drew from the part that top-k
# or top-p kept, of mass Z. So the ratio to the policy that acted has a factor of Z per token, which the loss leaves
# out.


def require_full_softmax(groups: Sequence[TrajectoryGroup]) -> None:
    """Raises ConfigError if a token was drawn from a cut softmax."""
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
      groups: the trained ones.
      oldest_version: tokens of an earlier version are not trained; None = all are.
    """
    oldest = NOT_GENERATED + 1 if oldest_version is None else max(oldest_version, NOT_GENERATED + 1)
    segments = [s for g in groups for t in g.trajectories for s in t.segments if s.policy_version >= oldest]
    if not any(map(_is_cut, segments)):
        return {}
    drawn = np.hstack([SAMPLING_LOGPROBS.of(s.columns, s.behavior_logprobs) for s in segments])
    mass = np.exp(np.hstack([s.behavior_logprobs for s in segments]).astype(np.float64) - drawn)
    return {'sampling/kept_mass_mean': float(mass.mean()), 'sampling/kept_mass_min': float(mass.min())}


def _is_cut(segment: Segment) -> bool:
    return SAMPLING_LOGPROBS.name in segment.columns


# The cost of an update in tokens, before it runs.


class UpdatePrice(NamedTuple):
    """Counts the tokens that an update reads."""

    packing: str  # 'shared_prompt' | 'ordinary', as the attention of the learner allows
    epochs: int
    filters: bool  # groups of equal rewards are left out
    masks_truncated: bool = False  # answers that ended at their limit are left out

    def tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return count_tokens(self.read(self.kept(groups)), self.packing) * self.epochs

    def kept(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [group for group in groups if not self.filters or has_signal(group)]

    def read(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The groups with only the rows that an update reads; groups without any are left out."""
        if not self.masks_truncated:
            return list(groups)
        rows = [(group, tuple(t for t in group.trajectories if t.finish_reason != 'length')) for group in groups]
        return [dataclasses.replace(group, trajectories=own) for group, own in rows if own]


# Aggregation: how the losses of tokens become one number, as a weight for each token and one denominator.
#
# The denominator counts the whole minibatch before any token is rejected, so a loss depends neither on packing nor on
# micro-batches. B answers with loss tokens, P prompts, n tokens of an answer:
#
#   token_mean     Σ L / Σ n                             DAPO, CISPO
#   sequence_mean  (1/B) Σ_i (1/n_i) Σ_t L               GRPO, GSPO
#   sequence_sum   (1/B) Σ_i Σ_t L                       RLOO; LUSPO with a geometric ratio
#   constant       (1/B) Σ_i Σ_t L / C                   Dr. GRPO; C = loss.length_constant
#   prompt_mean    (1/P) Σ_p Σ_{i in p} Σ_t L / Σ n_i    every prompt counts the same
#   token_sum      Σ L


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
      prompts: int [trajectories of the update], the number of each trajectory's group; only 'prompt_mean' needs it.

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
    """The divisor of a sum over the tokens, answers and prompts of `counts`; raises ValueError for an unknown name."""
    denominators = {
        'token_mean': counts.tokens, 'sequence_mean': counts.answers, 'sequence_sum': counts.answers,
        'constant': counts.answers, 'prompt_mean': counts.prompts, 'token_sum': 1,
    }  # fmt: skip
    if aggregation not in denominators:
        raise ValueError(f'loss.aggregation={aggregation!r} is unknown; use one of {", ".join(denominators)}')
    return float(denominators[aggregation])


def denominator_scale(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup], aggregation: str) -> float:
    """The factor for denominators that count all `groups` of the update, not only the `kept` ones.

    It is the ratio of the two counts that `aggregation` divides by. Every minibatch gets the same factor; a single
    minibatch has exactly the denominator of all groups. Loss, 'loss/value' and gradient norm shrink by the factor.
    Returns 1 if no group is kept.
    """
    whole, part = (count_denominator(aggregation, _count(side)) for side in (groups, kept))
    return whole / part if part else 1.0


def _count(groups: Sequence[TrajectoryGroup]) -> Counts:
    counts = [
        [sum(len(s.tokens) for s in t.segments if s.policy_version != NOT_GENERATED) for t in g.trajectories]
        for g in groups
    ]
    return Counts(
        sum(map(sum, counts)),
        sum(n > 0 for answers in counts for n in answers),
        sum(any(answers) for answers in counts),
    )


def find_starts(trajectory_ids: np.ndarray) -> np.ndarray:
    """int32 of the same shape [..., N]: the place in the row of the first loss token of the same answer.

    The loss tokens of an answer are contiguous, and padding counts as one more answer.
    """
    places = np.arange(trajectory_ids.shape[-1], dtype=np.int32)
    is_first = np.ones(trajectory_ids.shape, bool)
    is_first[..., 1:] = trajectory_ids[..., 1:] != trajectory_ids[..., :-1]
    return np.maximum.accumulate(np.where(is_first, places, 0), axis=-1).astype(np.int32)
