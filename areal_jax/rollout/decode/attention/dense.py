"""Attention of prefill (all tokens of a row) and of decode (one token per slot, over the cache).

Used by backend.py. Shapes: R rows, L tokens of a row, B slots, H heads, K key-value heads, G = H/K, D head size, W
positions of the cache that are read. Both compute dense masked scores: prompts are short, and a decode step takes the
time of reading the weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    """Attention of every token to itself and to the tokens before it in its row, [R, L, H, D].

    Args:
      q: [R, L, H, D]; k, v: [R, K, L, D], the layout of the cache. Padding comes after a row's tokens.
      window: number of tokens that a token attends to, itself included; None = all before it.
    """
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[1], -1, size)
    scores = jnp.einsum('rqkgd,rksd->rkgqs', grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    if window is not None:
        seen = jnp.triu(seen, 1 - window)
    scores = jnp.where(seen, scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum('rkgqs,rksd->rqkgd', weights, v).reshape(rows, length, heads, size)


def cache_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: int | None = None
) -> jax.Array:
    """Attention of one token per slot to the cache positions up to its own, [B, H, D].

    Args:
      q: [B, H, D]; k, v: [B, K, W, D], this token's included; positions: int32 [B], each < W.
      window: number of positions that a token attends to, its own included; None = all before it.
    """
    slots, heads, size = q.shape
    grouped = q.reshape(slots, k.shape[1], -1, size)
    scores = jnp.einsum('bkgd,bksd->bkgs', grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    place = jnp.arange(k.shape[2])
    seen = place <= positions[:, None]
    if window is not None:
        seen &= place > positions[:, None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, _MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum('bkgs,bksd->bkgd', weights, v).reshape(slots, heads, size)
