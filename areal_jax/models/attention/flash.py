"""Under arrow 7: what our own kernels share: layout, gradient rule, containment of bad values, names for remat.

Shapes: Sq queries and S keys of a stream, N query heads, K key and value heads, G = N / K query heads to a key head, D
head size. Inside, arrays lie heads first, so that every product is a plain matrix product batched over K.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from areal_jax.models.attention.visibility import KeyIds, QueryIds, visible

INVISIBLE = -3e38  # score of a key the query does not see: lower than any other, finite, so no difference is NaN
OUTPUT_NAME = 'attention_output'  # what jax.checkpoint may save so that the forward pass never runs again
LSE_NAME = 'attention_lse'


class Setting(NamedTuple):
    """What is compiled into a kernel."""

    scale: float
    window: int | None
    interpret: bool = False  # of Pallas kernels


class Rows(NamedTuple):
    """What the queries bring; the last two are filled for the gradient."""

    q: jax.Array  # [K, G, Sq, D]
    ids: QueryIds
    d_out: Any = None  # [K, G, Sq, D]
    statistics: Any = None  # float32 [2, K, G, Sq]: log-sum-exp of the scores, sum of d_out * out


class Keys(NamedTuple):
    k: jax.Array  # [K, S, D]
    v: jax.Array  # [K, S, D]
    ids: KeyIds


class Kernel(NamedTuple):
    """What a backend works out by itself."""

    forward: Callable[[Rows, Keys, Setting], tuple[jax.Array, jax.Array]]
    """-> (out [K, G, Sq, D], log-sum-exp of the scores, float32 [K, G, Sq])."""
    backward: Callable[[Rows, Keys, Setting], tuple[jax.Array, jax.Array, jax.Array]]
    """-> gradients of q, k and v."""


def attend(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, queries: QueryIds, keys: KeyIds, setting: Setting
) -> jax.Array:
    """softmax(scale q k') v over the visible keys: [Sq, N, D] for q [Sq, N, D], k and v [S, K, D].

    A value that is not finite makes NaN of what depends on it, along visible pairs, forward and backward, and leaves
    other segments untouched. Output and log-sum-exp carry names for `jax.checkpoint_policies.save_only_these_names`.
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
) -> tuple[jax.Array, Any]:
    # 0 * NaN is NaN: a bad value may not stand in `v` beside others. It moves into its key, whose scores are masked
    # where the key is invisible and turn the whole query to NaN where it is visible. Infinities count as NaN: a score
    # of -inf would lose to the masked ones.
    good_keys, good_values = _all_finite(k) & _all_finite(v), _all_finite(v)
    rows = Rows(jnp.where(_all_finite(q), q, jnp.nan), queries)
    columns = Keys(jnp.where(good_keys, k, jnp.nan), jnp.where(good_values, v, 0.0), keys)
    out, lse = kernel.forward(rows, columns, setting)
    out, lse = checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, (rows, columns, out, lse)


def _backward(kernel: Kernel, setting: Setting, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    rows, keys, out, lse = saved
    # likewise a bad query moves into its log-sum-exp, which turns its weights to NaN, but only those of visible keys
    overlap = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)
    statistics = jnp.stack([jnp.where(jnp.isfinite(overlap), lse, jnp.nan), overlap])
    rows = rows._replace(q=_finite(rows.q), d_out=_finite(d_out), statistics=statistics)
    keys = keys._replace(k=jnp.where(_all_finite(keys.k), keys.k, 0.0))
    return *kernel.backward(rows, keys, setting), None, None


_attention.defvjp(_forward, _backward)


def scores(rows: Rows, keys: Keys, seen: jax.Array, scale: float) -> jax.Array:
    """float32 [K, G, rows, keys], INVISIBLE where not `seen`."""
    return jnp.where(seen, product('kgtd,ksd->kgts', rows.q, keys.k) * scale, INVISIBLE)


def tile_gradients(rows: Rows, keys: Keys, setting: Setting) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What the pairs of a tile add to the gradients of q, k and v, float32 (arXiv 2205.14135, appendix B.4)."""
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
    """[K, G, t, ...] -> [K, G * t, ...]: XLA transposes and copies what it sums over two axes, but not over one."""
    return x.reshape(len(x), -1, *x.shape[3:])


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum accumulated in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _all_finite(x: jax.Array) -> jax.Array:
    """bool [..., 1]: the whole vector is finite."""
    return jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
