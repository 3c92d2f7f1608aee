"""Attention over blocks in its plainest form: every block of the table is gathered and all scores are masked.

The reference for the other implementations; it runs on hardware that has none of its own. Shapes as in
loops.py, with S = M * T positions of a table row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from areal_jax.rollout.decode.attention.loops import LayerCache

_MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


@dataclasses.dataclass(frozen=True)
class GatherAttention:
    """contract.CacheAttention; keys and values of a layer are [blocks, K, T, D]."""

    table_blocks: int  # M of the tables that are given: `attend` reads all of them
    name = 'gather'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        shape = (blocks, heads, block_tokens, head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        return layer[0].at[blocks, :, offsets].set(k), layer[1].at[blocks, :, offsets].set(v)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (side[blocks].swapaxes(1, 2) for side in layer)  # [C, T, K, D]
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

    def attend(
        self, q: jax.Array, layer: LayerCache, tables: jax.Array, lengths: jax.Array, window: int | None
    ) -> jax.Array:
        rows, heads, size = q.shape
        k, v = (side[tables].swapaxes(1, 2).reshape(rows, side.shape[1], -1, size) for side in layer)  # [B, K, S, D]
        place = jnp.arange(k.shape[2])
        seen = place < lengths[:, None]
        if window is not None:
            seen &= place >= lengths[:, None] - window
        grouped = q.reshape(rows, k.shape[1], -1, size)
        scores = jnp.einsum('bkgd,bksd->bkgs', grouped, k, preferred_element_type=jnp.float32) * size**-0.5
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
        v = jnp.where(seen[:, None, :, None], v, 0)  # a weight of 0 times NaN would be NaN
        return jnp.einsum('bkgs,bksd->bkgd', weights, v).reshape(rows, heads, size)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        return jnp.int32(len(lengths) * self.table_blocks * block_tokens)

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        return layer[0].at[targets].set(layer[0][sources]), layer[1].at[targets].set(layer[1][sources])
