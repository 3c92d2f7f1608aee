"""Publication inside one process: the learner's copy goes to the devices of the engines without passing the host.

The controller calls `transfer` and `release`, every engine `receive`; manifest.py checks the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax

from areal_jax.publication.manifest import (
    LeafDigest,
    Mover,
    UnchangedLeaves,
    by_path,
    device_manifest,
    finite_manifest,
    manifest_hash,
    require_equal,
)
from areal_jax.publication.versions import PublicationError
from areal_jax.sharding.placement import Place
from areal_jax.types import PublishedWeights, Tree


@dataclasses.dataclass(frozen=True)
class _Version:
    params: Tree
    manifest: dict[str, LeafDigest]


class DeviceChannel:
    """protocols.Channel over device memory.

    The weights of a version are held once until they are released. Engines on the device that holds them share that
    copy, so they must not donate it; every other engine gets a copy on its own devices. Leaves that are the arrays of
    the last version are neither moved nor measured again.

    Args:
      device: where `transfer` moves the weights; None = they stay on the devices of the learner, sharded as they are.
      verify: `receive` recomputes the digest of every leaf.
      keeps_newest: whether engines may receive a version after `release` was told that all of them have it. Where not,
        its copy does not live through the update that follows.
    """

    def __init__(self, device: jax.Device | None = None, *, verify: bool, keeps_newest: bool = True):
        self._verify, self._keeps_newest = verify, keeps_newest
        self._versions: dict[int, _Version] = {}
        self._digests: UnchangedLeaves[LeafDigest] = UnchangedLeaves()
        self._mover = None if device is None else Mover(device)
        self._movers: list[tuple[Place, Mover]] = []  # of the engines, each for its place
        self.carried_bytes = 0  # of the leaves that the last `transfer` found changed

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """Holds `copy`, buffers that no later update touches; returns when it is on the channel's device.

        Raises PublicationError for weights with NaN or infinity.
        """
        params = copy if self._mover is None else self._mover.move(copy)
        leaves = by_path(params)
        known = self._digests.find(leaves)
        changed = {path: leaf for path, leaf in leaves.items() if path not in known}
        manifest = known | finite_manifest(changed, version)
        self._digests.note(leaves, manifest)
        self.carried_bytes = sum(leaf.nbytes for leaf in changed.values())
        self._versions[version] = _Version(jax.block_until_ready(params), manifest)
        return PublishedWeights(version, manifest_hash(manifest), handle=version)

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Tree:
        """The weights, a nested dict of jax arrays, at `place`; None = where the channel holds them.

        Returns when they have arrived. Raises PublicationError for a version released or published by another channel,
        and for a leaf that changed.
        """
        held = self._versions.get(published.version)
        if held is None or manifest_hash(held.manifest) != published.manifest_hash:
            raise PublicationError(
                f'weights of version {published.version} (manifest {published.manifest_hash[:12]}) are not in this '
                f'channel, which holds {sorted(self._versions)}: receive a version before it is released, from the '
                'channel that transferred it'
            )
        params = held.params if place is None else jax.block_until_ready(self._mover_to(place).move(held.params))
        if self._verify:
            require_equal(held.manifest, device_manifest(params), published.version)
        return params

    def _mover_to(self, place: Place) -> Mover:
        """One for each engine, whose fetches are in order; engines fetch from several threads."""
        for known, mover in self._movers:
            if known is place:
                return mover
        self._movers.append((place, mover := Mover(place)))
        return mover

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """Drops the channel's references to versions below `version`, but for the `pinned` ones.

        `version` itself, which all engines have, is kept with `keeps_newest` alone.
        """
        lowest = version if self._keeps_newest else version + 1
        self._versions = {v: held for v, held in self._versions.items() if v >= lowest or v in pinned}
