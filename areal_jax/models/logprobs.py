"""Under arrows 3 and 7: the one definition of a token's log-prob, whole for decoding and chunked for training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def scale_logits(logits: jax.Array, temperature: Any) -> jax.Array:
    """float32 logits / temperature; temperature (a scalar or [...] for logits [..., V]) 0 = greedy counts as 1."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)[..., None]


def logprob_of(logits: jax.Array, target: jax.Array, temperature: Any) -> jax.Array:
    """log softmax(logits / temperature)[target], float32 [...], for logits [..., V] and target int [...].

    Temperature is part of the policy; 0 means greedy, whose log-probs are those of temperature 1.
    """
    z = scale_logits(logits, temperature)
    chosen = jnp.take_along_axis(z, target[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(z, axis=-1)


@functools.partial(jax.jit, static_argnames='chunk')
def token_logprobs(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: Any, *, chunk: int = 8192
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target and entropy of its distribution, float32 [N] each, without the [N, V] logits.

    `hidden` [N, d], `head` [V, d], `targets` int [N]; at most `chunk` of the V columns exist at a time. The same
    numbers as `logprob_of(hidden @ head.T, targets, temperature)`, differentiable in `hidden` and `head`.
    """
    z = scale_logits(jnp.einsum('nd,vd->nv', hidden, head, preferred_element_type=jnp.float32), temperature)
    logp = jax.nn.log_softmax(z, axis=-1)
    return jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, axis=-1)
