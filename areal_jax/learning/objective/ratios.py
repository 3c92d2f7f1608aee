"""Importance ratios: of a token, of a whole answer, or of its geometric mean. For arrays of numpy and of jax alike.

A log-ratio is bounded only where exp is taken of it: terms that are linear or quadratic in a log-ratio keep their value
and gradient at any distance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # of numpy or jax
_CHUNK = 32  # numbers that are added one after the other: float32 sums of 131,072 tokens are off by 4e-6 of 19


def fixed(x: Array) -> Array:
    """Returns `x` with its gradient stopped."""
    return x if isinstance(x, np.ndarray) else jax.lax.stop_gradient(x)


def masked_sum(values: jax.Array, loss_mask: jax.Array, token_weights: jax.Array | None = None) -> jax.Array:
    """Σₜ mₜ uₜ xₜ; values at masked positions are not read, not even NaN or infinity."""
    weighted = values if token_weights is None else values * token_weights
    return jnp.sum(jnp.where(loss_mask, weighted, 0.0), dtype=jnp.float32)


def sequence_sums(values: Array, loss_mask: Array, sequence_starts: Array) -> Array:
    """[R, N]: at each loss token Σ m x over the loss tokens of its answer; no answer is split over rows.

    Sums and gradients are computed in chunks of chunks, counted from the start of an answer, so that they are as exact
    for 100,000 tokens as for 100, and do not depend on the place in the row.

    Args:
      sequence_starts: int [R, N], the place in the row of the first loss token of the same answer.
    """
    if isinstance(values, np.ndarray):
        return _host_sums(np.where(loss_mask, values, 0.0), sequence_starts)
    sums, add = jnp.where(loss_mask, values, 0.0), jax.vmap(lambda row, at: jnp.zeros_like(row).at[at].add(row))
    levels = _chunk_starts(sequence_starts)
    for starts in levels:
        sums = add(sums, starts)
    for starts in reversed(levels):
        sums = jnp.take_along_axis(sums, starts, axis=1)
    return sums


def _chunk_starts(sequence_starts: jax.Array) -> list[jax.Array]:
    """int [R, N] each: where the chunk of a token begins, from small chunks to whole answers."""
    places = jnp.arange(sequence_starts.shape[-1])
    levels, size = [], _CHUNK
    while size < sequence_starts.shape[-1]:
        levels.append(places - (places - sequence_starts) % size)
        size *= _CHUNK
    return [*levels, sequence_starts]


def _host_sums(masked: np.ndarray, sequence_starts: np.ndarray) -> np.ndarray:
    sums = np.zeros_like(masked)
    np.add.at(sums, (np.arange(len(masked))[:, None], sequence_starts), masked)
    return np.take_along_axis(sums, sequence_starts, axis=1)


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

    Only k is bounded: beyond the bound, the term -log k keeps its value and gradient.
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
    """The ratio of each token, [..., N], differentiable in log π_θ."""

    log: Array
    value: Array  # its bounded exp


def policy_ratio(unit: str, policy: Array, denominator: Array, over_sequence: SumSequence) -> PolicyRatio:
    """The ratio that a surrogate reads.

    'geometric' is GSPO's sᵢ = (Π rₜ)^(1/n), whose gradient flows through all tokens of the answer; 'geometric_token'
    has the same value, but its gradient flows through the token itself only: sg(sᵢ) π_θ / sg(π_θ). GSPO, arXiv
    2507.18071, equations 7 and 14.
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
