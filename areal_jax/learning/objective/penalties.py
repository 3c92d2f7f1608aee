"""Penalties that stand beside a policy loss: divergence from a reference policy.

Arrays are [R, N] (learning/__init__.py) or of any other common shape, written [...].
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from areal_jax.config.declarations import choices
from areal_jax.learning.objective.ratios import bounded_exp, kl_term
from areal_jax.learning.objective.sums import Array, masked_sum

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
    That of k1 is zero in expectation, so k1 is no penalty: use it to measure only. These three assume tokens sampled
    from π_θ, and are not corrected for tokens of older policies. In 'unbiased' a gradient flows through q too, so that
    it is q ℓ: over tokens of π_behav its expectation is the gradient of KL(π_θ ‖ π_ref) at the state, as that of k2 is
    over tokens of π_θ (Tang and Munos, arXiv 2506.09477; DeepSeek-V3.2, arXiv 2512.02556). -ℓ and log q are
    clamped to ±20 where exp is taken of them, and there alone: beyond, k1 and k2 go on, k3 goes on by its term ℓ, and
    the gradient of 'unbiased' stays q ℓ.

    Args:
      policy_logprobs: float [...], log π_θ; the only differentiated input.
      reference_logprobs: float [...], log π_ref, constant.
      loss_mask: bool [...], tokens the loss may touch; values elsewhere are not read.
      denominator: float scalar > 0, of the whole minibatch, counted before any token is rejected.
      token_weights: float [...], the weight of each token in the sum; None = 1.
      estimator: see KL_ESTIMATORS.
      behavior_logprobs: float [...], log π_behav, constant; 'unbiased' alone reads it.

    Returns:
      (penalty, metrics), float32; 'reference_kl_sum' is of the estimates without weights. An empty mask gives 0 and
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
