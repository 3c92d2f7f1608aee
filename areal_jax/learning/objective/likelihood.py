"""The objective of supervised training: the negative log-likelihood of given answers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.learning.objective.losses import masked_sum
from areal_jax.learning.weights.finiteness import NonFiniteError


def negative_log_likelihood(
    policy_logprobs: jax.Array, loss_mask: jax.Array, denominator: jax.Array | float, token_weights: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-Σₜ mₜ uₜ log π_θ(yₜ|sₜ) / N, float32, over the same denominators as the policy losses.

    Arrays are float or bool [R, N], or of any other common shape; values at masked positions are not read.
    """
    loss = -masked_sum(policy_logprobs, loss_mask, token_weights) / denominator
    metrics = {
        'token_count': masked_sum(jnp.ones_like(policy_logprobs), loss_mask),
        'nll_sum': -masked_sum(policy_logprobs, loss_mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


def held_out_likelihood(logprobs: np.ndarray) -> dict[str, float]:
    """{'nll': nats per token, 'tokens': their number} from log-probs float32 [tokens].

    Raises NonFiniteError if the likelihood is NaN or infinite.
    """
    nll = -float(logprobs.mean(dtype=np.float64))
    if not math.isfinite(nll):
        raise NonFiniteError(
            f'the held-out likelihood is {nll} nats a token: lower optimizer.learning_rate, or use '
            "learner.dtype='float32'"
        )
    return {'nll': nll, 'tokens': float(logprobs.size)}


def finalize_likelihood(merged: Mapping[str, float]) -> dict[str, float]:
    """Per trained token of the update, in nats; nothing for no token."""
    n = merged.get('token_count', 0.0)
    if not n:
        return {}
    nll = merged['nll_sum'] / n
    perplexity = math.exp(nll) if nll < 700 else math.inf
    return {'loss/nll': nll, 'loss/perplexity': perplexity, 'loss/entropy': merged['entropy_sum'] / n}
