"""Rotary positions: the angles of positions, their stretching for long contexts, and the rotation of heads."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.ropes import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling


def rotary(positions: jax.Array, head_dim: int, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [T, D/2], of the angles position * theta^(-2j/D) (arXiv 2104.09864, Eq. 15).

    YaRN multiplies both by its magnitude.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies(head_dim, rope), jnp.float32)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    if isinstance(rope.scaling, YarnScaling):
        return cosine * rope.scaling.magnitude, sine * rope.scaling.magnitude
    return cosine, sine


def no_rotation(positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of angles of 0, which rotate nothing, in the form of `rotary`."""
    zeros = jnp.zeros((len(positions), head_dim // 2), jnp.float32)
    return zeros + 1, zeros


def frequencies(head_dim: int, rope: Rope) -> np.ndarray:
    """The angle of each pair at position 1, float64 [D/2]."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2) / head_dim)
    return plain if rope.scaling is None else stretch(plain, rope.theta, rope.scaling)


def stretch(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The frequencies for contexts longer than the original one."""
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, YarnScaling):
        kept = _kept_by_yarn(len(frequencies), theta, scaling)
    else:
        kept = _kept_by_llama3(frequencies, scaling)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _kept_by_llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """The share of each frequency that is kept, by the number of turns that it makes in the original context.

    A frequency with fewer turns than low_frequency_factor is divided by `factor`, one with more turns than
    high_frequency_factor is kept, and between the two the results are interpolated linearly in the number of turns.
    """
    turns = scaling.original_context_tokens * frequencies / (2 * np.pi)
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)


def _kept_by_yarn(pairs: int, theta: float, scaling: YarnScaling) -> np.ndarray:
    """The share of each frequency that is kept: linear in the number of the pair between the two betas."""
    dim = 2 * pairs
    pair_of = lambda turns: (
        dim * math.log(scaling.original_context_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))
    )
    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)


def rotate(x: jax.Array, cosine: jax.Array, sine: jax.Array) -> jax.Array:
    """Rotates the pairs (j, j + n/2) of the first n numbers of every head of x [T, H, D], in float32.

    `cosine` and `sine` are [T, n/2]. The result has the dtype of x; the other numbers are as they were.
    """
    size = 2 * cosine.shape[-1]
    if size < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], cosine, sine), x[..., size:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
