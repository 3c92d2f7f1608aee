"""Attention over blocks for CPUs in C++ (areal_jax/native/kernels.cc): each row reads its own positions, in place.

Layout: keys and values [blocks, T, K, D]. Shapes as in loops.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from areal_jax.models.attention import AttentionError
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention.loops import LayerCache


class NativeAttention:
    """contract.CacheAttention; float32 only. Raises AttentionError where the machine can not compile the kernels."""

    name = 'native'

    def __init__(self) -> None:
        try:
            library.register()
        except library.NativeError as error:
            raise AttentionError(f"rollout.attention='native' can not be had: {error}") from error

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        shape = (blocks, block_tokens, heads, head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        same = tuple(jax.ShapeDtypeStruct(side.shape, side.dtype) for side in layer)
        write = jax.ffi.ffi_call(library.WRITE, same, input_output_aliases={0: 0, 1: 1})
        return tuple(write(*layer, k, v, blocks, offsets))

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (side[blocks] for side in layer)  # [C, T, K, D]
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

    def attend(
        self, q: jax.Array, layer: LayerCache, tables: jax.Array, lengths: jax.Array, window: int | None
    ) -> jax.Array:
        rows, blocks = tables.shape
        return self.attend_pieces(q, layer, tables.ravel(), jnp.arange(rows) * blocks, lengths, window)

    def attend_pieces(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        window: int | None,
    ) -> jax.Array:
        """`attend` for rows that may share a table: row b's begins at starts[b], int32 [B], in `tables`, [M]."""
        attend = jax.ffi.ffi_call(library.ATTEND, jax.ShapeDtypeStruct(q.shape, q.dtype))
        return attend(q, *layer, tables, starts, lengths, window=window or 0)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        return jnp.sum(lengths)

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        keys, values = layer
        return keys.at[targets].set(keys[sources]), values.at[targets].set(values[sources])
