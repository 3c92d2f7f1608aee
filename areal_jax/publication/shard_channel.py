"""The ends of a channel to which every process of a learner sends its shards; shard_versions.py leads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from areal_jax.publication.manifest import (
    LeafDigest,
    by_path,
    encode_manifest,
    finite_host_manifest,
    finite_shard_manifest,
)
from areal_jax.publication.record import Held, Record, RecordReceiver, RecordSender
from areal_jax.publication.record_channel import Leaves, RecordReaders, VersionEncoder, wrap_whole
from areal_jax.publication.shard_plan import Box, Shard, divide_leaves, layouts_of, to_box
from areal_jax.publication.shard_versions import SentShards, ShardVersions
from areal_jax.publication.versions import ChainFull, PublicationError
from areal_jax.types import PublishedWeights, Tree


class ShardCarrier(RecordSender, Protocol):
    """A carrier of one of several processes, which may have to send a version again."""

    def withdraw(self, version: int) -> None:
        """Removes the delta of a version, if it was sent last and no reader was told of it.

        Else a pinned version would be in two chains, and keep both.
        """
        ...


class ShardSender:
    """One process's end of the channel.

    Args:
      sender: the carrier of this process.
      delta: whether versions may be sent as deltas.
      process: the number of this process; None = as jax has it.
      process_of: the process of a device, for tests.
    """

    def __init__(
        self,
        sender: ShardCarrier,
        *,
        delta: bool,
        process: int | None = None,
        process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
    ):
        self._sender, self._delta, self._process_of = sender, delta, process_of
        self._process = jax.process_index() if process is None else process
        self._encoder = VersionEncoder()
        self._last: tuple[Held, Mapping[str, LeafDigest]] | None = None
        self._plan: tuple[Mapping[str, object], Sequence[Shard]] = ({}, ())

    def send_shards(self, version: int, whole: bool, lowest: int, pinned: Collection[int], copy: Tree) -> SentShards:
        """Sends this process's shards of `copy`, global arrays over all processes, whole or as the changes since the
        version that was sent last.

        `lowest` and `pinned` are the arguments of the last RecordSender.release.

        Raises PublicationError for weights with NaN or infinity, if the carrier fails, and for changes since nothing.
        """
        self._sender.release(lowest, pinned)
        values = take_shards(copy, self._find_shards(copy))
        on_host = all(isinstance(each, np.ndarray) for each in values.values())
        manifest = finite_host_manifest(dict(values), version) if on_host else finite_shard_manifest(values, version)
        leaves: Leaves = {name: np.asarray(each) for name, each in values.items()}
        last, self._last, changed = self._last, None, 0.0
        if not self._delta:
            record = wrap_whole(version, leaves, manifest)
        elif whole:
            record = self._encoder.encode_whole(version, leaves, manifest)
        elif last is None:
            raise PublicationError(f'process {self._process} has no version before {version}: send it whole')
        else:
            record, share = self._encoder.encode_delta(version, leaves, *last)
            changed = share * sum(leaf.size for leaf in leaves.values())
        return self._send(record, changed)

    def repeat_shards(self, version: int) -> SentShards:
        """Sends the version that was sent last again, whole: the chain of another process had no room for its delta."""
        if self._last is None or self._last[0].version != version:
            raise PublicationError(f'version {version} was not sent from process {self._process}: publish it again')
        self._sender.withdraw(version)
        return self._send(self._encoder.repeat_whole(version, self._last[1]), 0.0)

    def _send(self, record: Record, changed: float) -> SentShards:
        header = record.header
        try:
            address = self._sender.send(record)
        except ChainFull:
            address = ''
        self._last = Held(header.version, header.manifest_hash), header.leaves
        leaves = encode_manifest(header.manifest)
        return SentShards(address=address, leaves=leaves, n_bytes=header.n_bytes, changed=changed)

    def close(self) -> None:
        self._sender.close()

    def _find_shards(self, copy: Tree) -> Sequence[Shard]:
        """The shards of this process; the plan is made anew when the shardings change."""
        key = {path: (leaf.shape, leaf.dtype, getattr(leaf, 'sharding', None)) for path, leaf in by_path(copy).items()}
        if key != self._plan[0]:
            self._plan = key, divide_leaves(layouts_of(copy, self._process_of))[self._process]
        return self._plan[1]


def take_shards(copy: Tree, shards: Sequence[Shard]) -> dict[str, np.ndarray | jax.Array]:
    """Returns the values of shards that this process holds, by name: views where the host has them, else on devices."""
    leaves, taken = by_path(copy), dict[str, np.ndarray | jax.Array]()
    for shard in shards:
        data, box = _find_data(leaves[shard.path], shard)
        if box != shard.box:
            data = data[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shard.box, box, strict=True))]
        if isinstance(data, jax.Array):
            data.copy_to_host_async()
        taken[shard.name] = data
    return taken


def _find_data(leaf: np.ndarray | jax.Array, shard: Shard) -> tuple[np.ndarray | jax.Array, Box]:
    """Returns values of this process that contain the shard, and their box in the leaf."""
    if isinstance(leaf, np.ndarray):
        return leaf, tuple((0, size) for size in leaf.shape)
    for held in leaf.addressable_shards:
        box = to_box(held.index, leaf.shape)
        if _contains(box, shard.box):
            return np.asarray(held.data) if held.device.platform == 'cpu' else held.data, box
    raise AssertionError(f'{shard.name} is not in this process')


def _contains(box: Sequence[tuple[int, int]], part: Sequence[tuple[int, int]]) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(box, part, strict=True))


class ShardChannel(RecordReaders):
    """protocols.Channel of a process of the learner: leads the versions of all processes, and reads them back.

    Args:
      versions: the versions that it leads.
      own: the end of this process, which `close` closes.
    """

    def __init__(
        self,
        versions: ShardVersions,
        open_receiver: Callable[[str], RecordReceiver],
        own: ShardSender,
        *,
        verify: bool = False,
    ):
        super().__init__(open_receiver, verify=verify)
        self._versions, self._own = versions, own
        self._newest: PublishedWeights | None = None

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """See ShardVersions.transfer."""
        self._newest = self._versions.transfer(version, copy)
        return self._newest

    def read_newest(self) -> Tree:
        """Returns the weights of the version that was transferred last, on the first device of this process."""
        assert self._newest is not None, 'nothing was transferred'
        return self.receive(self._newest)

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """See protocols.Channel."""
        self._versions.release(version, pinned)

    def close(self) -> None:
        super().close()
        self._own.close()
