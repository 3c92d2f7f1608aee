"""Paged attention kernels behind CacheAttention: Pallas for NVIDIA GPUs (Triton lowering) and for TPUs.

They are those of jax where these suffice, and else ours (paged_sums.py).

Each runs only if the check of choose.py passes. The GPU's passes on an H200 with jax 0.11.2 (docs/gpu.md). Facts about
the kernel of jax 0.10 to 0.12: it has no scale and no window; it takes sizes that are powers of two; and it multiplies
masked values by 0, which does not hide a NaN, so no value that is written here is NaN or infinite. Its module is
deprecated since jax 0.11: if it is missing, the check fails and another implementation is chosen.

The TPU's was written without a device. Facts about the kernel of jax 0.10 to 0.12: keys and values of a token are
interleaved by head in one array; head sizes are multiples of 128; the numbers of heads must fill whole tiles; a
sequence without positions breaks the chain of its copies from memory, so rows of padding are left out or read one
position.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from areal_jax.rollout.decode.attention.loops import BlocksFirst, HeadsFirst, LayerCache, Sums, finish, join

_TILE_BYTES = 16384  # of the keys that a program holds at once; its values take as much again
_MOST_TILE_TOKENS = 64
_MIN_SIZE = 16  # smallest axis of a product on tensor cores
_SHORT_TOKENS = 4096  # of a context


class Tuning(NamedTuple):
    """The kernel's work split; results for different splits are equal up to rounding."""

    part_tokens: int  # of a sequence in one program
    warps: int  # of a program
    stages: int  # tiles being loaded from memory


def default_tuning(context_tokens: int, dim: int) -> Tuning:
    """Returns the fastest tuning on an H200 (benchmarks.gpu, part `attention`), for tables of `context_tokens`.

    Short contexts are split into smaller parts, so that they fill all multiprocessors too: 64 rows of 1,024 took 49 us
    in parts of 256 and 67 us in parts of 512, 64 rows of 16,240 took 470 and 451 us.
    """
    return Tuning(256 if context_tokens <= _SHORT_TOKENS else 512, 4 if dim <= 128 else 8, 2)


@dataclasses.dataclass(frozen=True)
class PallasGpuAttention:
    """loops.CacheAttention; keys and values of a layer are [K, blocks, T, D], D padded to a power of two.

    A token with a NaN or infinity in its key or value gets a key of NaN and a value of zeros: a query that attends
    to the token gets NaN, and no other query does.

    Args:
      head_dim: D of the model.
      interpret: runs the kernel in Pallas's interpreter, for tests on a CPU.
      tuning: None = default_tuning.
    """

    head_dim: int
    interpret: bool = False
    tuning: Tuning | None = None
    name = 'pallas_gpu'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        shape = (heads, blocks, block_tokens, padded_dim(head_dim))
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
        written = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
        return tuple(
            pages.at[:, blocks, offsets].set(_pad_dim(new, pages.shape[-1]).swapaxes(0, 1))
            for pages, new in zip(layer, written, strict=True)
        )

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (
            pages[:, blocks, :, : self.head_dim].reshape(len(pages), -1, self.head_dim).swapaxes(0, 1)
            for pages in layer
        )
        return k, v

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        run = self._attend if window is None and sinks is None else functools.partial(self._attend_sums, window, sinks)
        return run(q, layer, tables, lengths)[..., : self.head_dim]

    def _attend(self, q: jax.Array, layer: LayerCache, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        """Attends by the kernel of jax."""
        k, v = layer
        heads, blocks, block_tokens, dim = k.shape
        tile = tile_tokens(dim, k.dtype)
        page = math.gcd(block_tokens, tile)  # tokens: a block is one or more pages of the kernel
        k, v = (x.reshape(heads, blocks * (block_tokens // page), page, dim) for x in (k, v))
        part, warps, stages = self.tuning or default_tuning(tables.shape[1] * block_tokens, dim)
        pages = _pages_of(tables, block_tokens // page, part // page)
        return _paged_attention()(
            _scaled(q, self.head_dim, k), k, v, pages, lengths,
            block_h=_MIN_SIZE, pages_per_compute_block=tile // page, k_splits=pages.shape[1] * page // part,
            num_warps=warps, num_stages=stages, interpret=self.interpret,
        )  # fmt: skip

    def _attend_sums(
        self,
        window: int | None,
        sinks: jax.Array | None,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """Attends by our kernel."""
        from areal_jax.rollout.decode.attention import paged_sums  # its imports from jax take a tenth of a second

        k, v = layer
        heads, _, block_tokens, dim = k.shape
        part, warps, stages = self.tuning or default_tuning(tables.shape[1] * block_tokens, dim)
        tile = tile_tokens(dim, k.dtype)
        q = _scaled(q, self.head_dim, k)
        sums = paged_sums.gpu_sums(
            _by_key_head(q, heads, padded_dim), k, v, tables, lengths, window,
            tile=tile, part_tokens=part, warps=warps, stages=stages, interpret=self.interpret,
        )  # fmt: skip
        return _finish(join(sums, axis=2), sinks, q)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """The positions of whole tiles of each row, with tiles for 16-bit keys."""
        tile = tile_tokens(padded_dim(self.head_dim), jnp.bfloat16)
        return jnp.sum(-(-lengths // tile) * tile, dtype=jnp.int32)

    def copy(self, layer: LayerCache, sources: jax.Array, targets: jax.Array) -> LayerCache:
        return tuple(pages.at[:, targets].set(pages[:, sources]) for pages in layer)


def _pages_of(tables: jax.Array, pages_of_block: int, pages_of_part: int) -> jax.Array:
    """Returns int32 [B, pages]: the pages of all listed blocks, padded to whole parts with page 0 (beyond lengths)."""
    pages = (tables[..., None] * pages_of_block + jnp.arange(pages_of_block, dtype=jnp.int32)).reshape(len(tables), -1)
    return jnp.pad(pages, ((0, 0), (0, -pages.shape[1] % pages_of_part)))


def padded_dim(head_dim: int) -> int:
    """The size of a head in the cache: a power of two."""
    return max(_MIN_SIZE, 1 << (head_dim - 1).bit_length())


def tile_tokens(dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Tokens that a program reads at once: a power of two from 16 to 64 within _TILE_BYTES."""
    return max(_MIN_SIZE, min(_MOST_TILE_TOKENS, _TILE_BYTES // (dim * jnp.dtype(dtype).itemsize)))


def _pad_dim(x: jax.Array, dim: int) -> jax.Array:
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, dim - x.shape[-1]),))


def _paged_attention() -> Callable[..., jax.Array]:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # which the import of the module raises
        from jax.experimental.pallas.ops.gpu import paged_attention
    assert isinstance(paged_attention, ModuleType)
    return paged_attention.paged_attention


_LANES = 128  # head sizes are padded to multiples
_TILE_TOKENS = 128  # positions that are read at once, unless a block is longer
_MOST_QUERIES = 8  # rows in one step of the grid: the kernel computes the scores of all of them for every sequence


@dataclasses.dataclass(frozen=True)
class PallasTpuAttention(BlocksFirst):
    """loops.CacheAttention by the kernel of jax, without sinks.

    A layer is one array [blocks, T, 2 K', D'] of key, value, key, value, ... by head. K' and D' are padded to sizes
    that the kernel takes. Positions before a window are read too, and masked.

    Args:
      kv_heads, head_dim: K and D of the model, on one device.
    """

    kv_heads: int
    head_dim: int
    name = 'pallas_tpu'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        return (jnp.zeros((blocks, block_tokens, 2 * padded_heads(heads), padded_lanes(head_dim)), dtype),)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        (pages,) = layer
        pairs = jnp.stack([k, v], axis=2)  # [N, K, 2, D]
        more_heads, more_dim = pages.shape[2] // 2 - k.shape[1], pages.shape[3] - k.shape[2]
        pairs = jnp.pad(pairs, ((0, 0), (0, more_heads), (0, 0), (0, more_dim)))
        return (pages.at[blocks, offsets].set(pairs.reshape(len(k), *pages.shape[2:])),)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        from jax.experimental.layout import Layout, with_layout_constraint

        (pages,) = layer
        # in the cache's own layout: XLA would copy the whole cache to another one for what reads these blocks
        found = with_layout_constraint(pages[blocks], Layout(tuple(range(pages.ndim))))
        tokens = found.reshape(-1, pages.shape[2] // 2, 2, pages.shape[3])
        k, v = (tokens[:, : self.kv_heads, which, : self.head_dim] for which in (0, 1))
        return k, v

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        if sinks is not None:
            raise ValueError('the kernel of jax cannot express sinks; use HeadMajorTpuAttention')
        # imported here, so that the check of choose.py reports a version of jax that lacks the module
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

        (pages,) = layer
        rows, heads, _ = q.shape
        more_heads, more_dim = pages.shape[2] // 2 - self.kv_heads, pages.shape[3] - self.head_dim
        grouped = q.reshape(rows, self.kv_heads, -1, self.head_dim)
        grouped = jnp.pad(grouped, ((0, 0), (0, more_heads), (0, 0), (0, more_dim)))
        out = ragged_paged_attention(
            grouped.reshape(rows, -1, pages.shape[3]),
            pages,
            jnp.maximum(lengths, 1),
            tables,
            jnp.arange(rows + 1, dtype=jnp.int32),  # every sequence has one query
            jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.int32), 1)[None],
            sm_scale=self.head_dim**-0.5,
            sliding_window=window,
            num_kv_pages_per_block=min(tables.shape[1], max(1, _TILE_TOKENS // pages.shape[1])),
            num_queries_per_block=min(rows, _MOST_QUERIES),
        )
        out = out.reshape(rows, -1, heads // self.kv_heads, pages.shape[3])[:, : self.kv_heads, :, : self.head_dim]
        return jnp.where((lengths > 0)[:, None, None], out.reshape(q.shape), 0)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """The positions of whole tiles of each row."""
        tile = max(1, _TILE_TOKENS // block_tokens) * block_tokens
        return jnp.sum(-(-lengths // tile) * tile, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class HeadMajorTpuAttention(HeadsFirst):
    """loops.CacheAttention with sinks by our kernel; heads are padded to whole lanes.

    Only pages with a visible position are read.

    Args:
      head_dim: D of the model.
      interpret: runs the kernel in Pallas's interpreter, for tests on a CPU.
    """

    head_dim: int
    interpret: bool = False
    name = 'pallas_tpu'

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        return super().empty(blocks, heads, block_tokens, padded_lanes(head_dim), dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        k, v = (_pad_dim(new, layer[0].shape[-1]) for new in (k, v))
        return super().write(layer, k, v, blocks, offsets)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = super().read(layer, blocks)
        return k[..., : self.head_dim], v[..., : self.head_dim]

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        from areal_jax.rollout.decode.attention import paged_sums  # its imports from jax take a tenth of a second

        k, v = layer
        _, heads, block_tokens, _ = k.shape
        q = _scaled(q, self.head_dim, k)
        sums = paged_sums.tpu_sums(
            _by_key_head(q, heads, lambda size: size + -size % _MIN_SIZE), k, v, tables, lengths, window,
            pages=max(1, _TILE_TOKENS // block_tokens), interpret=self.interpret,
        )  # fmt: skip
        return _finish(sums, sinks, q)[..., : self.head_dim]

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        """The positions of whole blocks of each row."""
        return jnp.sum(-(-lengths // block_tokens) * block_tokens, dtype=jnp.int32)


def _scaled(q: jax.Array, head_dim: int, keys: jax.Array) -> jax.Array:
    """[B, H, D] in the dtype and with the padded D of the cache's keys."""
    return _pad_dim((q * head_dim**-0.5).astype(keys.dtype), keys.shape[-1])


def _by_key_head(q: jax.Array, heads: int, padded: Callable[[int], int]) -> jax.Array:
    """[B, K, G', D] of q [B, H, D], the G queries of a key head padded to padded(G)."""
    q = q.reshape(len(q), heads, -1, q.shape[-1])
    return jnp.pad(q, ((0, 0), (0, 0), (0, padded(q.shape[2]) - q.shape[2]), (0, 0)))


def _finish(sums: Sums, sinks: jax.Array | None, q: jax.Array) -> jax.Array:
    """Attention [B, H, D] for the padded q [B, H, D] from the sums of `_by_key_head`."""
    heads = sums.top.shape[1]
    each = q.shape[1] // heads
    sums = Sums(*(x[:, :, :each] for x in sums))
    logits = None if sinks is None else sinks.astype(jnp.float32).reshape(heads, each)
    return finish(sums, logits).reshape(q.shape).astype(q.dtype)


def padded_lanes(head_dim: int) -> int:
    """The size of a head in the cache: whole lanes of a register."""
    return head_dim + -head_dim % _LANES


def padded_heads(heads: int) -> int:
    """Rounds up to 1, 2, 4 or a multiple of 8: whole tiles of pairs of key and value, in 32 and in 16 bits."""
    return next((size for size in (1, 2, 4) if heads <= size), heads + -heads % 8)
