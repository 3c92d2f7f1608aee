"""The chains that a sender over sockets keeps: bytes in a few buffers, lent to connections that send from them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from areal_jax.publication.carriers.stream_sender import describe, find_missing, is_needed, require_next, require_parts
from areal_jax.publication.carriers.stream_socket import Kind, Piece, encode_prefix
from areal_jax.publication.record import Held, Record
from areal_jax.publication.versions import ChainFull, PublicationError

Stop = Callable[[], None]  # ends a connection, so that its thread gives back what it was lent


class StoredRecord:
    """A record in a buffer. Prefixes of frames are computed once, however many readers there are."""

    def __init__(self, record: Record, header: bytes, content: memoryview):
        self.held = Held(record.header.version, record.header.manifest_hash)
        self.header, self.sizes = header, tuple(record.header.sizes)
        self._content, self._starts, at = content, list[int](), 0
        for size in self.sizes:
            self._starts.append(at)
            at += size
        self._prefixes: dict[Piece, bytes] = {}

    def frame(self, piece: Piece) -> tuple[bytes, memoryview]:
        """(prefix, payload) of the frame that carries a piece."""
        start = self._starts[piece.leaf] + piece.offset
        payload = self._content[start : start + piece.n_bytes]
        if piece not in self._prefixes:
            self._prefixes[piece] = encode_prefix(Kind.PART, payload, self.held.version, piece.leaf, piece.offset)
        return self._prefixes[piece], payload


class _Place:
    """A buffer with one chain."""

    def __init__(self, n_bytes: int):
        self.buffer = np.empty(n_bytes, np.uint8)
        self.records: list[StoredRecord] = []
        self.end = 0
        self.lent: list[Stop] = []  # of each connection that sends from it

    @property
    def chain(self) -> list[Held]:
        return [stored.held for stored in self.records]

    def append(self, record: Record, header: bytes) -> StoredRecord:
        """Copies a record behind the others, which are not touched."""
        start = self.end
        for part, size in zip(record.parts, record.header.sizes, strict=True):
            if size:
                np.copyto(self.buffer[self.end : self.end + size], np.frombuffer(part, np.uint8))
            self.end += size
        return StoredRecord(record, header, self.buffer.data[start : self.end].toreadonly())


class StreamChains:
    """At most `most_places` chains; a new one takes the buffer of an old one, whose readers are cut off if need be.

    One thread calls `store`, any number `lend`.
    """

    def __init__(self, delta_share: float, most_places: int):
        self._delta_share, self._most_places = delta_share, max(most_places, 2)
        self._places: list[_Place] = []
        self._newest: _Place | None = None
        self._lowest, self._pinned = 0, frozenset[int]()
        self._changed = threading.Condition()

    def release(self, version: int, pinned: Collection[int]) -> None:
        with self._changed:
            self._lowest, self._pinned = version, frozenset(pinned)

    def store(self, record: Record) -> None:
        """Raises ChainFull for a delta without room, PublicationError for one on another base."""
        require_parts(record)
        header = record.header.encode()
        if record.header.base is None:
            place = self._take_place(record.header.n_bytes)
        else:
            place = self._find_end(record)
        stored = place.append(record, header)  # nobody is lent these bytes yet
        with self._changed:
            place.records.append(stored)
            self._newest = place

    @contextlib.contextmanager
    def lend(self, version: int, known: Held | None, stop: Stop) -> Iterator[StoredRecord | None]:
        """The next record on the way to `version`, None where none is missing; its bytes stay inside the block.

        `stop` is called, from another thread, when the buffer is needed. Raises PublicationError for a version that is
        in no chain.
        """
        with self._changed:
            place, stored = self._find(version, known)
            place.lent.append(stop)
        try:
            yield stored
        finally:
            with self._changed:
                place.lent.remove(stop)
                self._changed.notify_all()

    def _find(self, version: int, known: Held | None) -> tuple[_Place, StoredRecord | None]:
        for place in sorted(self._places, key=lambda place: place is not self._newest):
            if (missing := find_missing(place.chain, version, known)) is not None:
                return place, place.records[missing.start] if missing else None
        raise PublicationError(
            f'version {version} is not at the sender of weights, which has '
            f'{describe([place.chain for place in self._places])}: fetch a version that was published and not yet '
            'released'
        )

    def _find_end(self, record: Record) -> _Place:
        require_next(self._newest.chain if self._newest else [], record.header)
        assert self._newest is not None
        left, needed = len(self._newest.buffer) - self._newest.end, record.header.n_bytes
        if needed > left:
            raise ChainFull(
                f'the delta of version {record.header.version} has {needed} bytes, and the buffer of its chain '
                f'{left} left: send the version whole'
            )
        return self._newest

    def _take_place(self, n_bytes: int) -> _Place:
        """An empty buffer that nobody reads; connections that read it are ended."""
        with self._changed:
            place = self._choose()
            place.records.clear()
            while place.lent:
                for stop in tuple(place.lent):
                    stop()
                self._changed.wait()
            place.end = 0
        if len(place.buffer) < n_bytes:
            place.buffer = np.empty(n_bytes + int(n_bytes * self._delta_share), np.uint8)
        return place

    def _choose(self) -> _Place:
        others = [place for place in self._places if place is not self._newest]
        released = [place for place in others if not is_needed(place.chain, self._lowest, self._pinned)]
        if unread := [place for place in released if not place.lent]:
            return unread[0]
        if len(self._places) < self._most_places:
            self._places.append(_Place(0))
            return self._places[-1]
        unpinned = [place for place in others if not _is_pinned(place.chain, self._pinned)]
        if candidates := released or unpinned:
            return candidates[0]
        raise PublicationError(
            f'all {len(self._places)} buffers of the sender of weights have versions that the run still needs '
            f'({sorted(self._pinned)}): evaluate less often (evaluation.every)'
        )


def _is_pinned(chain: Sequence[Held], pinned: Collection[int]) -> bool:
    return any(held.version in pinned for held in chain)
