"""Losses of a handful of tokens, for tests: arrays in, (loss, metrics) out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.objective.objective import LossTokens
from areal_jax.learning.objective.policy_loss import policy_loss


def make_tokens(
    policy, behavior, advantages, mask, denominator, *, token_weights=None, starts=None, known=None, entropy=None
):
    """LossTokens of arrays [R, N] or [N]; by default a row is one answer."""
    zeros = jnp.zeros(jnp.shape(policy), jnp.int32)
    return LossTokens(
        policy_logprobs=policy,
        entropy=jnp.zeros(jnp.shape(policy)) if entropy is None else entropy,
        behavior_logprobs=behavior,
        advantages=advantages,
        loss_mask=mask,
        policy_versions=zeros,
        sequence_starts=zeros if starts is None else starts,
        token_weights=token_weights,
        denominator=denominator,
        version=np.int32(0),
        known=known or {},
    )


def loss_of(
    policy: jax.Array, proximal, behavior, advantages, mask, denominator, token_weights=None, prepared=None,
    starts=None, **choices,
):  # fmt: skip
    """policy_loss of a combination: by default decoupled PPO."""
    tokens = make_tokens(
        policy, behavior, advantages, mask, denominator, token_weights=token_weights, starts=starts, known=prepared
    )
    return policy_loss(PolicyChoices(**choices), tokens, proximal)


def group_advantages_of(group, estimator: str = 'group', **choices):
    from areal_jax.learning.objective.advantages import group_advantages

    return group_advantages(group, PolicyChoices(advantage=estimator, **choices))
