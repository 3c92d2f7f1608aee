"""Receives versions from every process of a learner at the same time, each process's shards from its own sender."""

from __future__ import annotations

import collections
import concurrent.futures
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from areal_jax.publication.manifest import LeafDigest
from areal_jax.publication.record import Held, Part, Record, RecordHeader, RecordReceiver
from areal_jax.publication.shard_plan import Shard, find_overlap, parse_shard
from areal_jax.publication.versions import PublicationError

_KEPT = 64  # versions of which the parts are remembered


class ShardReceiver:
    """record.RecordReceiver over one receiver for each process of the learner.

    Its records have the shards of all processes; their manifest is of the whole leaves.
    """

    def __init__(self, receivers: Sequence[RecordReceiver]):
        self._receivers = receivers
        self._threads = concurrent.futures.ThreadPoolExecutor(len(receivers), 'shards')
        self._parts: collections.OrderedDict[Held, tuple[Held, ...]] = collections.OrderedDict()  # by the whole version
        self._tiled: tuple[str, ...] = ()  # the names that were found to cover every leaf once

    def fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        """See RecordReceiver; also raises PublicationError if the processes send records that do not fit together."""
        current = held if held in self._parts else None
        meeting = _Meeting(len(self._receivers))
        known = self._parts[current] if current is not None else [None] * len(self._receivers)
        fetching = [
            self._threads.submit(meeting.attend, index, receiver.fetch, version, part)
            for index, (receiver, part) in enumerate(zip(self._receivers, known, strict=True))
        ]
        try:
            for records in meeting.rounds():
                record = self._join(records, current)
                consume(record)
                current = _held(record)
                self._note(current, records)
        finally:
            meeting.end()
            concurrent.futures.wait(fetching)
        if meeting.error is not None:
            raise meeting.error

    def acknowledge(self, held: Held) -> None:
        """See RecordReceiver."""
        parts = self._parts.get(held)
        if parts is not None:
            list(self._threads.map(lambda each, part: each.acknowledge(part), self._receivers, parts))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for receiver in self._receivers:
            receiver.close()

    def _note(self, current: Held, records: Sequence[Record]) -> None:
        self._parts[current] = tuple(_held(record) for record in records)
        while len(self._parts) > _KEPT:
            self._parts.popitem(last=False)

    def _join(self, records: Sequence[Record], current: Held | None) -> Record:
        headers = [record.header for record in records]
        version, bases = headers[0].version, tuple(header.base for header in headers)
        whole = bases == (None,) * len(bases)
        fits = whole or (current is not None and bases == self._parts[current])
        if not fits or any(header.version != version for header in headers):
            told = ', '.join(f'{header.kind} {header.version}' for header in headers)
            raise PublicationError(f'the processes of the learner sent records that do not fit together: {told}')
        leaves: dict[str, LeafDigest] = {}
        parts: dict[str, Part] = {}
        for record in records:
            leaves |= record.header.leaves
            parts |= dict(zip(sorted(record.header.leaves), record.parts, strict=True))
        names = tuple(sorted(leaves))
        if names != self._tiled:
            require_tiled(leaves, version)
            self._tiled = names
        sizes = [memoryview(parts[name]).nbytes for name in names]
        base = None if whole else current
        return Record(RecordHeader(version, leaves, sizes, base), [parts[name] for name in names])


class _Meeting:
    """Brings the next record of every process together; the records are valid until the next round."""

    def __init__(self, count: int):
        self._count, self._changed = count, threading.Condition()
        self._records: dict[int, Record] = {}
        self._round = 0
        self.error: BaseException | None = None  # the first one
        self._ended = False
        self._done = 0  # processes without further records

    def attend(
        self,
        index: int,
        fetch: Callable[[int, Held | None, Callable[[Record], None]], None],
        version: int,
        held: Held | None,
    ) -> None:
        """Runs `fetch` of one process, whose records wait for the records of the others."""

        def bring(record: Record) -> None:
            with self._changed:
                number = self._round
                self._records[index] = record
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._round > number or self._ended)
                if self._ended and self._round == number:
                    raise PublicationError('another process of the learner did not send its shards')

        try:
            fetch(version, held, bring)
        except BaseException as error:
            with self._changed:
                if not self._ended:
                    self.error = self.error or error
        finally:
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def rounds(self) -> Iterator[list[Record]]:
        """Yields the records of each round, in the order of the processes, until all have ended or one has failed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._records) + self._done >= self._count or self.error)
                if self.error or not self._records:
                    return
                if len(self._records) < self._count:
                    raise PublicationError(
                        'the processes of the learner sent records that do not fit together: some sent fewer'
                    )
                records = [self._records[index] for index in range(self._count)]
            yield records
            with self._changed:
                self._records.clear()
                self._round += 1
                self._changed.notify_all()

    def end(self) -> None:
        """Lets no process wait any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _held(record: Record) -> Held:
    return Held(record.header.version, record.header.manifest_hash)


def require_tiled(leaves: Mapping[str, LeafDigest], version: int) -> None:
    """Raises PublicationError unless the shards cover each leaf, each of its elements once."""
    by_path = collections.defaultdict[str, list[Shard]](list)
    for name, digest in leaves.items():
        shard = parse_shard(name, digest.shape)
        by_path[shard.path].append(shard)
    for path, shards in by_path.items():
        whole, overlap = math.prod(shards[0].shape), False
        for number, shard in enumerate(shards):
            overlap |= any(find_overlap(shard.box, other.box) is not None for other in shards[:number])
        if overlap or sum(shard.size for shard in shards) != whole or len({shard.shape for shard in shards}) > 1:
            raise PublicationError(
                f'weights of version {version}: the shards of {path!r} do not cover its {whole} elements once: '
                'start all processes of the learner from one installation'
            )
