"""Block-sparse attention in plain JAX, for CPUs and for hardware without a special kernel.

It visits only tiles that may contain a visible pair. The backward pass recomputes each tile from (out, log-sum-exp)
(arXiv 2205.14135, algorithms 2 and 4). The length of its loops depends on the ids. Under vmap all rows would loop as
often as the longest, so rows are laid end to end as one stream instead.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from areal_jax.models.attention import flash
from areal_jax.models.attention.flash import (
    INVISIBLE,
    GradientRows,
    Kernel,
    KeyIds,
    Keys,
    QueryIds,
    RowIds,
    Rows,
    Setting,
    pad_keys,
    pad_queries,
    product,
    stream_ids,
    tile_gradients,
    visible,
    visible_tiles,
    visits,
)

BLOCK, _SHORT_BLOCK = 64, 32  # tokens: side of a tile, and in short rows, because their segments are short
_SHORT_ROW = 2048  # tokens


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting) -> jax.Array:
    """`flash.attend` by tiles, [R, Tq, H, D]; its time is proportional to the number of visible tiles."""
    queries, keys = stream_ids(ids, q.shape[1])
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    block = tile_tokens(ids.segment.shape[1])
    more_queries, more_keys = -len(q) % block, -len(k) % block
    padded = jnp.pad(q, ((0, more_queries), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, more_keys), (0, 0), (0, 0))) for x in (k, v))
    queries, keys = pad_queries(queries, more_queries), pad_keys(keys, more_keys)
    return flash.attend(_KERNELS[block], padded, k, v, queries, keys, setting)[: len(q)].reshape(shape)


def tile_tokens(row_tokens: int) -> int:
    """The side of a tile in rows of `row_tokens` tokens."""
    return _SHORT_BLOCK if row_tokens <= _SHORT_ROW else BLOCK


def forward(rows: Rows, keys: Keys, setting: Setting, block: int) -> tuple[jax.Array, jax.Array]:
    """See flash.Kernel; `block` is the side of a tile in tokens."""
    order, count = visits(visible_tiles(rows.ids, keys.ids, setting.window, block))

    def attend_block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, columns = _row_block(rows, index, block), _at(order, index)

        def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # The state is the largest score so far and the sums of exp(score - top) and exp(score - top) v. If a tile
            # has no key that a query sees, its sums are over masked keys only. The tile with the query itself raises
            # `top` so far that `shrink` sets such sums to 0.
            top, total, out = state
            tile = _key_block(keys, _at(columns, step), block)
            scores = flash.scores(queries, tile, visible(queries.ids, tile.ids, setting.window), setting.scale)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[..., None] + product('kgts,ksd->kgtd', weights.astype(tile.v.dtype), tile.v)
            return new_top, total * shrink + weights.sum(axis=-1), out

        shape = queries.q.shape
        zeros = jnp.zeros(shape[:-1], jnp.float32)
        start = (jnp.full_like(zeros, INVISIBLE), zeros, jnp.zeros(shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(0, _at(count, index), fold, start)
        return (out / total[..., None]).astype(keys.v.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(attend_block, jnp.arange(len(count)))
    return jnp.moveaxis(out, 0, 2).reshape(rows.q.shape), jnp.moveaxis(lse, 0, 2).reshape(rows.q.shape[:-1])


def backward(rows: GradientRows, keys: Keys, setting: Setting, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See flash.Kernel; `block` is the side of a tile in tokens."""
    order, count = visits(visible_tiles(rows.ids, keys.ids, setting.window, block))

    def add_gradients(index: jax.Array, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries, columns = _gradient_block(rows, index, block), _at(order, index)

        def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = state
            column = _at(columns, step)
            tile_q, tile_k, tile_v = tile_gradients(queries, _key_block(keys, column, block), setting)
            return d_q + tile_q, _add_block(d_k, tile_k, column), _add_block(d_v, tile_v, column)

        d_q, d_k, d_v = gradients
        start = jnp.zeros(queries.q.shape, jnp.float32)
        own, d_k, d_v = jax.lax.fori_loop(0, _at(count, index), fold, (start, d_k, d_v))
        return _add_block(d_q, own, index), d_k, d_v

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (rows.q, keys.k, keys.v))
    d_q, d_k, d_v = jax.lax.fori_loop(0, len(count), add_gradients, start)
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


_KERNELS = {
    block: Kernel(functools.partial(forward, block=block), functools.partial(backward, block=block))
    for block in (BLOCK, _SHORT_BLOCK)
}


def _row_block(rows: Rows | GradientRows, index: jax.Array, block: int) -> Rows:
    ids = QueryIds(*(_slice(x, index, block, axis=0) for x in rows.ids))
    return Rows(_slice(rows.q, index, block, axis=2), ids)


def _gradient_block(rows: GradientRows, index: jax.Array, block: int) -> GradientRows:
    d_out, statistics = _slice(rows.d_out, index, block, axis=2), _slice(rows.statistics, index, block, axis=3)
    return GradientRows(*_row_block(rows, index, block), d_out, statistics)


def _key_block(keys: Keys, index: jax.Array, block: int) -> Keys:
    ids = KeyIds(*(_slice(x, index, block, axis=0) for x in keys.ids))
    return Keys(_slice(keys.k, index, block, axis=1), _slice(keys.v, index, block, axis=1), ids)


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _slice(x: jax.Array, index: jax.Array, block: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis, allow_negative_indices=False)


def _add_block(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """Adds `part` in place to the tokens (next to last axis) of a block."""
    axis = total.ndim - 2
    block = part.shape[axis]
    added = _slice(total, index, block, axis) + part
    return jax.lax.dynamic_update_slice_in_dim(total, added, index * block, axis, allow_negative_indices=False)
