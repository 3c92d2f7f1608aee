"""The implementations of CacheAttention: on which hardware each runs, what it can compute, and how one is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from areal_jax.models.attention import AttentionError
from areal_jax.rollout.decode.attention.choose import NativeAttention
from areal_jax.rollout.decode.attention.loops import CacheAttention, GatherAttention, LoopAttention
from areal_jax.rollout.decode.attention.pallas_gpu import PallasGpuAttention
from areal_jax.rollout.decode.attention.pallas_tpu import PallasTpuAttention

SETTING = 'rollout.attention'
_ANY_PLATFORM = ()
_FLOATS = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Demand:
    """What an engine needs of attention; sizes of one device."""

    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    table_blocks: int  # of the longest sequence
    dtype: jax.typing.DTypeLike
    windows: bool  # whether a layer has a sliding window


@dataclasses.dataclass(frozen=True)
class Implementation:
    """What one supports, and how it is made for an engine."""

    make: Callable[[Demand], CacheAttention]
    platforms: tuple[str, ...]  # of a jax.Device; empty = any
    dtypes: tuple[str, ...]
    windows: bool
    is_kernel: bool  # compiled apart from XLA: it runs only where it passes the check
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    max_head_dim: int | None = None


IMPLEMENTATIONS = {
    'gather': Implementation(
        lambda d: GatherAttention(d.table_blocks), _ANY_PLATFORM, _FLOATS, windows=True, is_kernel=False
    ),
    'loops': Implementation(lambda d: LoopAttention(), _ANY_PLATFORM, _FLOATS, windows=True, is_kernel=False),
    'native': Implementation(lambda d: NativeAttention(), ('cpu',), ('float32',), windows=True, is_kernel=True),
    'pallas_gpu': Implementation(
        lambda d: PallasGpuAttention(d.head_dim),
        ('gpu',),
        _FLOATS,
        windows=False,
        is_kernel=True,
        min_capability=(8, 0),
        max_head_dim=256,
    ),
    'pallas_tpu': Implementation(
        lambda d: PallasTpuAttention(d.kv_heads, d.head_dim),
        ('tpu',),
        ('float32', 'bfloat16'),
        windows=True,
        is_kernel=True,
        max_head_dim=256,
    ),
}
_PREFERRED = {
    'cpu': ('native', 'loops'),
    'gpu': ('pallas_gpu',),
    'tpu': ('pallas_tpu',),
}  # then 'gather', which runs everywhere


def choose_implementation(impl: str, demand: Demand, device: jax.Device, excluded: Collection[str] = ()) -> str:
    """The name of the implementation to use: the best one for 'auto', else `impl`, if it can do what is needed.

    Args:
      excluded: those that 'auto' passes over.

    Raises AttentionError, naming what `impl` lacks and one that has it.
    """
    if impl == 'auto':
        names = (*_PREFERRED.get(device.platform, ()), 'gather')
        able = [name for name in names if name not in excluded and not _missing(name, demand, device)]
        if not able:
            raise AttentionError(f'no {SETTING} is left on {device.platform!r}: excluded are {sorted(excluded)}')
        return able[0]
    if impl not in IMPLEMENTATIONS:
        raise AttentionError(f'{SETTING}={impl!r} is unknown; use one of auto, {", ".join(IMPLEMENTATIONS)}')
    if reason := _missing(impl, demand, device):
        able = [repr(name) for name in IMPLEMENTATIONS if not _missing(name, demand, device)]
        raise AttentionError(f'{SETTING}={impl!r} {reason}; use {" or ".join(able)}')
    return impl


def _missing(name: str, demand: Demand, device: jax.Device) -> str | None:
    """The first thing that the implementation lacks, as the end of a sentence; None = it has all."""
    found, dtype = IMPLEMENTATIONS[name], jnp.dtype(demand.dtype).name
    if found.platforms and device.platform not in found.platforms:
        return f'does not run on {device.platform!r} (only {", ".join(found.platforms)})'
    if (capability := _capability(device)) is not None and capability < found.min_capability:
        return f'needs CUDA compute capability {found.min_capability}, {device} has {capability}'
    if dtype not in found.dtypes:
        return f'cannot compute in {dtype} (only {", ".join(found.dtypes)})'
    if demand.windows and not found.windows:
        return 'cannot express a sliding window, which this model has'
    if found.max_head_dim is not None and demand.head_dim > found.max_head_dim:
        return f'cannot take head size {demand.head_dim} (at most {found.max_head_dim})'
    return None


def _capability(device: jax.Device) -> tuple[int, int] | None:
    """Of a CUDA device; None for others."""
    major, _, minor = str(getattr(device, 'compute_capability', '')).partition('.')
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
