"""Attention over packed rows, in which a token attends only to its own segment and that segment's parent.

The learner's forward pass calls it; it chooses a backend and checks that the backend supports the call.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.attention import blocked, cudnn, dense, flash
from areal_jax.models.attention.backends import (
    BACKENDS,
    AttentionError,
    Demand,
    able,
    choose_implementation,
    local_device,
    missing_feature,
)
from areal_jax.models.attention.flash import PALLAS_BLOCK, RowIds, Setting

MAX_TILE_TOKENS = max(blocked.BLOCK, PALLAS_BLOCK)  # every tile of our kernels divides it


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
    interpret: bool = False,
) -> jax.Array:
    """softmax(scale q k') v over the visible tokens of a row: [Tq, H, D] for q [Tq, H, D], k and v [T, K, D].

    Token t sees token s iff s <= t, segment_ids[s] is segment_ids[t] or parent_ids[t], and, with a window,
    positions[t] - positions[s] < window. Padding is one more segment, so every token sees itself.

    Args:
      segment_ids, parent_ids: int32 [T]; 0 = padding, at the end of the row.
      scale: static.
      impl: static, one of IMPLEMENTATIONS, see `backends`. 'auto' chooses a backend that supports the call. Pass the
        same array as segment_ids and parent_ids if no prompts are shared; otherwise it must assume that they are.
      positions: int32 [T], in the trajectory; required with a window.
      window: static, tokens, >= 1.
      first: the queries are the tokens first to first + Tq of the row (context parallelism). It may be traced; the
        caller must then keep it in range.
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
        first=first, interpret=interpret,
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
            shares_prompts=shares, window=window, slices=slices,
        )  # fmt: skip
    known_to_share = shares and not _is_traced(segment_ids, parent_ids)
    demand = Demand(q.dtype, q.shape[-1], known_to_share, window, slices)
    if reason := missing_feature(impl, demand):
        raise AttentionError(f'attention {impl!r} {reason}; use {able(lambda name: missing_feature(name, demand))}')
    ids = RowIds(segment_ids, parent_ids, positions if window else None, first)
    out = _find_module(impl).attend_rows(q, k, v, ids, Setting(scale, window, interpret))
    if shares and not BACKENDS[impl].shares_prompts:
        return jnp.where((segment_ids == parent_ids)[..., None, None], out, jnp.nan)
    return out


def tile_tokens(row_tokens: int) -> int:
    """Tokens: a segment that starts at a multiple of them has a result independent, bit for bit, of other segments.

    On a CPU: the tile side of 'blocked'. Elsewhere: the largest tile side of 'pallas', which is a multiple of its
    smaller ones.
    """
    return blocked.tile_tokens(row_tokens) if local_device()[0] == 'cpu' else PALLAS_BLOCK


_MODULES = {'dense': dense, 'blocked': blocked, 'splash': flash, 'cudnn': cudnn}


def _find_module(impl: str) -> types.ModuleType:
    if impl == 'pallas':
        from areal_jax.models.attention import pallas  # its imports from jax take a tenth of a second

        return pallas
    return _MODULES[impl]


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
