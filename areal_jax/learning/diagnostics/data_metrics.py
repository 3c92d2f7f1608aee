"""What an update reports of its data besides the loss: rewards, ages of tokens, mismatch. numpy only.

A metric that is not defined (the mean over no tokens) is absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from areal_jax.learning.objective.counting import rewards_of
from areal_jax.learning.packing.rows import BatchError
from areal_jax.telemetry import names
from areal_jax.telemetry.names import MISMATCH_OF, MISMATCH_OF_TURN
from areal_jax.types import NOT_GENERATED, PackedBatch, TrajectoryGroup, concatenate

_MOST_TURNS = 8  # that have a metric each: the last one has those behind it too
Metrics = Mapping[str, Any]  # floats by name, and for a histogram a list of floats


def data_metrics(groups: Sequence[TrajectoryGroup], kept: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Rewards of all groups of the update, and how many groups the filter of equal rewards keeps and removes."""
    metrics = {
        'update/groups': float(len(groups)),
        'update/trained_groups': float(len(kept)),
        'update/filtered_equal_rewards': float(len(groups) - len(kept)),
    }
    rewards = concatenate([rewards_of(g) for g in groups], np.float64)
    if len(rewards):
        metrics['reward/mean'] = float(rewards.mean())
        metrics['reward/std'] = float(rewards.std())
    return metrics


def require_published(batches: Sequence[PackedBatch], version: int) -> None:
    """Raises BatchError for a token of a version after `version`, which starts the update."""
    for batch in batches:
        newest = int(batch.policy_versions[batch.trajectory_ids >= 0].max(initial=NOT_GENERATED))
        if newest > version:
            raise BatchError(f'a token has policy version {newest}, but the update starts from version {version}')


def age_metrics(kept: Sequence[TrajectoryGroup], batches: Sequence[PackedBatch], version: int) -> Metrics:
    """Age of the trained tokens when the batch was formed (version - policy version), and how versions mix in them.

    Masked tokens are counted from the groups, because packing drops a minibatch that has only such tokens. Entry a of
    the histogram is the number of trained tokens of age a; it is empty if nothing is trained.
    """
    trained = _join([b.loss_mask for b in batches], bool)  # [all loss tokens], as the next two
    ids = _join([b.trajectory_ids for b in batches], np.int32)
    ages = version - _join([b.policy_versions for b in batches], np.int32)
    segments = (s for g in kept for t in g.trajectories for s in t.segments)
    generated = sum(len(s.tokens) for s in segments if s.policy_version != NOT_GENERATED)
    metrics = {
        'update/trained_tokens': float(trained.sum()),
        'update/trained_trajectories': 0.0,
        'staleness/masked_tokens': float(generated - trained.sum()),
        'staleness/token_age_histogram': np.bincount(ages[trained]).astype(float).tolist(),
    }
    if trained.any():
        versions_of = np.unique(np.stack([ids[trained], ages[trained]]), axis=1)[0]  # one entry per (trajectory, age)
        counts = np.unique(versions_of, return_counts=True)[1]
        metrics |= {
            'staleness/token_age_mean': float(ages[trained].mean()),
            'staleness/token_age_max': float(ages[trained].max()),
            'update/trained_trajectories': float(len(counts)),
            'staleness/versions_per_trajectory_mean': float(counts.mean()),
            'staleness/versions_per_trajectory_max': float(counts.max()),
        }
    return metrics


def fate_metrics(
    groups: Sequence[TrajectoryGroup],
    kept: Sequence[TrajectoryGroup],
    batches: Sequence[PackedBatch],
    applied: Sequence[bool],
    version: int,
) -> Metrics:
    """What became of every generated token of the update's groups, for the token ledger: lists by age.

    Args:
      groups: all of the update; `kept` are those that the filter of equal rewards left.
      applied: per batch, whether one of its optimizer steps was.
    """
    everything, left = _generated_by_age(groups, version), _generated_by_age(kept, version)
    size = len(everything)
    left = np.pad(left, (0, size - len(left)))
    trained, unused = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for batch, was_applied in zip(batches, applied, strict=True):
        in_loss = trained if was_applied else unused
        in_loss += np.bincount(version - batch.policy_versions[batch.loss_mask], minlength=size)
    fates = {
        names.TRAINED_BY_AGE: trained,
        names.FILTERED_BY_AGE: everything - left,
        names.MASKED_BY_AGE: left - trained - unused,
        names.UNUSED_BY_AGE: unused,
    }
    return {str(name): np.trim_zeros(tokens, 'b').astype(float).tolist() for name, tokens in fates.items()}


def useful_metrics(batches: Sequence[PackedBatch], applied: Sequence[bool]) -> dict[str, float]:
    """Trained tokens that move the weights: of batches with an applied step, those whose advantage is not 0."""
    useful = [
        np.count_nonzero(batch.advantages[batch.loss_mask])
        for batch, was_applied in zip(batches, applied, strict=True)
        if was_applied
    ]
    return {str(names.USEFUL_TOKENS): float(sum(useful))}


def inside_metrics(batches: Sequence[PackedBatch], applied: Sequence[bool]) -> dict[str, float]:
    """Optimizer steps of the update that come before the one that trains a token: over tokens and epochs.

    Args:
      applied: per step, whose number i is of batch i % len(batches).
    """
    if not batches:
        return {}
    tokens = [float(batch.loss_mask.sum()) for batch in batches]
    weights = [tokens[number % len(batches)] for number in range(len(applied))]
    before = [float(sum(applied[:number])) for number in range(len(applied))]
    mean = sum(weight * steps for weight, steps in zip(weights, before, strict=True)) / sum(weights)
    return {str(names.STEPS_INSIDE_MEAN): mean, str(names.STEPS_INSIDE_MAX): max(before)}


def mismatch_metrics(
    batches: Sequence[PackedBatch], logprobs: Sequence[np.ndarray], version: int, engines: Sequence[str] = ()
) -> dict[str, float]:
    """|behavior log-prob - the learner's log-prob| over generated tokens of the current version.

    Both log-probs are of the full softmax, also if the engine sampled with top-k or top-p.

    Args:
      logprobs: per batch float32 [M, R, N] of the weights of `version`, i.e. before the update.
      engines: of each trajectory of the update the one that generated its last segment; () = not by engine.
    """
    differences, trajectories, turns = [np.zeros(0)], [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for batch, learned in zip(batches, logprobs, strict=True):
        current = (batch.trajectory_ids >= 0) & (batch.policy_versions == version)
        differences.append(np.abs(batch.behavior_logprobs.astype(np.float64) - learned)[current])
        trajectories.append(batch.trajectory_ids[current])
        turns.append(_number_turns(batch)[current])
    all_differences = np.concatenate(differences)
    if not len(all_differences):
        return {'mismatch/n': 0.0}
    return {
        'mismatch/n': float(len(all_differences)),
        'mismatch/mean_abs': float(all_differences.mean()),
        'mismatch/max_abs': float(all_differences.max()),
        'mismatch/exact_share': float((all_differences == 0).mean()),
        **_mismatch_by_engine(all_differences, np.concatenate(trajectories), engines),
        **_mismatch_by_turn(all_differences, np.concatenate(turns)),
    }


def _mismatch_by_engine(differences: np.ndarray, trajectories: np.ndarray, engines: Sequence[str]) -> dict[str, float]:
    """Of each engine the number of tokens and their mean."""
    found = {}
    for engine in sorted(set(engines)):
        own = differences[np.isin(trajectories, [index for index, name in enumerate(engines) if name == engine])]
        if len(own):
            found[f'{MISMATCH_OF}{engine}/n'] = float(len(own))
            found[f'{MISMATCH_OF}{engine}/mean_abs'] = float(own.mean())
    return found


def _mismatch_by_turn(differences: np.ndarray, turns: np.ndarray) -> dict[str, float]:
    """Of each turn of rows the number of tokens and their mean; nothing where no row has a second one."""
    turns = np.minimum(turns, _MOST_TURNS)
    found: dict[str, float] = {}
    for turn in np.unique(turns) if turns.max(initial=1) > 1 else ():
        own = differences[turns == turn]
        found |= {
            f'{MISMATCH_OF_TURN}{turn}/n': float(len(own)),
            f'{MISMATCH_OF_TURN}{turn}/mean_abs': float(own.mean()),
        }
    return found


def _number_turns(batch: PackedBatch) -> np.ndarray:
    """int64 [M, R, N]: 1 for the first generated tokens of a trajectory, 2 behind those of its environment, and so on.

    Loss tokens are generated ones alone, so those of the environment are a gap in their positions.
    """
    is_first = np.diff(batch.trajectory_ids, axis=-1, prepend=-2) != 0
    positions = np.take_along_axis(batch.positions, batch.sources, axis=-1)
    begins = ~is_first & (np.diff(positions, axis=-1, prepend=0) > 1)
    count = np.cumsum(begins, axis=-1)
    return 1 + count - np.maximum.accumulate(np.where(is_first, count, 0), axis=-1)


def _generated_by_age(groups: Sequence[TrajectoryGroup], version: int) -> np.ndarray:
    """int64: generated tokens of age 0, 1, ...; counted from segments, as packing leaves some groups out."""
    segments = [s for g in groups for t in g.trajectories for s in t.segments if s.policy_version != NOT_GENERATED]
    ages = np.array([version - s.policy_version for s in segments], np.int64)
    return np.bincount(ages, [len(s.tokens) for s in segments]).astype(np.int64)


def _join(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    return concatenate([a.ravel() for a in arrays], dtype)
