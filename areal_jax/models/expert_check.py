"""The check of the mixture of experts at start-up, on the device and in the dtype of the run.

Kernels of accelerators differ by version and device: one has given an expert without tokens a gradient, and what they
leave in rows without an expert is not promised. So what they compute is compared with plain JAX before it is used.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.expert_products import Mixer, choose_mixer, mix_blocks

_TOKENS, _CHOICES, _EXPERTS, _WIDTH, _EXPERT_WIDTH = 96, 2, 6, 64, 48
_UNUSED, _NONE_SHARE = 4, 0.2  # an expert that nobody chooses, and the share of choices that are none
# largest error relative to the largest value: wrong rows give 0.1, and accelerators multiply float32 with fewer bits
_ALLOWED = {'float32': 2e-2, 'bfloat16': 4e-2, 'float16': 2e-2}
_NAMES = ('output', 'gradient of x', 'gradient of weights', 'gradient of gate', 'gradient of up', 'gradient of down')


def choose_checked_mixer(platform: str, dtype: jax.typing.DTypeLike, devices: int) -> tuple[Mixer, str]:
    """(the mixer to use, why the one of accelerators was rejected); '' where none was.

    Args:
      platform, dtype, devices: of the run, as for choose_mixer; the check runs on the default device.
    """
    mix = choose_mixer(platform, dtype, devices)
    if platform == 'cpu':
        return mix, ''  # the tests compare these
    fault = find_fault(mix, dtype)
    return (mix_blocks, fault) if fault else (mix, '')


def find_fault(mix: Mixer, dtype: jax.typing.DTypeLike) -> str:
    """What a mixer computes otherwise than mix_blocks on a small random input, in a sentence; '' = nothing."""
    try:
        found = jax.device_get(_differentiate(mix, dtype))
    except Exception as error:  # kernels of accelerators fail in many ways
        return f'the products of experts do not run here: {error or type(error).__name__}; plain JAX is used'
    expected = jax.device_get(_differentiate(mix_blocks, dtype))
    allowed = _ALLOWED[jnp.dtype(dtype).name]
    for name, value, reference in zip(_NAMES, found, expected, strict=True):
        value, reference = np.asarray(value, np.float64), np.asarray(reference, np.float64)
        off = float(np.abs(value - reference).max() / np.abs(reference).max())
        if not off <= allowed:  # NaN fails too
            return (
                f'the products of experts fail their check: {name} is off by {off:.2g} of its largest value in '
                f'{jnp.dtype(dtype).name}, allowed are {allowed:g}; plain JAX is used'
            )
        if name in _NAMES[3:] and value[_UNUSED].any():
            return f'the products of experts fail their check: {name} is not 0 for an unused expert; plain JAX is used'
    return ''


def _differentiate(mix: Mixer, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, ...]:
    """The output and the gradients that _NAMES names."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), dtype)
    used = np.delete(np.arange(_EXPERTS), _UNUSED)
    experts = np.array([rng.choice(used, _CHOICES, replace=False) for _ in range(_TOKENS)], np.int32)
    experts[rng.random(experts.shape) < _NONE_SHARE] = _EXPERTS
    weights = jnp.asarray(rng.random(experts.shape), jnp.float32)
    into, out_of = (_EXPERTS, _WIDTH, _EXPERT_WIDTH), (_EXPERTS, _EXPERT_WIDTH, _WIDTH)
    inputs = (normal(_TOKENS, _WIDTH), weights, normal(*into), normal(*into), normal(*out_of))
    d_out = normal(_TOKENS, _WIDTH)

    @jax.jit
    def run(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda x, *rest: mix(x, jnp.asarray(experts), *rest), *inputs)
        return out, *pull(d_out)

    return run(*inputs)
