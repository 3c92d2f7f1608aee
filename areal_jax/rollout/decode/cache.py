"""The state of an engine: its sizes, the cache in the layout of an attention, and the routes of the cached tokens."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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


class EngineState(NamedTuple):
    """What the programs of an engine take and return besides weights."""

    layers: Cache
    # [blocks + 1, block_tokens, layers with experts, choices], of the token whose keys and values are at the same
    # place; None = not recorded
    routes: jax.Array | None


def empty_routes(config: ModelConfig, sizes: CacheSizes) -> jax.Array:
    """No position has any."""
    column = config.routes
    assert column.shape is not None
    return jnp.full((sizes.blocks + 1, sizes.block_tokens, *column.shape), column.fill, column.dtype)


def empty_cache(attention: CacheAttention, config: ModelConfig, sizes: CacheSizes, dtype: jnp.dtype) -> Cache:
    """Zeros, the padding block included."""
    blocks = sizes.blocks + 1
    return tuple(
        attention.empty(blocks, config.n_kv_heads, sizes.block_tokens, config.head_dim, dtype)
        for _ in range(config.n_layers)
    )


def copy_blocks(attention: CacheAttention, state: EngineState, sources: jax.Array, targets: jax.Array) -> EngineState:
    """The state with each source block, int32 [C], copied to the target block beside it."""
    layers = tuple(attention.copy(layer, sources, targets) for layer in state.layers)
    return EngineState(layers, None if state.routes is None else state.routes.at[targets].set(state.routes[sources]))


def write_routes(state: EngineState, live: jax.Array, blocks: jax.Array, offsets: jax.Array) -> jax.Array | None:
    """The routes of a state with what routers chose, int [L, T, k], at the places of T tokens, int32 [T]."""
    if state.routes is None:
        return None
    return state.routes.at[blocks, offsets].set(jnp.moveaxis(live, 0, 1).astype(state.routes.dtype))
