"""Publication from every process of a learner: each sends its shards as records, and one process leads.

    every process   ShardSender(carrier, delta=True) ... sends, when the leader says so, the shards that the plan gives it
    leader          ShardChannel(everywhere, open_receiver, ...).transfer(version, copy)
    engine          carriers/shard_receiver.py joins the records of all processes

A version counts as published after all processes have it: only then engines are told its name. All records of a version
are of one kind, which the leader chooses; shard_plan.py says which process sends what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import jax
import numpy as np

from areal_jax.publication.carriers.stream_receiver import join_addresses, name_version
from areal_jax.publication.delta import add_sums
from areal_jax.publication.manifest import (
    LeafDigest,
    by_path,
    decode_manifest,
    encode_manifest,
    finite_host_manifest,
    finite_shard_manifest,
    manifest_hash,
)
from areal_jax.publication.record import Held, Record, RecordReceiver, RecordSender
from areal_jax.publication.record_channel import Leaves, RecordReaders, VersionEncoder, wrap_whole
from areal_jax.publication.shard_plan import Shard, divide_leaves, layouts_of, to_box
from areal_jax.publication.versions import ChainFull, PublicationError
from areal_jax.types import PublicationSize, PublishedWeights, Tree


class SentShards(TypedDict):
    """What a process tells the leader about the record of its shards."""

    address: str  # '' = the chain has no room for the delta: all processes must send the version whole
    leaves: Mapping[str, Any]  # the digests by path, of this process's shards only, encoded
    n_bytes: int
    changed: float  # elements


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
        sender: RecordSender,
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

    def send_shards(self, version: int, whole: bool, copy: Tree) -> SentShards:
        """Sends this process's shards of `copy`, global arrays over all processes, whole or as the changes since the
        version that was sent last.

        Raises PublicationError for weights with NaN or infinity, if the carrier fails, and for changes since nothing.
        """
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

    def release_shards(self, version: int, pinned: Collection[int] = ()) -> None:
        """See RecordSender.release."""
        self._sender.release(version, pinned)

    def close(self) -> None:
        self._sender.close()

    def _find_shards(self, copy: Tree) -> Sequence[Shard]:
        """The shards of this process; the plan is made anew when the shardings change."""
        key = {path: (leaf.shape, leaf.dtype, leaf.sharding) for path, leaf in by_path(copy).items()}
        if key != self._plan[0]:
            self._plan = key, divide_leaves(layouts_of(copy, self._process_of))[self._process]
        return self._plan[1]


def take_shards(copy: Tree, shards: Sequence[Shard]) -> dict[str, np.ndarray | jax.Array]:
    """Returns the values of shards that this process holds, by name: views where the host has them, else on devices."""
    leaves, taken = by_path(copy), dict[str, np.ndarray | jax.Array]()
    for shard in shards:
        leaf = leaves[shard.path]
        held, box = next(
            (each, box)
            for each in leaf.addressable_shards
            if _contains(box := to_box(each.index, leaf.shape), shard.box)
        )
        data = np.asarray(held.data) if held.device.platform == 'cpu' else held.data
        if box != shard.box:
            data = data[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shard.box, box, strict=True))]
        if isinstance(data, jax.Array):
            data.copy_to_host_async()
        taken[shard.name] = data
    return taken


def _contains(box: Sequence[tuple[int, int]], part: Sequence[tuple[int, int]]) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(box, part, strict=True))


def add_manifests(parts: Sequence[Mapping[str, LeafDigest]]) -> dict[str, LeafDigest]:
    """Adds the digests of leaves of which each process has sent some shards."""
    total: dict[str, LeafDigest] = {}
    for part in parts:
        for path, digest in part.items():
            known = total.get(path)
            content = digest.content if known is None else add_sums(known.content, digest.content)
            total[path] = dataclasses.replace(digest, content=content)
    return dict(sorted(total.items()))


@dataclasses.dataclass(frozen=True)
class _Chain:
    begun: int  # the whole version
    whole_bytes: int
    nbytes: int = 0  # of the deltas

    def grow(self, nbytes: int) -> _Chain:
        return dataclasses.replace(self, nbytes=self.nbytes + nbytes)


class Everywhere(Protocol):
    """Calls a method of the ShardSender of every process at the same time."""

    def __call__(self, name: str, *args: Any, copy: Tree = None) -> list[Any]:
        """Returns the results, in the order of the processes.

        `copy`: the version, where this process has a part of it. Raises PublicationError if a process failed.
        """
        ...


class ShardChannel(RecordReaders):
    """protocols.Channel whose versions every process of the learner sends.

    A version is whole if it is the first, `base_every` versions after a whole one, if the deltas since then would take as
    many bytes, or if the last transfer failed.
    """

    def __init__(
        self,
        everywhere: Everywhere,
        open_receiver: Callable[[str], RecordReceiver],
        *,
        name: str,
        delta: bool,
        base_every: int = 20,
        verify: bool = False,
    ):
        super().__init__(open_receiver, verify=verify)
        self._everywhere, self._name, self._delta, self._base_every = everywhere, name, delta, base_every
        self._chain: _Chain | None = None  # None: the next version is sent whole
        self._newest: PublishedWeights | None = None

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """Returns when every process has its shards ready for readers; the handle is the name of the version.

        Raises PublicationError for weights with NaN or infinity, and if a process or its carrier fails.
        """
        chain, self._chain = self._chain, None  # if a process fails, readers may or may not have this version
        if chain is not None and not (self._delta and chain.begun < version < chain.begun + self._base_every):
            chain = None
        sent: list[SentShards] = self._everywhere('send_shards', version, chain is None, copy=copy)
        nbytes = sum(each['n_bytes'] for each in sent)
        if chain is not None:
            has_room = all(each['address'] for each in sent)
            if not has_room or chain.nbytes + nbytes >= chain.whole_bytes:
                chain, sent = None, self._everywhere('repeat_shards', version)
                nbytes = sum(each['n_bytes'] for each in sent)
        manifest = add_manifests([decode_manifest(each['leaves']) for each in sent])
        held = Held(version, manifest_hash(manifest))
        self._chain = _Chain(version, nbytes) if chain is None else chain.grow(nbytes)
        elements = sum(math.prod(leaf.shape) for leaf in manifest.values())
        changed = None if chain is None else sum(each['changed'] for each in sent) / max(1, elements)
        size = PublicationSize(self._name, 'whole' if chain is None else 'delta', nbytes, changed)
        handle = name_version(join_addresses([each['address'] for each in sent]), held)
        self._newest = PublishedWeights(version, held.manifest_hash, handle=handle, size=size)
        return self._newest

    def read_newest(self) -> Tree:
        """Returns the weights of the version that was transferred last, on the first device of this process."""
        assert self._newest is not None, 'nothing was transferred'
        return self.receive(self._newest)

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        self._everywhere('release_shards', version, sorted(pinned))
