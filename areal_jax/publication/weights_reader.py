"""A reader's end of a chain of records: the next version is made beside the one in use, from what changed.

The weights in use and the next ones are two sets of buffers. The set that is free holds the version before the one in
use, so it takes two deltas: the last one, which is kept, and the new one. It is done while the engine decodes with the
other set; the engine swaps between two dispatches.

  held         version and manifest of each set; None after a failure, then a whole record is what it takes next
  wrong base, lost record, flipped bit    the digest says so before the swap: the reader takes the whole record of the
               chain, once; if this fails as well it raises, and the engine keeps its version
  all sets in use (requests pinned to a version)    another set is made, and goes when it is free again
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Collection

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.publication.record import Held, Record, RecordReceiver, put_leaf
from areal_jax.publication.versions import PublicationError
from areal_jax.publication.weight_buffers import Delta, WeightBuffers, decode_delta
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

_KEPT_DELTAS = 2


class WeightsReader:
    """Gives the weights of versions as arrays at a place. Calls may come from several threads.

    Args:
      place: one device, or a tree of shardings. Leaves that are cut over devices are placed whole for each version.
      transposed: paths of matrices that are given transposed, as the decode programs take them; on one device only.
      verify: computes all digests again before a version is given. Without it, those of a delta are updated from the
        changes, which finds everything but memory that is changed beside them.
    """

    def __init__(
        self, receiver: RecordReceiver, place: Place, *, transposed: Collection[str] = (), verify: bool = False
    ):
        assert isinstance(place, jax.Device) or not transposed, 'what lies transposed is on one device'
        self._receiver, self._place, self._transposed = receiver, place, frozenset(transposed)
        self._verify, self._lock = verify, threading.Lock()
        self._sets: list[WeightBuffers] = []
        self._deltas: collections.deque[Delta] = collections.deque(maxlen=_KEPT_DELTAS)  # in the order of arrival

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Of the sets of buffers; None: nothing."""
        return tuple(None if each.held is None else each.held.version for each in self._sets)

    def receive(self, version: int, manifest_hash: str | None = None) -> tuple[Tree, Held]:
        """The weights, a nested dict of jax arrays, and what they are by their digests.

        `manifest_hash`: of the version that is meant; None = whichever the sender has under this number.

        Raises PublicationError for a version that cannot be had, or not as it was published; arrays that were given
        before stay as they are.
        """
        with self._lock:
            buffers = self._find(version, manifest_hash) or self._bring(version, manifest_hash)
            if self._verify:
                buffers = self._verified(buffers, version, manifest_hash)
            assert buffers.held is not None
            weights = self._put(buffers)
            surplus = [each for each in self._free() if each is not buffers][:-1]  # one is the next spare
            self._sets = [each for each in self._sets if each not in surplus]
            self._receiver.acknowledge(buffers.held)
            return weights, buffers.held

    def close(self) -> None:
        self._receiver.close()

    def _find(self, version: int, manifest_hash: str | None) -> WeightBuffers | None:
        return next((each for each in self._sets if _is(each.held, version, manifest_hash)), None)

    def _bring(self, version: int, manifest_hash: str | None) -> WeightBuffers:
        """Makes a set that is free hold the version."""
        spare, first = self._take_spare(), None
        with contextlib.suppress(PublicationError):  # then nothing is held
            self._roll(spare, version)
        if _is(spare.held, version, manifest_hash):
            return spare
        if spare.held is not None and spare.held.version < version:
            try:
                self._fetch(spare, version, spare.held, manifest_hash)
                return spare
            except PublicationError as error:
                first = error
        self._deltas.clear()
        spare.held = None
        try:
            self._fetch(spare, version, None, manifest_hash)
        except PublicationError as error:
            raise error from first
        return spare

    def _verified(self, buffers: WeightBuffers, version: int, manifest_hash: str | None) -> WeightBuffers:
        """The same, or another set where something else has changed the memory of this one."""
        try:
            buffers.require_published()
        except PublicationError:  # then this set holds nothing
            buffers = self._bring(version, manifest_hash)
            buffers.require_published()
        return buffers

    def _take_spare(self) -> WeightBuffers:
        """The newest set that is free; a new one where all are in use."""
        free = self._free()
        if not free:
            self._sets.append(WeightBuffers(self._transposed))
        return free[-1] if free else self._sets[-1]

    def _free(self) -> list[WeightBuffers]:
        """The sets that nothing uses, the newest last."""
        jax.device_put(np.uint8(0))  # jax lets go of the numpy arrays of deleted ones at its next call
        return sorted((each for each in self._sets if not each.in_use), key=_version)

    def _roll(self, spare: WeightBuffers, version: int) -> None:
        """Takes the set as near to the version as what is in memory allows."""
        for delta in self._deltas:
            if spare.held == delta.base and delta.held.version <= version:
                spare.apply(delta)
        for delta in reversed(self._deltas):
            if spare.held == delta.held and delta.base.version >= version:
                spare.apply(delta, back=True)
        nearer = [each for each in self._sets if _version(spare) < _version(each) <= version]
        if nearer and _version(spare) != version:
            spare.copy_from(max(nearer, key=_version))

    def _fetch(self, spare: WeightBuffers, version: int, held: Held | None, manifest_hash: str | None) -> None:
        def consume(record: Record) -> None:
            if record.header.base is None:
                self._deltas.clear()
                spare.load(record)
                return
            delta = decode_delta(record)
            spare.apply(delta)
            self._deltas.append(delta)

        self._receiver.fetch(version, held, consume)
        if not _is(spare.held, version, manifest_hash):
            found = 'nothing' if spare.held is None else f'{spare.held.version} with {spare.held.manifest_hash[:12]}'
            asked = '' if manifest_hash is None else f' with manifest {manifest_hash[:12]}'
            spare.held = None
            raise PublicationError(
                f'version {version}{asked} was asked for, and its records lead to {found}: give every run a '
                'publication.directory of its own'
            )

    def _put(self, buffers: WeightBuffers) -> Tree:
        leaves = buffers.lend()
        if isinstance(self._place, jax.Device):
            placed = jax.device_put(leaves, SingleDeviceSharding(self._place))
        else:
            shardings = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self._place)}
            placed = jax.device_put(leaves, {path: shardings[path] for path in leaves})
        tree: dict[str, Tree] = {}
        for path, leaf in jax.block_until_ready(placed).items():
            put_leaf(tree, path, leaf)
        return tree


def _is(held: Held | None, version: int, manifest_hash: str | None) -> bool:
    return held is not None and held.version == version and manifest_hash in (None, held.manifest_hash)


def _version(buffers: WeightBuffers) -> int:
    return -1 if buffers.held is None else buffers.held.version
