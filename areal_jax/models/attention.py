"""Under arrow 7: attention over packed rows, where segments share a row and do not see each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parent_ids: jax.Array,
    *,
    scale: float,
    impl: str = 'auto',
) -> jax.Array:
    """softmax(scale q k^T + mask) v, [T, N, H], of q [T, N, H], k and v [T, K, H]."""
    tokens, heads, dim = q.shape
    grouped = q.reshape(tokens, k.shape[1], heads // k.shape[1], dim)
    scores = jnp.einsum('qkgh,skh->kgqs', grouped, k, preferred_element_type=jnp.float32) * scale
    same = segment_ids[:, None] == segment_ids[None, :]
    visible = jnp.tril(same | (parent_ids[:, None] == segment_ids[None, :]))
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum('kgqs,skh->qkgh', weights.astype(v.dtype), v).reshape(tokens, heads, dim)
