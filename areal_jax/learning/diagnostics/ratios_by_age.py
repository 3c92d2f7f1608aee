"""The ratios of an update by the age of its tokens: effective sample size, clip share, KL. numpy only.

Made from the log-probs that the steps of the update have computed anyway: no pass of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_jax.learning.passes import StepResult
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.train_step import KnownLogprobs
from areal_jax.telemetry.ages import age_ranges, range_label
from areal_jax.telemetry.names import BY_AGE
from areal_jax.types import PackedBatch

_LIMIT = 20.0  # of a log-ratio, as in losses.py


def metrics_by_age(
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    results: Sequence[StepResult],
    known: Sequence[KnownLogprobs],
    version: int,
) -> dict[str, float]:
    """Of the trained tokens of each range of ages, over all steps of the update; a range without tokens is absent.

      effective sample size  (Σ w)² / (n Σ w²),   w = min(π_prox / π_behav, behavior_weight_cap)
      clip fraction          share of the tokens whose r = π_θ / π_prox is clipped
      kl                     mean of k - 1 - log k,   k = π_θ / π_behav

    Summed over all ranges, they equal the metrics loss/... of the same names, to rounding; a test checks it.

    Args:
      results: of the steps, whose number i is of batch i % len(batches).
      known: per batch, as the steps after the first used them.
      version: of the weights before the update.
    """
    sums: dict[str, np.ndarray] = {}
    ranges = 0
    for number, result in enumerate(results):
        batch = batches[number % len(batches)]
        mask = batch.loss_mask
        groups = age_ranges(version - batch.policy_versions[mask])  # [trained tokens], as the next ones
        policy = np.reshape(result.logprobs, mask.shape)[mask].astype(np.float64)
        behavior = batch.behavior_logprobs[mask].astype(np.float64)
        recomputed = policy if number == 0 else _recomputed(known[number % len(batches)], mask)
        proximal = _proximal(settings.proximal, policy, behavior, recomputed, version - batch.policy_versions[mask])
        weights = np.exp(np.clip(proximal - behavior, -_LIMIT, _LIMIT))
        if settings.behavior_weight_cap is not None:
            weights = np.minimum(weights, settings.behavior_weight_cap)
        log_ratio = np.clip(policy - behavior, -_LIMIT, _LIMIT)
        clipped = _is_clipped(settings, np.exp(np.clip(policy - proximal, -_LIMIT, _LIMIT)), batch.advantages[mask])
        ranges = max(ranges, int(groups.max(initial=-1)) + 1)
        for name, values in {
            'tokens': np.ones_like(weights), 'weight': weights, 'weight_sq': weights**2, 'clipped': clipped,
            'kl': np.expm1(log_ratio) - log_ratio,
        }.items():  # fmt: skip
            added = np.bincount(groups, values, minlength=ranges)
            before = sums.get(name, np.zeros(0))
            sums[name] = added + np.pad(before, (0, len(added) - len(before)))
    return {name: value for number in range(ranges) for name, value in _of_range(sums, number).items()}


def _of_range(sums: dict[str, np.ndarray], number: int) -> dict[str, float]:
    tokens, weight, weight_sq, clipped, kl = (
        float(sums[name][number]) for name in ('tokens', 'weight', 'weight_sq', 'clipped', 'kl')
    )
    if not tokens:
        return {}
    name = f'{BY_AGE}{range_label(number)}'
    return {
        f'{name}/tokens': tokens,
        f'{name}/effective_sample_size': weight**2 / (tokens * weight_sq) if weight_sq else 0.0,
        f'{name}/clip_fraction': clipped / tokens,
        f'{name}/kl': kl / tokens,
    }


def _recomputed(known: KnownLogprobs, mask: np.ndarray) -> np.ndarray | None:
    return None if known.proximal is None else np.reshape(known.proximal, mask.shape)[mask].astype(np.float64)


def _proximal(
    kind: str, policy: np.ndarray, behavior: np.ndarray, recomputed: np.ndarray | None, ages: np.ndarray
) -> np.ndarray:
    """float64 [trained tokens]: as proximal.proximal_logprobs, on the host."""
    if kind == 'recompute':
        assert recomputed is not None, 'a step after the first needs the log-probs of the weights before the update'
        return recomputed
    if kind == 'loglinear':
        return behavior + ages / (ages + 1.0) * (policy - behavior)
    return behavior


def _is_clipped(settings: LearnerSettings, ratio: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """float64 [trained tokens], 1 where losses.decoupled_ppo_loss clips."""
    high = settings.clip_epsilon if settings.clip_epsilon_high is None else settings.clip_epsilon_high
    above, below = (advantages > 0) & (ratio > 1 + high), (advantages < 0) & (ratio < 1 - settings.clip_epsilon)
    return (above | below).astype(np.float64)
