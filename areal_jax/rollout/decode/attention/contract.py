"""The interface of attention over a cache of blocks; each kind of hardware has its implementation and layout.

Implementations run inside jax.jit. Shapes: B rows, H heads, K key-value heads, D head size, T tokens of a block, M
blocks of a table row, N written tokens, C listed blocks.
"""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

LayerCache = tuple[jax.Array, ...]  # keys and values of one layer, in the implementation's layout
Cache = tuple[LayerCache, ...]  # one entry a layer: XLA would copy an array of all layers when one is written


class CacheAttention(Protocol):
    """Attention of one token a row over the blocks of its sequence, and what else touches the cache's layout."""

    @property
    def name(self) -> str: ...

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        """Zeros."""
        ...

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        """The layer with k, v [N, K, D] of token n at place offsets[n] of block blocks[n], int32 [N]; in place."""
        ...

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """k, v [C * T, K, D] of the listed blocks, int32 [C], one after the other."""
        ...

    def attend(
        self, q: jax.Array, layer: LayerCache, tables: jax.Array, lengths: jax.Array, window: int | None
    ) -> jax.Array:
        """softmax(q k' / sqrt(D)) v over the first lengths[b] positions of row b: [B, H, D].

        Args:
          q: [B, H, D].
          tables: int32 [B, M]; position p of row b is in block tables[b, p // T].
          lengths: int32 [B], descending; 0 = a row of padding, for which any finite result is right.
          window: number of last positions that are seen; None = all.

        What the cache holds beyond lengths[b], NaN included, has no influence.
        """
        ...

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """int32: positions that `attend` reads for rows of these lengths without a window, masked ones included."""
        ...

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        """The layer with each source block, int32 [C], copied to the target block beside it; in place."""
        ...
