"""Paged attention for what the kernels of jax cannot express: windows on GPUs, and sinks.

A kernel returns sums over the positions of a row, which `finish` divides. Both follow FlashAttention (arXiv 2205.14135)
with one query a row: the GPU's is cut into parts of a sequence, so that few rows fill all multiprocessors; in the TPU's
the pages of a row are the steps of the grid, and Pallas loads the next pages during a step. They were written without a
device, and run only if the check of choose.py passes.

Shapes: B rows, K key heads, G queries of each, padded to whole tiles, D padded head size, M blocks of a table, T tokens
of a block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton

from areal_jax.models.attention.pallas import Ref
from areal_jax.rollout.decode.attention.loops import MASKED, Sums

_LANES = 128
_MOST_PAGES = 8  # of one step of the TPU's grid, each an operand of its own


def _first_positions(lengths: jax.Array, window: int | None) -> jax.Array:
    """int32 [B]: the first position of each row that is visible."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)


def gpu_sums(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    window: int | None,
    *,
    tile: int,
    part_tokens: int,
    warps: int,
    stages: int,
    interpret: bool,
) -> Sums:
    """The sums of each part of `part_tokens` positions, a multiple of `tile`: Sums with the axes [B, K, parts, G].

    Args:
      q: [B, K, G, D], scaled, G and D powers of two.
      k, v: [K, blocks, T, D]; no value may be NaN or infinite.
      tables: int32 [B, M].
      lengths: int32 [B].
      tile: positions that a program reads at once, a power of two.
    """
    rows, heads, queries, dim = q.shape
    blocks, block_tokens = k.shape[1:3]
    positions = tables.shape[1] * block_tokens
    parts = -(-min(positions, positions if window is None else window + tile) // part_tokens)
    cache = pl.BlockSpec((None, blocks * block_tokens, dim), lambda b, h, p: (h, 0, 0))
    by_part = lambda size: pl.BlockSpec((None, None, None, queries, size), lambda b, h, p: (b, h, p, 0, 0))
    found = pl.pallas_call(
        functools.partial(_gpu_kernel, tile=tile, part_tokens=part_tokens, block_tokens=block_tokens),
        grid=(rows, heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, queries, dim), lambda b, h, p: (b, h, 0, 0)),
            *(cache, cache, pl.BlockSpec((None, tables.shape[1]), lambda b, h, p: (b, 0))),
            *[pl.BlockSpec((1,), lambda b, h, p: (b,))] * 2,
        ],
        out_specs=[by_part(size) for size in (1, 1, dim)],
        out_shape=[jax.ShapeDtypeStruct((rows, heads, parts, queries, size), jnp.float32) for size in (1, 1, dim)],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name='paged_attention_sums',
    )(q, *(x.reshape(heads, -1, dim) for x in (k, v)), tables, _first_positions(lengths, window), lengths)
    return Sums(found[0][..., 0], found[1][..., 0], found[2])


def _gpu_kernel(
    q_ref: Ref, k_ref: Ref, v_ref: Ref, tables_ref: Ref, first_ref: Ref, length_ref: Ref, top_ref: Ref, total_ref: Ref,
    out_ref: Ref, *, tile: int, part_tokens: int, block_tokens: int,
) -> None:  # fmt: skip
    q, first, length = q_ref[...], first_ref[0], length_ref[0]
    start = first // tile * tile + pl.program_id(2) * part_tokens

    def fold(step: jax.Array, sums: Sums) -> Sums:
        place = start + step * tile + jnp.arange(tile)
        seen = (place >= first) & (place < length)
        inside = jnp.minimum(place, length - 1)  # what is not seen is not read beyond the row
        token = tables_ref[lax.div(inside, block_tokens)] * block_tokens + lax.rem(inside, block_tokens)
        return _add_tile(sums, q, k_ref[token, :], v_ref[token, :], seen[None, :])

    number = jnp.zeros((len(q), 1), jnp.float32)
    tiles = pl.cdiv(jnp.clip(length - start, 0, part_tokens), tile)
    sums = lax.fori_loop(0, tiles, fold, Sums(number + MASKED, number, jnp.zeros(q.shape, jnp.float32)))
    top_ref[...], total_ref[...], out_ref[...] = sums


def tpu_sums(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tables: jax.Array,
    lengths: jax.Array,
    window: int | None,
    *,
    pages: int,
    interpret: bool,
) -> Sums:
    """The sums of each row, with the axes [B, K, G].

    Args:
      q: [B, K, G, D], scaled, G a multiple of 16 and D of 128.
      k, v: [blocks, K, T, D]; what no row sees may be NaN.
      tables: int32 [B, M].
      lengths: int32 [B].
      pages: blocks that are loaded at once.
    """
    rows, heads, queries, dim = q.shape
    block_tokens, blocks = k.shape[2], tables.shape[1]
    pages = min(pages, _MOST_PAGES, blocks)
    most = blocks if window is None else min(blocks, (window - 2) // block_tokens + 2)

    def page(index: int) -> pl.BlockSpec:
        def place(
            row: jax.Array, step: jax.Array, tables: Ref, first: Ref, lengths: Ref
        ) -> tuple[jax.Array | int, ...]:
            # a page behind the last one is the last one again, which is not loaded twice
            last = jnp.maximum(lengths[row] - 1, 0) // block_tokens
            return tables[row, jnp.minimum(first[row] // block_tokens + step * pages + index, last)], 0, 0, 0

        return pl.BlockSpec((None, heads, block_tokens, dim), place)

    def of_row(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, queries, size), lambda row, *_: (row, 0, 0, 0))

    shape = heads, queries, dim
    found = pl.pallas_call(
        functools.partial(_tpu_kernel, pages=pages),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(rows, -(-most // pages)),
            in_specs=[of_row(dim), *[page(index) for index in range(pages) for _ in (k, v)]],
            out_specs=[of_row(_LANES), of_row(_LANES), of_row(dim)],
        ),
        out_shape=[
            *[jax.ShapeDtypeStruct((rows, heads, queries, _LANES), jnp.float32)] * 2,
            jax.ShapeDtypeStruct((rows, *shape), jnp.float32),
        ],
        compiler_params=tpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
        interpret=interpret,
        name='paged_attention_sums',
    )(tables, _first_positions(lengths, window), lengths, q, *[k, v] * pages)
    return Sums(found[0][..., 0], found[1][..., 0], found[2])


def _tpu_kernel(tables_ref: Ref, first_ref: Ref, length_ref: Ref, q_ref: Ref, *refs: Ref, pages: int) -> None:
    cache, (top_ref, total_ref, out_ref) = refs[:-3], refs[-3:]
    row, step = pl.program_id(0), pl.program_id(1)
    first, length = first_ref[row], length_ref[row]
    heads, block_tokens = cache[0].shape[:2]

    @pl.when(step == 0)
    def begin() -> None:
        top_ref[...], total_ref[...], out_ref[...] = (
            jnp.full_like(ref, start) for ref, start in ((top_ref, MASKED), (total_ref, 0), (out_ref, 0))
        )

    def fold(k_ref: Ref, v_ref: Ref, start: jax.Array) -> None:
        place = start + lax.broadcasted_iota(jnp.int32, (1, block_tokens), 1)
        down = start + lax.broadcasted_iota(jnp.int32, (block_tokens, 1), 0)
        seen, held = ((x >= first) & (x < length) for x in (place, down))
        for head in range(heads):
            v = jnp.where(held, v_ref[head], 0)  # 0 * NaN would be NaN
            before = Sums(top_ref[head, :, :1], total_ref[head, :, :1], out_ref[head])
            top, total, out_ref[head] = _add_tile(before, q_ref[head], k_ref[head], v, seen)
            top_ref[head] = jnp.broadcast_to(top, top_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

    for index in range(pages):
        start = (first // block_tokens + step * pages + index) * block_tokens
        pl.when(start < length)(functools.partial(fold, cache[2 * index], cache[2 * index + 1], start))


def _add_tile(sums: Sums, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> Sums:
    """Adds the positions of k and v [tokens, D] to the sums of q [G, D]; top and total are [G, 1], seen [1, tokens]."""
    scores = jnp.where(seen, _dot(q, k, 1), MASKED)
    top = jnp.maximum(sums.top, scores.max(axis=1, keepdims=True))
    weights, shift = jnp.exp(scores - top), jnp.exp(sums.top - top)
    total = sums.total * shift + weights.sum(axis=1, keepdims=True)
    return Sums(top, total, sums.out * shift + _dot(weights.astype(v.dtype), v, 0))


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Product over the last axis of `a` and one of `b`, float32; float32 inputs are not rounded to TF32."""
    highest = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=highest, preferred_element_type=jnp.float32)
