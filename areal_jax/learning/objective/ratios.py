"""Importance ratios: of a token, of a whole answer, or of its geometric mean. For arrays of numpy and of jax alike.

A log-ratio is bounded where exp is taken of it, and nowhere else: what is linear or quadratic in a log-ratio keeps its
value and its gradient at any distance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from areal_jax.learning.objective.sums import Array, fixed

LOG_RATIO_LIMIT = 20.0  # bounds |log ratio| before exp; e^20 = 4.9e8 is far outside any trust region
SumSequence = Callable[[Array], Array]  # at each token the sum over its answer


def namespace(x: Array) -> Any:
    """numpy or jax.numpy, by the kind of array: a diagnostic computes on the host what a loss does on devices."""
    return np if isinstance(x, np.ndarray) else jnp


def clamp(log_ratio: Array) -> Array:
    return namespace(log_ratio).clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def bounded_exp(log_ratio: Array) -> Array:
    """e^x with |x| bounded by LOG_RATIO_LIMIT: beyond, the value is constant and the gradient 0."""
    return namespace(log_ratio).exp(clamp(log_ratio))


def kl_term(log_ratio: Array) -> Array:
    """k - 1 - log k from log k, at least 0: for k = π'/π and tokens of π its mean estimates KL(π ‖ π').

    k alone is bounded: beyond, the term -log k goes on with its gradient.
    """
    return namespace(log_ratio).expm1(clamp(log_ratio)) - log_ratio


def level_log_ratio(log_ratio: Array, level: str, over_sequence: SumSequence) -> Array:
    """The log-ratio at a level: 'token', 'sequence' (sum over the answer) or 'geometric' (mean over it).

    Args:
      log_ratio: float [..., N], 0 at masked tokens.

    Raises ValueError for an unknown level.
    """
    if level == 'token':
        return log_ratio
    if level not in ('sequence', 'geometric'):
        raise ValueError(f'{level!r} is no level of a ratio; use token, sequence or geometric')
    whole = over_sequence(log_ratio)
    if level == 'geometric':
        xp = namespace(log_ratio)
        whole = whole / xp.maximum(over_sequence(xp.ones_like(log_ratio)), 1.0)
    return whole


class PolicyRatio(NamedTuple):
    """Of each token, [..., N], differentiable in log π_θ."""

    log: Array
    value: Array  # its bounded exp


def policy_ratio(unit: str, policy: Array, denominator: Array, over_sequence: SumSequence) -> PolicyRatio:
    """The ratio that a surrogate reads.

    'geometric' is GSPO's sᵢ = (Π rₜ)^(1/n), whose gradient goes through all tokens of the answer; 'geometric_token' has
    its value and the gradient of the own token alone: sg(sᵢ) π_θ / sg(π_θ). GSPO, arXiv 2507.18071, equations 7 and 14.
    """
    if unit == 'none':
        xp = namespace(policy)
        return PolicyRatio(xp.zeros_like(policy), xp.ones_like(policy))
    if unit == 'geometric_token':
        whole = level_log_ratio(fixed(policy) - denominator, 'geometric', over_sequence)
        own = policy - fixed(policy)  # exactly 0
        return PolicyRatio(whole + own, namespace(policy).exp(clamp(whole) + own))
    log_ratio = level_log_ratio(policy - denominator, unit, over_sequence)
    return PolicyRatio(log_ratio, bounded_exp(log_ratio))
