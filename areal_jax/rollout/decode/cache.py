"""The KV cache: keys and values of every layer and slot, and the insertion of prefilled rows.

Used by backend.py. Each layer has a pair (k, v), each [B slots, K key-value heads, S positions, D]. The positions of a
head are contiguous, so attention is a matrix product over a view. Layers are separate arrays, because XLA would copy an
array of all layers whenever one layer is written.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

LayerCache = tuple[jax.Array, jax.Array]  # k, v
Cache = tuple[LayerCache, ...]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The keys and values of one prefilled sequence: a row of the batch in which it was computed."""

    rows: Cache  # per layer k, v [R, K, L, D]; shared by the prefixes of the batch, never donated
    row: int
    length: int  # positions in use, <= L


def empty_cache(n_layers: int, slots: int, heads: int, positions: int, head_dim: int, dtype: jnp.dtype) -> Cache:
    """Zeros."""
    shape = (slots, heads, positions, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(n_layers))


def write_token(layer: LayerCache, k: jax.Array, v: jax.Array, positions: jax.Array) -> LayerCache:
    """The layer with k, v [B, K, D] of one token per slot at its position, int32 [B]; in place when donated."""
    slots = jnp.arange(k.shape[0])
    return layer[0].at[slots, :, positions].set(k), layer[1].at[slots, :, positions].set(v)


def insert_row(cache: Cache, rows: Cache, row: jax.Array, slots: jax.Array, n: jax.Array) -> Cache:
    """The cache with one row of `rows` in each of the first `n` slots listed in `slots`, int32 [B].

    All positions of the slots are written, because a masked position has weight 0 and 0 * NaN, left by an earlier
    request, would be NaN. The cost is n rows of memory traffic, not the whole cache.
    """
    fitted = jax.tree.map(lambda target, source: _fit(source, row, target.shape[2]), cache, rows)

    def write(i: jax.Array, written: Cache) -> Cache:
        at = (slots[i], 0, 0, 0)
        return jax.tree.map(lambda target, source: lax.dynamic_update_slice(target, source, at), written, fitted)

    return lax.fori_loop(0, n, write, cache)


def _fit(rows: jax.Array, row: jax.Array, positions: int) -> jax.Array:
    """[1, K, S, D]: row `row` of [R, K, L, D], cut or padded to S positions."""
    chosen = lax.dynamic_slice_in_dim(rows, row, 1, axis=0)[:, :, :positions]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, positions - chosen.shape[2]), (0, 0)))
