"""Low-rank adapters of frozen projections: which projections have them, and merging them into the weights.

A projection W [in, out] with adapters computes x W + (x A) B alpha / r, A [in, r], B [r, out] (arXiv 2106.09685,
Eq. 3). B starts at 0: new adapters change nothing. `weights` adds the adapters to the table of weights; the learner
trains them and merges them for publication.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from areal_jax.config.declarations import require_allowed
from areal_jax.config.ranges import COUNT, ConfigError
from areal_jax.models.families import COMMON
from areal_jax.types import Tree

# 'query', 'key', ...
TARGETS = tuple(dict.fromkeys(row.path.split('/')[-2] for row in COMMON if row.path.endswith('/weight')))
ADAPTERS = ('lora_a', 'lora_b')  # leaves A and B


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
    return path.rsplit('/', 1)[-1] in ADAPTERS


def attach_adapters(params: Tree, adapters: Tree) -> Tree:
    """`params` with the adapter leaves of `adapters` (a tree that has them, other leaves ignored)."""
    if not isinstance(adapters, dict):
        return params
    own = {name: leaf for name, leaf in adapters.items() if name in ADAPTERS}
    return {name: attach_adapters(value, adapters.get(name)) for name, value in params.items()} | own


def merge_adapters(params: Tree, lora: Lora) -> Tree:
    """The weights W + alpha / r A B without adapters, computed in float32, in either form of layers."""
    if not isinstance(params, dict):
        return params
    if ADAPTERS[0] not in params:
        return {name: merge_adapters(value, lora) for name, value in params.items()}
    a, b = (params[name].astype(jnp.float32) for name in ADAPTERS)
    weight = params['weight']
    merged = weight.astype(jnp.float32) + lora.scale * jnp.matmul(a, b, precision='highest')
    kept = {name: leaf for name, leaf in params.items() if name not in ADAPTERS}
    return kept | {'weight': merged.astype(weight.dtype)}
