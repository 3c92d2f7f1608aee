"""Corrections for stale and mismatched behavior: a constant weight, and which tokens are trained. numpy and jax alike.

Weights multiply after the surrogate, so that any of them goes with any of those.
"""

from __future__ import annotations

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.ratios import SumSequence, bounded_exp, level_log_ratio, namespace
from areal_jax.learning.objective.sums import Array


def behavior_weight(choices: PolicyChoices, log_ratio: Array, over_sequence: SumSequence) -> Array:
    """w of each token from log π_prox - log π_behav, or log π_θ - log π_behav where there is no ratio; constant.

    'truncate': min(w, loss.behavior_weight_cap), TIS. 'mask': w inside the bounds, else 0, MIS and IcePop. A mask reads
    the raw weight.

    Raises ValueError for an unknown correction.
    """
    xp = namespace(log_ratio)
    if choices.correction == 'none':
        return xp.ones_like(log_ratio)
    weight = bounded_exp(level_log_ratio(log_ratio, choices.correction_level, over_sequence))
    if choices.correction == 'truncate':
        cap = choices.behavior_weight_cap
        return weight if cap is None else xp.where(weight > cap, cap, weight)
    if choices.correction == 'mask':
        kept = (weight >= choices.correction_low) & (weight <= choices.correction_high)
        return xp.where(kept, weight, 0.0)
    raise ValueError(f'loss.correction={choices.correction!r} is unknown; use none, truncate or mask')


def is_vetoed(choices: PolicyChoices, log_ratio: Array, over_sequence: SumSequence) -> Array:
    """bool: whether a token of the same answer has π_prox / π_behav below loss.veto."""
    xp = namespace(log_ratio)
    if choices.veto is None:
        return xp.zeros_like(log_ratio, dtype=bool)
    below = (log_ratio < xp.log(xp.asarray(choices.veto, log_ratio.dtype))).astype(log_ratio.dtype)
    return over_sequence(below) > 0


def shifts_too_far(choices: PolicyChoices, policy: Array, denominator: Array, advantages: Array) -> Array:
    """bool: π_θ is further than loss.gate_threshold from π, in the direction in which the advantage pushes it.

    The total-variation mask of DPPO, arXiv 2602.04879: A > 0 is kept while π_θ - π <= δ, others while it is >= -δ.
    """
    xp = namespace(policy)
    shift = bounded_exp(policy) - bounded_exp(denominator)
    return xp.where(advantages > 0, shift > choices.gate_threshold, shift < -choices.gate_threshold)
