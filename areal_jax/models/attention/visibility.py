"""Under arrow 7: who sees whom among packed tokens, by token and by tile.

Shapes: R rows of T tokens; a stream of S keys, and of Sq queries, is one row or several end to end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowIds(NamedTuple):
    segment: jax.Array  # int32 [R, T]
    parent: jax.Array  # int32 [R, T]
    position: jax.Array | None  # int32 [R, T], in the trajectory
    first: jax.Array | int  # place of the first query in every row


class QueryIds(NamedTuple):
    place: jax.Array  # int32 [Sq], index in the stream of keys
    segment: jax.Array  # int32 [Sq]
    parent: jax.Array  # int32 [Sq]
    position: jax.Array  # int32 [Sq], in the trajectory; read only with a window


class KeyIds(NamedTuple):
    place: jax.Array  # int32 [S]
    segment: jax.Array  # int32 [S]
    position: jax.Array  # int32 [S]


def stream_ids(ids: RowIds, n_queries: int) -> tuple[QueryIds, KeyIds]:
    """Ids of rows laid end to end, for all keys and for the `n_queries` queries of every row.

    Segments and places of different rows differ. Padding (id 0) stands last in its row and becomes its highest id, so
    that ids of a stream rise and ranges of ids tell tiles apart. The highest id less the lowest, times R, must fit
    int32.
    """
    rows, tokens = ids.segment.shape
    lowest = jnp.minimum(ids.segment.min(), ids.parent.min())
    span = jnp.maximum(ids.segment.max(), ids.parent.max()) - lowest + 2
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]

    def unique(x: jax.Array) -> jax.Array:
        return (row * span + jnp.where(x == 0, span - 1, x - lowest)).astype(jnp.int32)

    def of_queries(x: jax.Array) -> jax.Array:
        if n_queries != tokens:
            x = jax.lax.dynamic_slice_in_dim(x, ids.first, n_queries, axis=1)
        return x.reshape(-1)

    place = row * tokens + jnp.arange(tokens, dtype=jnp.int32)
    position = jnp.zeros_like(place) if ids.position is None else ids.position
    segment, parent = unique(ids.segment), unique(ids.parent)
    return (
        QueryIds(*(of_queries(x) for x in (place, segment, parent, position))),
        KeyIds(*(x.reshape(-1) for x in (place, segment, position))),
    )


def pad_queries(ids: QueryIds, count: int) -> QueryIds:
    """`count` queries more, which see what the last one sees: they widen no range."""
    return QueryIds(*(jnp.pad(x, (0, count), mode='edge') for x in ids))


def pad_keys(ids: KeyIds, count: int) -> KeyIds:
    """`count` keys more, behind every query."""
    padded = KeyIds(*(jnp.pad(x, (0, count), mode='edge') for x in ids))
    behind = jnp.arange(len(padded.place)) >= len(ids.place)
    return padded._replace(place=jnp.where(behind, jnp.iinfo(jnp.int32).max, padded.place))


def visible(queries: QueryIds, keys: KeyIds, window: int | None) -> jax.Array:
    """bool [queries, keys]: who sees whom."""
    row = QueryIds(*(x[:, None] for x in queries))
    column = KeyIds(*(x[None, :] for x in keys))
    seen = (column.place <= row.place) & ((column.segment == row.segment) | (column.segment == row.parent))
    return seen if window is None else seen & (row.position - column.position < window)


def visible_tiles(queries: QueryIds, keys: KeyIds, window: int | None, block: int) -> jax.Array:
    """bool [blocks of queries, blocks of keys]: the tiles of side `block` that may hold a visible pair.

    A tile may hold one if some query stands behind some key, the range of the keys' segments meets the range of the
    queries' segments or parents, and the nearest positions lie within the window. For any numbering no visible pair is
    missed, and few tiles are visited in vain where segments are numbered in the order of the stream.
    """

    def lowest(ids: jax.Array) -> jax.Array:
        return ids.reshape(-1, block).min(axis=1)

    def highest(ids: jax.Array) -> jax.Array:
        return ids.reshape(-1, block).max(axis=1)

    def meets(ids: jax.Array) -> jax.Array:
        return (lowest(ids)[:, None] <= highest(keys.segment)) & (lowest(keys.segment) <= highest(ids)[:, None])

    tiles = (lowest(keys.place) <= highest(queries.place)[:, None]) & (meets(queries.segment) | meets(queries.parent))
    if window is not None:
        tiles &= lowest(queries.position)[:, None] - highest(keys.position) < window
    return tiles


def visits(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per row of tiles: its columns, those to visit first and in order, int32 [Q, K], and their number, int32 [Q]."""
    order = jnp.argsort(~tiles, axis=1, stable=True)
    return order.astype(jnp.int32), tiles.sum(axis=1, dtype=jnp.int32)
