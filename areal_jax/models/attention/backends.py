"""Attention over packed rows, in which a token attends only to its own segment and that segment's parent.

Each backend supports some hardware and some features of the mask; a call chooses one and checks that it supports it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.models.attention import cudnn, flash, splash
from areal_jax.models.attention.cudnn import MAX_SEGMENTS
from areal_jax.models.attention.flash import PALLAS_BLOCK, RowIds, Setting

DENSE_BELOW_TOKENS = 256  # on a CPU 'dense' is faster than 'blocked' in rows shorter than this
_ANY_PLATFORM = ()
_FLOATS = ('float32', 'bfloat16', 'float16')


class AttentionError(UserError, ValueError):
    """A backend lacks a feature or computes wrong results; the message names backend, feature and alternative."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The features of a backend. All have segments, causal masks, sliding windows, grouped queries and sinks."""

    platforms: tuple[str, ...]  # of a jax.Device; empty = any
    dtypes: tuple[str, ...]
    shares_prompts: bool  # parent_ids that differ from segment_ids, and windows over positions other than places
    slices: bool  # queries of a part of the row (context parallelism)
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    head_dim_step: int = 1
    max_head_dim: int | None = None
    max_segments: int | None = None  # of a row, padding included; without shared prompts only
    asks_device: bool = False  # lowering asks a device of this process, so a described one is not enough


@dataclasses.dataclass(frozen=True)
class Demand:
    """The features that a call needs; fields as in choose_implementation."""

    dtype: jax.typing.DTypeLike
    head_dim: int | None
    shares_prompts: bool
    slices: bool


# In 'dense', 'blocked' and 'pallas' a NaN or infinity stays within its segment, forward and backward.
BACKENDS = {
    'dense': Backend(_ANY_PLATFORM, _FLOATS, True, True),
    'blocked': Backend(_ANY_PLATFORM, _FLOATS, True, True),
    'pallas': Backend(('gpu',), _FLOATS, True, True, min_capability=(8, 0), max_head_dim=256),
    'splash': Backend(('tpu',), ('float32', 'bfloat16'), False, False),
    'cudnn': Backend(
        ('gpu',),
        ('bfloat16', 'float16'),
        False,
        False,
        (9, 0),
        head_dim_step=8,
        max_head_dim=256,
        max_segments=MAX_SEGMENTS,
        asks_device=True,
    ),
}
IMPLEMENTATIONS = ('auto', *BACKENDS)
_PREFERRED = {'tpu': ('splash',), 'gpu': ('cudnn', 'pallas')}  # then 'blocked', which runs everywhere
# with a window or sinks: those of 'cudnn' have not run on a GPU yet (docs/status.md), those of 'pallas' read less
_PREFERRED_BEYOND_CAUSAL = _PREFERRED | {'gpu': ('pallas', 'cudnn')}


def choose_implementation(
    impl: str,
    *,
    platform: str,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    head_dim: int | None = None,
    capability: tuple[int, int] | None = None,
    shares_prompts: bool = False,
    window: int | None = None,
    slices: bool = False,
    sinks: bool = False,
    excluded: Collection[str] = (),
) -> str:
    """The backend to use: the best one for 'auto', else `impl`, after checking that it supports the call.

    Args:
      platform: of a jax.Device, see `describe_device`.
      tokens: of a row.
      head_dim, capability: of the model and of a CUDA device, see `describe_device`; None = not checked.
      shares_prompts, slices: features that the mask must express, see packed_attention.
      window, sinks: likewise; every backend has them, but 'auto' may prefer another.
      excluded: backends that 'auto' passes over.

    Raises AttentionError, naming the feature that `impl` lacks and a backend that has it.
    """

    demand = Demand(dtype, head_dim, shares_prompts, slices)

    def missing(name: str) -> str | None:
        return missing_feature(name, demand) or _missing_hardware(BACKENDS[name], platform, capability)

    if impl != 'auto':
        if reason := missing(impl):
            raise AttentionError(f'attention {impl!r} {reason}; use {able(missing)}')
        return impl
    fallback = ('dense',) if tokens < DENSE_BELOW_TOKENS and platform not in _PREFERRED else ()
    preferred = _PREFERRED if window is None and not sinks else _PREFERRED_BEYOND_CAUSAL
    for name in (*preferred.get(platform, ()), *fallback, 'blocked', 'dense'):
        if name not in excluded and not missing(name):
            return name
    raise AttentionError(f'no attention is left for {jnp.dtype(dtype)} on {platform!r}: excluded are {list(excluded)}')


def shares_prompts(impl: str) -> bool:
    """Whether the backend supports rows where several answers share one copy of their prompt; not for 'auto'."""
    if impl not in BACKENDS:
        raise AttentionError(f'impl={impl!r} is not a backend; use one of {", ".join(BACKENDS)}')
    return BACKENDS[impl].shares_prompts


def missing_feature(impl: str, demand: Demand) -> str | None:
    """The first feature that the backend lacks, as the end of a sentence; None = it has all."""
    if impl not in BACKENDS:
        raise AttentionError(f'impl={impl!r} is unknown; use one of {", ".join(IMPLEMENTATIONS)}')
    backend, dtype, head_dim = BACKENDS[impl], jnp.dtype(demand.dtype).name, demand.head_dim
    if dtype not in backend.dtypes:
        return f'cannot compute in {dtype} (only {", ".join(backend.dtypes)})'
    if demand.shares_prompts and not backend.shares_prompts:
        return 'cannot express shared prompts (parent_ids other than segment_ids)'
    if demand.slices and not backend.slices:
        return 'cannot express a slice of the queries (first, or fewer queries than keys)'
    if head_dim is not None and (head_dim % backend.head_dim_step or head_dim > (backend.max_head_dim or head_dim)):
        return (
            f'cannot take head size {head_dim} (at most {backend.max_head_dim}, a multiple of {backend.head_dim_step})'
        )
    return None


def local_device() -> tuple[str, tuple[int, int] | None]:
    """`describe_device` of the first device of this process."""
    return describe_device(jax.local_devices()[0])


def describe_device(device: jax.Device) -> tuple[str, tuple[int, int] | None]:
    """(platform, CUDA compute capability or None) of a device, which may belong to a described topology."""
    major, _, minor = str(getattr(device, 'compute_capability', '')).partition('.')
    return device.platform, (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def is_attached(device: jax.Device) -> bool:
    """Whether this process can run programs on the device: it cannot on one of a topology that is only described."""
    return device in jax.local_devices()


def jax_settings() -> str:
    """All settings of jax: a program compiled or checked under other settings may compute something else."""
    return repr(sorted(jax.config.values.items()))


def able(missing: Callable[[str], str | None]) -> str:
    """The backends that lack nothing, for an error message."""
    return ' or '.join(repr(name) for name in BACKENDS if not missing(name)) or 'none: no backend can'


def _missing_hardware(backend: Backend, platform: str, capability: tuple[int, int] | None) -> str | None:
    if backend.platforms and platform not in backend.platforms:
        return f'does not run on {platform!r} (only {", ".join(backend.platforms)})'
    if capability is not None and capability < backend.min_capability:
        return f'needs CUDA compute capability {backend.min_capability}, this device has {capability}'
    return None


MAX_TILE_TOKENS = max(flash.BLOCK, PALLAS_BLOCK)  # every tile of our kernels divides it


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parent_ids: jax.Array,
    *,
    scale: float,
    impl: str = 'auto',
    positions: jax.Array | None = None,
    window: int | None = None,
    first: jax.Array | int = 0,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """softmax(scale q k') v over the visible tokens of a row: [Tq, H, D] for q [Tq, H, D], k and v [T, K, D].

    Token t sees token s iff s <= t, segment_ids[s] is segment_ids[t] or parent_ids[t], and, with a window,
    positions[t] - positions[s] < window. Padding is one more segment, so every token sees itself.

    Args:
      segment_ids, parent_ids: int32 [T]; 0 = padding, at the end of the row.
      scale: static.
      impl: static, one of IMPLEMENTATIONS, see BACKENDS. 'auto' chooses a backend that supports the call. Pass the
        same array as segment_ids and parent_ids if no prompts are shared; otherwise it must assume that they are.
      positions: int32 [T], in the trajectory; required with a window. Backends without shared prompts count places of
        the row instead: the positions of a segment must increase by 1, else they return NaN.
      window: static, tokens, >= 1.
      first: the queries are the tokens first to first + Tq of the row (context parallelism). It may be traced; the
        caller must then keep it in range.
      sinks: [H], one more logit in the sum of each head's softmax; it has no value.
      interpret: static; Pallas kernels run in the interpreter, for tests on a CPU.

    A backend without shared prompts raises for them if the ids are concrete; if they are traced, it returns NaN for
    the tokens with another parent.

    Raises AttentionError for an unknown `impl`, for shapes that do not fit, and for features that the backend lacks.
    """
    one_row = None if positions is None else positions[None]
    segments = segment_ids[None]
    parents = segments if parent_ids is segment_ids else parent_ids[None]
    return packed_rows_attention(
        q[None], k[None], v[None], segments, parents, scale=scale, impl=impl, positions=one_row, window=window,
        first=first, sinks=sinks, interpret=interpret,
    )[0]  # fmt: skip


def packed_rows_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parent_ids: jax.Array,
    *,
    scale: float,
    impl: str = 'auto',
    positions: jax.Array | None = None,
    window: int | None = None,
    first: jax.Array | int = 0,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Applies packed_attention to R rows on one device: [R, Tq, H, D].

    Every array has a leading axis R; `first` is the same for all rows. 'blocked' and 'pallas' read the rows end to end
    as one stream, the others row by row or as a batch.
    """
    _check_shapes(q, k, positions, window, first)
    slices = not (isinstance(first, int) and first == 0 and q.shape[1] == k.shape[1])
    shares = _may_share(segment_ids, parent_ids)
    if impl == 'auto':
        platform, capability = local_device()
        impl = choose_implementation(
            impl, platform=platform, capability=capability, tokens=k.shape[1], dtype=q.dtype, head_dim=q.shape[-1],
            shares_prompts=shares, window=window, slices=slices, sinks=sinks is not None,
        )  # fmt: skip
    known_to_share = shares and not _is_traced(segment_ids, parent_ids)
    demand = Demand(q.dtype, q.shape[-1], known_to_share, slices)
    if reason := missing_feature(impl, demand):
        raise AttentionError(f'attention {impl!r} {reason}; use {able(lambda name: missing_feature(name, demand))}')
    ids = RowIds(segment_ids, parent_ids, positions if window else None, first)
    more = () if sinks is None else (sinks,)
    out = _find_attention(impl)(q, k, v, ids, Setting(scale, window, interpret), *more)
    if BACKENDS[impl].shares_prompts:
        return out
    if window is not None and positions is not None:
        out = jnp.where(_counts_places(segment_ids, positions)[:, None, None, None], out, jnp.nan)
    return jnp.where((segment_ids == parent_ids)[..., None, None], out, jnp.nan) if shares else out


def _counts_places(segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """bool [R]: positions increase by 1 within each segment, padding aside."""
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.all(~inside | (positions[:, 1:] - positions[:, :-1] == 1), axis=1)


def tile_tokens(row_tokens: int) -> int:
    """Tokens: a segment that starts at a multiple of them has a result independent, bit for bit, of other segments.

    On a CPU: the tile side of 'blocked'. Elsewhere: the largest tile side of 'pallas', which is a multiple of its
    smaller ones.
    """
    return flash.side_of_tile(row_tokens) if local_device()[0] == 'cpu' else PALLAS_BLOCK


def _find_attention(impl: str) -> Callable[..., jax.Array]:
    if impl == 'pallas':
        from areal_jax.models.attention import pallas  # its imports from jax take a tenth of a second

        return pallas.attend_rows
    return {
        'dense': flash.attend_dense,
        'blocked': flash.attend_blocked,
        'splash': splash.attend_rows,
        'cudnn': cudnn.attend_rows,
    }[impl]


def _may_share(segment_ids: jax.Array, parent_ids: jax.Array) -> bool:
    if parent_ids is segment_ids:
        return False
    return _is_traced(segment_ids, parent_ids) or bool(np.any(np.asarray(segment_ids) != np.asarray(parent_ids)))


def _is_traced(*arrays: jax.Array) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def _check_shapes(
    q: jax.Array, k: jax.Array, positions: jax.Array | None, window: int | None, first: jax.Array | int
) -> None:
    if q.shape[2] % k.shape[2]:
        raise AttentionError(f'{q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads')
    if window is not None and (window < 1 or positions is None):
        raise AttentionError(f'window={window} with positions={positions}: give a window of >= 1 tokens and positions')
    place = first if isinstance(first, int) else 0
    if place < 0 or place + q.shape[1] > k.shape[1]:
        raise AttentionError(f'queries {place} to {place + q.shape[1]} do not lie in a row of {k.shape[1]} tokens')
