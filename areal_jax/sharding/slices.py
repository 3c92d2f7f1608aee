"""Under arrow 7: which tokens of a row lie on which device of `context`, so that all have the same attention to do.

Under a causal mask the last token of a segment reads all others and the first none. So a row of T tokens is cut into
2 * context halves, and device c holds the halves c and 2 * context - 1 - c, one cheap and one dear (arXiv 2407.21783,
section 3.3.2). Laid out device after device, these are the row in slice order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def to_slices(x: jax.Array, context: int) -> jax.Array:
    """[R, T, ...] in the order of the row -> in slice order. T is a multiple of 2 * context."""
    halves = x.reshape(x.shape[0], 2 * context, x.shape[1] // (2 * context), *x.shape[2:])
    cheap, dear = halves[:, :context], halves[:, context:][:, ::-1]
    return jnp.stack([cheap, dear], axis=2).reshape(x.shape)


def from_slices(x: jax.Array, context: int) -> jax.Array:
    """[R, T, ...] in slice order -> in the order of the row; undoes `to_slices`."""
    pairs = x.reshape(x.shape[0], context, 2, x.shape[1] // (2 * context), *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def slice_places(index: jax.Array, tokens: int, context: int) -> jax.Array:
    """Where tokens of a row of `tokens` stand in slice order: int of the shape of `index`."""
    size = tokens // (2 * context)
    half = index // size
    place = jnp.where(half < context, 2 * half, 2 * (2 * context - 1 - half) + 1)
    return place * size + index % size


def first_tokens(device: jax.Array | int, tokens: int, context: int) -> tuple[jax.Array | int, jax.Array | int]:
    """The places in the row at which the two halves of a device of `context` begin."""
    size = tokens // (2 * context)
    return device * size, (2 * context - 1 - device) * size
