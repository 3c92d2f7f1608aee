"""The state of an engine: its sizes, the cache in the layout of an attention, and the columns of cached tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from areal_jax.columns import Column
from areal_jax.models.shape import ModelConfig
from areal_jax.rollout.decode.attention.loops import Cache, CacheAttention

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
    # ModelConfig.columns by name, [blocks + 1, block_tokens, *shape], of the token whose keys and values are at the
    # same place; {} = not recorded
    columns: dict[str, jax.Array]


def empty_columns(columns: Iterable[Column], *axes: int) -> dict[str, jax.Array]:
    """[*axes, *shape] of the fill value of each column; the model has given its shape."""
    return {column.name: jnp.full((*axes, *column.blank(0).shape[1:]), column.fill, column.dtype) for column in columns}


def read_columns(columns: Mapping[str, jax.Array], table: jax.Array) -> dict[str, jax.Array]:
    """[M, block_tokens, *shape] of the blocks of a table, int32 [M]."""
    return {name: kept[table] for name, kept in columns.items()}


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
    return EngineState(layers, {name: kept.at[targets].set(kept[sources]) for name, kept in state.columns.items()})


def write_columns(
    state: EngineState, found: Mapping[str, jax.Array], blocks: jax.Array, offsets: jax.Array
) -> dict[str, jax.Array]:
    """The columns of a state with those of a pass, [T, *shape], at the places of its T tokens, int32 [T]."""
    write = lambda kept, new: kept.at[blocks, offsets].set(new.astype(kept.dtype))
    return {name: write(kept, found[name]) for name, kept in state.columns.items()}
