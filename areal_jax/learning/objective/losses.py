"""Losses as pure functions of arrays: each is a weighted masked sum over loss tokens, divided by one denominator.

Arrays are [R, N] (learning/__init__.py) or of any other common shape, written [...]. Metrics are sums (`*_sum`,
`*_count`) and maxima (`*_max`): `merge_metrics` joins the metrics of all micro-batches of an update, `finalize_metrics`
turns them into means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.declarations import choices

KL_ESTIMATORS = choices('loss.kl_estimator')
_LOG_RATIO_LIMIT = 20.0  # bounds |log ratio| before exp; e^20 = 4.9e8 is far outside any trust region


def decoupled_ppo_loss(
    policy_logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    behavior_logprobs: jax.Array,
    advantages: jax.Array,
    loss_mask: jax.Array,
    denominator: jax.Array | float,
    token_weights: jax.Array | None = None,
    *,
    clip_epsilon: float = 0.2,
    clip_epsilon_high: float | None = None,
    behavior_weight_cap: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped surrogate around the proximal policy, weighted to the behavior policy.

      L(θ) = -Σₜ mₜ wₜ min(rₜ Âₜ, clip(rₜ, 1-ε, 1+ε) Âₜ) / N
      rₜ = π_θ(aₜ|sₜ) / π_prox(aₜ|sₜ),   wₜ = π_prox(aₜ|sₜ) / π_behav(aₜ|sₜ)

    Equation 5 of "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning",
    arXiv 2505.24298, after Hilton et al., arXiv 2110.00641. With proximal == behavior every wₜ is 1 and this is PPO.
    A token whose ratio is exactly at the edge (rₜ = 1+ε or 1-ε) is not clipped: it keeps its gradient. Log-ratios are
    clamped to ±20; beyond, a ratio is constant and its gradient zero.

    Args:
      policy_logprobs: float [...], log π_θ; the only differentiated input.
      proximal_logprobs: float [...], log π_prox, of the weights before the update.
      behavior_logprobs: float [...], log π_behav, recorded while sampling.
      advantages: float [...], constant.
      loss_mask: bool [...], tokens the loss may touch; values elsewhere are not read.
      denominator: float scalar > 0, of the whole minibatch, counted before any token is rejected.
      token_weights: float [...], the weight of each token in the sum; None = 1.
      clip_epsilon, clip_epsilon_high: lower and upper half width of the trust region; None = the lower one.
      behavior_weight_cap: wₜ is at most this; None = uncapped, as in the paper.

    Returns:
      (loss, metrics), float32. An empty mask gives loss 0 and gradient 0.
    """
    chex.assert_equal_shape([policy_logprobs, proximal_logprobs, behavior_logprobs, advantages, loss_mask])
    chex.assert_rank(denominator, 0)
    constants = jax.lax.stop_gradient((proximal_logprobs, behavior_logprobs, advantages))
    policy, proximal, behavior, advantages = (
        jnp.where(loss_mask, x, 0.0).astype(jnp.float32) for x in (policy_logprobs, *constants)
    )
    policy_ratio = jnp.exp(_clamp(policy - proximal))
    behavior_weight = jnp.exp(_clamp(proximal - behavior))
    if behavior_weight_cap is not None:
        behavior_weight = jnp.where(behavior_weight > behavior_weight_cap, behavior_weight_cap, behavior_weight)
    low, high = 1.0 - clip_epsilon, 1.0 + (clip_epsilon if clip_epsilon_high is None else clip_epsilon_high)
    # explicit, because libraries differ in the gradients of minimum and clip at a tie
    clipped_above = (advantages > 0) & (policy_ratio > high)
    clipped_below = (advantages < 0) & (policy_ratio < low)
    clipped_ratio = jnp.where(clipped_above, high, jnp.where(clipped_below, low, policy_ratio))
    token_loss = -behavior_weight * clipped_ratio * advantages
    loss = masked_sum(token_loss, loss_mask, token_weights) / denominator
    metrics = _ratio_metrics(policy - behavior, behavior_weight, clipped_above | clipped_below, loss_mask)
    return loss, jax.lax.stop_gradient(metrics)


def kl_penalty(
    policy_logprobs: jax.Array,
    reference_logprobs: jax.Array,
    loss_mask: jax.Array,
    denominator: jax.Array | float,
    token_weights: jax.Array | None = None,
    *,
    estimator: str = 'k3',
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean estimate of KL(policy ‖ reference) on tokens of the policy, to be added to the loss with a coefficient.

      K(θ) = Σₜ mₜ uₜ kₜ / N,   ℓₜ = log π_θ(aₜ|sₜ) - log π_ref(aₜ|sₜ)
      'k1': ℓ    'k2': ℓ²/2    'k3': e^-ℓ - 1 + ℓ

    Schulman, "Approximating KL Divergence" (2020). The gradients with respect to log π_θ are 1, ℓ and 1 - π_ref/π_θ.
    That of k1 is zero in expectation, so k1 is no penalty: use it to measure only. ℓ is clamped to ±20 in all three;
    beyond, the value is constant and the gradient zero. The estimates assume tokens sampled from π_θ; they are not
    corrected for tokens of older policies.

    Args:
      policy_logprobs: float [...], log π_θ; the only differentiated input.
      reference_logprobs: float [...], log π_ref, constant.
      loss_mask: bool [...], tokens the loss may touch; values elsewhere are not read.
      denominator: float scalar > 0, of the whole minibatch, counted before any token is rejected.
      token_weights: float [...], the weight of each token in the sum; None = 1.
      estimator: see KL_ESTIMATORS.

    Returns:
      (penalty, metrics), float32; 'reference_kl_sum' is of the estimates without weights. An empty mask gives 0 and
      gradient 0.

    Raises ValueError for an unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f'loss.kl_estimator={estimator!r} is unknown; use one of {", ".join(KL_ESTIMATORS)}')
    chex.assert_equal_shape([policy_logprobs, reference_logprobs, loss_mask])
    chex.assert_rank(denominator, 0)
    policy, reference = (
        jnp.where(loss_mask, x, 0.0).astype(jnp.float32)
        for x in (policy_logprobs, jax.lax.stop_gradient(reference_logprobs))
    )
    log_ratio = _clamp(policy - reference)
    if estimator == 'k1':
        token_kl = log_ratio
    elif estimator == 'k2':
        token_kl = 0.5 * log_ratio**2
    else:
        token_kl = jnp.expm1(-log_ratio) + log_ratio
    penalty = masked_sum(token_kl, loss_mask, token_weights) / denominator
    return penalty, {'reference_kl_sum': jax.lax.stop_gradient(masked_sum(token_kl, loss_mask))}


def entropy_bonus(
    entropy: jax.Array, loss_mask: jax.Array, denominator: jax.Array | float, token_weights: jax.Array | None = None
) -> jax.Array:
    """Mean entropy Σₜ mₜ H(π_θ(·|sₜ)) / N of the policy, to be rewarded: float32 scalar."""
    return masked_sum(entropy, loss_mask, token_weights) / denominator


def masked_sum(values: jax.Array, loss_mask: jax.Array, token_weights: jax.Array | None = None) -> jax.Array:
    """Σₜ mₜ uₜ xₜ; values at masked positions are not read, not even NaN or infinity."""
    weighted = values if token_weights is None else values * token_weights
    return jnp.sum(jnp.where(loss_mask, weighted, 0.0), dtype=jnp.float32)


def merge_metrics(metrics: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Joins the metrics of micro-batches, each value a scalar or an array over micro-batches."""
    merged = {}
    for name in metrics[0] if metrics else ():
        values = np.concatenate([np.ravel(m[name]) for m in metrics]).astype(np.float64)
        merged[name] = float(values.max() if name.endswith('_max') else values.sum())
    return merged


def finalize_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Per trained token of the update; nothing for no token."""
    n = merged.get('token_count', 0.0)
    if not n:
        return {}
    weight_sum, weight_sq_sum = merged['weight_sum'], merged['weight_sq_sum']
    reference = {'loss/reference_kl': merged['reference_kl_sum'] / n} if 'reference_kl_sum' in merged else {}
    return reference | {
        'loss/clip_fraction': merged['clip_count'] / n,
        'loss/behavior_weight_mean': weight_sum / n,
        'loss/behavior_weight_max': merged['weight_max'],
        'loss/effective_sample_size': weight_sum**2 / (n * weight_sq_sum) if weight_sq_sum else 0.0,
        'loss/approx_kl': merged['kl_sum'] / n,
        'loss/entropy': merged['entropy_sum'] / n,
    }


def _clamp(log_ratio: jax.Array) -> jax.Array:
    return jnp.clip(log_ratio, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)


def _ratio_metrics(
    log_full_ratio: jax.Array, behavior_weight: jax.Array, clipped: jax.Array, loss_mask: jax.Array
) -> dict[str, jax.Array]:
    """Sums and maxima for `finalize_metrics`.

    'kl_sum' adds k - 1 - log k with k = π_θ/π_behav, an unbiased estimate of KL(behavior ‖ policy), because the tokens
    were sampled from the behavior policy.
    """
    log_full_ratio = _clamp(log_full_ratio)
    return {
        'token_count': masked_sum(jnp.ones_like(behavior_weight), loss_mask),
        'clip_count': masked_sum(clipped, loss_mask),
        'weight_sum': masked_sum(behavior_weight, loss_mask),
        'weight_sq_sum': masked_sum(behavior_weight**2, loss_mask),
        'weight_max': jnp.max(jnp.where(loss_mask, behavior_weight, 0.0), initial=0.0),
        'kl_sum': masked_sum(jnp.expm1(log_full_ratio) - log_full_ratio, loss_mask),
    }
