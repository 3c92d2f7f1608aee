"""Publication as records: whole versions, or the changes since the last version sent, over any carrier.

app/parts/channels.py builds the channel. On the learner's side the channel encodes versions as records; for engines in
the same process it also reads them back, as servers do in theirs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.models.weights import is_float32
from areal_jax.publication.delta import ChangeFinder, encode_changes, encode_wide
from areal_jax.publication.manifest import LeafDigest, finite_host_manifest, leaves_by_path, unfinite_error
from areal_jax.publication.record import (
    Held,
    Part,
    Record,
    RecordHeader,
    RecordReceiver,
    RecordSender,
    leaf_bytes,
    put_leaf,
)
from areal_jax.publication.shard_plan import find_runs, leaf_path, parse_shard
from areal_jax.publication.versions import ChainFull, PublicationError, add_sums
from areal_jax.publication.weight_buffers import Delta, WeightBuffers, decode_delta
from areal_jax.sharding.placement import Place
from areal_jax.sharding.rules import path_name
from areal_jax.types import PublicationSize, PublishedWeights, Tree

_KEPT_DELTAS = 2


class WeightsReader:
    """Returns the weights of versions as arrays at a place. Calls may come from several threads.

    Args:
      place: one device, or a tree of shardings. Sharded leaves are placed anew, whole, for each version.
      transposed: paths of matrices that are returned transposed, as the decode programs take them; one device only.
      verify: recomputes all digests before a version is returned. Without it, a delta updates the digests from its
        changes, which finds every error except memory that something else has changed.
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
        """The versions that the sets of buffers hold; None for a set that holds nothing."""
        return tuple(None if each.held is None else each.held.version for each in self._sets)

    def receive(self, version: int, manifest_hash: str | None = None) -> tuple[Tree, Held]:
        """Returns the weights, a nested dict of jax arrays, and the version that their digests identify.

        `manifest_hash`: of the wanted version; None = any version that the sender has under this number.

        Raises PublicationError for a version that is missing or not as it was published; arrays that were returned
        before do not change.
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
        spare, first = self._take_spare(), None
        with contextlib.suppress(PublicationError):  # after an error the set holds nothing
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
        """Returns `buffers`, or another set if something else has changed the memory of `buffers`."""
        try:
            buffers.require_published()
        except PublicationError:  # now this set holds nothing
            buffers = self._bring(version, manifest_hash)
            buffers.require_published()
        return buffers

    def _take_spare(self) -> WeightBuffers:
        free = self._free()
        if not free:
            self._sets.append(WeightBuffers(self._transposed))
        return free[-1] if free else self._sets[-1]

    def _free(self) -> list[WeightBuffers]:
        jax.device_put(np.uint8(0))  # jax drops the numpy arrays behind deleted jax arrays at its next call
        return sorted((each for each in self._sets if not each.in_use), key=_version)

    def _roll(self, spare: WeightBuffers, version: int) -> None:
        """Brings the set as near to the version as the deltas and sets in memory allow."""
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


Leaves = Mapping[str, np.ndarray]  # by path or name of a shard, in the order of the names


class VersionEncoder:
    """Encodes versions with 16-bit elements, and keeps the bits of the last one, in memory that it reuses.

    Leaves with the names of shards (shard_plan.py) have the sums and the positions of their elements in the whole leaf.
    Leaves that are float32 in every copy of the weights (models/weights.is_float32) have 32 bits here too.
    """

    def __init__(self) -> None:
        self._bits: dict[str, np.ndarray] = {}  # uint16 or uint32 [n]
        self._finder = ChangeFinder(0)

    def encode_whole(self, version: int, leaves: Leaves, manifest: Mapping[str, LeafDigest] | None = None) -> Record:
        """Returns a whole record, whose parts are valid until the next call; computes all digests without `manifest`.

        Raises PublicationError for NaN and infinity, and for leaves that should have elements of 16 bits and do not.
        """
        for path, leaf in leaves.items():
            if leaf.dtype.itemsize != 2 and not is_float32(leaf_path(path)):
                raise PublicationError(
                    f'publication.delta=True with the leaf {path!r} in {leaf.dtype}: 99.8 % of the elements of float32 '
                    "weights change in each update, so that no delta is smaller; use publication.dtype='bfloat16', or "
                    'publication.delta=False'
                )
        if {path: bits.size for path, bits in self._bits.items()} != {path: leaf.size for path, leaf in leaves.items()}:
            self._bits = {path: np.empty(leaf.size, _word(path)) for path, leaf in leaves.items()}
            self._finder = ChangeFinder(max((leaf.size for leaf in leaves.values()), default=0))
        manifest = finite_host_manifest(dict(leaves), version) if manifest is None else manifest
        for path, leaf in leaves.items():
            np.copyto(self._bits[path], _bits_of(path, leaf))
        return self.repeat_whole(version, manifest)

    def repeat_whole(self, version: int, manifest: Mapping[str, LeafDigest]) -> Record:
        """Returns a whole record of the version that was encoded last, whose manifest this is."""
        parts: list[Part] = [bits.data.cast('B') for bits in self._bits.values()]
        return Record(RecordHeader(version, manifest, [len(part) for part in parts]), parts)

    def encode_delta(
        self, version: int, leaves: Leaves, base: Held, manifest: Mapping[str, LeafDigest]
    ) -> tuple[Record, float]:
        """Returns (the record, share of elements changed) against the last version, which is `base` with `manifest`.

        Raises PublicationError for NaN and infinity. The kept bits are then partly of the new version; after that, or
        if the record is not sent, encode a whole version next.
        """
        changed, digests = 0, {}
        parts: list[Part] = []
        for path, leaf in leaves.items():
            digest, shard = manifest[path], parse_shard(path, leaf.shape)
            if is_float32(shard.path):
                digests[path], part, count = self._encode_wide(version, path, leaf)
                parts.append(part)
                changed += count
                continue
            found = self._finder.find(self._bits[path], _bits_of(path, leaf), digest.dtype)
            if found.unfinite:
                raise unfinite_error(version, path, digest, found.unfinite)
            if not shard.is_whole:
                found = found.of_leaf(find_runs(*shard.bounds), self._bits[path])
            changed += found.changes.count
            parts.append(encode_changes(found.changes, math.prod(shard.shape)))
            digests[path] = dataclasses.replace(digest, content=add_sums(digest.content, found.sums))
        header = RecordHeader(version, digests, [len(part) for part in parts], base)
        return Record(header, parts), changed / max(1, sum(leaf.size for leaf in leaves.values()))

    def _encode_wide(self, version: int, path: str, leaf: np.ndarray) -> tuple[LeafDigest, Part, int]:
        """Returns (digest, part, elements changed) of a leaf of 32 bits, and keeps its bits."""
        digest = finite_host_manifest({path: leaf}, version)[path]
        base, bits = self._bits[path], _bits_of(path, leaf)
        part, changed = encode_wide(base, bits), int(np.count_nonzero(base != bits))
        np.copyto(base, bits)
        return digest, part, changed


def wrap_whole(version: int, leaves: Leaves, manifest: Mapping[str, LeafDigest] | None = None) -> Record:
    """Returns a whole record, of any dtype, over the leaves; raises PublicationError for NaN and infinity.

    Computes all digests without `manifest`.
    """
    manifest = finite_host_manifest(dict(leaves), version) if manifest is None else manifest
    parts = [leaf_bytes(leaf) for leaf in leaves.values()]
    return Record(RecordHeader(version, manifest, [len(part) for part in parts]), parts)


def _bits_of(path: str, leaf: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(leaf).reshape(-1).view(_word(path))


def _word(path: str) -> type[np.unsignedinteger]:
    return np.uint32 if is_float32(leaf_path(path)) else np.uint16


@dataclasses.dataclass(frozen=True)
class _Chain:
    held: Held  # the newest version
    manifest: Mapping[str, LeafDigest]  # of the newest version
    begun: int  # the whole version
    nbytes: int = 0  # of the deltas


class RecordReaders:
    """The part of a channel of records that reads versions back, for engines in this process.

    Args:
      open_receiver: opens an address; called once for each place where engines need weights.
      verify: all digests of a version are computed again before it is used.
    """

    def __init__(self, open_receiver: Callable[[str], RecordReceiver], *, verify: bool):
        self._open_receiver, self._verify = open_receiver, verify
        self._readers: dict[object, WeightsReader] = {}
        self._lock = threading.Lock()  # of the readers: each engine fetches on its own lane

    def receive(self, published: PublishedWeights, place: Place | None = None) -> Tree:
        """Returns the weights, a nested dict of jax arrays, at `place`; None = the first device of this process.

        Raises PublicationError as WeightsReader.receive does.
        """
        return self.read(published, jax.local_devices()[0] if place is None else place)

    def read(self, published: PublishedWeights, place: Place, transposed: Collection[str] = ()) -> Tree:
        """Receives for engines that take some matrices transposed, see WeightsReader."""
        devices = place if isinstance(place, jax.Device) else tuple(jax.tree.leaves(place))
        key = devices, frozenset(transposed)
        with self._lock:
            if key not in self._readers:
                receiver = self._open_receiver(published.handle)
                self._readers[key] = WeightsReader(receiver, place, transposed=transposed, verify=self._verify)
            reader = self._readers[key]
        return reader.receive(published.version, published.manifest_hash)[0]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


class RecordChannel(RecordReaders):
    """protocols.Channel over a carrier of records.

    A record is whole if it is the first, if it comes `base_every` versions after a whole one, if the deltas since then
    would take as many bytes as a whole version, or if the last send failed: readers may or may not have that version.

    Args:
      open_receiver: opens an address that `send` returned; called once for each place where engines need weights.
      name: publication.channel, for the log.
      name_version: makes the name to tell readers, from an address, the version there and its manifest hash.
      delta: False = all records are whole, of any dtype.
      base_every: most versions from a whole record to the next.
      verify: readers in this process compute all digests of a version again before they use it.
    """

    def __init__(
        self,
        sender: RecordSender,
        open_receiver: Callable[[str], RecordReceiver],
        *,
        name: str,
        name_version: Callable[[str, int, str], str] = lambda address, version, manifest_hash: address,
        delta: bool,
        base_every: int = 20,
        verify: bool = False,
    ):
        super().__init__(open_receiver, verify=verify)
        self._sender, self._name, self._name_version = sender, name, name_version
        self._delta, self._base_every = delta, base_every
        self._chain: _Chain | None = None  # None: the next record is whole
        self._encoder = VersionEncoder()

    def transfer(self, version: int, copy: Tree) -> PublishedWeights:
        """Sends `copy`; the handle is the name of the version, which readers are told.

        Raises PublicationError for weights with NaN or infinity, for weights that cannot have deltas, and if the
        carrier fails.
        """
        # numpy arrays on the host do not wait for the update that is under way
        leaves = {path: np.asarray(leaf) for path, leaf in leaves_by_path(copy).items()}
        chain, self._chain = self._chain, None  # if the send fails, readers may or may not have this version
        record, changed, after = self._encode(version, leaves, chain)
        try:
            address = self._sender.send(record)
        except ChainFull:
            record, _, after = self._encode(version, leaves, None)
            address = self._sender.send(record)
        self._chain, header = after, record.header
        size = PublicationSize(self._name, header.kind, header.n_bytes, changed)
        handle = self._name_version(address, version, header.manifest_hash)
        return PublishedWeights(version, header.manifest_hash, handle=handle, size=size)

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        self._sender.release(version, pinned)

    def close(self) -> None:
        super().close()
        self._sender.close()

    def _encode(self, version: int, leaves: Leaves, chain: _Chain | None) -> tuple[Record, float | None, _Chain | None]:
        """Returns (the record, share of the elements that changed, the chain after the record is sent)."""
        if not self._delta:
            return wrap_whole(version, leaves), None, None
        changed = None
        if chain is not None and self._continues(chain, version, leaves):
            record, changed = self._encoder.encode_delta(version, leaves, chain.held, chain.manifest)
            spent = chain.nbytes + record.header.n_bytes
            if spent < sum(leaf.nbytes for leaf in leaves.values()):
                held = Held(version, record.header.manifest_hash)
                return record, changed, _Chain(held, record.header.leaves, chain.begun, spent)
        record = self._encoder.encode_whole(version, leaves)
        return record, changed, _Chain(Held(version, record.header.manifest_hash), record.header.leaves, version)

    def _continues(self, chain: _Chain, version: int, leaves: Leaves) -> bool:
        forms = {path: (leaf.shape, str(leaf.dtype)) for path, leaf in leaves.items()}
        held = {path: (digest.shape, digest.dtype) for path, digest in chain.manifest.items()}
        return chain.held.version < version < chain.begun + self._base_every and forms == held
