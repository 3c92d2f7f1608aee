"""Surrogates: how a policy loss combines a ratio q and an advantage A. For arrays of numpy and of jax alike.

The loss of a token is -w·f·A + w·e, with w the correction, f the factor of a surrogate and e its term without A. The
coefficient g of a surrogate is f's derivative by log π_θ: -w·g·A is the gradient (docs/objectives.md lists all g).
Clips are explicit, because libraries differ in the gradients of minimum and clip at a tie: a token whose ratio is
exactly at an edge keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.ratios import Array, fixed, namespace


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
