"""The attention mask of packed rows, by token and by tile, for the backends that are ours.

Shapes: R rows of T tokens; L keys and Lq queries of a stream, which is one row or several rows end to end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RowIds(NamedTuple):
    segment: jax.Array  # int32 [R, T]
    parent: jax.Array  # int32 [R, T]
    position: jax.Array | None  # int32 [R, T], in the trajectory
    first: jax.Array | int  # index in the row of the first query, the same in every row


class QueryIds(NamedTuple):
    place: jax.Array  # int32 [Lq], index in the stream
    segment: jax.Array  # int32 [Lq]
    parent: jax.Array  # int32 [Lq]
    position: jax.Array  # int32 [Lq], in the trajectory; read only with a window


class KeyIds(NamedTuple):
    place: jax.Array  # int32 [L]
    segment: jax.Array  # int32 [L]
    position: jax.Array  # int32 [L]


def stream_ids(ids: RowIds, n_queries: int) -> tuple[QueryIds, KeyIds]:
    """Ids of rows laid end to end, for all keys and for the `n_queries` queries of every row.

    Ids are renumbered so that no two rows share a segment id. Padding (id 0), which is last in its row, gets the row's
    highest id: ids increase along the stream, so that a tile is described by its lowest and highest id. The highest id
    minus the lowest, times R, must fit int32.
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
    """Appends `count` queries with the ids of the last one, so that no tile's range of ids grows."""
    return QueryIds(*(jnp.pad(x, (0, count), mode='edge') for x in ids))


def pad_keys(ids: KeyIds, count: int) -> KeyIds:
    """Appends `count` keys that are after every query, so that no query sees them."""
    padded = KeyIds(*(jnp.pad(x, (0, count), mode='edge') for x in ids))
    behind = jnp.arange(len(padded.place)) >= len(ids.place)
    return padded._replace(place=jnp.where(behind, jnp.iinfo(jnp.int32).max, padded.place))


def visible(queries: QueryIds, keys: KeyIds, window: int | None) -> jax.Array:
    """bool [queries, keys]: whether the query attends to the key."""
    row = QueryIds(*(x[:, None] for x in queries))
    column = KeyIds(*(x[None, :] for x in keys))
    seen = (column.place <= row.place) & ((column.segment == row.segment) | (column.segment == row.parent))
    return seen if window is None else seen & (row.position - column.position < window)


def visible_tiles(queries: QueryIds, keys: KeyIds, window: int | None, block: int) -> jax.Array:
    """bool [blocks of queries, blocks of keys]: the tiles of side `block` that may hold a visible pair.

    A tile may hold one if some query is after some key, the range of the keys' segments overlaps the range of the
    queries' segments or parents, and the nearest positions are within the window. Conservative: every tile that
    contains a visible pair is returned, whatever the segment ids. If ids increase along the stream, few empty tiles are
    returned.
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
    """(columns, count) of each row of tiles: int32 [rows, columns], the columns to visit first, and int32 [rows]."""
    order = jnp.argsort(~tiles, axis=1, stable=True)
    return order.astype(jnp.int32), tiles.sum(axis=1, dtype=jnp.int32)
