"""Attention that holds all scores at once: for short rows and tests, and the reference for the other backends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from areal_jax.models.attention import flash
from areal_jax.models.attention.flash import (
    GradientRows,
    Kernel,
    Keys,
    RowIds,
    Rows,
    Setting,
    product,
    stream_ids,
    tile_gradients,
    visible,
)


def attend_rows(q: jax.Array, k: jax.Array, v: jax.Array, ids: RowIds, setting: Setting) -> jax.Array:
    """`flash.attend` row by row, with scores [R, H, Tq, T] in memory: [R, Tq, H, D]."""

    def row(
        q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, parent: jax.Array, position: jax.Array | None
    ) -> jax.Array:
        one = RowIds(segment[None], parent[None], None if position is None else position[None], ids.first)
        return flash.attend(Kernel(forward, backward), q, k, v, *stream_ids(one, len(q)), setting)

    axes = (0, 0, 0, 0, 0, None if ids.position is None else 0)
    return jax.vmap(row, in_axes=axes)(q, k, v, ids.segment, ids.parent, ids.position)


def forward(rows: Rows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array]:
    """See flash.Kernel."""
    scores = flash.scores(rows, keys, visible(rows.ids, keys.ids, setting.window), setting.scale)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])
    return product('kgts,ksd->kgtd', weights.astype(keys.v.dtype), keys.v).astype(keys.v.dtype), lse


def backward(rows: GradientRows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See flash.Kernel."""
    d_q, d_k, d_v = tile_gradients(rows, keys, setting)
    return d_q.astype(rows.q.dtype), d_k.astype(keys.k.dtype), d_v.astype(keys.v.dtype)
