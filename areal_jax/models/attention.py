"""Under arrow 7: attention over packed rows, whose segments share a row without seeing each other.

Shapes: T tokens of a row, N query heads, K key and value heads, G = N / K query heads to a key head, D head size.
Inside, arrays lie heads first, so that every product is a plain matrix product batched over K.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IMPLEMENTATIONS = ('auto', 'dense', 'blocked')
BLOCKED_FROM_TOKENS = 256  # 'auto' takes 'blocked' for rows of so many; below, its loops cost more than they save
_BLOCK = 64  # tokens: side of a tile of 'blocked'
_INVISIBLE = -3e38  # score of a key the query does not see: lower than any other, finite, so no difference is NaN


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parent_ids: jax.Array,
    *,
    scale: float,
    impl: str = 'auto',
) -> jax.Array:
    """softmax(scale q k') v over what each token sees: [T, N, D] for q [T, N, D], k and v [T, K, D].

    Token t sees token s iff s <= t and segment_ids[s] is segment_ids[t] or parent_ids[t] (int32 [T], any values):
    padding is one more segment, so every token sees itself. `impl` is static: 'dense' holds scores [N, T, T];
    'blocked' visits only tiles that may hold a visible pair and works each out again for the gradient from
    (out, log-sum-exp) (arXiv 2205.14135, algorithms 2 and 4); 'auto' chooses by T. Map rows with jax.vmap.

    A value that is not finite makes NaN of what depends on it, along visible pairs, forward and backward, and leaves
    other segments untouched. Raises ValueError for an unknown `impl` or head counts that do not divide.
    """
    tokens, heads, dim = q.shape
    groups = k.shape[1]
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f'impl={impl!r} is unknown; use one of {", ".join(IMPLEMENTATIONS)}')
    if heads % groups:
        raise ValueError(f'{heads} query heads are not a multiple of {groups} key heads')
    if impl == 'auto':
        impl = 'blocked' if tokens >= BLOCKED_FROM_TOKENS else 'dense'
    q = q.reshape(tokens, groups, heads // groups, dim).transpose(1, 2, 0, 3)
    k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    if impl == 'blocked' and (missing := -tokens % _BLOCK):
        q, k, v = (jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) for x in (q, k, v))
        segment_ids, parent_ids = (jnp.pad(ids, (0, missing)) for ids in (segment_ids, parent_ids))
    out = _attention(q, k, v, segment_ids, parent_ids, scale, impl)[:, :, :tokens]
    return out.transpose(2, 0, 1, 3).reshape(tokens, heads, dim)


class _Rows(NamedTuple):
    """What the queries bring; the last two are filled for the gradient."""

    q: jax.Array  # [K, G, T, D]
    place: jax.Array  # int32 [T], index in the row
    segment: jax.Array  # int32 [T]
    parent: jax.Array  # int32 [T]
    d_out: Any = None  # [K, G, T, D]
    statistics: Any = None  # float32 [2, K, G, T]: log-sum-exp of the scores, sum of d_out * out


class _Keys(NamedTuple):
    k: jax.Array  # [K, T, D]
    v: jax.Array  # [K, T, D]
    place: jax.Array  # int32 [T], index in the row
    segment: jax.Array  # int32 [T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, parent: jax.Array, scale: float, impl: str
) -> jax.Array:
    return _forward(q, k, v, segment, parent, scale, impl)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, parent: jax.Array, scale: float, impl: str
) -> tuple[jax.Array, Any]:
    # 0 * NaN is NaN: a bad value may not stand in `v` beside others. It moves into its key, whose scores are masked
    # where the key is invisible and turn the whole query to NaN where it is visible. Infinities count as NaN: a score
    # of -inf would lose to the masked ones.
    good_keys, good_values = _all_finite(k) & _all_finite(v), _all_finite(v)
    q = jnp.where(_all_finite(q), q, jnp.nan)
    k, v = jnp.where(good_keys, k, jnp.nan), jnp.where(good_values, v, 0.0)
    place = jnp.arange(q.shape[2])
    rows, keys = _Rows(q, place, segment, parent), _Keys(k, v, place, segment)
    out, lse = _forward_dense(rows, keys, scale) if impl == 'dense' else _forward_blocked(rows, keys, scale)
    return out, (rows, keys, out, lse)


def _backward(scale: float, impl: str, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    rows, keys, out, lse = saved
    # likewise a bad query moves into its log-sum-exp, which turns its weights to NaN, but only those of visible keys
    overlap = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)
    statistics = jnp.stack([jnp.where(jnp.isfinite(overlap), lse, jnp.nan), overlap])
    rows = rows._replace(q=_finite(rows.q), d_out=_finite(d_out), statistics=statistics)
    keys = keys._replace(k=jnp.where(_all_finite(keys.k), keys.k, 0.0))
    backward = _backward_dense if impl == 'dense' else _backward_blocked
    return *backward(rows, keys, scale), None, None


_attention.defvjp(_forward, _backward)


def _forward_dense(rows: _Rows, keys: _Keys, scale: float) -> tuple[jax.Array, jax.Array]:
    """(out [K, G, T, D], log-sum-exp of the scores, float32 [K, G, T])."""
    scores = _scores(rows, keys, _visible(rows, keys), scale)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return _product('kgts,ksd->kgtd', weights.astype(keys.v.dtype), keys.v).astype(keys.v.dtype), lse


def _backward_dense(rows: _Rows, keys: _Keys, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v."""
    d_q, d_k, d_v = _tile_gradients(rows, keys, scale)
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


def _forward_blocked(rows: _Rows, keys: _Keys, scale: float) -> tuple[jax.Array, jax.Array]:
    order, count = _visible_tiles(rows, keys)

    def block(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries = _row_block(rows, index)

        def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # largest score so far; sums of exp(score - top) and of that times v. Where a tile holds nothing visible
            # to a query the sums are of invisible keys: its own tile, which comes last, shrinks them to nothing.
            top, total, out = state
            tile = _key_block(keys, order[index, step])
            scores = _scores(queries, tile, _visible(queries, tile), scale)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            out = out * shrink[..., None] + _product('kgts,ksd->kgtd', weights.astype(tile.v.dtype), tile.v)
            return new_top, total * shrink + weights.sum(axis=-1), out

        shape = queries.q.shape
        start = (jnp.full(shape[:-1], _INVISIBLE), jnp.zeros(shape[:-1]), jnp.zeros(shape))
        top, total, out = jax.lax.fori_loop(0, count[index], fold, start)
        return (out / total[..., None]).astype(keys.v.dtype), top + jnp.log(total)

    out, lse = jax.lax.map(block, jnp.arange(len(count)))
    return jnp.moveaxis(out, 0, 2).reshape(rows.q.shape), jnp.moveaxis(lse, 0, 2).reshape(rows.q.shape[:-1])


def _backward_blocked(rows: _Rows, keys: _Keys, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    order, count = _visible_tiles(rows, keys)

    def block(index: jax.Array, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        queries = _row_block(rows, index)

        def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_q, d_k, d_v = state
            column = order[index, step]
            tile_q, tile_k, tile_v = _tile_gradients(queries, _key_block(keys, column), scale)
            return d_q + tile_q, _add_block(d_k, tile_k, column), _add_block(d_v, tile_v, column)

        d_q, d_k, d_v = gradients
        own, d_k, d_v = jax.lax.fori_loop(0, count[index], fold, (jnp.zeros(queries.q.shape), d_k, d_v))
        return _add_block(d_q, own, index), d_k, d_v

    start = tuple(jnp.zeros(x.shape) for x in (rows.q, keys.k, keys.v))
    d_q, d_k, d_v = jax.lax.fori_loop(0, len(count), block, start)
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)


def _tile_gradients(rows: _Rows, keys: _Keys, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the pairs of a tile add to the gradients of q, k and v, float32 (arXiv 2205.14135, appendix B.4)."""
    lse, overlap = rows.statistics
    visible = _visible(rows, keys)
    weights = jnp.where(visible, jnp.exp(_scores(rows, keys, visible, scale) - lse[..., None]), 0.0)
    d_weights = _product('kgtd,ksd->kgts', rows.d_out, keys.v)
    d_scores = jnp.where(visible, weights * (d_weights - overlap[..., None]), 0.0) * scale
    return (
        _product('kgts,ksd->kgtd', d_scores, keys.k),
        _product('kgts,kgtd->ksd', d_scores, rows.q),
        _product('kgts,kgtd->ksd', weights, rows.d_out),
    )


def _visible(rows: _Rows, keys: _Keys) -> jax.Array:
    """bool [rows, keys]: who sees whom."""
    row_segment, row_parent, row_place = (x[:, None] for x in (rows.segment, rows.parent, rows.place))
    return (keys.place <= row_place) & ((keys.segment == row_segment) | (keys.segment == row_parent))


def _scores(rows: _Rows, keys: _Keys, visible: jax.Array, scale: float) -> jax.Array:
    return jnp.where(visible, _product('kgtd,ksd->kgts', rows.q, keys.k) * scale, _INVISIBLE)


def _visible_tiles(rows: _Rows, keys: _Keys) -> tuple[jax.Array, jax.Array]:
    """Per block of queries: key blocks, those that may hold a visible pair first [B, B], and their number [B].

    A tile may hold one if it is not above the diagonal and the range of the keys' segments meets the range of the
    queries' segments or parents: for any numbering no visible pair is missed, and few tiles are visited in vain
    where segments are numbered in the order of the row. Padding (0) stands last and is counted as highest.
    """

    def ranges(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = jnp.where(ids == 0, jnp.iinfo(ids.dtype).max, ids).reshape(-1, _BLOCK)
        return blocks.min(axis=1), blocks.max(axis=1)

    key_low, key_high = ranges(keys.segment)
    own, parent = (
        (low[:, None] <= key_high) & (key_low <= high[:, None])
        for low, high in (ranges(rows.segment), ranges(rows.parent))
    )
    visited = jnp.tril(own | parent)
    return jnp.argsort(~visited, axis=1, stable=True), visited.sum(axis=1)


def _row_block(rows: _Rows, index: jax.Array) -> _Rows:
    gradient = {}
    if rows.statistics is not None:
        gradient = {'d_out': _block(rows.d_out, index, 2), 'statistics': _block(rows.statistics, index, 3)}
    segment, parent = _block(rows.segment, index, 0), _block(rows.parent, index, 0)
    return _Rows(_block(rows.q, index, 2), _block(rows.place, index, 0), segment, parent, **gradient)


def _key_block(keys: _Keys, index: jax.Array) -> _Keys:
    k, v = _block(keys.k, index, 1), _block(keys.v, index, 1)
    return _Keys(k, v, _block(keys.place, index, 0), _block(keys.segment, index, 0))


def _block(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * _BLOCK, _BLOCK, axis)


def _add_block(total: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    """`part` added in place to the tokens (next to last axis) of a block."""
    axis = total.ndim - 2
    return jax.lax.dynamic_update_slice_in_dim(total, _block(total, index, axis) + part, index * _BLOCK, axis)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _all_finite(x: jax.Array) -> jax.Array:
    """bool [..., 1]: the whole vector is finite."""
    return jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
