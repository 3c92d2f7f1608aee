"""Rotary positions: the angles of positions, their stretching for long contexts, and the rotation of heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.families import Llama3Scaling


def rotary(
    positions: jax.Array, head_dim: int, theta: float, scaling: Llama3Scaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [T, D/2], of the angles position * theta^(-2j/D) (arXiv 2104.09864, Eq. 15)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        frequencies = stretch(frequencies, scaling)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def stretch(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Llama 3.1's rule, by the number of turns that a frequency makes in the original context.

    A frequency with fewer turns than low_frequency_factor is divided by `factor`, one with more turns than
    high_frequency_factor is kept, and between the two the results are interpolated linearly in the number of turns.
    """
    turns = scaling.original_context_tokens * frequencies / (2 * np.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    kept = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates the pairs (j, j + D/2) of every head of x [T, H, D], in float32; the result has the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
