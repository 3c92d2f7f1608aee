"""Arrow 8 inside one process: the learner's copy is placed where the engines decode, without leaving the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from areal_jax.publication.errors import PublicationError
from areal_jax.publication.manifest import LeafDigest, device_manifest, finite_manifest, manifest_hash, require_equal
from areal_jax.types import PublishedWeights


@dataclasses.dataclass(frozen=True)
class _Version:
    params: Any
    manifest: dict[str, LeafDigest]


class DeviceChannel:
    """types.Channel over device memory; one placed copy serves all engines, which must not donate it.

    Args:
      shardings: where the engines want the weights (a sharding, or a tree of them like the weights); None = where the
        learner made the copy.
      verify: `receive` recomputes the digest of every leaf.
    """

    def __init__(self, shardings: Any = None, *, verify: bool = False):
        self._shardings, self._verify = shardings, verify
        self._versions: dict[int, _Version] = {}

    def transfer(self, version: int, copy: Any) -> PublishedWeights:
        """Places `copy`, buffers that no later update touches; returns when it has arrived.

        Raises PublicationError for weights with NaN or infinity.
        """
        manifest = finite_manifest(copy, version)
        placed = copy if self._shardings is None else jax.device_put(copy, self._shardings)
        self._versions[version] = _Version(jax.block_until_ready(placed), manifest)
        return PublishedWeights(version, manifest_hash(manifest), handle=version)

    def receive(self, published: PublishedWeights) -> Any:
        """The placed weights: a nested dict of jax arrays.

        Raises PublicationError for a version released or published by another channel, and for a leaf that changed.
        """
        held = self._versions.get(published.version)
        if held is None or manifest_hash(held.manifest) != published.manifest_hash:
            raise PublicationError(
                f'weights of version {published.version} (manifest {published.manifest_hash[:12]}) are not in this '
                f'channel, which holds {sorted(self._versions)}: receive a version before it is released, from the '
                'channel that transferred it'
            )
        if self._verify:
            require_equal(held.manifest, device_manifest(held.params), published.version)
        return held.params

    def release(self, version: int) -> None:
        """Drops the channel's references to versions below `version`."""
        self._versions = {v: held for v, held in self._versions.items() if v >= version}
