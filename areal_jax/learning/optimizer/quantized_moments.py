"""Adam that computes its moments in float32 and stores them in fewer bits."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from areal_jax.config.fields import ConfigError
from areal_jax.types import Tree

MOMENT_DTYPES = ('float32', 'bfloat16', 'int8')
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 32  # values that share a scale
_SHARDS = 16  # a last axis sharded over up to 16 devices is cut between blocks, if its size allows
_SIGNED_LEVELS, _UNSIGNED_LEVELS = 127, 255


class AdamState(NamedTuple):
    """Moments in the shapes of the parameters; scales of their blocks for int8, else None."""

    step: jax.Array  # int32 scalar, updates done
    mu: Tree  # first moment, see `quantize`
    nu: Tree  # second moment
    mu_scale: Tree = None  # float32 [..., blocks of the last axis]
    nu_scale: Tree = None


def scale_by_adam(b1: float, b2: float, eps: float, moment_dtype: str) -> optax.GradientTransformation:
    """Adam's direction m̂ / (√v̂ + ε) (arXiv 1412.6980, algorithm 1) from moments stored as `moment_dtype`.

    'bfloat16' and 'int8' (see `quantize`) use stochastic rounding, which is unbiased. Rounding to nearest could freeze
    a moment: b2 = 0.999 changes it by 0.1% a step, but half the gap between two bfloat16 numbers is up to 0.4%. The
    noise is a hash of step and index, so it is the same on any number of devices. The direction is computed before the
    rounding.

    Raises ValueError for an unknown `moment_dtype`.
    """
    if moment_dtype not in MOMENT_DTYPES:
        raise ConfigError(f'optimizer.moment_dtype={moment_dtype!r} is unknown; use one of {", ".join(MOMENT_DTYPES)}')
    blocks = moment_dtype == 'int8'

    def init(params: Tree) -> AdamState:
        def zeros() -> Tree:
            return jax.tree.map(lambda p: jnp.zeros(p.shape, moment_dtype), params)

        def scales() -> Tree:
            return jax.tree.map(lambda p: jnp.zeros(_scale_shape(p.shape), jnp.float32), params) if blocks else None

        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), scales(), scales())

    def update(gradients: Tree, state: AdamState, params: Tree = None) -> tuple[Tree, AdamState]:
        number = state.step + 1
        corrections = tuple(1 - b ** number.astype(jnp.float32) for b in (b1, b2))

        def one(index: int, gradient: jax.Array, *stored: jax.Array) -> tuple[jax.Array, ...]:
            g = gradient.astype(jnp.float32)
            if blocks:
                old = dequantize(stored[0], stored[2], signed=True), dequantize(stored[1], stored[3], signed=False)
            else:
                old = stored[0].astype(jnp.float32), stored[1].astype(jnp.float32)
            mu, nu = b1 * old[0] + (1 - b1) * g, b2 * old[1] + (1 - b2) * g * g
            direction = (mu / corrections[0]) / (jnp.sqrt(nu / corrections[1]) + eps)
            if moment_dtype == 'float32':
                return direction, mu, nu
            noise = _noise(g.shape, number, index)
            mu_noise, nu_noise = noise & 0xFFFF, noise >> 16
            if not blocks:
                return direction, _round_bfloat16(mu, mu_noise), _round_bfloat16(nu, nu_noise)
            (mu_codes, mu_scale), (nu_codes, nu_scale) = (
                quantize(mu, mu_noise, signed=True),
                quantize(nu, nu_noise, signed=False),
            )
            return direction, mu_codes, nu_codes, mu_scale, nu_scale

        leaves = jax.tree.leaves(gradients)
        stored = [jax.tree.leaves(tree) for tree in state[1:] if tree is not None]
        results = [one(index, *leaf) for index, leaf in enumerate(zip(leaves, *stored, strict=True))]
        structure = jax.tree.structure(gradients)
        directions, *moments = (jax.tree.unflatten(structure, tree) for tree in zip(*results, strict=True))
        return directions, AdamState(number, *moments)

    return optax.GradientTransformation(init, update)


def quantize(values: jax.Array, noise: jax.Array, *, signed: bool) -> tuple[jax.Array, jax.Array]:
    """int8 codes in the shape of float32 `values` and the float32 scale of each block: its largest magnitude.

    A block is up to 256 neighbours on the last axis. The code is the fourth root of value / scale in 127 levels and
    a sign, or in 255 (stored minus 128) for values that are never negative: steps of 3% or 1.6% at the scale, and 8 or
    9 decades below it. Rounding is stochastic and unbiased: `noise` (integers in [0, 2^16)) picks the lower or the
    upper code. A positive second moment is never rounded to 0, because Adam divides by its root.
    """
    blocks = _in_blocks(jnp.abs(values))
    scale = blocks.max(axis=-1)
    ratio = (blocks / jnp.where(scale > 0, scale, 1.0)[..., None]).reshape(values.shape)
    levels = _SIGNED_LEVELS if signed else _UNSIGNED_LEVELS
    below = jnp.floor(jnp.sqrt(jnp.sqrt(ratio)) * levels)
    low, high = ((k / levels) ** 4 for k in (below, below + 1))
    code = below + (noise.astype(jnp.float32) / 2**16 < (ratio - low) / (high - low))
    code = jnp.minimum(code, levels)
    if signed:
        return (code * jnp.sign(values)).astype(jnp.int8), scale
    code = jnp.maximum(code, (values > 0).astype(code.dtype))
    return (code - (_SIGNED_LEVELS + 1)).astype(jnp.int8), scale


def dequantize(codes: jax.Array, scale: jax.Array, *, signed: bool) -> jax.Array:
    """The float32 values of `quantize`'s codes."""
    levels = codes.astype(jnp.float32)
    root = levels / _SIGNED_LEVELS if signed else (levels + (_SIGNED_LEVELS + 1)) / _UNSIGNED_LEVELS
    power = jnp.square(jnp.square(root)) * (jnp.sign(root) if signed else 1.0)
    return (_in_blocks(power) * scale[..., None]).reshape(codes.shape)


def block_size(size: int) -> int:
    """The number of neighbours that share a scale: the largest divisor up to 256 that leaves a multiple of 16 blocks.

    An axis sharded over 2, 4, 8 or 16 devices is then split between blocks, so no device needs values of another. If
    there is no such divisor of at least 32, the largest divisor from 32 to 256 is used, and without one a single block.
    """
    divisors = [b for b in range(_LARGEST_BLOCK, _SMALLEST_BLOCK - 1, -1) if size % b == 0]
    aligned = [b for b in divisors if size // b % _SHARDS == 0]
    return next(iter(aligned + divisors), size)


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    size = shape[-1] if shape else 1
    return *shape[:-1], size // block_size(size)


def _in_blocks(values: jax.Array) -> jax.Array:
    """Reshapes values to [..., blocks, values of a block]."""
    return values.reshape(*_scale_shape(values.shape), -1)


def _round_bfloat16(values: jax.Array, noise: jax.Array) -> jax.Array:
    """Stochastic rounding, unbiased: adds 16 random bits below the last bit that is kept, then drops the lower half."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _noise(shape: tuple[int, ...], step: jax.Array, leaf: int) -> jax.Array:
    """Pseudo-random uint32, a hash of index, step and leaf: far cheaper than jax.random, which is cryptographic."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return _mix(_mix(index) ^ _mix(_mix(step.astype(jnp.uint32)) + jnp.uint32(leaf)))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 after which every bit depends on every bit: the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
