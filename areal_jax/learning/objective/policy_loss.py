"""The parts of a policy objective: proximal log-probs, corrections, gates, the loss, and the penalties added to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import choices
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.counting import find_starts
from areal_jax.learning.objective.objective import RETURNS, VALUES, LossTokens, Metrics
from areal_jax.learning.objective.ratios import (
    SURROGATES,
    Array,
    SumSequence,
    SurrogateInputs,
    bounded_exp,
    fixed,
    kl_term,
    level_log_ratio,
    masked_sum,
    namespace,
    policy_ratio,
)
from areal_jax.types import PackedBatch

KINDS = choices('loss.proximal')


def recomputed_logprobs(policy_logprobs: jax.Array, known: jax.Array, weights_are_proximal: jax.Array) -> jax.Array:
    """log π_prox under the weights before the update, constant, of the shape of `policy_logprobs`.

    In the first optimizer step the policy still has these weights, so its log-probs are used (`weights_are_proximal`, a
    scalar); later steps use `known`, the log-probs of a pass before the update.
    """
    return jnp.where(weights_are_proximal, jax.lax.stop_gradient(policy_logprobs), known)


def proximal_logprobs(
    kind: str,
    policy_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    policy_versions: jax.Array,
    version: jax.Array,
    recomputed: jax.Array | None = None,
) -> jax.Array:
    """log π_prox of each loss token, constant: float32 of the shape of `policy_logprobs`.

    Arrays are [R, N], or of any other common shape; `recomputed` is what `recomputed_logprobs` returned. Raises
    ValueError for an unknown kind.
    """
    if kind == 'recompute':
        assert recomputed is not None, "'recompute' needs the log-probs of the weights before the update"
        return recomputed
    if kind == 'loglinear':
        return loglinear_logprobs(policy_logprobs, behavior_logprobs, policy_versions, version)
    if kind == 'behavior':
        return behavior_logprobs
    raise ValueError(f'loss.proximal={kind!r} is unknown; use one of {", ".join(KINDS)}')


def loglinear_logprobs(
    policy_logprobs: jax.Array, behavior_logprobs: jax.Array, policy_versions: jax.Array, version: jax.Array
) -> jax.Array:
    """A-3PO: the proximal policy as a point between behavior and policy, without an additional pass.

      log π_prox ≈ log π_behav + α (log π_θ - log π_behav),   α = e / (e + 1),   e = V - v

    After "A-3PO", arXiv 2512.06547, whose α is (v_prox - v) / (v_θ - v): here the proximal policy is version V, the
    weights before the update, and the policy in training is V + 1. A token of the current version (e = 0) has
    proximal = behavior exactly; one of age e = 1 has the mean of behavior and policy; with growing age the proximal
    log-prob approaches policy.

    Args:
      policy_logprobs, behavior_logprobs: float [...].
      policy_versions: int [...], v of each token, at most `version`.
      version: int scalar, V.
    """
    age = jnp.maximum(version - policy_versions, 0).astype(jnp.float32)
    alpha = age / (age + 1.0)
    return behavior_logprobs + alpha * jax.lax.stop_gradient(policy_logprobs - behavior_logprobs)


# Corrections for stale and mismatched behavior: a constant weight, and which tokens are trained. numpy and jax alike.
#
# Weights multiply after the surrogate, so that every weight can be combined with every surrogate.


def behavior_weight(choices: PolicyChoices, log_ratio: Array, over_sequence: SumSequence) -> Array:
    """w of each token from log π_prox - log π_behav, or log π_θ - log π_behav without a ratio; constant.

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
    """bool: whether any token of the same answer has π_prox / π_behav below loss.veto."""
    xp = namespace(log_ratio)
    if choices.veto is None:
        return xp.zeros_like(log_ratio, dtype=bool)
    below = (log_ratio < xp.log(xp.asarray(choices.veto, log_ratio.dtype))).astype(log_ratio.dtype)
    return over_sequence(below) > 0


def shifts_too_far(choices: PolicyChoices, policy: Array, denominator: Array, advantages: Array) -> Array:
    """bool: π_θ is further than loss.gate_threshold from π, in the direction in which the advantage moves it.

    The total-variation mask of DPPO, arXiv 2602.04879: A > 0 is kept while π_θ - π <= δ, others while it is >= -δ.
    """
    xp = namespace(policy)
    shift = bounded_exp(policy) - bounded_exp(denominator)
    return xp.where(advantages > 0, shift > choices.gate_threshold, shift < -choices.gate_threshold)


# Decisions that need a whole minibatch, and so cannot be made in the loss of a micro-batch: on the host before a step.


def keep_second_moment(batch: PackedBatch, policy_logprobs: np.ndarray, threshold: float) -> np.ndarray:
    """float32 [M, R, N]: 0 at the tokens with the largest (log π_θ - log π_behav)², else 1.

    The fewest tokens are removed that bring the mean square of the rest below `threshold`; equal squares are removed
    together. M2PO, arXiv 2510.01161, equation 6 and algorithm 1, over the minibatch: independent of packing.
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
    """float32 [M, R, N] in [0, 1), from the seed, the answer, the token and its place; independent of packing."""
    fields = (batch.trajectory_ids, _places(batch.trajectory_ids), batch.targets)
    mixed = np.full(batch.targets.shape, np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15), np.uint64)
    for values in (*fields, batch.policy_versions, batch.behavior_logprobs.view(np.int32)):
        mixed = _mix(mixed ^ (values.astype(np.int64).view(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32)


def _places(trajectory_ids: np.ndarray) -> np.ndarray:
    """int: the number of a loss token in its answer; no answer is split over rows."""
    return np.arange(trajectory_ids.shape[-1]) - find_starts(trajectory_ids)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Penalties added to a policy loss: divergence from a reference policy.
#
# Arrays are [R, N] (learning/__init__.py) or of any other common shape, written [...].


KL_ESTIMATORS = choices('loss.kl_estimator')


def kl_penalty(
    policy_logprobs: jax.Array,
    reference_logprobs: jax.Array,
    loss_mask: jax.Array,
    denominator: jax.Array | float,
    token_weights: jax.Array | None = None,
    *,
    estimator: str = 'k3',
    behavior_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean estimate of KL(policy ‖ reference) on tokens of the policy, to be added to the loss with a coefficient.

      K(θ) = Σₜ mₜ uₜ kₜ / N,   ℓₜ = log π_θ(aₜ|sₜ) - log π_ref(aₜ|sₜ)
      'k1': ℓ    'k2': ℓ²/2    'k3': e^-ℓ - 1 + ℓ    'unbiased': q (e^-ℓ - 1 + ℓ), q = π_θ / π_behav

    Schulman, "Approximating KL Divergence" (2020). The gradients with respect to log π_θ are 1, ℓ and 1 - π_ref/π_θ.
    The gradient of k1 is zero in expectation, so k1 is not a penalty: use it only to measure. These three assume tokens
    sampled from π_θ, and are not corrected for tokens of older policies. In 'unbiased' the gradient also flows through
    q, so it is q ℓ: its expectation over tokens of π_behav is the gradient of KL(π_θ ‖ π_ref) at the state, like the
    expectation of k2's gradient over tokens of π_θ (Tang and Munos, arXiv 2506.09477; DeepSeek-V3.2, arXiv 2512.02556).
    -ℓ and log q are clamped to ±20, but only where exp is taken of them: beyond, k1 and k2 are unchanged, k3 keeps its
    term ℓ, and the gradient of 'unbiased' stays q ℓ.

    Args:
      policy_logprobs: float [...], log π_θ; the only differentiated input.
      reference_logprobs: float [...], log π_ref, constant.
      loss_mask: bool [...], tokens that the loss may read; values elsewhere are not read.
      denominator: float scalar > 0, of the whole minibatch, counted before any token is rejected.
      token_weights: float [...], the weight of each token in the sum; None = 1.
      estimator: see KL_ESTIMATORS.
      behavior_logprobs: float [...], log π_behav, constant; only 'unbiased' reads it.

    Returns:
      (penalty, metrics), float32; 'reference_kl_sum' sums the estimates without weights. An empty mask gives 0 and
      gradient 0.

    Raises ValueError for an unknown estimator.
    """
    chex.assert_equal_shape([policy_logprobs, reference_logprobs, loss_mask])
    chex.assert_rank(denominator, 0)
    policy, reference = (
        jnp.where(loss_mask, x, 0.0).astype(jnp.float32)
        for x in (policy_logprobs, jax.lax.stop_gradient(reference_logprobs))
    )
    token_kl = estimate_kl(policy - reference, estimator)
    if estimator == 'unbiased':
        assert behavior_logprobs is not None, 'its factor is π_θ / π_behav'
        behavior = jnp.where(loss_mask, jax.lax.stop_gradient(behavior_logprobs), 0.0)
        weight = jax.lax.stop_gradient(bounded_exp(policy - behavior))
        slope = weight * jax.lax.stop_gradient(policy - reference)  # as a product: terms of the size of e^-ℓ cancel
        token_kl = jax.lax.stop_gradient(weight * token_kl) + slope * (policy - jax.lax.stop_gradient(policy))
    penalty = masked_sum(token_kl, loss_mask, token_weights) / denominator
    return penalty, {'reference_kl_sum': jax.lax.stop_gradient(masked_sum(token_kl, loss_mask))}


def estimate_kl(log_ratio: Array, estimator: str) -> Array:
    """k of each token from ℓ = log π - log π_ref of a token that π drew, see `kl_penalty`; numpy and jax alike.

    'unbiased' is k3 here: q is 1.

    Raises ValueError for an unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f'loss.kl_estimator={estimator!r} is unknown; use one of {", ".join(KL_ESTIMATORS)}')
    if estimator == 'k1':
        return log_ratio
    if estimator == 'k2':
        return 0.5 * log_ratio**2
    return kl_term(-log_ratio)


# The loss of a critic, and its metrics.


def value_loss(tokens: LossTokens, clip: float) -> tuple[jax.Array, Metrics]:
    """(loss, metrics): the mean of ½ max((V - R)², (clip(V, V₀ - ε, V₀ + ε) - R)²) with the aggregation of the policy.

    V₀ are the values before the update, R the returns; ε = 0 leaves the second term out. PPO, arXiv 1707.06347, as its
    published code clips values. At V = V₀ ± ε the gradient is the one of the unclipped term.
    """
    assert tokens.values is not None, 'the learner gives values to an objective that reads them'
    mask = tokens.loss_mask
    values, before, returns = (
        jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (tokens.values, tokens.read(VALUES), tokens.read(RETURNS))
    )
    squares, moved = (values - returns) ** 2, jax.lax.stop_gradient(values - before)
    clipped = jnp.zeros_like(squares, bool)
    if clip:
        at_edge = (before + jnp.clip(moved, -clip, clip) - returns) ** 2  # constant
        clipped = (jnp.abs(moved) > clip) & (at_edge > squares)
        squares = jnp.where(clipped, at_edge, squares)
    error = returns - before
    sums = {'value': before, 'return': returns, 'return_sq': returns**2, 'error': error, 'error_sq': error**2}
    metrics = {f'critic_{name}_sum': tokens.total(x) for name, x in sums.items()}
    metrics |= {'critic_clip_count': tokens.total(clipped), 'critic_loss_sum': tokens.total(squares) / 2}
    return tokens.mean(squares) / 2, jax.lax.stop_gradient(metrics)


def finalize_critic_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the critic per trained token of the update; {} without a critic or without any token.

    'critic/explained_variance' is 1 - Var(R - V₀) / Var(R): 1 for values that predict every return, 0 for a constant.
    """
    n = merged.get('token_count', 0.0)
    if not n or 'critic_loss_sum' not in merged:
        return {}
    mean = lambda name: merged[f'critic_{name}_sum'] / n
    variance = mean('return_sq') - mean('return') ** 2
    unexplained = mean('error_sq') - mean('error') ** 2
    # sums are float32: the rounding error of equal returns must not count as a variance
    explained = {'critic/explained_variance': 1 - unexplained / variance} if variance > 1e-6 * mean('return_sq') else {}
    return explained | {
        'critic/loss': mean('loss'),
        'critic/value_mean': mean('value'),
        'critic/return_mean': mean('return'),
        'critic/clip_fraction': merged['critic_clip_count'] / n,
    }


# The loss of a policy objective: one combination of ratio, correction, gate and surrogate, token by token.
#
#   L(θ) = Σₜ mₜ uₜ Mₜ (-wₜ fₜ Âₜ + wₜ eₜ) / N
#
# m is the loss mask, u and N the aggregation (counting.py), M the gate, w the correction, f and e
# the surrogate (ratios.py), Â the advantage. Decoupled PPO, equation 5 of "AReaL: A Large-Scale Asynchronous
# Reinforcement Learning System for Language Reasoning", arXiv 2505.24298, after Hilton et al., arXiv 2110.00641, has
# f = min(r, clip(r, 1-ε, 1+ε)) by the sign of Â with r = π_θ / π_prox, w = π_prox / π_behav, M = 1 and e = 0. The log
# of a ratio is clamped to ±20 before exp; beyond, the ratio is constant and its gradient zero. A surrogate that reads
# a log-ratio itself gets it unclamped. Losses are minimised.


class Terms(NamedTuple):
    """Terms of the loss for each token, [..., N]."""

    loss: Array
    weight: Array  # the correction, constant
    above: Array  # bool: the surrogate's upper edge acts on it
    below: Array  # bool: the lower edge does
    closed: Array  # bool: a gate, a mask or the veto takes it out of the loss, not out of the denominator


def token_terms(
    choices: PolicyChoices,
    policy: Array,
    proximal: Array,
    behavior: Array,
    advantages: Array,
    over_sequence: SumSequence,
    prepared: Mapping[str, Array],
) -> Terms:
    """The terms of tokens with log-probs and advantages [..., N], 0 where they are masked; numpy and jax alike.

    `proximal` is log π_prox; if the combination does not use it, any values will do. Only `policy` is differentiated.
    """
    xp, policy_now = namespace(policy), fixed(policy)
    denominator = behavior if choices.ratio_denominator == 'behavior' else proximal
    ratio = policy_ratio(choices.ratio, policy, denominator, over_sequence)
    behind = policy_now if choices.ratio == 'none' else proximal  # compared with behavior
    weight = behavior_weight(choices, behind - behavior, over_sequence)
    closed = is_vetoed(choices, behind - behavior, over_sequence)
    if choices.correction == 'mask':
        closed = closed | (weight == 0)
    if choices.gate == 'probability_shift':
        closed = closed | shifts_too_far(choices, policy_now, denominator, advantages)
    elif choices.gate == 'second_moment':
        closed = closed | (prepared['gate'] == 0)
    factor, above, below, extra = SURROGATES[choices.surrogate](
        choices, SurrogateInputs(ratio.value, ratio.log, policy, advantages, prepared)
    )
    loss = -weight * factor * advantages
    if not (isinstance(extra, float) and extra == 0.0):
        loss = loss + weight * extra
    if choices.veto is not None or choices.gate != 'none':
        loss = xp.where(closed, 0.0, loss)
    return Terms(loss, weight, above, below, closed)


def policy_loss(choices: PolicyChoices, tokens: LossTokens, proximal: jax.Array) -> tuple[jax.Array, Metrics]:
    """(loss, metrics), float32; an empty mask gives loss 0 and gradient 0."""
    mask = tokens.loss_mask
    constants = jax.lax.stop_gradient((proximal, tokens.behavior_logprobs, tokens.advantages))
    policy, proximal, behavior, advantages = (
        jnp.where(mask, x, 0.0).astype(jnp.float32) for x in (tokens.policy_logprobs, *constants)
    )
    prepared = {name: tokens.read(name) for name in prepared_names(choices)}
    terms = token_terms(choices, policy, proximal, behavior, advantages, tokens.over_sequence, prepared)
    metrics = _ratio_metrics(policy - behavior, terms, mask)
    return tokens.mean(terms.loss), jax.lax.stop_gradient(metrics)


def prepared_names(choices: PolicyChoices) -> tuple[str, ...]:
    """Names of the arrays that PolicyObjective.prepare computes on the host before a step."""
    if choices.gate == 'second_moment' or _draws(choices, 'kondo'):
        return ('gate',)
    return ('uniform',) if _draws(choices, 'bernoulli') else ()


def _draws(choices: PolicyChoices, gate: str) -> bool:
    return choices.surrogate == 'delight' and choices.delight_gate == gate


def _ratio_metrics(log_full_ratio: jax.Array, terms: Terms, loss_mask: jax.Array) -> Metrics:
    """Sums and maxima for `finalize_policy_metrics`.

    'kl_sum' adds k - 1 - log k with k = π_θ/π_behav, an unbiased estimate of KL(behavior ‖ policy), because the tokens
    were sampled from the behavior policy.
    """
    weight = terms.weight
    return {
        'token_count': masked_sum(jnp.ones_like(weight), loss_mask),
        'clip_count': masked_sum(terms.above | terms.below, loss_mask),
        'weight_sum': masked_sum(weight, loss_mask),
        'weight_sq_sum': masked_sum(weight**2, loss_mask),
        'weight_max': jnp.max(jnp.where(loss_mask, weight, 0.0), initial=0.0),
        'kl_sum': masked_sum(kl_term(log_full_ratio), loss_mask),
    }


def finalize_policy_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Metrics per trained token of the update; {} without any."""
    n = merged.get('token_count', 0.0)
    if not n:
        return {}
    weight_sum, weight_sq_sum = merged['weight_sum'], merged['weight_sq_sum']
    asked_for = {'loss/reference_kl': 'reference_kl_sum', 'loss/clamped_entropy': 'clamped_entropy_sum'}
    found = {name: merged[total] / n for name, total in asked_for.items() if total in merged}
    return found | {
        'loss/clip_fraction': merged['clip_count'] / n,
        'loss/behavior_weight_mean': weight_sum / n,
        'loss/behavior_weight_max': merged['weight_max'],
        'loss/effective_sample_size': weight_sum**2 / (n * weight_sq_sum) if weight_sq_sum else 0.0,
        'loss/approx_kl': merged['kl_sum'] / n,
        'loss/entropy': merged['entropy_sum'] / n,
    }
