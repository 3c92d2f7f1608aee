"""Measures with the functions of the loss how an update's steps treated its tokens: by age, and for single answers.

Uses the log-probs that the steps have computed anyway, so that no pass is added. numpy only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.counting import find_starts
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.objective.policy_loss import Terms, token_terms
from areal_jax.learning.objective.ratios import kl_term, sequence_sums
from areal_jax.learning.passes import KnownTokens, StepResult, Update
from areal_jax.learning.settings import LearnerSettings
from areal_jax.telemetry.names import BY_AGE, age_ranges, range_label
from areal_jax.types import PackedBatch, TokenArrays

_SUMS = ('tokens', 'weight', 'weight_sq', 'clipped', 'above', 'below', 'closed', 'kl', 'moved', 'stale')


def metrics_by_age(
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    results: Sequence[StepResult],
    known: Sequence[KnownTokens],
    version: int,
) -> dict[str, float]:
    """Metrics of the trained tokens in each range of ages, over all steps of the update; no entry without tokens.

      effective sample size  (Σ w)² / (n Σ w²),   w the correction
      clip fraction          share of the tokens on which an edge of the surrogate acts; above, below: by edge
      masked                 share that a gate, a mask or the veto leaves out, if there is one
      kl                     mean of k - 1 - log k,   k = π_θ / π_behav
      kl of proximal         mean of ρ - 1 - log ρ,   ρ = π_prox / π_behav: staleness and mismatch
      kl of the update       mean of r - 1 - log r,   r = π_θ / π_prox

    Summed over all ranges, they equal the metrics loss/... of the same names, to rounding; a test checks it. {} unless
    the objective is a PolicyObjective.

    Args:
      results: one for each step; step i is on batch i % len(batches).
      known: per batch, as the steps after the first used them.
      version: of the weights before the update.
    """
    objective = settings.objective
    if not isinstance(objective, PolicyObjective):
        return {}
    sums: dict[str, np.ndarray] = {name: np.zeros(0) for name in _SUMS}
    for number, result in enumerate(results):
        batch = batches[number % len(batches)]
        policy = np.where(batch.loss_mask, np.reshape(result.logprobs, batch.loss_mask.shape), 0.0)
        recomputed = policy if number == 0 else known[number % len(batches)].proximal
        compared = compare_tokens(objective, batch, policy, recomputed, version, result.prepared)
        terms = _measure(compared, batch.loss_mask)
        groups = age_ranges(version - batch.policy_versions[batch.loss_mask])  # [trained tokens]
        ranges = max(len(sums['tokens']), int(groups.max(initial=-1)) + 1)
        for name, values in terms.items():
            added = np.bincount(groups, values, minlength=ranges)
            sums[name] = added + np.pad(sums[name], (0, len(added) - len(sums[name])))
    gated = _closes(objective.choices)
    return {
        name: value for number in range(len(sums['tokens'])) for name, value in _of_range(sums, number, gated).items()
    }


class ComparedTokens(NamedTuple):
    """Values for each token of a batch, float64 [M, R, N], 0 at masked tokens."""

    policy: np.ndarray  # log-probs, of the weights that took the gradient
    proximal: np.ndarray  # log-probs as the loss read them
    behavior: np.ndarray  # log-probs
    terms: Terms


def compare_tokens(
    objective: PolicyObjective,
    batch: PackedBatch,
    policy: np.ndarray,
    recomputed: np.ndarray | None,
    version: int,
    prepared: Mapping[str, np.ndarray],
) -> ComparedTokens:
    """Evaluates the functions of the loss on the tokens of a step's batch.

    Args:
      policy: log-probs [M, R, N] of the step.
      recomputed: log-probs of the weights before the update, if the objective reads them.
      version: of the weights before the update.
      prepared: see Objective.prepare.
    """
    mask, choices = batch.loss_mask, objective.choices
    policy, behavior, advantages = (
        np.where(mask, x, 0.0).astype(np.float64) for x in (policy, batch.behavior_logprobs, batch.advantages)
    )
    proximal = np.where(mask, _proximal(choices, policy, behavior, recomputed, version - batch.policy_versions), 0.0)
    over_sequence = functools.partial(_sum_rows, loss_mask=mask, sequence_starts=find_starts(batch.trajectory_ids))
    terms = token_terms(choices, policy, proximal, behavior, advantages, over_sequence, prepared)
    return ComparedTokens(policy, proximal, behavior, terms)


def _measure(compared: ComparedTokens, mask: np.ndarray) -> dict[str, np.ndarray]:
    """The values that are summed by age, float64 [trained tokens] each."""
    policy, proximal, behavior, terms = compared
    found = {
        'tokens': np.ones_like(policy), 'weight': terms.weight, 'weight_sq': terms.weight**2,
        'clipped': terms.above | terms.below, 'above': terms.above, 'below': terms.below, 'closed': terms.closed,
        'kl': kl_term(policy - behavior), 'stale': kl_term(proximal - behavior),
        'moved': kl_term(policy - proximal),
    }  # fmt: skip
    return {name: np.broadcast_to(values, mask.shape)[mask].astype(np.float64) for name, values in found.items()}


def _sum_rows(values: np.ndarray, loss_mask: np.ndarray, sequence_starts: np.ndarray) -> np.ndarray:
    rows = lambda x: x.reshape(-1, x.shape[-1])
    return sequence_sums(rows(values), rows(loss_mask), rows(sequence_starts)).reshape(values.shape)


def _closes(choices: PolicyChoices) -> bool:
    return choices.correction == 'mask' or choices.veto is not None or choices.gate != 'none'


def _of_range(sums: Mapping[str, np.ndarray], number: int, gated: bool) -> dict[str, float]:
    one = {name: float(values[number]) for name, values in sums.items()}
    tokens, weight, weight_sq = one['tokens'], one['weight'], one['weight_sq']
    if not tokens:
        return {}
    name = f'{BY_AGE}{range_label(number)}'
    shares = {
        'clip_fraction': one['clipped'], 'clip_fraction_above': one['above'], 'clip_fraction_below': one['below'],
        'kl': one['kl'], 'kl_of_proximal': one['stale'], 'kl_of_update': one['moved'],
    } | ({'masked': one['closed']} if gated else {})  # fmt: skip
    return {
        f'{name}/tokens': tokens,
        f'{name}/effective_sample_size': weight**2 / (tokens * weight_sq) if weight_sq else 0.0,
        **{f'{name}/{kind}': value / tokens for kind, value in shares.items()},
    }


def _proximal(
    choices: PolicyChoices, policy: np.ndarray, behavior: np.ndarray, recomputed: np.ndarray | None, ages: np.ndarray
) -> np.ndarray:
    """float64 [M, R, N]: log π_prox as in PolicyObjective, on the host."""
    if not choices.uses_proximal or choices.proximal == 'behavior':
        return behavior
    if choices.proximal == 'loglinear':
        return behavior + np.maximum(ages, 0) / (np.maximum(ages, 0) + 1.0) * (policy - behavior)
    assert recomputed is not None, 'a step after the first needs the log-probs of the weights before the update'
    return np.reshape(recomputed, policy.shape).astype(np.float64)


# Values of single tokens in an update, for the answers that a run keeps (telemetry/rollout_writer.py): computed only
# for the rows with these answers.


def read_tokens(update: Update, settings: LearnerSettings, draws: Sequence[int]) -> list[list[TokenArrays]]:
    """The arrays of each trajectory of the groups in `draws`; [] for a group that was not trained.

    If several steps trained a token (learner.epochs), the values are of the last one.

      policy_logprobs    float32, of the weights that took the gradient
      advantages         float32
      loss_mask          bool: False where an age or the end of its answer took it out of the loss
      proximal_logprobs  float32, log π_prox as the loss read it
      ratio              float32, r = π_θ / π_prox of the token alone
      weight             float32, w of the correction, as in the loss
      clip               int8, 1 where the upper edge of the surrogate acts, -1 where the lower does
      closed             bool: a gate, a mask or the veto takes it out of the loss

    The arrays from `proximal_logprobs` on exist for policy objectives only, and are 0 outside the loss mask.
    """
    numbers: dict[int, range] = {}
    first = 0
    for group in update.kept:
        numbers[group.draw] = range(first, first + len(group.trajectories))
        first += len(group.trajectories)
    wanted = {number for draw in draws for number in numbers.get(draw, ())}
    found = dict(_of_trajectories(update, settings, wanted))
    return [[found.get(number, {}) for number in numbers.get(draw, ())] for draw in draws]


def _of_trajectories(update: Update, settings: LearnerSettings, wanted: Set[int]) -> Iterator[tuple[int, TokenArrays]]:
    """Yields (number of the trajectory in the update, its arrays)."""
    batches, results = update.trained.batches, update.trained.results
    for index, batch in enumerate(batches):
        rows = np.asarray(np.isin(batch.trajectory_ids, list(wanted)).any(axis=-1))  # [M, R]
        if not rows.any():
            continue
        number = len(results) - len(batches) + index  # of the last step on this batch
        cut = lambda values, rows=rows: values[rows][None]
        some = _cut_batch(batch, rows)
        policy = cut(np.reshape(results[number].logprobs, batch.loss_mask.shape))
        known = update.trained.known[index]
        recomputed = policy if number == 0 else None if known.proximal is None else cut(known.proximal)
        prepared = {name: cut(values) for name, values in results[number].prepared.items()}
        arrays = _of_batch(settings, some, policy, recomputed, update.version, prepared)
        for one in wanted & set(np.unique(some.trajectory_ids).tolist()):
            place = some.trajectory_ids == one
            yield one, {name: values[place] for name, values in arrays.items()}


def _cut_batch(batch: PackedBatch, rows: np.ndarray) -> PackedBatch:
    fields = {name: values[rows][None] for name, values in batch.fields().items()}
    return dataclasses.replace(batch, **fields, columns={}, inputs={})


def _of_batch(
    settings: LearnerSettings,
    batch: PackedBatch,
    policy: np.ndarray,
    recomputed: np.ndarray | None,
    version: int,
    prepared: Mapping[str, np.ndarray],
) -> TokenArrays:
    """Arrays by name, [1, rows, N] each."""
    mask = batch.loss_mask
    found = {
        'policy_logprobs': policy.astype(np.float32),
        'advantages': batch.advantages,
        'loss_mask': mask,
    }
    if not isinstance(settings.objective, PolicyObjective):
        return found
    compared = compare_tokens(settings.objective, batch, policy, recomputed, version, prepared)
    terms = compared.terms
    whole = lambda values, dtype: np.where(mask, np.broadcast_to(values, mask.shape), 0).astype(dtype)
    return found | {
        'proximal_logprobs': compared.proximal.astype(np.float32),
        'ratio': whole(np.exp(compared.policy - compared.proximal), np.float32),
        'weight': whole(terms.weight, np.float32),
        'clip': whole(terms.above, np.int8) - whole(terms.below, np.int8),
        'closed': whole(terms.closed, bool),
    }
