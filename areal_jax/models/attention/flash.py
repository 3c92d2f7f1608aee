"""What our own kernels share: layout, gradient rule, containment of NaN, names of what remat may save.

Shapes: Lq queries and L keys of a stream, H query heads, K kv heads, G = H / K query heads per kv head, D head_dim; in
einsum t are queries and s keys. Kernels have the heads first, so that every product is a matrix product batched over K.
`dense`, `blocked` and `pallas` are its kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from areal_jax.models.attention.flash import KeyIds, QueryIds, visible

INVISIBLE = -3e38  # score of a masked key: below every other score, and finite because -inf - -inf is NaN
PALLAS_BLOCK = 64  # tokens: largest side of a tile of 'pallas'
OUTPUT_NAME = 'attention_output'  # what jax.checkpoint may save so that the forward pass never runs again
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


_Saved = tuple[Rows, Keys, jax.Array, jax.Array]  # the last two are out and log-sum-exp


def attend(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, queries: QueryIds, keys: KeyIds, setting: Setting
) -> jax.Array:
    """softmax(scale q k') v over the visible keys: [Lq, H, D] for q [Lq, H, D], k and v [L, K, D].

    An input that is NaN or infinite gives NaN wherever a visible pair depends on it, forward and backward, and nowhere
    else. Output and log-sum-exp have names for `jax.checkpoint_policies.save_only_these_names`.
    """
    n_queries, heads, dim = q.shape
    groups = k.shape[1]
    q = q.reshape(n_queries, groups, heads // groups, dim).transpose(1, 2, 0, 3)
    out = _attention(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), queries, keys, kernel, setting)
    return out.transpose(2, 0, 1, 3).reshape(n_queries, heads, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, queries: QueryIds, keys: KeyIds, kernel: Kernel, setting: Setting
) -> jax.Array:
    return _forward(q, k, v, queries, keys, kernel, setting)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, queries: QueryIds, keys: KeyIds, kernel: Kernel, setting: Setting
) -> tuple[jax.Array, _Saved]:
    # A NaN in `v` would reach every query of the tile, since 0 * NaN is NaN. So it is replaced by 0, and its key is set
    # to NaN instead: the mask hides the NaN from all queries but those that see the key. Infinities become NaN too,
    # because a score of -inf would be below the masked scores.
    good_keys, good_values = _all_finite(k) & _all_finite(v), _all_finite(v)
    rows = Rows(jnp.where(_all_finite(q), q, jnp.nan), queries)
    columns = Keys(jnp.where(good_keys, k, jnp.nan), jnp.where(good_values, v, 0.0), keys)
    out, lse = kernel.forward(rows, columns, setting)
    out, lse = checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (rows, columns, out, lse)


def _backward(kernel: Kernel, setting: Setting, saved: _Saved, d_out: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, keys, out, lse = saved
    # likewise a NaN in a query is replaced by 0, and its log-sum-exp is set to NaN: only weights of visible keys use it
    overlap = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)
    statistics = jnp.stack([jnp.where(jnp.isfinite(overlap), lse, jnp.nan), overlap])
    gradient_rows = GradientRows(_finite(rows.q), rows.ids, _finite(d_out), statistics)
    keys = keys._replace(k=jnp.where(_all_finite(keys.k), keys.k, 0.0))
    return *kernel.backward(gradient_rows, keys, setting), None, None


_attention.defvjp(_forward, _backward)


def scores(rows: Rows | GradientRows, keys: Keys, seen: jax.Array, scale: float) -> jax.Array:
    """float32 [K, G, rows, keys], INVISIBLE where not `seen`."""
    return jnp.where(seen, product('kgtd,ksd->kgts', rows.q, keys.k) * scale, INVISIBLE)


def tile_gradients(rows: GradientRows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The contribution of a tile to the gradients of q, k and v, float32 (arXiv 2205.14135, appendix B.4)."""
    lse, overlap = rows.statistics
    seen = visible(rows.ids, keys.ids, setting.window)
    weights = jnp.where(seen, jnp.exp(scores(rows, keys, seen, setting.scale) - lse[..., None]), 0.0)
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
