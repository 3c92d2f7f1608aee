"""The cache of an engine: its sizes, and the pair of arrays of each layer in the layout of an attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from areal_jax.models.shape import ModelConfig
from areal_jax.rollout.decode.attention.contract import Cache, CacheAttention

COPIES = 8  # blocks that one call of `copy_blocks` copies


@dataclasses.dataclass(frozen=True)
class CacheSizes:
    """In blocks of `block_tokens` positions."""

    context_tokens: int
    block_tokens: int
    blocks: int  # that sequences may have

    @property
    def table_blocks(self) -> int:
        """Of the longest sequence."""
        return -(-self.context_tokens // self.block_tokens)

    @property
    def padding_block(self) -> int:
        """One more than sequences have: what belongs to none is written here."""
        return self.blocks


def empty_cache(attention: CacheAttention, config: ModelConfig, sizes: CacheSizes, dtype: jnp.dtype) -> Cache:
    """Zeros, the padding block included."""
    blocks = sizes.blocks + 1
    return tuple(
        attention.empty(blocks, config.n_kv_heads, sizes.block_tokens, config.head_dim, dtype)
        for _ in range(config.n_layers)
    )


def copy_blocks(attention: CacheAttention, cache: Cache, sources: jax.Array, targets: jax.Array) -> Cache:
    """The cache with each source block, int32 [C], copied to the target block beside it."""
    return tuple(attention.copy(layer, sources, targets) for layer in cache)
