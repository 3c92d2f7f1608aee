"""Our block-sparse attention as Pallas kernels for GPUs (Triton lowering).

Tiles, masks and formulas are the same as in `blocked`: FlashAttention (arXiv 2205.14135) over the tiles that may
contain a visible pair. A program of the forward pass and of the gradient of q owns a block of queries of one head. A
program of the gradients of k and v owns a block of keys of one kv head, with all its query heads. So programs never add
to the same output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from areal_jax.models.attention import flash
from areal_jax.models.attention.flash import (
    INVISIBLE,
    PALLAS_BLOCK,
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
    stream_ids,
    visible,
    visible_tiles,
    visits,
)

Ref = Any  # a block of an array in memory, as Pallas passes it to a kernel; indexing reads, assignment writes
_TILE_BYTES = 16384  # of one block of vectors: the four blocks of a backward tile fit the shared memory of an sm80
_MIN_DIM = 16  # smallest axis of a product on tensor cores


def attend_rows(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting, sinks: jax.Array | None = None
) -> jax.Array:
    """`flash.attend` over rows end to end, [R, Tq, H, D].

    Pads tokens to whole blocks, and D to a power of two, which Triton requires.
    """
    queries, keys = stream_ids(ids, q.shape[1])
    shape = q.shape
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    dim = shape[-1]
    block = block_tokens(dim, q.dtype)
    more_queries, more_keys, more_dim = -len(q) % block, -len(k) % block, padded_dim(dim) - dim
    padded = jnp.pad(q, ((0, more_queries), (0, 0), (0, more_dim)))
    k, v = (jnp.pad(x, ((0, more_keys), (0, 0), (0, more_dim))) for x in (k, v))
    queries, keys = pad_queries(queries, more_queries), pad_keys(keys, more_keys)
    out = flash.attend(Kernel(forward, backward), padded, k, v, queries, keys, setting, sinks)
    return out[: len(q), :, :dim].reshape(shape)


def forward(rows: Rows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array]:
    """See flash.Kernel."""
    groups, heads_each, n_queries, dim = rows.q.shape
    block = block_tokens(dim, rows.q.dtype)
    order, count = visits(visible_tiles(rows.ids, keys.ids, setting.window, block))
    q = rows.q.reshape(groups * heads_each, n_queries, dim)
    by_query, by_key = _by_query(block), _by_key(heads_each)
    out, lse = pl.pallas_call(
        functools.partial(_forward_kernel, block=block, setting=setting),
        grid=(n_queries // block, len(q)),
        in_specs=[
            *(_whole(order), _whole(count), by_query(q), by_key(keys.k), by_key(keys.v)),
            *(_block_ids(block), _whole(keys.ids.place, 4)),
        ],
        out_specs=[by_query(q), by_query(q[..., 0])],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, keys.v.dtype),
            jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32),
        ],
        compiler_params=_compiler_params(dim),
        interpret=setting.interpret,
        name='packed_attention_forward',
    )(order, count, q, keys.k, keys.v, _stack(rows.ids), _stack(keys.ids))
    return out.reshape(rows.q.shape), lse.reshape(rows.q.shape[:-1])


def backward(rows: GradientRows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See flash.Kernel."""
    tiles = visible_tiles(rows.ids, keys.ids, setting.window, block_tokens(rows.q.shape[-1], rows.q.dtype))
    return _query_gradient(rows, keys, tiles, setting), *_key_gradients(rows, keys, tiles, setting)


def _query_gradient(rows: GradientRows, keys: Keys, tiles: jax.Array, setting: Setting) -> jax.Array:
    groups, heads_each, n_queries, dim = rows.q.shape
    block = n_queries // len(tiles)
    q, d_out = (x.reshape(groups * heads_each, n_queries, dim) for x in (rows.q, rows.d_out))
    lse, overlap = rows.statistics.reshape(2, groups * heads_each, n_queries)
    by_query, by_key = _by_query(block), _by_key(heads_each)
    order, count = visits(tiles)
    d_q = pl.pallas_call(
        functools.partial(_query_gradient_kernel, block=block, setting=setting),
        grid=(n_queries // block, len(q)),
        in_specs=[
            *(_whole(order), _whole(count), by_query(q), by_key(keys.k), by_key(keys.v)),
            *(_block_ids(block), _whole(keys.ids.place, 4), by_query(d_out), by_query(lse), by_query(overlap)),
        ],
        out_specs=by_query(q),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=_compiler_params(dim),
        interpret=setting.interpret,
        name='packed_attention_query_gradient',
    )(order, count, q, keys.k, keys.v, _stack(rows.ids), _stack(keys.ids), d_out, lse, overlap)
    return d_q.reshape(rows.q.shape)


def _key_gradients(rows: GradientRows, keys: Keys, tiles: jax.Array, setting: Setting) -> tuple[jax.Array, jax.Array]:
    groups, heads_each, n_queries, dim = rows.q.shape
    block = n_queries // len(tiles)
    order, count = visits(tiles.T)
    vectors = pl.BlockSpec((None, heads_each, n_queries, dim), lambda i, h: (h, 0, 0, 0))
    numbers = pl.BlockSpec((None, heads_each, n_queries), lambda i, h: (h, 0, 0))
    key_block = pl.BlockSpec((None, block, dim), lambda i, h: (h, i, 0))
    d_k, d_v = pl.pallas_call(
        functools.partial(_key_gradient_kernel, block=block, heads=heads_each, setting=setting),
        grid=(len(count), groups),
        in_specs=[
            *(_whole(order), _whole(count), vectors, key_block, key_block),
            *(_whole(rows.ids.place, 4), _block_ids(block), vectors, numbers, numbers),
        ],
        out_specs=[key_block, key_block],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys.k, keys.v)],
        compiler_params=_compiler_params(dim),
        interpret=setting.interpret,
        name='packed_attention_key_gradients',
    )(order, count, rows.q, keys.k, keys.v, _stack(rows.ids), _stack(keys.ids), rows.d_out, *rows.statistics)
    return d_k, d_v


def _forward_kernel(
    order: Ref, count: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, query_ids: Ref, key_ids: Ref, out_ref: Ref,
    lse_ref: Ref, *, block: int, setting: Setting,
) -> None:  # fmt: skip
    index = pl.program_id(0)
    q, queries = q_ref[...], _read_queries(query_ids, pl.ds(0, block))

    def fold(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = state
        tile = pl.ds(order[index, step] * block, block)
        v = v_ref[tile, :]
        seen = visible(queries, _read_keys(key_ids, tile), setting.window)
        scores = jnp.where(seen, _dot(q, k_ref[tile, :], (1, 1)) * setting.scale, INVISIBLE)
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp(scores - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        out = out * shrink[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))
        return new_top, total * shrink + weights.sum(axis=1), out

    zeros = jnp.zeros((block,), jnp.float32)
    start = (zeros + INVISIBLE, zeros, jnp.zeros(q.shape, jnp.float32))
    top, total, out = jax.lax.fori_loop(0, count[index], fold, start)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = top + jnp.log(total)


def _query_gradient_kernel(
    order: Ref, count: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, query_ids: Ref, key_ids: Ref, d_out_ref: Ref,
    lse_ref: Ref, overlap_ref: Ref, d_q_ref: Ref, *, block: int, setting: Setting,
) -> None:  # fmt: skip
    index = pl.program_id(0)
    q, d_out, lse, overlap = q_ref[...], d_out_ref[...], lse_ref[...], overlap_ref[...]
    queries = _read_queries(query_ids, pl.ds(0, block))

    def fold(step: jax.Array, d_q: jax.Array) -> jax.Array:
        tile = pl.ds(order[index, step] * block, block)
        k, v = k_ref[tile, :], v_ref[tile, :]
        seen = visible(queries, _read_keys(key_ids, tile), setting.window)
        _, d_scores = _weights(q, k, v, d_out, lse, overlap, seen, setting.scale)
        return d_q + _dot(d_scores.astype(k.dtype), k, (1, 0))

    d_q = jax.lax.fori_loop(0, count[index], fold, jnp.zeros(q.shape, jnp.float32))
    d_q_ref[...] = d_q.astype(d_q_ref.dtype)


def _key_gradient_kernel(
    order: Ref, count: Ref, q_ref: Ref, k_ref: Ref, v_ref: Ref, query_ids: Ref, key_ids: Ref, d_out_ref: Ref,
    lse_ref: Ref, overlap_ref: Ref, d_k_ref: Ref, d_v_ref: Ref, *, block: int, heads: int, setting: Setting,
) -> None:  # fmt: skip
    index = pl.program_id(0)
    k, v, keys = k_ref[...], v_ref[...], _read_keys(key_ids, pl.ds(0, block))
    visited = count[index]

    def fold(step: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        d_k, d_v = state
        head = jax.lax.div(step, visited)
        tile = pl.ds(order[index, step - head * visited] * block, block)
        q, d_out = q_ref[head, tile, :], d_out_ref[head, tile, :]
        lse, overlap = lse_ref[head, tile], overlap_ref[head, tile]
        seen = visible(_read_queries(query_ids, tile), keys, setting.window)
        weights, d_scores = _weights(q, k, v, d_out, lse, overlap, seen, setting.scale)
        d_k = d_k + _dot(d_scores.astype(q.dtype), q, (0, 0))
        return d_k, d_v + _dot(weights.astype(d_out.dtype), d_out, (0, 0))

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, visited * heads, fold, (zeros, zeros))
    d_k_ref[...] = d_k.astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def _weights(
    q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, lse: jax.Array, overlap: jax.Array, seen: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Softmax weights of a tile and the gradient of its products q k', float32 [queries, keys]."""
    scores = jnp.where(seen, _dot(q, k, (1, 1)) * scale, INVISIBLE)
    weights = jnp.where(seen, jnp.exp(scores - lse[:, None]), 0.0)
    d_weights = _dot(d_out, v, (1, 1))
    return weights, jnp.where(seen, weights * (d_weights - overlap[:, None]), 0.0) * scale


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over one axis of each, float32; float32 inputs are not rounded to TF32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(a, b, dimensions, precision=highest, preferred_element_type=jnp.float32)


def _stack(ids: QueryIds | KeyIds) -> jax.Array:
    return jnp.stack([*ids, *([jnp.zeros_like(ids[0])] * (4 - len(ids)))])


def _read_queries(ref: Ref, tile: pl.Slice | slice) -> QueryIds:
    return QueryIds(ref[0, tile], ref[1, tile], ref[2, tile], ref[3, tile])


def _read_keys(ref: Ref, tile: pl.Slice | slice) -> KeyIds:
    return KeyIds(ref[0, tile], ref[1, tile], ref[2, tile])


def _whole(x: jax.Array, rows: int | None = None) -> pl.BlockSpec:
    shape = x.shape if rows is None else (rows, *x.shape)
    return pl.BlockSpec(shape, lambda i, h: (0,) * len(shape))


def _block_ids(block: int) -> pl.BlockSpec:
    return pl.BlockSpec((4, block), lambda i, h: (0, i))


def _by_query(block: int) -> Callable[[jax.Array], pl.BlockSpec]:
    return lambda x: pl.BlockSpec((None, block, *x.shape[2:]), lambda i, h: (h, i, 0)[: x.ndim])


def _by_key(heads_each: int) -> Callable[[jax.Array], pl.BlockSpec]:
    return lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, h: (jax.lax.div(h, heads_each), 0, 0))


def _compiler_params(dim: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=4 if dim <= 64 else 8, num_stages=2)


def padded_dim(dim: int) -> int:
    """The size of a head as the kernels take it: a power of two."""
    return max(_MIN_DIM, pl.next_power_of_2(dim))


def block_tokens(dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Side of a tile in tokens: at most PALLAS_BLOCK, at least 16, and so that a block of vectors fits _TILE_BYTES."""
    return max(16, min(PALLAS_BLOCK, _TILE_BYTES // (padded_dim(dim) * jnp.dtype(dtype).itemsize)))
