"""Under arrow 7: low-rank adapters beside frozen projections, and their merging for publication.

A projection W [in, out] with adapters computes x W + (x A) B alpha / r, A [in, r], B [r, out] (arXiv 2106.09685,
Eq. 3). B starts at 0, so that attaching changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from areal_jax.declarations import require_allowed
from areal_jax.ranges import COUNT, ConfigError

TARGETS = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')
_LEAVES = ('lora_a', 'lora_b')


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which projections get adapters, and how large they are."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        COUNT.require('lora.rank', self.rank)
        require_allowed({'lora.alpha': self.alpha})
        if not self.targets or set(self.targets) - set(TARGETS):
            raise ConfigError(f'lora.targets={self.targets!r} must name some of {", ".join(TARGETS)} and nothing else')

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def is_adapter(path: str) -> bool:
    """Whether a leaf 'layers/0/attention/query/lora_a' belongs to an adapter."""
    return path.rsplit('/', 1)[-1] in _LEAVES


def attach_adapters(params: Any, adapters: Any) -> Any:
    """`params` with the adapter leaves of `adapters` (a tree that has them, other leaves ignored)."""
    if not isinstance(adapters, dict):
        return params
    own = {name: leaf for name, leaf in adapters.items() if name in _LEAVES}
    return {name: attach_adapters(value, adapters.get(name)) for name, value in params.items()} | own


def merge_adapters(params: Any, lora: Lora) -> Any:
    """The weights W + alpha / r A B without adapters, computed in float32, in either form of layers."""
    if not isinstance(params, dict):
        return params
    if _LEAVES[0] not in params:
        return {name: merge_adapters(value, lora) for name, value in params.items()}
    a, b = (params[name].astype(jnp.float32) for name in _LEAVES)
    weight = params['weight']
    merged = weight.astype(jnp.float32) + lora.scale * jnp.matmul(a, b, precision='highest')
    kept = {name: leaf for name, leaf in params.items() if name not in _LEAVES}
    return kept | {'weight': merged.astype(weight.dtype)}
