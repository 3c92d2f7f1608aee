"""The ragged paged attention kernel of jax for TPUs behind CacheAttention.

It was written without a device, so it runs only if the check of choose.py passes. Facts about the kernel of jax
0.10 to 0.12: keys and values of a token are interleaved by head in one array; head sizes are multiples of 128; the
numbers of heads must fill whole tiles; a sequence without positions breaks the chain of its copies from memory, so rows
of padding are left out or read one position.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from areal_jax.rollout.decode.attention.loops import LayerCache

_LANES = 128  # head sizes are padded to multiples
_TILE_TOKENS = 128  # positions that are read at once, unless a block is longer
_MOST_QUERIES = 8  # rows in one step of the grid: the kernel computes the scores of all of them for every sequence


@dataclasses.dataclass(frozen=True)
class PallasTpuAttention:
    """loops.CacheAttention; a layer is one array [blocks, T, 2 K', D'] of key, value, key, value, ... by head.

    K' and D' are padded to sizes that the kernel takes. Positions before a window are read too, and masked.

    Args:
      kv_heads, head_dim: K and D of the model, on one device.
    """

    kv_heads: int
    head_dim: int
    name = 'pallas_tpu'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        return (jnp.zeros((blocks, block_tokens, 2 * padded_heads(heads), padded_dim(head_dim)), dtype),)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        (pages,) = layer
        pairs = jnp.stack([k, v], axis=2)  # [N, K, 2, D]
        more_heads, more_dim = pages.shape[2] // 2 - k.shape[1], pages.shape[3] - k.shape[2]
        pairs = jnp.pad(pairs, ((0, 0), (0, more_heads), (0, 0), (0, more_dim)))
        return (pages.at[blocks, offsets].set(pairs.reshape(len(k), *pages.shape[2:])),)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        (pages,) = layer
        tokens = pages[blocks].reshape(-1, pages.shape[2] // 2, 2, pages.shape[3])
        k, v = (tokens[:, : self.kv_heads, which, : self.head_dim] for which in (0, 1))
        return k, v

    def attend(
        self, q: jax.Array, layer: LayerCache, tables: jax.Array, lengths: jax.Array, window: int | None
    ) -> jax.Array:
        # imported here, so that the check of choose.py reports a version of jax that lacks the module
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        (pages,) = layer
        rows, heads, _ = q.shape
        more_heads, more_dim = pages.shape[2] // 2 - self.kv_heads, pages.shape[3] - self.head_dim
        grouped = q.reshape(rows, self.kv_heads, -1, self.head_dim)
        grouped = jnp.pad(grouped, ((0, 0), (0, more_heads), (0, 0), (0, more_dim)))
        out = ragged_paged_attention(
            grouped.reshape(rows, -1, pages.shape[3]),
            pages,
            jnp.maximum(lengths, 1),
            tables,
            jnp.arange(rows + 1, dtype=jnp.int32),  # every sequence has one query
            jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.int32), 1)[None],
            sm_scale=self.head_dim**-0.5,
            sliding_window=window,
            num_kv_pages_per_block=min(tables.shape[1], max(1, _TILE_TOKENS // pages.shape[1])),
            num_queries_per_block=min(rows, _MOST_QUERIES),
        )
        out = out.reshape(rows, -1, heads // self.kv_heads, pages.shape[3])[:, : self.kv_heads, :, : self.head_dim]
        return jnp.where((lengths > 0)[:, None, None], out.reshape(q.shape), 0)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """The positions of whole tiles of each row."""
        tile = max(1, _TILE_TOKENS // block_tokens) * block_tokens
        return jnp.sum(-(-lengths // tile) * tile, dtype=jnp.int32)

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        return tuple(pages.at[targets].set(pages[sources]) for pages in layer)


def padded_dim(head_dim: int) -> int:
    """The size of a head in the cache: whole lanes of a register."""
    return head_dim + -head_dim % _LANES


def padded_heads(heads: int) -> int:
    """Rounds up to 1, 2, 4 or a multiple of 8: whole tiles of pairs of key and value, in 32 and in 16 bits."""
    return next((size for size in (1, 2, 4) if heads <= size), heads + -heads % 8)
