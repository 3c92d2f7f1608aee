"""Attention over blocks for CPUs: loops over the blocks that the rows hold, with a softmax corrected block by block.

Rows that share a loop (a chunk) read as many blocks as the longest of them holds; rows are sorted by length, so that
rows of a chunk are about equally long. Chunks are small for the longest rows, where lengths differ most, and larger for
the other rows, to save iterations.

Layout: keys [blocks, K, D, T], values [blocks, K, T, D]: in both products the summed axis is the one that XLA's CPU
product reads fastest. Shapes as in CacheAttention; R rows of a chunk, G = H / K.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

LayerCache = tuple[jax.Array, ...]  # keys and values of one layer, in the implementation's layout
Cache = tuple[LayerCache, ...]  # one entry per layer: XLA would copy an array of all layers when one is written


class CacheAttention(Protocol):
    """Attention of one token per row over the blocks of its sequence, and all operations on the cache's layout."""

    @property
    def name(self) -> str: ...

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache: ...

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        """Writes k, v [N, K, D] of token n at position offsets[n] of block blocks[n], int32 [N], in place."""
        ...

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns k, v [C * T, K, D] of the listed blocks, int32 [C], one after the other."""
        ...

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Computes softmax(q k' / sqrt(D)) v over the first lengths[b] positions of row b: [B, H, D].

        Args:
          q: [B, H, D].
          tables: int32 [B, M]; position p of row b is in block tables[b, p // T].
          lengths: int32 [B], descending; 0 = a row of padding, for which any finite result is right.
          window: number of last positions that are visible; None = all.
          sinks: [H], one more logit in the sum of each head's softmax, which has no value.

        Cache content beyond lengths[b], NaN included, has no influence.
        """
        ...

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """The positions (int32) that `attend` reads for rows of these lengths without a window, with masked ones."""
        ...

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        """Copies block sources[i] to block targets[i], both int32 [C], in place."""
        ...


class Sums(NamedTuple):
    """The sums of a softmax over some positions; sums over no position have the top MASKED."""

    top: jax.Array  # float32 [...], the largest score
    total: jax.Array  # float32 [...], sum of e^(score - top)
    out: jax.Array  # float32 [..., D], sum of e^(score - top) value


def join(sums: Sums, axis: int) -> Sums:
    """Adds up sums over different positions."""
    top = sums.top.max(axis=axis, keepdims=True)
    share = jnp.exp(sums.top - top)
    out = (sums.out * share[..., None]).sum(axis=axis)
    return Sums(top.squeeze(axis), (sums.total * share).sum(axis=axis), out)


def finish(sums: Sums, sinks: jax.Array | None) -> jax.Array:
    """Divides the sums; sinks broadcast to `total`, to which each adds a score without a value."""
    top, total, out = sums
    if sinks is not None:  # infinite if the sink is far above all scores, and then the result is 0
        total = total + jnp.exp(sinks - top)
    return out / jnp.where(total == 0, 1, total)[..., None]  # 0: all rows are padding


class BlocksFirst:
    """A layout whose arrays have the blocks on their first axis."""

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        return tuple(side.at[targets].set(side[sources]) for side in layer)


class HeadsFirst(BlocksFirst):
    """A layout of keys and values, each [blocks, K, T, D]."""

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        shape = (blocks, heads, block_tokens, head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        return layer[0].at[blocks, :, offsets].set(k), layer[1].at[blocks, :, offsets].set(v)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (side[blocks].swapaxes(1, 2) for side in layer)  # [C, T, K, D]
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])


# Attention over blocks in its plainest form: every block of the table is gathered and all scores are masked.
#
# The reference for the other implementations, and the fallback for hardware without one. Shapes as in
# CacheAttention, with S = M * T positions of a table row.


MASKED = -1e30  # the softmax gives a weight of exactly 0 to this score


@dataclasses.dataclass(frozen=True)
class GatherAttention(HeadsFirst):
    """CacheAttention by a gather."""

    table_blocks: int  # M of the tables: `attend` reads all M blocks
    name = 'gather'

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        rows, heads, size = q.shape
        k, v = (side[tables].swapaxes(1, 2).reshape(rows, side.shape[1], -1, size) for side in layer)  # [B, K, S, D]
        place = jnp.arange(k.shape[2])
        seen = place < lengths[:, None]
        if window is not None:
            seen &= place >= lengths[:, None] - window
        grouped = q.reshape(rows, k.shape[1], -1, size)
        scores = jnp.einsum('bkgd,bksd->bkgs', grouped, k, preferred_element_type=jnp.float32) * size**-0.5
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1)
        if sinks is not None:
            lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
            weights = weights * jax.nn.sigmoid(lse - sinks.astype(jnp.float32).reshape(k.shape[1], -1, 1))
        weights = weights.astype(v.dtype)
        v = jnp.where(seen[:, None, :, None], v, 0)  # a weight of 0 times NaN would be NaN
        return jnp.einsum('bkgs,bksd->bkgd', weights, v).reshape(rows, heads, size)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        return jnp.int32(len(lengths) * self.table_blocks * block_tokens)


class LatentBlocks(BlocksFirst):
    """A layout of one head whose keys are its values: a layer is one array, [blocks, 1, T, D]."""

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        return (jnp.zeros((blocks, heads, block_tokens, head_dim), dtype),)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        return (layer[0].at[blocks, :, offsets].set(k),)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k = layer[0][blocks].swapaxes(1, 2)  # [C, T, 1, D]
        k = k.reshape(-1, *k.shape[2:])
        return k, k


class GatherLatents(LatentBlocks, GatherAttention):
    """CacheAttention by a gather, of latents."""

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        return super().attend(q, layer * 2, tables, lengths, window, sinks)


_SMALL_CHUNK, _LARGE_CHUNK = 4, 8


class _Group(NamedTuple):
    """Consecutive rows [start, stop) in chunks of one size."""

    start: int
    stop: int
    chunk: int


class LoopAttention(BlocksFirst):
    """CacheAttention in plain XLA."""

    name = 'loops'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        k, v = (blocks, heads, head_dim, block_tokens), (blocks, heads, block_tokens, head_dim)
        return jnp.zeros(k, dtype), jnp.zeros(v, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        keys, values = layer
        return keys.at[blocks, :, :, offsets].set(k), values.at[blocks, :, offsets].set(v)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        keys, values = layer[0][blocks].transpose(0, 3, 1, 2), layer[1][blocks].transpose(0, 2, 1, 3)
        return keys.reshape(-1, *keys.shape[2:]), values.reshape(-1, *values.shape[2:])

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        rows, heads, size = q.shape
        grouped = q.reshape(rows, layer[0].shape[1], -1, size) * size**-0.5
        logits = None if sinks is None else sinks.astype(jnp.float32).reshape(grouped.shape[1:3])
        parts = [_attend_group(grouped, layer, tables, lengths, window, group, logits) for group in _groups(rows)]
        return jnp.concatenate(parts).reshape(rows, heads, size)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        longest = [
            group.chunk * -(-lengths[group.start : group.stop : group.chunk] // block_tokens)
            for group in _groups(len(lengths))
        ]
        return jnp.sum(jnp.concatenate(longest)) * block_tokens


class LoopLatents(LatentBlocks, LoopAttention):
    """CacheAttention in plain XLA, of latents: a block is read once, for both products."""


def _groups(rows: int) -> tuple[_Group, ...]:
    few = min(rows, 2 * _SMALL_CHUNK)
    groups = [_Group(0, few, _divisor(few, _SMALL_CHUNK))]
    if rows > few:
        groups.append(_Group(few, rows, _divisor(rows - few, _LARGE_CHUNK)))
    return tuple(groups)


def _divisor(n: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if n % size == 0)


def _attend_group(
    q: jax.Array,
    layer: LayerCache,
    tables: jax.Array,
    lengths: jax.Array,
    window: int | None,
    group: _Group,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attends for the rows of a group: [stop - start, K, G, D] of scaled queries [B, K, G, D] and sinks [K, G]."""

    def chunk(index: jax.Array, out: jax.Array) -> jax.Array:
        first = group.start + index * group.chunk
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=group.chunk)
        found = _attend_chunk(cut(q), layer, cut(tables), cut(lengths), window, sinks)
        return lax.dynamic_update_slice_in_dim(out, found, index * group.chunk, 0)

    rows = group.stop - group.start
    return lax.fori_loop(0, rows // group.chunk, chunk, jnp.zeros((rows, *q.shape[1:]), q.dtype))


def _attend_chunk(
    q: jax.Array,
    layer: LayerCache,
    tables: jax.Array,
    lengths: jax.Array,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attends for a chunk: [R, K, G, D] of scaled queries [R, K, G, D], tables [R, M] and lengths [R].

    A block in which a row sees nothing does not change its result: the weights are exp(-1e30 - m) = 0, and the sums so
    far are multiplied by exp(0) = 1. Before the first block that a row sees, m = -1e30, and the sums of those blocks
    are multiplied by exp(-1e30 - m) = 0 later.
    """
    *keys, values = layer  # latents are both
    block = values.shape[-2]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    starts = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)
    longest = jnp.max(lengths)

    def fold(index: jax.Array, sums: Sums) -> Sums:
        top, total, out = sums
        at = lax.dynamic_index_in_dim(tables, index, axis=1, keepdims=False)
        places = index * block + jnp.arange(block)
        seen = (places < lengths[:, None]) & (places >= starts[:, None])  # [R, T]
        held = jnp.where(seen[:, None, :, None], values[at], 0)  # 0 * NaN would be NaN
        found = product('rkgd,rkdt->rkgt', q, keys[0][at]) if keys else product('rkgd,rktd->rkgt', q, held)
        scores = jnp.where(seen[:, None, None], found, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        shift = jnp.exp(top - new_top)
        out = out * shift[..., None] + product('rkgt,rktd->rkgd', weights.astype(held.dtype), held)
        return Sums(new_top, total * shift + jnp.sum(weights, axis=-1), out)

    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    first = jnp.min(jnp.where(lengths > 0, starts, longest)) // block
    end = -(-longest // block)
    start = Sums(zeros + MASKED, zeros, jnp.zeros(q.shape, jnp.float32))
    return finish(lax.fori_loop(first, end, fold, start), sinks).astype(q.dtype)
