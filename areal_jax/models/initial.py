"""Draws initial weights from the table of weights."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from areal_jax.models.families import Init
from areal_jax.models.weights import Params, WeightSpec, find_leaf, nest


def complete(
    table: Mapping[str, WeightSpec], given: Params, n_layers: int, seed: int, scale: float, embedding_scale: float
) -> Params:
    """All weights of the table, in list form: leaves of `given` as they are, the others drawn."""
    key = jax.random.key(seed)
    leaves = []
    for spec in table.values():
        for path in spec.paths:
            leaf = find_leaf(given, path)
            own = scale * embedding_scale if spec.init is Init.LOOKUP else scale
            leaves.append((path, _draw(key, path, spec, n_layers, own) if leaf is None else leaf))
    return nest(leaves)


def _draw(key: jax.Array, path: str, spec: WeightSpec, n_layers: int, scale: float) -> jax.Array:
    if spec.init in (Init.ONES, Init.ZEROS):
        return jnp.full(spec.shape, float(spec.init is Init.ONES), jnp.float32)
    deviation = scale / math.sqrt(spec.shape[1 if spec.init in (Init.TABLE, Init.LOOKUP) else -2])
    if spec.init is Init.RESIDUAL:
        deviation /= math.sqrt(2 * n_layers)  # so that the variance of the residual stream does not grow with depth
    return _normal(jax.random.fold_in(key, zlib.crc32(path.encode())), spec.shape, deviation)


@functools.partial(jax.jit, static_argnums=1)  # one program per shape, not one per leaf
def _normal(key: jax.Array, shape: tuple[int, ...], deviation: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) * deviation
