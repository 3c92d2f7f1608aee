"""The implementations of CacheAttention: the hardware, dtypes and features of each, and the choice between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.attention.backends import AttentionError, describe_device, is_attached, jax_settings
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention.loops import (
    BlocksFirst,
    CacheAttention,
    GatherAttention,
    GatherLatents,
    LayerCache,
    LoopAttention,
    LoopLatents,
)
from areal_jax.rollout.decode.attention.pallas_kernels import (
    HeadMajorTpuAttention,
    PallasGpuAttention,
    PallasTpuAttention,
)


class NativeAttention(BlocksFirst):
    """loops.CacheAttention in C++ kernels; float32 only. Raises AttentionError if the machine can not compile them."""

    name = 'native'

    def __init__(self) -> None:
        try:
            library.register()
        except library.NativeError as error:
            raise AttentionError(f"rollout.attention='native' can not be had: {error}") from error

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        shape = (blocks, block_tokens, heads, head_dim)
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        same = tuple(jax.ShapeDtypeStruct(side.shape, side.dtype) for side in layer)
        write = jax.ffi.ffi_call(library.WRITE, same, input_output_aliases={0: 0, 1: 1})
        return tuple(write(*layer, k, v, blocks, offsets))

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (side[blocks] for side in layer)  # [C, T, K, D]
        return k.reshape(-1, *k.shape[2:]), v.reshape(-1, *v.shape[2:])

    def attend(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        rows, blocks = tables.shape
        return self.attend_pieces(q, layer, tables.ravel(), jnp.arange(rows) * blocks, lengths, window, sinks)

    def attend_pieces(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Does `attend` for rows that may share a table: row b's begins at starts[b], int32 [B], in `tables`, [M]."""
        more = () if sinks is None else (sinks,)
        attend = jax.ffi.ffi_call(library.ATTEND, jax.ShapeDtypeStruct(q.shape, q.dtype))
        return attend(q, *layer, tables, starts, lengths, *more, window=window or 0)

    def positions_read(self, lengths: jax.Array, block_tokens: int) -> jax.Array:
        return jnp.sum(lengths)


class NativeLatents(NativeAttention):
    """The same of one head whose keys are its values: a layer is one array, [blocks, T, 1, D]."""

    def empty(self, blocks: int, heads: int, block_tokens: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
        return (jnp.zeros((blocks, block_tokens, heads, head_dim), dtype),)

    def write(self, layer: LayerCache, k: jax.Array, v: jax.Array, blocks: jax.Array, offsets: jax.Array) -> LayerCache:
        return (layer[0].at[blocks, offsets].set(k),)

    def read(self, layer: LayerCache, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        return super().read(layer * 2, blocks)

    def attend_pieces(
        self,
        q: jax.Array,
        layer: LayerCache,
        tables: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        return super().attend_pieces(q, layer * 2, tables, starts, lengths, window, sinks)


SETTING = 'rollout.attention'
_ANY_PLATFORM = ()
_FLOATS = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Demand:
    """An engine's requirements on attention; sizes are of one device."""

    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    table_blocks: int  # of the longest sequence
    dtype: jax.typing.DTypeLike
    windows: bool  # whether a layer has a sliding window
    sinks: bool = False  # whether each head has one more logit in the sum of its softmax
    latents: bool = False  # whether the keys are the values too, and are stored once


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation's capabilities, and the function that makes it; all have windows and sinks."""

    make: Callable[[Demand], CacheAttention]
    platforms: tuple[str, ...]  # of a jax.Device; empty = any
    dtypes: tuple[str, ...]
    is_kernel: bool  # not compiled by XLA: it runs only if it passes the check
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    max_head_dim: int | None = None
    latents: bool = False


IMPLEMENTATIONS = {
    'gather': Implementation(
        lambda d: (GatherLatents if d.latents else GatherAttention)(d.table_blocks),
        _ANY_PLATFORM,
        _FLOATS,
        is_kernel=False,
        latents=True,
    ),
    'loops': Implementation(
        lambda d: LoopLatents() if d.latents else LoopAttention(),
        _ANY_PLATFORM,
        _FLOATS,
        is_kernel=False,
        latents=True,
    ),
    'native': Implementation(
        lambda d: NativeLatents() if d.latents else NativeAttention(),
        ('cpu',),
        ('float32',),
        is_kernel=True,
        latents=True,
    ),
    'pallas_gpu': Implementation(
        lambda d: PallasGpuAttention(d.head_dim),
        ('gpu',),
        _FLOATS,
        is_kernel=True,
        min_capability=(8, 0),
        max_head_dim=256,
    ),
    'pallas_tpu': Implementation(
        lambda d: HeadMajorTpuAttention(d.head_dim) if d.sinks else PallasTpuAttention(d.kv_heads, d.head_dim),
        ('tpu',),
        ('float32', 'bfloat16'),
        is_kernel=True,
        max_head_dim=256,
    ),
}
_PREFERRED = {
    'cpu': ('native', 'loops'),
    'gpu': ('pallas_gpu',),
    'tpu': ('pallas_tpu',),
}  # then 'gather', which runs everywhere


def choose_implementation(impl: str, demand: Demand, device: jax.Device, excluded: Collection[str] = ()) -> str:
    """Returns the name of the implementation to use: for 'auto' the best, else `impl` if it meets the demand.

    Args:
      excluded: names that 'auto' skips.

    Raises AttentionError, naming what `impl` lacks and the implementations that have it.
    """
    if impl == 'auto':
        names = (*_PREFERRED.get(device.platform, ()), 'gather')
        able = [name for name in names if name not in excluded and not _missing(name, demand, device)]
        if not able:
            raise AttentionError(f'no {SETTING} is left on {device.platform!r}: excluded are {sorted(excluded)}')
        return able[0]
    if impl not in IMPLEMENTATIONS:
        raise AttentionError(f'{SETTING}={impl!r} is unknown; use one of auto, {", ".join(IMPLEMENTATIONS)}')
    if reason := _missing(impl, demand, device):
        able = [repr(name) for name in IMPLEMENTATIONS if not _missing(name, demand, device)]
        raise AttentionError(f'{SETTING}={impl!r} {reason}; use {" or ".join(able)}')
    return impl


def _missing(name: str, demand: Demand, device: jax.Device) -> str | None:
    """Names the first requirement that the implementation lacks, as the end of a sentence; None = it has all."""
    found, dtype = IMPLEMENTATIONS[name], jnp.dtype(demand.dtype).name
    if found.platforms and device.platform not in found.platforms:
        return f'does not run on {device.platform!r} (only {", ".join(found.platforms)})'
    if (capability := describe_device(device)[1]) is not None and capability < found.min_capability:
        return f'needs CUDA compute capability {found.min_capability}, {device} has {capability}'
    if dtype not in found.dtypes:
        return f'cannot compute in {dtype} (only {", ".join(found.dtypes)})'
    if demand.latents and not found.latents:
        return "has no cache of latents (rollout.mla='absorbed')"
    if found.max_head_dim is not None and demand.head_dim > found.max_head_dim:
        return f'cannot take head size {demand.head_dim} (at most {found.max_head_dim})'
    return None


# The check of a decode attention at start-up, on the device, in the dtype and with the heads and blocks of the run.
#
# It runs when the backend chooses an implementation. Kernels were written without a device at hand, and a kernel that
# reads a wrong page or a masked position would still decode, only worse.


TABLE_BLOCKS = 4  # length of the check's tables, for implementations that are made for one table length
ROWS = 8  # sequences of the check
_FREE_BLOCKS = 2  # not used by any row: they hold NaN, like every position outside the sequences
# largest error relative to the largest value; a wrong page, head or mask gives 0.1 and more
_ALLOWED = {'float32': 2e-2, 'bfloat16': 4e-2, 'float16': 2e-2}  # accelerators multiply float32 with fewer bits
_ALLOWED_FLOAT32_ON_CPU = 1e-4


def choose_checked(impl: str, demand: Demand, device: jax.Device) -> tuple[CacheAttention, tuple[str, ...]]:
    """Returns (the attention for this device, why 'auto' rejected faster ones); see choose_implementation.

    Programs in plain JAX, which run everywhere, are not checked, and nothing is on a device that is only described. A
    process checks a kernel once for each demand: further engines, on devices of the same kind, take the result.

    Raises AttentionError if a kernel that was requested by name fails its check.
    """
    rejected: dict[str, str] = {}
    while True:
        name = choose_implementation(impl, demand, device, rejected)
        try:
            attention = IMPLEMENTATIONS[name].make(demand)
            if IMPLEMENTATIONS[name].is_kernel and is_attached(device):
                _check_once(IMPLEMENTATIONS[name], demand, device)
            return attention, tuple(rejected.values())
        except AttentionError as error:
            if impl != 'auto':
                raise
            rejected[name] = str(error)


_PASSED: set[tuple[Implementation, Demand, tuple[str, tuple[int, int] | None], str]] = set()


def _check_once(implementation: Implementation, demand: Demand, device: jax.Device) -> None:
    key = implementation, demand, describe_device(device), jax_settings()
    if key not in _PASSED:
        self_check(implementation.make(demand), demand, device)
        _PASSED.add(key)


def self_check(attention: CacheAttention, demand: Demand, device: jax.Device) -> float:
    """Compares rows of several lengths with a dense float64 softmax, and raises if they differ.

    Pairs of rows share their first block; blocks are in random order; positions of no row hold NaN; one block is a
    copy. `read` is compared, and `attend` without a window and, if the demand has windows, with one.

    Returns the largest error, relative to the largest value.

    Raises AttentionError, naming the implementation, the difference, its size and the alternative.
    """
    case = _make_case(demand)
    try:
        with jax.default_device(device):
            found = jax.device_get(_run(attention, case, demand))
    except AttentionError:
        raise
    except Exception as error:  # kernels and experimental modules of jax fail in many ways, a missing name among them
        reason = str(error) or type(error).__name__
        raise AttentionError(f'{SETTING}={attention.name!r} does not run here: {reason}; {_WAY_OUT}') from error
    blocks, outs = found
    errors = [_compare(attention.name, 'a read block', blocks, case.read(), demand.dtype, device)]
    for window, out in zip(case.windows, outs, strict=True):
        what = 'attention' if window is None else f'attention in a window of {window}'
        rows = np.asarray(out, np.float64)
        if not np.isfinite(rows).all():
            raise AttentionError(
                f'{SETTING}={attention.name!r} fails its check: {what} is not finite in {len(rows)} rows of lengths '
                f'{case.lengths.tolist()}, because what lies beyond them is not masked; {_WAY_OUT}'
            )
        live = case.lengths > 0
        errors.append(_compare(attention.name, what, rows[live], case.attend(window)[live], demand.dtype, device))
    return max(errors)


_WAY_OUT = "use 'gather', which runs everywhere"


@dataclasses.dataclass(frozen=True)
class _Case:
    """The check's rows over blocks; every position of every block is written once."""

    q: np.ndarray  # [B, H, D]
    k: np.ndarray  # [blocks, T, K, D], NaN where no row reads
    v: np.ndarray  # likewise
    tables: np.ndarray  # int32 [B, M]
    lengths: np.ndarray  # int32 [B], descending, the last 0
    copied: tuple[int, int]  # (source, target): the target gets its content from `copy`
    windows: tuple[int | None, ...]
    sinks: np.ndarray | None  # [H]

    def read(self) -> np.ndarray:
        """Returns the keys and values of the source and the target, [2, 2 T, K, D]."""
        source = list(self.copied[:1]) * 2
        return np.stack([x[source].reshape(-1, *x.shape[2:]) for x in (self.k, self.v)]).astype(np.float64)

    def attend(self, window: int | None) -> np.ndarray:
        """Computes attention by its definition, float64 [B, H, D]; 0 for a row without positions."""
        out = np.zeros(self.q.shape)
        for row, length in enumerate(self.lengths):
            first = 0 if window is None else max(0, length - window)
            k, v = (
                x[self.tables[row]].reshape(-1, *x.shape[2:])[first:length].astype(np.float64) for x in (self.k, self.v)
            )
            q = self.q[row].astype(np.float64).reshape(k.shape[1], -1, k.shape[2])
            if length:
                scores = np.einsum('kgd,skd->kgs', q, k) * k.shape[2] ** -0.5
                top = scores.max(axis=-1, keepdims=True)
                weights = np.exp(scores - top)
                total = weights.sum(axis=-1, keepdims=True)
                if self.sinks is not None:
                    total = total + np.exp(self.sinks.astype(np.float64).reshape(*q.shape[:2], 1) - top)
                weights /= total
                out[row] = np.einsum('kgs,skd->kgd', weights, v).reshape(out[row].shape)
        return out


def _make_case(demand: Demand) -> _Case:
    rng, tokens = np.random.default_rng(0), demand.block_tokens
    blocks = ROWS * TABLE_BLOCKS + _FREE_BLOCKS
    tables = rng.permutation(blocks)[: ROWS * TABLE_BLOCKS].reshape(ROWS, TABLE_BLOCKS).astype(np.int32)
    tables[1::2, 0] = tables[::2, 0]  # a shared prompt
    whole = TABLE_BLOCKS * tokens
    lengths = [whole, whole - 1, 3 * tokens + 1, 2 * tokens, tokens + tokens // 2 + 1, tokens, 1, 0]
    lengths.sort(reverse=True)  # blocks of one token
    q, k, v = (
        rng.normal(size=shape).astype(jnp.dtype(demand.dtype))
        for shape in (
            (ROWS, demand.heads, demand.head_dim),
            *((blocks, tokens, demand.kv_heads, demand.head_dim),) * 2,
        )
    )
    if demand.latents:
        v = k
    read = np.zeros((blocks, tokens), bool)
    for row, length in zip(tables, lengths, strict=True):
        places = np.arange(length)
        read[row[places // tokens], places % tokens] = True
    for x in (k, v):
        x[~read] = np.nan
    copied = int(tables[0, 1]), int(tables[1, 1])
    for x in (k, v):
        x[copied[1]] = x[copied[0]]
    windows = (None, tokens + tokens // 2) if demand.windows else (None,)
    sinks = rng.normal(size=demand.heads).astype(q.dtype) if demand.sinks else None
    return _Case(q, k, v, tables, np.array(lengths, np.int32), copied, windows, sinks)


def _run(attention: CacheAttention, case: _Case, demand: Demand) -> tuple[jax.Array, list[jax.Array]]:
    """Returns (keys and values of the copied block and its source [2, 2 T, K, D], out [B, H, D] for each window)."""
    blocks, tokens = case.k.shape[:2]
    block, offset = (index.astype(np.int32).ravel() for index in np.indices((blocks, tokens)))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        layer = attention.empty(blocks, demand.kv_heads, tokens, demand.head_dim, jnp.dtype(demand.dtype))
        layer = attention.write(layer, k, v, jnp.asarray(block), jnp.asarray(offset))
        layer = attention.copy(layer, *(jnp.full(1, block, jnp.int32) for block in case.copied))
        tables, lengths = jnp.asarray(case.tables), jnp.asarray(case.lengths)
        sinks = None if case.sinks is None else jnp.asarray(case.sinks)
        outs = [attention.attend(q, layer, tables, lengths, window, sinks) for window in case.windows]
        return jnp.stack(attention.read(layer, jnp.array(case.copied, jnp.int32))), outs

    k, v = (x.copy() for x in (case.k, case.v))
    k[case.copied[1]], v[case.copied[1]] = 0, 0
    return run(case.q, *(x.reshape(-1, *x.shape[2:]) for x in (k, v)))


def _compare(
    name: str, what: str, found: np.ndarray, expected: np.ndarray, dtype: jax.typing.DTypeLike, device: jax.Device
) -> float:
    """Returns the largest error relative to the largest expected value; raises AttentionError if it is too large."""
    kind = jnp.dtype(dtype).name
    allowed = _ALLOWED_FLOAT32_ON_CPU if (kind, device.platform) == ('float32', 'cpu') else _ALLOWED[kind]
    error = float(np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max())
    if not error <= allowed:  # NaN fails too
        raise AttentionError(
            f'{SETTING}={name!r} fails its check: {what} is off by {error:.2g} of its largest value in {kind} on '
            f'{device.platform!r}, allowed are {allowed:g}; {_WAY_OUT}'
        )
    return error
