"""The trained weights of the last published versions, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from areal_jax.config.ranges import ConfigError
from areal_jax.sharding.placement import gather, place
from areal_jax.telemetry.progress import format_bytes
from areal_jax.types import Tree

_FIELD = 'diagnostics.ring_bytes'


class WeightRing:
    """Copies of the trained weights by version, as passes compute with them; the oldest leaves when room is needed.

    Frozen weights are not copied, so that a ring of adapters is small. On a mesh that spans processes, each process
    has the whole weights in its ring, and all must call `add` and `read` in the same order.

    Args:
      most_bytes: of all copies together.
      weights: arrays, or descriptions of them, like the trees that `add` will get.

    Raises ConfigError where not even one version fits.
    """

    def __init__(self, most_bytes: int, weights: Tree):
        self._bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
        self._most = most_bytes // max(self._bytes, 1)  # versions
        if not self._most:
            raise ConfigError(
                f'{_FIELD}={most_bytes} does not hold the weights of one version, {format_bytes(self._bytes)}: raise '
                f'it to at least {self._bytes}, times the versions that trained tokens come from, or set '
                'diagnostics.ratio_sample=0'
            )
        self._held: dict[int, Tree] = {}  # ascending

    @property
    def versions(self) -> Sequence[int]:
        """Ascending, without a gap."""
        return list(self._held)

    def add(self, version: int, weights: Tree) -> None:
        """Keeps a copy. A version that does not follow the newest one starts the ring anew."""
        if self._held and version not in (last := max(self._held), last + 1):
            self.clear()
        while len(self._held) >= self._most and version not in self._held:
            del self._held[min(self._held)]
        self._held[version] = jax.tree.map(gather, weights)

    def read(self, version: int, shardings: Tree) -> Tree:
        """The weights on the devices again."""
        return place(self._held[version], shardings)

    def clear(self) -> None:
        self._held = {}
