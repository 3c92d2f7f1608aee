"""Our own kernels, and what they share: layout, gradient rule, containment of NaN, names of values that remat may save.

Shapes: Lq queries and L keys of a stream, H query heads, K kv heads, G = H / K query heads per kv head, D head_dim; in
einsum t are queries and s keys. Kernels have the heads first, so that every product is a matrix product batched over K.
'dense' holds all scores at once: for short rows and tests, and the reference for the other backends. 'blocked' is
block-sparse attention in plain JAX, for CPUs and for hardware without a special kernel: it visits only tiles that may
contain a visible pair, and the backward pass recomputes each tile from (out, log-sum-exp) (arXiv 2205.14135, algorithms
2 and 4). The length of its loops depends on the ids. Under vmap all rows would loop as often as the longest, so rows
are laid end to end as one stream instead. pallas.py has the kernel in Pallas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


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


INVISIBLE = -3e38  # score of a masked key: below every other score, and finite because -inf - -inf is NaN
PALLAS_BLOCK = 64  # tokens: largest side of a tile of 'pallas'
OUTPUT_NAME = 'attention_output'  # values that jax.checkpoint may save so that the forward pass never runs again
LSE_NAME = 'attention_lse'


class Setting(NamedTuple):
    """Static parameters of a kernel."""

    scale: float
    window: int | None
    interpret: bool = False  # of Pallas kernels


class Rows(NamedTuple):
    """The arrays with an axis of queries."""

    q: jax.Array  # [K, G, Lq, D]
    ids: QueryIds


class GradientRows(NamedTuple):
    """The arrays with an axis of queries in the backward pass."""

    q: jax.Array  # [K, G, Lq, D]
    ids: QueryIds
    d_out: jax.Array  # [K, G, Lq, D]
    statistics: jax.Array  # float32 [2, K, G, Lq]: log-sum-exp of the scores, sum of d_out * out


class Keys(NamedTuple):
    k: jax.Array  # [K, L, D]
    v: jax.Array  # [K, L, D]
    ids: KeyIds


class Kernel(NamedTuple):
    """The part of attention that differs between backends."""

    forward: Callable[[Rows, Keys, Setting], tuple[jax.Array, jax.Array]]
    """-> (out [K, G, Lq, D], log-sum-exp of the scores, float32 [K, G, Lq])."""
    backward: Callable[[GradientRows, Keys, Setting], tuple[jax.Array, jax.Array, jax.Array]]
    """-> gradients of q, k and v."""


_Saved = tuple[Rows, Keys, jax.Array | None, jax.Array, jax.Array]  # the last three are sinks, out and log-sum-exp


def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    queries: QueryIds,
    keys: KeyIds,
    setting: Setting,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale q k') v over the visible keys: [Lq, H, D] for q [Lq, H, D], k and v [L, K, D].

    With `sinks` [H] the softmax of a head has one more logit, which has no value.

    An input that is NaN or infinite gives NaN wherever a visible pair depends on it, forward and backward, and nowhere
    else. Output and log-sum-exp have names for `jax.checkpoint_policies.save_only_these_names`.
    """
    n_queries, heads, dim = q.shape
    groups = k.shape[1]
    q = q.reshape(n_queries, groups, heads // groups, dim).transpose(1, 2, 0, 3)
    logits = None if sinks is None else sinks.reshape(groups, -1)
    out = _attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), logits, queries, keys, kernel, setting)
    return out.transpose(2, 0, 1, 3).reshape(n_queries, heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, queries: QueryIds, keys: KeyIds, kernel: Kernel,
    setting: Setting,
) -> jax.Array:  # fmt: skip
    return _forward(q, k, v, sinks, queries, keys, kernel, setting)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, queries: QueryIds, keys: KeyIds, kernel: Kernel,
    setting: Setting,
) -> tuple[jax.Array, _Saved]:  # fmt: skip
    # A NaN in `v` would reach every query of the tile, since 0 * NaN is NaN. So it is replaced by 0, and its key is set
    # to NaN instead: the mask hides the NaN from all queries but those that see the key. Infinities become NaN too,
    # because a score of -inf would be below the masked scores.
    good_keys, good_values = _all_finite(k) & _all_finite(v), _all_finite(v)
    rows = Rows(jnp.where(_all_finite(q), q, jnp.nan), queries)
    columns = Keys(jnp.where(good_keys, k, jnp.nan), jnp.where(good_values, v, 0.0), keys)
    out, lse = kernel.forward(rows, columns, setting)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks[..., None])
    out, lse = checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (rows, columns, sinks, out, lse)


def _backward(kernel: Kernel, setting: Setting, saved: _Saved, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, keys, sinks, out, lse = saved
    # likewise a NaN in a query is replaced by 0, and its log-sum-exp is set to NaN: only weights of visible keys use it
    overlap = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)
    statistics = jnp.stack([jnp.where(jnp.isfinite(overlap), lse, jnp.nan), overlap])
    gradient_rows = GradientRows(_finite(rows.q), rows.ids, _finite(d_out), statistics)
    keys = keys._replace(k=jnp.where(_all_finite(keys.k), keys.k, 0.0))
    d_sinks = None if sinks is None else sink_gradient(sinks[..., None], lse, overlap).sum(axis=-1).astype(sinks.dtype)
    d_q, d_k, d_v = kernel.backward(gradient_rows, keys, setting)
    return d_q, d_k, d_v, d_sinks, None, None


_attention.defvjp(_forward, _backward)


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds to attention, out [..., D] and log-sum-exp [...], a key of the scores `sinks` that has no value.

    `sinks` broadcasts to the log-sum-exp. A backward pass that gets this output and this log-sum-exp computes the
    gradients of q, k and v as they are: the sink is in the sum, and it has no value that could add to d_out * out.
    """
    sinks = sinks.astype(jnp.float32)
    lowered = out * jax.nn.sigmoid(lse - sinks)[..., None]
    return lowered.astype(out.dtype), jnp.logaddexp(lse, sinks)


def sink_gradient(sinks: jax.Array, lse: jax.Array, overlap: jax.Array) -> jax.Array:
    """The gradient of `sinks` by query, from the log-sum-exp of `add_sinks` and the sum of d_out * out."""
    return -jnp.exp(sinks.astype(jnp.float32) - lse) * overlap


def tile_scores(rows: Rows | GradientRows, keys: Keys, seen: jax.Array, scale: float) -> jax.Array:
    """float32 [K, G, rows, keys], INVISIBLE where not `seen`."""
    return jnp.where(seen, product('kgtd,ksd->kgts', rows.q, keys.k) * scale, INVISIBLE)


def tile_gradients(rows: GradientRows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contribution of a tile to the gradients of q, k and v, float32 (arXiv 2205.14135, appendix B.4)."""
    lse, overlap = rows.statistics
    seen = visible(rows.ids, keys.ids, setting.window)
    weights = jnp.where(seen, jnp.exp(tile_scores(rows, keys, seen, setting.scale) - lse[..., None]), 0.0)
    d_weights = product('kgtd,ksd->kgts', rows.d_out, keys.v)
    d_scores = jnp.where(seen, weights * (d_weights - overlap[..., None]), 0.0) * setting.scale
    return (
        product('kgts,ksd->kgtd', d_scores, keys.k),
        product('kms,kmd->ksd', _by_key_head(d_scores), _by_key_head(rows.q)),
        product('kms,kmd->ksd', _by_key_head(weights), _by_key_head(rows.d_out)),
    )


def _by_key_head(x: jax.Array) -> jax.Array:
    """[K, G, t, ...] -> [K, G * t, ...]: a sum over one axis needs no transposed copy, a sum over two axes does."""
    return x.reshape(len(x), -1, *x.shape[3:])


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum accumulated in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _all_finite(x: jax.Array) -> jax.Array:
    """bool [..., 1]: the whole vector is finite."""
    return jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def attend_dense(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting, sinks: jax.Array | None = None
) -> jax.Array:
    """`attend` row by row, with scores [R, H, Tq, T] in memory: [R, Tq, H, D]."""

    def row(
        q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, parent: jax.Array, position: jax.Array | None
    ) -> jax.Array:
        one = RowIds(segment[None], parent[None], None if position is None else position[None], ids.first)
        return attend(Kernel(forward_dense, backward_dense), q, k, v, *stream_ids(one, len(q)), setting, sinks)

    axes = (0, 0, 0, 0, 0, None if ids.position is None else 0)
    return jax.vmap(row, in_axes=axes)(q, k, v, ids.segment, ids.parent, ids.position)


def forward_dense(rows: Rows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array]:
    """See Kernel."""
    scores = tile_scores(rows, keys, visible(rows.ids, keys.ids, setting.window), setting.scale)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return product('kgts,ksd->kgtd', weights.astype(keys.v.dtype), keys.v).astype(keys.v.dtype), lse


def backward_dense(rows: GradientRows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See Kernel."""
    d_q, d_k, d_v = tile_gradients(rows, keys, setting)
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


BLOCK, _SHORT_BLOCK = 64, 32  # tokens: side of a tile, and in short rows, because their segments are short
_SHORT_ROW = 2048  # tokens


def attend_blocked(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting, sinks: jax.Array | None = None
) -> jax.Array:
    """`attend` by tiles, [R, Tq, H, D]; its time is proportional to the number of visible tiles."""
    queries, keys = stream_ids(ids, q.shape[1])
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    block = side_of_tile(ids.segment.shape[1])
    more_queries, more_keys = -len(q) % block, -len(k) % block
    padded = jnp.pad(q, ((0, more_queries), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, more_keys), (0, 0), (0, 0))) for x in (k, v))
    queries, keys = pad_queries(queries, more_queries), pad_keys(keys, more_keys)
    return attend(_KERNELS[block], padded, k, v, queries, keys, setting, sinks)[: len(q)].reshape(shape)


def side_of_tile(row_tokens: int) -> int:
    """The side of a tile in rows of `row_tokens` tokens."""
    return _SHORT_BLOCK if row_tokens <= _SHORT_ROW else BLOCK


def forward_blocked(rows: Rows, keys: Keys, setting: Setting, block: int) -> tuple[jax.Array, jax.Array]:
    """See Kernel; `block` is the side of a tile in tokens."""
    order, count = visits(visible_tiles(rows.ids, keys.ids, setting.window, block))

    def attend_block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, columns = _row_block(rows, index, block), _at(order, index)

        def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # The state is the largest score so far and the sums of exp(score - top) and exp(score - top) v. If a tile
            # has no key that a query sees, its sums are over masked keys only. The tile with the query itself raises
            # `top` so far that `shrink` sets such sums to 0.
            top, total, out = state
            tile = _key_block(keys, _at(columns, step), block)
            scores = tile_scores(queries, tile, visible(queries.ids, tile.ids, setting.window), setting.scale)
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


def backward_blocked(
    rows: GradientRows, keys: Keys, setting: Setting, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See Kernel; `block` is the side of a tile in tokens."""
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
    block: Kernel(functools.partial(forward_blocked, block=block), functools.partial(backward_blocked, block=block))
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
