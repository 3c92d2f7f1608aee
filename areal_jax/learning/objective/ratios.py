"""Importance ratios: of a token, of a whole answer, or of its geometric mean. For arrays of numpy and of jax alike.

A log-ratio is bounded only where exp is taken of it: terms that are linear or quadratic in a log-ratio keep their value
and gradient at any distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.policy_choices import PolicyChoices

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


class SurrogateInputs(NamedTuple):
    """The inputs of a surrogate for each token, [..., N]."""

    ratio: Array  # q, whose log is bounded, differentiable
    log_ratio: Array  # not bounded, differentiable
    policy: Array  # log π_θ, differentiable
    advantages: Array
    prepared: Mapping[str, Array]  # see PolicyObjective.prepare


class Surrogate(NamedTuple):
    """The results of a surrogate for each token, [..., N]."""

    factor: Array
    above: Array  # bool: the upper edge acts on the token
    below: Array  # bool: the lower edge does
    extra: Array | float = 0.0  # added to the loss, without the advantage


Rule: TypeAlias = Callable[[PolicyChoices, SurrogateInputs], Surrogate]


def clip(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """min(q A, clip(q, 1-ε, 1+ε_high) A) = f A. PPO, arXiv 1707.06347, equation 7; ε_high > ε: DAPO, arXiv 2503.14476.

    g = q, and 0 where A > 0 and q > 1+ε_high, or A < 0 and q < 1-ε.
    """
    xp, ratio, (low, high) = namespace(x.ratio), x.ratio, _edges(choices)
    above = (x.advantages > 0) & (ratio > high)
    below = (x.advantages < 0) & (ratio < low)
    return Surrogate(xp.where(above, high, xp.where(below, low, ratio)), above, below)


def dual_clip(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """`clip`, with q at most c = loss.dual_clip where A < 0 (Ye et al., arXiv 1912.09729, equation 3); g = 0 above."""
    xp = namespace(x.ratio)
    clipped = clip(choices, x)
    over = (x.advantages < 0) & (clipped.factor > choices.dual_clip)
    return clipped._replace(factor=xp.where(over, choices.dual_clip, clipped.factor), above=clipped.above | over)


def cispo(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = sg(clip(q, 1-ε, 1+ε_high)) log π_θ: no token loses its gradient; g = clip(q, 1-ε, 1+ε_high).

    MiniMax-M1, arXiv 2506.13585, equations 4 and 5.
    """
    xp, ratio, (low, high) = namespace(x.ratio), fixed(x.ratio), _edges(choices)
    above, below = ratio > high, ratio < low
    return Surrogate(xp.where(above, high, xp.where(below, low, ratio)) * x.policy, above, below)


def reinforce(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = log π_θ, g = 1 (Williams, 1992)."""
    return _unclipped(x, x.policy)


def importance_weighted(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = q, g = q: importance-weighted policy gradient, unbounded."""
    return _unclipped(x, x.ratio)


def sapo(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = (4/τ) σ(τ(q - 1)), τ by the sign of A; g = 4 q σ(1 - σ). SAPO, arXiv 2511.20347, equations 5 and 6."""
    xp = namespace(x.ratio)
    tau = xp.where(x.advantages > 0, choices.sapo_positive, choices.sapo_negative)
    return _unclipped(x, 4.0 / tau * _sigmoid(tau * (x.ratio - 1.0)))


def topr(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = log π_θ where A > 0, else sg(min(q, 1)) log π_θ with q of the answer. TOPR, arXiv 2503.14286, section 3."""
    xp, ratio = namespace(x.ratio), fixed(x.ratio)
    above = (x.advantages <= 0) & (ratio > 1.0)
    weight = xp.where((x.advantages > 0) | above, 1.0, ratio)
    return Surrogate(weight * x.policy, above, xp.zeros_like(above))


def quadratic(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = log π_θ, e = (τ/2) (log q)², g = 1 - (τ/A) log q. Kimi k1.5, arXiv 2501.12599, section 2.3.2."""
    return _unclipped(x, x.policy)._replace(extra=0.5 * choices.quadratic_weight * x.log_ratio**2)


def oapl(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """(β Δ - A)² with Δ = log q of the whole answer, the same at each token. OAPL, arXiv 2602.19362, equation 3.

    So the mean over the tokens of an answer is that value.
    """
    residual = choices.oapl_beta * x.log_ratio - x.advantages
    return _unclipped(x, namespace(x.log_ratio).zeros_like(x.policy))._replace(extra=residual**2)


def delight(choices: PolicyChoices, x: SurrogateInputs) -> Surrogate:
    """f = sg(v) log π_θ with v by advantage times surprisal χ = -A log π_θ; g = v.

    'sigmoid': v = σ(χ / η). 'bernoulli': 1 with that probability, drawn from the run's seed. 'kondo': 1 for a share
    of the minibatch's tokens, the ones with the largest χ, else 0. 'additive': v = σ(((1 - u) A - u log π_θ) / η).
    "Delightful Policy Gradient", arXiv 2603.14608; Kondo gate: arXiv 2603.20526. A biased weight: neither ratio nor
    versions are read.
    """
    xp = namespace(x.policy)
    surprisal = -fixed(x.policy)
    gate, eta = choices.delight_gate, choices.delight_temperature
    if gate == 'kondo':
        weight = x.prepared['gate']
    elif gate == 'additive':
        mix = choices.delight_mix
        weight = _sigmoid(((1.0 - mix) * x.advantages + mix * surprisal) / eta)
    else:
        weight = _sigmoid(x.advantages * surprisal / eta)
        if gate == 'bernoulli':
            weight = (x.prepared['uniform'] < weight).astype(x.policy.dtype)
    zeros = xp.zeros_like(x.advantages, dtype=bool)
    return Surrogate(weight * x.policy, zeros, zeros)


SURROGATES: Mapping[str, Rule] = {
    'clip': clip, 'dual_clip': dual_clip, 'cispo': cispo, 'reinforce': reinforce, 'is_pg': importance_weighted,
    'sapo': sapo, 'topr': topr, 'quadratic': quadratic, 'oapl': oapl, 'delight': delight,
}  # fmt: skip


def _edges(choices: PolicyChoices) -> tuple[float, float]:
    high = choices.clip_epsilon if choices.clip_epsilon_high is None else choices.clip_epsilon_high
    return 1.0 - choices.clip_epsilon, 1.0 + high


def _unclipped(x: SurrogateInputs, factor: Array) -> Surrogate:
    zeros = namespace(factor).zeros_like(x.advantages, dtype=bool)
    return Surrogate(factor, zeros, zeros)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x)) if isinstance(x, np.ndarray) else jax.nn.sigmoid(x)
