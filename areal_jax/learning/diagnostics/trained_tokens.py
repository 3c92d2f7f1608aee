"""What an update knew of single tokens, for the answers that a run keeps (telemetry/rollouts/). numpy only.

Made from what the steps have computed anyway, by the functions of the loss, and only for the rows with these answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from areal_jax.learning.diagnostics.ratios_by_age import compare_tokens
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.update import Update
from areal_jax.types import PackedBatch, TokenArrays


def read_tokens(update: Update, settings: LearnerSettings, draws: Sequence[int]) -> list[list[TokenArrays]]:
    """Of each of these groups, for each of its trajectories; [] for a group that was not trained.

    Several steps on a token (learner.epochs): those of the last one.

      policy_logprobs    float32, of the weights that took the gradient
      advantages         float32
      loss_mask          bool: False where an age or the end of its answer took it out of the loss
      proximal_logprobs  float32, log π_prox as the loss read it
      ratio              float32, r = π_θ / π_prox of the token alone
      weight             float32, w of the correction, as in the loss
      clip               int8, 1 where the upper edge of the surrogate acts, -1 where the lower does
      closed             bool: a gate, a mask or the veto takes it out of the loss

    Those from the proximal log-probs on are of policy objectives, and 0 outside the loss mask.
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
    """(number of the trajectory in the update, its arrays)."""
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
    """These rows of a batch as one micro-batch, without columns."""
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
    """By name, [1, rows, N] each."""
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
