"""Importance ratios: of a token, of a whole answer, or of its geometric mean. For arrays of numpy and of jax alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def level_log_ratio(log_ratio: Array, level: str, over_sequence: SumSequence) -> Array:
    """The clamped log-ratio at a level: 'token', 'sequence' (sum over the answer) or 'geometric' (mean over it).

    Args:
      log_ratio: float [..., N], 0 at masked tokens.

    Raises ValueError for an unknown level.
    """
    if level == 'token':
        return clamp(log_ratio)
    if level not in ('sequence', 'geometric'):
        raise ValueError(f'{level!r} is no level of a ratio; use token, sequence or geometric')
    whole = over_sequence(log_ratio)
    if level == 'geometric':
        xp = namespace(log_ratio)
        whole = whole / xp.maximum(over_sequence(xp.ones_like(log_ratio)), 1.0)
    return clamp(whole)


def policy_log_ratio(unit: str, policy: Array, denominator: Array, over_sequence: SumSequence) -> Array:
    """The clamped log-ratio that a surrogate reads, differentiable in `policy`.

    'geometric' is GSPO's sᵢ = (Π rₜ)^(1/n), whose gradient goes through all tokens of the answer; 'geometric_token' has
    its value and the gradient of the own token alone: sg(sᵢ) π_θ / sg(π_θ). GSPO, arXiv 2507.18071, equations 7 and 14.
    """
    if unit == 'none':
        return namespace(policy).zeros_like(policy)
    if unit == 'geometric_token':
        whole = level_log_ratio(fixed(policy) - denominator, 'geometric', over_sequence)
        return whole + (policy - fixed(policy))  # exactly 0
    return level_log_ratio(policy - denominator, unit, over_sequence)
