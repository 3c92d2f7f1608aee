"""Advantages of packed loss tokens: those that need a pass before the first step, and all that are whitened.

A critic, an optimal baseline and a KL in the reward need a pass. Whitening reads the loss tokens of all minibatches of
the update, each once, and no others. `trajectory_ids` tells the answer of a token. numpy only; advantages.py has the
estimators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.advantages import Estimator, Passed, whiten
from areal_jax.learning.objective.gae import generalized_advantages
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, VALUES, TokenAdvantages
from areal_jax.learning.objective.penalties import estimate_kl
from areal_jax.learning.objective.rewards import shape_rewards, sum_rows, to_rows
from areal_jax.learning.objective.sums import find_starts, sequence_sums
from areal_jax.types import PackedBatch, TrajectoryGroup, concatenate

Known = Mapping[str, np.ndarray]  # of a minibatch, see Objective.token_advantages


def packed_advantages(
    choices: PolicyChoices,
    estimate: Estimator,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
) -> list[TokenAdvantages]:
    """Per minibatch those of its tokens, 0 outside the loss.

    With the advantage 'gae' returns are A + V before whitening. With kl_in='reward' an answer has the reward R - β Σ kₜ
    before its group is compared; with the advantages 'reward' and 'gae' the token t has the reward -β kₜ, so that for
    'reward' its advantage is the return without discount, R - β Σ kₛ over s >= t (REINFORCE++, arXiv 2501.03262). k
    estimates KL(behavior ‖ reference) from the log-probs of the policy that drew the tokens. Where no pass is needed,
    `estimate` has made the advantages of the batches, which are whitened alone.
    """
    divergences = [_divergences(choices, *of) for of in zip(batches, known, strict=True)]
    if choices.advantage == 'gae':
        return _of_critic(choices, groups, batches, known, divergences)
    if is_kl_in_reward(choices) and choices.advantage == 'reward':
        advantages = _returns(choices, groups, batches, divergences)
    else:
        sizes = [len(group.trajectories) for group in groups]
        if is_kl_in_reward(choices) or choices.advantage == 'optimal_baseline':
            estimated = estimate(groups, _measure_answers(choices, sizes, groups, batches, known, divergences))
            values = concatenate(estimated, np.float64)
        else:
            values = _of_rows(batches, sum(sizes))
        if choices.whiten == 'batch':
            values = whiten(values, _sum_rows(batches, [np.ones(b.loss_mask.shape) for b in batches], sum(sizes)))
        advantages = _spread(batches, values)
    return [TokenAdvantages(_trained(b, a)) for b, a in zip(batches, advantages, strict=True)]


def is_kl_in_reward(choices: PolicyChoices) -> bool:
    return bool(choices.kl_coefficient) and choices.kl_in == 'reward'


def squared_norms(logprobs: np.ndarray, collisions: np.ndarray) -> np.ndarray:
    """1 - 2 π + Σ_v π_v², at least 0: the squared norm of ∂ log π / ∂ logits of a token, from one forward pass.

    Args:
      logprobs: log π of the token.
      collisions: log Σ_v π_v².
    """
    return np.maximum(1 - 2 * np.exp(logprobs) + np.exp(collisions), 0.0)


def _measure_answers(
    choices: PolicyChoices,
    sizes: Sequence[int],
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
    divergences: Sequence[np.ndarray],
) -> list[Passed]:
    """By group what `estimate` reads: sums over the loss tokens of each answer, in all of its rows.

    Args:
      sizes: rows of each group.
    """
    of_rows = lambda arrays: np.split(_sum_rows(batches, arrays, sum(sizes)), np.cumsum(sizes))[:-1]
    by_group = lambda arrays: [sum_rows(*of) for of in zip(groups, of_rows(arrays), strict=True)]
    zeros = [np.zeros(batch.loss_mask.shape) for batch in batches]
    logs = norms = zeros
    if choices.advantage == 'optimal_baseline':
        logs = [of[POLICY] - batch.behavior_logprobs for batch, of in zip(batches, known, strict=True)]
        norms = [squared_norms(of[POLICY].astype(np.float64), of[COLLISION].astype(np.float64)) for of in known]
    penalties = [choices.kl_coefficient * values for values in divergences]
    return [Passed(*of) for of in zip(*map(by_group, (penalties, logs, norms)), strict=True)]


def _divergences(choices: PolicyChoices, batch: PackedBatch, known: Known) -> np.ndarray:
    """float64 [M, R, N]: k of each loss token; 0 without a divergence in the reward."""
    if not is_kl_in_reward(choices):
        return np.zeros(batch.loss_mask.shape)
    behavior, reference = (
        np.where(batch.loss_mask, x, 0.0).astype(np.float64) for x in (batch.behavior_logprobs, known[REFERENCE])
    )
    return np.asarray(estimate_kl(behavior - reference, choices.kl_estimator))


def _returns(
    choices: PolicyChoices,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    divergences: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Of each loss token R - β Σ kₛ over the loss tokens from it to the end of its answer; whitened if asked for."""
    rewards = _spread_rewards(choices, groups, batches)
    later = [_sum_later(*of) for of in zip(batches, divergences, strict=True)]
    returns = [r - choices.kl_coefficient * k for r, k in zip(rewards, later, strict=True)]
    return returns if choices.whiten == 'none' else _whiten(batches, returns)


def _of_critic(
    choices: PolicyChoices,
    groups: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    known: Sequence[Known],
    divergences: Sequence[np.ndarray],
) -> list[TokenAdvantages]:
    """From the values of the critic; the reward of an answer comes with the last trained token of each row."""
    rewards = _spread_rewards(choices, groups, batches)
    values = [_trained(batch, of[VALUES]).astype(np.float64) for batch, of in zip(batches, known, strict=True)]
    advantages = [
        generalized_advantages(
            v, -choices.kl_coefficient * k, r, of.get(END_VALUES, np.zeros_like(v)), b.loss_mask, b.trajectory_ids,
            discount=choices.discount, decay=choices.gae_lambda,
        )
        for b, v, k, r, of in zip(batches, values, divergences, rewards, known, strict=True)
    ]  # fmt: skip
    returns = [_trained(b, a + v) for b, a, v in zip(batches, advantages, values, strict=True)]
    if choices.whiten == 'batch':
        advantages = _whiten(batches, advantages)
    found = zip(batches, advantages, returns, strict=True)
    return [TokenAdvantages(_trained(batch, a), of) for batch, a, of in found]


def _trained(batch: PackedBatch, values: np.ndarray) -> np.ndarray:
    """float32: the values of the loss tokens, 0 elsewhere."""
    return np.where(batch.loss_mask, values, 0.0).astype(np.float32)


def _sum_rows(batches: Sequence[PackedBatch], arrays: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """float64 [rows of the update]: sums over the loss tokens of each."""
    add = lambda batch, values: np.bincount(
        batch.trajectory_ids[batch.loss_mask], values[batch.loss_mask].astype(np.float64), minlength=rows
    )
    return sum((add(*of) for of in zip(batches, arrays, strict=True)), np.zeros(rows))


def _of_rows(batches: Sequence[PackedBatch], rows: int) -> np.ndarray:
    """float64 [rows of the update]: the advantage of the loss tokens of each, 0 where it has none."""
    found = np.zeros(rows)
    for batch in batches:
        found[batch.trajectory_ids[batch.loss_mask]] = batch.advantages[batch.loss_mask]
    return found


def _spread(batches: Sequence[PackedBatch], values: np.ndarray) -> list[np.ndarray]:
    """At each loss token the value of its row."""
    return [np.where(b.loss_mask, values[np.where(b.loss_mask, b.trajectory_ids, 0)], 0.0) for b in batches]


def _spread_rewards(
    choices: PolicyChoices, groups: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch]
) -> list[np.ndarray]:
    of_rows = [to_rows(group, shape_rewards(group, choices)) for group in groups]
    return _spread(batches, concatenate(of_rows, np.float64))


def _sum_later(batch: PackedBatch, values: np.ndarray) -> np.ndarray:
    """At each loss token the sum over it and the later ones of its answer, which stand side by side in a row."""
    by_row = lambda x: x.reshape(-1, x.shape[-1])
    mask, starts = by_row(batch.loss_mask), by_row(find_starts(batch.trajectory_ids))
    kept = np.where(mask, by_row(values), 0.0)
    before = np.cumsum(kept, axis=-1) - kept  # in the row
    of_answer = sequence_sums(kept, mask, starts)
    return (of_answer - before + np.take_along_axis(before, starts, axis=-1)).reshape(values.shape)


def _whiten(batches: Sequence[PackedBatch], values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Values of loss tokens [M, R, N] each, 0 elsewhere."""
    masks = [batch.loss_mask for batch in batches]
    trained = concatenate([v[mask] for v, mask in zip(values, masks, strict=True)], np.float64)
    whitened, found = whiten(trained, np.ones(len(trained))), [np.zeros(mask.shape) for mask in masks]
    first = 0
    for array, mask in zip(found, masks, strict=True):
        array[mask] = whitened[first : first + mask.sum()]
        first += mask.sum()
    return found
