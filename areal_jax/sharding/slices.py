"""Which tokens of a row each device of the axis `context` holds, so that all compute equally much attention.

Under a causal mask the last token of a segment attends to all others and the first to none. So a row of T tokens is
split into 2 * context blocks, and device c holds blocks c and 2 * context - 1 - c, one early and one late (arXiv
2407.21783, section 3.3.2). "Slice order" is the order of a row's tokens device after device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def to_slices(x: jax.Array, context: int) -> jax.Array:
    """Tokens [R, T, ...] from the order of the row to slice order. T is a multiple of 2 * context."""
    blocks = x.reshape(x.shape[0], 2 * context, x.shape[1] // (2 * context), *x.shape[2:])
    early, late = blocks[:, :context], blocks[:, context:][:, ::-1]
    return jnp.stack([early, late], axis=2).reshape(x.shape)


def from_slices(x: jax.Array, context: int) -> jax.Array:
    """Tokens [R, T, ...] from slice order to the order of the row: the inverse of `to_slices`."""
    pairs = x.reshape(x.shape[0], context, 2, x.shape[1] // (2 * context), *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def slice_places(index: jax.Array, tokens: int, context: int) -> jax.Array:
    """The position in slice order of each token `index` of a row of `tokens`: int, of the shape of `index`."""
    size = tokens // (2 * context)
    block = index // size
    place = jnp.where(block < context, 2 * block, 2 * (2 * context - 1 - block) + 1)
    return place * size + index % size


def first_tokens(device: jax.Array | int, tokens: int, context: int) -> tuple[jax.Array | int, jax.Array | int]:
    """The indices in the row of the first token of the two blocks that a device of `context` holds."""
    size = tokens // (2 * context)
    return device * size, (2 * context - 1 - device) * size
