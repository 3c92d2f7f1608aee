"""Proximal log-probs, the centre of the trust region. Their kind is chosen by config, never by data.

'recompute': those of the weights before the update. 'loglinear': see `loglinear_logprobs`. 'behavior': plain PPO around
the behavior policy, so that every behavior weight is 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from areal_jax.config.declarations import choices

KINDS = choices('loss.proximal')


def recomputed_logprobs(policy_logprobs: jax.Array, known: jax.Array, weights_are_proximal: jax.Array) -> jax.Array:
    """log π_prox under the weights before the update, constant, of the shape of `policy_logprobs`.

    In the first optimizer step the policy still has these weights, so that its log-probs are taken
    (`weights_are_proximal`, a scalar); later steps take the `known` ones of a pass before the update.
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
    """A-3PO: the proximal policy as a point between behavior and policy, without a pass of its own.

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
