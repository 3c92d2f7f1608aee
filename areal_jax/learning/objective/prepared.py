"""Decisions over a whole minibatch that a loss cannot make in a micro-batch: made on the host before a step."""

from __future__ import annotations

import numpy as np

from areal_jax.learning.objective.sums import find_starts
from areal_jax.types import PackedBatch


def keep_second_moment(batch: PackedBatch, policy_logprobs: np.ndarray, threshold: float) -> np.ndarray:
    """float32 [M, R, N]: 0 at the tokens with the largest (log π_θ - log π_behav)² until the mean of the rest is below.

    M2PO, arXiv 2510.01161, equation 6 and algorithm 1, over the minibatch: the result does not depend on packing. Equal
    squares go together, the fewest tokens that suffice.
    """
    mask = batch.loss_mask
    squares = (policy_logprobs[mask].astype(np.float64) - batch.behavior_logprobs[mask]) ** 2
    ascending = np.sort(squares)
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)
    below = np.flatnonzero(means < threshold)
    largest = ascending[below[-1]] if len(below) else -1.0
    if len(below) and below[-1] + 1 < len(ascending) and ascending[below[-1] + 1] == largest:
        smaller = ascending[ascending < largest]  # a part of equal squares would depend on their order
        largest = smaller[-1] if len(smaller) else -1.0
    gate = np.zeros(mask.shape, np.float32)
    gate[mask] = squares <= largest
    return gate


def keep_share(batch: PackedBatch, values: np.ndarray, share: float) -> np.ndarray:
    """float32 [M, R, N]: 1 at the share of the loss tokens with the largest values [M, R, N], at least one."""
    mask = batch.loss_mask
    found, gate = values[mask], np.zeros(mask.shape, np.float32)
    if len(found):
        kept = max(1, round(share * len(found)))
        gate[mask] = found >= np.partition(found, len(found) - kept)[len(found) - kept]
    return gate


def uniform_numbers(batch: PackedBatch, seed: int) -> np.ndarray:
    """float32 [M, R, N] in [0, 1): from the seed, the token and its place in the answer, wherever that is packed."""
    fields = (batch.trajectory_ids, _places(batch.trajectory_ids), batch.targets)
    mixed = np.full(batch.targets.shape, np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15), np.uint64)
    for values in (*fields, batch.policy_versions, batch.behavior_logprobs.view(np.int32)):
        mixed = _mix(mixed ^ (values.astype(np.int64).view(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32)


def _places(trajectory_ids: np.ndarray) -> np.ndarray:
    """int: the number of a loss token in its answer, of which a row holds all or none."""
    return np.arange(trajectory_ids.shape[-1]) - find_starts(trajectory_ids)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
