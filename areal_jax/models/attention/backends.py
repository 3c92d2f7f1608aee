"""The attention backends: the hardware and the mask features that each supports, and the choice of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp

from areal_jax.errors import UserError
from areal_jax.models.attention.cudnn import MAX_SEGMENTS

DENSE_BELOW_TOKENS = 256  # on a CPU 'dense' is faster than 'blocked' in rows shorter than this
_ANY_PLATFORM = ()
_FLOATS = ('float32', 'bfloat16', 'float16')


class AttentionError(UserError, ValueError):
    """A backend lacks a feature or computes wrong results; the message names backend, feature and alternative."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The features of a backend. All backends support segments, causal masks and grouped queries."""

    platforms: tuple[str, ...]  # of jax.default_backend(); empty = any
    dtypes: tuple[str, ...]
    shares_prompts: bool  # parent_ids that differ from segment_ids
    windows: bool  # a sliding window
    slices: bool  # queries of a part of the row (context parallelism)
    min_capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    head_dim_step: int = 1
    max_head_dim: int | None = None
    max_segments: int | None = None  # of a row, padding included; without shared prompts only


@dataclasses.dataclass(frozen=True)
class Demand:
    """The features that a call needs; fields as in choose_implementation."""

    dtype: jax.typing.DTypeLike
    head_dim: int | None
    shares_prompts: bool
    window: int | None
    slices: bool


# In 'dense', 'blocked' and 'pallas' a NaN or infinity stays within its segment, forward and backward.
BACKENDS = {
    'dense': Backend(_ANY_PLATFORM, _FLOATS, True, True, True),
    'blocked': Backend(_ANY_PLATFORM, _FLOATS, True, True, True),
    'pallas': Backend(('gpu',), _FLOATS, True, True, True, min_capability=(8, 0), max_head_dim=256),
    'splash': Backend(('tpu',), ('float32', 'bfloat16'), False, False, False),
    'cudnn': Backend(
        ('gpu',),
        ('bfloat16', 'float16'),
        False,
        False,
        False,
        (9, 0),
        head_dim_step=8,
        max_head_dim=256,
        max_segments=MAX_SEGMENTS,
    ),
}
IMPLEMENTATIONS = ('auto', *BACKENDS)
_PREFERRED = {'tpu': ('splash',), 'gpu': ('cudnn', 'pallas')}  # then 'blocked', which runs everywhere


def choose_implementation(
    impl: str,
    *,
    platform: str,
    tokens: int,
    dtype: jax.typing.DTypeLike,
    head_dim: int | None = None,
    capability: tuple[int, int] | None = None,
    shares_prompts: bool = False,
    window: int | None = None,
    slices: bool = False,
    excluded: Collection[str] = (),
) -> str:
    """The backend to use: the best one for 'auto', else `impl`, after checking that it supports the call.

    Args:
      platform: of jax.default_backend().
      tokens: of a row.
      head_dim, capability: of the model and of a CUDA device, see `local_device`; None = not checked.
      shares_prompts, window, slices: features that the mask must express, see packed_attention.
      excluded: backends that 'auto' passes over.

    Raises AttentionError, naming the feature that `impl` lacks and a backend that has it.
    """

    demand = Demand(dtype, head_dim, shares_prompts, window, slices)

    def missing(name: str) -> str | None:
        return missing_feature(name, demand) or _missing_hardware(BACKENDS[name], platform, capability)

    if impl != 'auto':
        if reason := missing(impl):
            raise AttentionError(f'attention {impl!r} {reason}; use {able(missing)}')
        return impl
    fallback = ('dense',) if tokens < DENSE_BELOW_TOKENS and platform not in _PREFERRED else ()
    for name in (*_PREFERRED.get(platform, ()), *fallback, 'blocked', 'dense'):
        if name not in excluded and not missing(name):
            return name
    raise AttentionError(f'no attention is left for {jnp.dtype(dtype)} on {platform!r}: excluded are {list(excluded)}')


def shares_prompts(impl: str) -> bool:
    """Whether the backend supports rows where several answers share one copy of their prompt; not for 'auto'."""
    if impl not in BACKENDS:
        raise AttentionError(f'impl={impl!r} is not a backend; use one of {", ".join(BACKENDS)}')
    return BACKENDS[impl].shares_prompts


def missing_feature(impl: str, demand: Demand) -> str | None:
    """The first feature that the backend lacks, as the end of a sentence; None = it has all."""
    if impl not in BACKENDS:
        raise AttentionError(f'impl={impl!r} is unknown; use one of {", ".join(IMPLEMENTATIONS)}')
    backend, dtype, head_dim = BACKENDS[impl], jnp.dtype(demand.dtype).name, demand.head_dim
    if dtype not in backend.dtypes:
        return f'cannot compute in {dtype} (only {", ".join(backend.dtypes)})'
    if demand.shares_prompts and not backend.shares_prompts:
        return 'cannot express shared prompts (parent_ids other than segment_ids)'
    if demand.window is not None and not backend.windows:
        return f'cannot express a sliding window (window={demand.window})'
    if demand.slices and not backend.slices:
        return 'cannot express a slice of the queries (first, or fewer queries than keys)'
    if head_dim is not None and (head_dim % backend.head_dim_step or head_dim > (backend.max_head_dim or head_dim)):
        return (
            f'cannot take head size {head_dim} (at most {backend.max_head_dim}, a multiple of {backend.head_dim_step})'
        )
    return None


def local_device() -> tuple[str, tuple[int, int] | None]:
    """(platform, CUDA compute capability or None) of the first device of this process."""
    device = jax.local_devices()[0]
    major, _, minor = str(getattr(device, 'compute_capability', '')).partition('.')
    return jax.default_backend(), (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def jax_settings() -> str:
    """All settings of jax: a program compiled or checked under other settings may compute something else."""
    return repr(sorted(jax.config.values.items()))


def able(missing: Callable[[str], str | None]) -> str:
    """The backends that lack nothing, for an error message."""
    return ' or '.join(repr(name) for name in BACKENDS if not missing(name)) or 'none: no backend can'


def _missing_hardware(backend: Backend, platform: str, capability: tuple[int, int] | None) -> str | None:
    if backend.platforms and platform not in backend.platforms:
        return f'does not run on {platform!r} (only {", ".join(backend.platforms)})'
    if capability is not None and capability < backend.min_capability:
        return f'needs CUDA compute capability {backend.min_capability}, this device has {capability}'
    return None
