"""Carries records of weights through shared memory, from the learner to any number of readers on its host.

The sender fills a place that no reader holds, and then makes it the newest. A reader holds the place that it reads. If
the sender could not wait, the reader learns it from the place's sequence number. shm_segment.py has the file.
"""

from __future__ import annotations

import dataclasses
import pathlib
import struct
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from areal_jax.publication.carriers.shm_segment import MOST_PLACES, Segment, create_segment, open_segment
from areal_jax.publication.carriers.stream_sender import describe, find_missing, is_needed, require_next, require_parts
from areal_jax.publication.record import Held, Record, decode_header
from areal_jax.publication.versions import ChainFull, PublicationError

_PREFIX = struct.Struct('<8sqQQ64sI')
_CRC = struct.Struct('<I')
_PREFIX_BYTES = _PREFIX.size + _CRC.size
_MAGIC = b'ajrecord'
_ALIGN = 64  # bytes of a cache line, and a multiple of every element


class Entry(NamedTuple):
    """The position of a record in a place."""

    held: Held
    header: slice
    header_crc: int
    end: int


def count_bytes(header: bytes, sizes: Sequence[int]) -> int:
    return _align(_PREFIX_BYTES) + _align(len(header)) + sum(map(_align, sizes))


def write_record(place: memoryview, start: int, record: Record, header: bytes) -> int:
    """Copies a record to `start`; returns the start of the next one. The copy of the parts does not hold the GIL."""
    total = count_bytes(header, record.header.sizes)
    prefix = _PREFIX.pack(
        *(_MAGIC, record.header.version, len(header), total, record.header.manifest_hash.encode()), zlib.crc32(header)
    )
    place[start : start + _PREFIX_BYTES] = prefix + _CRC.pack(zlib.crc32(prefix))
    at = start + _align(_PREFIX_BYTES)
    place[at : at + len(header)] = header
    at += _align(len(header))
    content = np.frombuffer(place, np.uint8)
    for part, size in zip(record.parts, record.header.sizes, strict=True):
        np.copyto(content[at : at + size], np.frombuffer(part, np.uint8) if size else content[:0])
        at += _align(size)
    return start + total


def read_entries(place: memoryview, n_records: int) -> list[Entry]:
    """Finds the records of the chain in a place; raises PublicationError for bytes that are not records."""
    entries, start = list[Entry](), 0
    for _ in range(n_records):
        prefix = bytes(place[start : start + _PREFIX.size])
        crc = bytes(place[start + _PREFIX.size : start + _PREFIX_BYTES])
        if len(crc) < _CRC.size or _CRC.pack(zlib.crc32(prefix)) != crc or not prefix.startswith(_MAGIC):
            raise PublicationError(f'record {len(entries)} of a chain of weights in shared memory is damaged')
        _, version, header_bytes, total, digest, header_crc = _PREFIX.unpack(prefix)
        at = start + _align(_PREFIX_BYTES)
        if at + header_bytes > start + total or start + total > len(place):
            raise PublicationError(f'record {len(entries)} of a chain of weights in shared memory has {total} bytes')
        held = Held(version, digest.rstrip(b'\0').decode(errors='replace'))
        entries.append(Entry(held, slice(at, at + header_bytes), header_crc, start + total))
        start += total
    return entries


def read_record(place: memoryview, entry: Entry) -> Record:
    """Returns a record whose parts are views of the place; raises PublicationError for a damaged header."""
    content = bytes(place[entry.header])
    if zlib.crc32(content) != entry.header_crc:
        raise PublicationError(f'the header of version {entry.held.version} in shared memory is damaged')
    header, parts = decode_header(content), list[memoryview]()
    at = entry.header.start + _align(len(content))
    for size in header.sizes:
        parts.append(place[at : at + size])
        at += _align(size)
    if at != entry.end:
        raise PublicationError(
            f'version {entry.held.version} in shared memory is damaged: its parts end at byte {at}, not {entry.end}'
        )
    return Record(header, parts)


def _align(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


# The row of a reader in the control of a segment: its name, and the version that it acknowledged last.
#
# length of the name in bytes (4), name (116), holds taken (8), time of the acknowledgement (8, ns), version (8),
# manifest hash (64), crc32 of the fields before (4)


_ROW = struct.Struct('<I116sQqq64s')
MOST_NAME_BYTES = 116
_NOTHING = -1  # version of a reader that has acknowledged none


@dataclasses.dataclass(frozen=True)
class ReaderRow:
    """A reader's description of itself."""

    name: str
    holds: int = 0  # how often it has begun to read: tells a new hold from one that was ignored
    acknowledged_ns: int = 0  # by the monotonic clock, which all processes of a host share
    held: Held | None = None

    def __post_init__(self) -> None:
        if len(self.name.encode()) > MOST_NAME_BYTES:
            raise PublicationError(
                f'the name of a reader of weights has {len(self.name.encode())} bytes, {self.name[:20]!r}...: use at '
                f'most {MOST_NAME_BYTES}'
            )

    def write(self, row: memoryview) -> None:
        name, held = self.name.encode(), self.held or Held(_NOTHING, '')
        fields = (len(name), name, self.holds, self.acknowledged_ns, held.version, held.manifest_hash.encode())
        content = _ROW.pack(*fields)
        row[: _ROW.size + _CRC.size] = content + _CRC.pack(zlib.crc32(content))


def read_row(row: memoryview) -> ReaderRow | None:
    """Reads the row of a reader; None if no reader wrote it, or if its writer died or is stopped while writing."""
    content, crc = bytes(row[: _ROW.size]), bytes(row[_ROW.size : _ROW.size + _CRC.size])
    if _CRC.pack(zlib.crc32(content)) != crc:
        return None
    size, name, holds, when_ns, version, digest = _ROW.unpack(content)
    held = None if version == _NOTHING else Held(version, digest.rstrip(b'\0').decode(errors='replace'))
    return ReaderRow(name[:size].decode(errors='ignore'), holds, when_ns, held) if size else None


SCHEME = 'shm:'
_PAGE_BYTES = 1 << 21  # places begin at huge pages, if the system has them
_FIRST_PLACES = 2
_LOOK_S = 1e-3  # between two checks whether a place is free
_TRIES = 5  # of one fetch, each ended by a newer version

Result = TypeVar('Result')


class ShmSender:
    """record.RecordSender over shared memory.

    Args:
      path: of the segment, `segment_path` of the run; this process owns it until `close`.
      delta_share: room for deltas after a whole record, as a share of its bytes.
      hold_deadline_s: how long `send` waits for a reader (a stopped one, say) of the place that it must fill. It does
        not wait for a reader whose process has died.
      most_places: chains kept at the same time, from 2 to 8: the newest, the one being written, and the chains that
        `release` names as pinned or has not reached.
    """

    def __init__(
        self,
        path: pathlib.Path,
        *,
        delta_share: float = 0.5,
        hold_deadline_s: float = 5.0,
        most_places: int = 3,
    ):
        self._delta_share, self._hold_deadline_s = delta_share, hold_deadline_s
        self._most_places = min(max(most_places, _FIRST_PLACES), MOST_PLACES)
        self._chains: dict[int, list[Held]] = {}  # by place
        self._ends: dict[int, int] = {}  # where the next record of the place begins
        self._lowest, self._pinned = 0, frozenset[int]()
        self._ignored: dict[int, dict[int, int]] = {}  # by place: readers that were not waited for, and their `holds`
        self._segment, self._is_closed = create_segment(path), False

    @property
    def address(self) -> str:
        return f'{SCHEME}{self._segment.path}'

    def send(self, record: Record) -> str:
        """See RecordSender. Raises ChainFull if the place of the chain has no room for a delta."""
        require_parts(record)
        header = record.header.encode()
        needed = count_bytes(header, record.header.sizes)
        if record.header.base is None:
            self._send_whole(record, header, needed)
        else:
            self._send_delta(record, header, needed)
        return self.address

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        self._lowest, self._pinned = version, frozenset(pinned)

    def withdraw(self, version: int) -> None:
        """See shard_channel.ShardCarrier."""
        place = self._segment.newest
        chain = self._chains.get(place, [])
        if len(chain) > 1 and chain[-1].version == version:
            chain.pop()
            self._segment.set_n_records(place, len(chain))

    def held(self) -> Mapping[str, Held]:
        """The version that each living reader acknowledged last, by name; of two with one name, the later one's."""
        rows = [read_row(self._segment.reader_row(reader)) for reader in self._segment.living_readers()]
        latest = sorted((row for row in rows if row), key=lambda row: row.acknowledged_ns)
        return {row.name: row.held for row in latest if row.held}

    def close(self) -> None:
        """Removes the segment, once; readers that have it mapped can read its versions to the end."""
        if not self._is_closed:
            self._is_closed = True
            self._segment.end()
            self._segment.close()

    def _send_whole(self, record: Record, header: bytes, needed: int) -> None:
        segment = self._segment
        if not segment.n_places:
            segment.allocate(_round_up(needed + int(record.header.n_bytes * self._delta_share)), _FIRST_PLACES)
        if needed > segment.place_bytes:
            raise PublicationError(
                f'version {record.header.version} needs {needed} bytes of shared memory, and a place of '
                f'{segment.path} has {segment.place_bytes}, made for the first version: start the run again'
            )
        place = self._free_place()
        sequence = segment.sequence(place)
        segment.set_sequence(place, sequence | 1)  # from now on readers of the old chain know that it is gone
        segment.set_n_records(place, 0)
        self._chains[place] = []
        self._ends[place] = write_record(memoryview(segment.map_place(place)), 0, record, header)
        self._append(place, record)
        segment.set_sequence(place, (sequence | 1) + 1)
        segment.newest = place

    def _send_delta(self, record: Record, header: bytes, needed: int) -> None:
        segment, place = self._segment, self._segment.newest
        require_next(self._chains.get(place, []), record.header)
        end = self._ends[place]
        if end + needed > segment.place_bytes:
            raise ChainFull(
                f'the delta of version {record.header.version} needs {needed} bytes of shared memory, and its chain '
                f'has {segment.place_bytes - end} left: send the version whole'
            )
        self._ends[place] = write_record(memoryview(segment.map_place(place)), end, record, header)
        self._append(place, record)

    def _append(self, place: int, record: Record) -> None:
        self._chains[place].append(Held(record.header.version, record.header.manifest_hash))
        self._segment.set_n_records(place, len(self._chains[place]))

    def _free_place(self) -> int:
        """Returns a place whose chain may be replaced: no reader holds it, or its readers missed the deadline."""
        segment = self._segment
        others = [place for place in range(segment.n_places) if not self._chains.get(place) or place != segment.newest]
        released = [place for place in others if not is_needed(self._chains.get(place, []), self._lowest, self._pinned)]
        if unheld := [place for place in released if not self._holders(place)]:
            return unheld[0]
        if self._add_place():
            return segment.n_places - 1
        # unpinned versions may go before their release: their readers take the newest chain instead
        candidates = released or [place for place in others if not self._is_pinned(place)]
        if not candidates:
            raise PublicationError(
                f'all {segment.n_places} places of {segment.path} have versions that the run still needs '
                f'({sorted(self._pinned)}): evaluate less often (evaluation.every)'
            )
        return self._await_place(candidates)

    def _await_place(self, candidates: Sequence[int]) -> int:
        """Returns the first place that its readers let go; after the deadline, one that they still hold."""
        end_s = time.monotonic() + self._hold_deadline_s
        while not (unheld := [place for place in candidates if not self._holders(place)]):
            if time.monotonic() > end_s:
                first = candidates[0]
                self._ignored[first] = {reader: self._n_holds(reader) for reader in self._segment.holders(first)}
                return first
            time.sleep(_LOOK_S)
        return unheld[0]

    def _add_place(self) -> bool:
        """Makes room for one more chain; False if there are enough, or if the file system has no room."""
        if self._segment.n_places >= self._most_places:
            return False
        try:
            self._segment.allocate(self._segment.place_bytes, self._segment.n_places + 1)
        except PublicationError:
            return False
        return True

    def _is_pinned(self, place: int) -> bool:
        return any(record.version in self._pinned for record in self._chains.get(place, []))

    def _holders(self, place: int) -> list[int]:
        """Readers that hold a place, except for holds that an earlier send has ignored."""
        ignored = self._ignored.get(place, {})
        return [reader for reader in self._segment.holders(place) if ignored.get(reader) != self._n_holds(reader)]

    def _n_holds(self, reader: int) -> int:
        row = read_row(self._segment.reader_row(reader))
        return row.holds if row else 0


class ShmReceiver:
    """record.RecordReceiver over shared memory; parts are read-only views of it.

    If this process is stopped for longer than the sender's deadline, `consume` may see bytes that change during the
    call. The result or exception of that call is dropped, and `consume` is called again, from a whole record on.

    Args:
      path: of the segment that the address names.
      name: of the reader, for `RecordSender.held`.
    """

    def __init__(self, path: pathlib.Path, name: str):
        self._row = ReaderRow(name)
        self._segment = open_segment(path)
        try:
            self._reader = self._segment.claim_reader()
        except PublicationError:
            self._segment.close()
            raise
        self._row.write(self._segment.reader_row(self._reader))

    def fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        """See RecordReceiver; a version of a dead sender can be fetched if it was complete."""
        for _ in range(_TRIES):
            try:
                return self._fetch(version, held, consume)
            except _Overtaken:
                held = None  # deltas from overwritten bytes may have been applied
        raise PublicationError(
            f'version {version} in {self._segment.path} was overwritten {_TRIES} times while it was read: give this '
            'engine more of the processor, or publish less often'
        )

    def acknowledge(self, held: Held) -> None:
        """See RecordReceiver; raises PublicationError if the sender is gone."""
        if not self._is_served():
            raise PublicationError(f'version {held.version} was not acknowledged: {self._describe_sender()}')
        self._write_row(dataclasses.replace(self._row, held=held, acknowledged_ns=time.monotonic_ns()))

    def close(self) -> None:
        self._segment.close()

    def _fetch(self, version: int, held: Held | None, consume: Callable[[Record], None]) -> None:
        found = list[Sequence[Held]]()
        for place in self._search_order():
            if not self._segment.hold(place, self._reader):
                raise PublicationError(f'{self._segment.path}: this reader is in use by two threads; open one for each')
            try:
                self._write_row(dataclasses.replace(self._row, holds=self._row.holds + 1))
                if (sequence := self._segment.sequence(place)) % 2:
                    continue  # it is being replaced
                reading = _Reading(self._segment, place, sequence)
                entries = reading.entries()
                chain = [entry.held for entry in entries]
                if (missing := find_missing(chain, version, held)) is not None:
                    return reading.feed(entries[missing.start : missing.stop], consume)
                found.append(chain)
            finally:
                self._segment.let_go(place, self._reader)
        gone = '' if self._is_served() else f'; {self._describe_sender()}'
        raise PublicationError(
            f'version {version} is not in {self._segment.path}, which has {describe(found)}{gone}: fetch a version '
            'that was published and not yet released'
        )

    def _search_order(self) -> list[int]:
        self._segment.require_places()
        newest = self._segment.newest
        return sorted(range(self._segment.n_places), key=lambda place: place != newest)

    def _write_row(self, row: ReaderRow) -> None:
        row.write(self._segment.reader_row(self._reader))
        self._row = row

    def _is_served(self) -> bool:
        return not self._segment.is_closed and self._segment.has_owner()

    def _describe_sender(self) -> str:
        what = 'has closed it' if self._segment.is_closed else 'is dead'
        return f'the process {self._segment.owner_pid} that sent weights there {what}'


class _Overtaken(Exception):
    """The sender has replaced the chain that was being read."""


class _Reading:
    def __init__(self, segment: Segment, place: int, sequence: int):
        self._segment, self._place, self._sequence = segment, place, sequence
        self._view = memoryview(segment.map_place(place))

    def entries(self) -> list[Entry]:
        return self._unless_overtaken(lambda: read_entries(self._view, self._segment.n_records(self._place)))

    def feed(self, entries: Sequence[Entry], consume: Callable[[Record], None]) -> None:
        """Calls `consume` with each record; raises _Overtaken if the chain was replaced, whatever `consume` raised."""
        for entry in entries:
            record = self._unless_overtaken(lambda: read_record(self._view, entry))
            self._unless_overtaken(lambda: consume(record))

    def _unless_overtaken(self, read: Callable[[], Result]) -> Result:
        try:
            result = read()
        except Exception:
            self._require_sequence()
            raise
        self._require_sequence()
        return result

    def _require_sequence(self) -> None:
        if self._segment.sequence(self._place) != self._sequence:
            raise _Overtaken from None


def _round_up(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
