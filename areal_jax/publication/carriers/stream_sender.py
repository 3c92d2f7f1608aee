"""Sends records of weights over sockets: a Unix socket for readers on this host, TCP for the others.

One thread accepts connections at each socket, and one thread serves each reader, so that a slow reader delays no other.
Nothing is sent before both ends have proved that they have the key of the run.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from areal_jax.errors import UserError
from areal_jax.publication.carriers.stream_socket import (
    TCP,
    UNIX,
    FrameError,
    FrameSocket,
    Hello,
    Kind,
    Piece,
    Prove,
    Request,
    cut_pieces,
    decode_held,
    decode_hello,
    decode_request,
    encode_prefix,
    listen_tcp,
    listen_unix,
    prepare,
    remove_unix,
    sweep_unix,
)
from areal_jax.publication.record import Held, Record, RecordHeader
from areal_jax.publication.versions import ChainFull, PublicationError


def find_missing(chain: Sequence[Held], version: int, held: Held | None) -> range | None:
    """Indices of the records that bring a reader from `held` to `version`; None if the chain lacks that version.

    These are deltas alone if the chain has `held` at or before that version, else all records from the whole one on.
    """
    versions = [record.version for record in chain]
    if version not in versions:
        return None
    end = versions.index(version) + 1
    known = chain[:end]
    return range(known.index(held) + 1 if held in known else 0, end)


def require_next(chain: Sequence[Held], header: RecordHeader) -> None:
    """Raises PublicationError for a delta whose base is not the last record of the chain."""
    last = chain[-1] if chain else None
    if header.base is not None and header.base != last:
        told = 'no record' if last is None else f'version {last.version} (manifest {last.manifest_hash[:12]})'
        raise PublicationError(
            f'the delta of version {header.version} is based on version {header.base.version} (manifest '
            f'{header.base.manifest_hash[:12]}), and the chain ends with {told}: send version {header.version} whole'
        )


def require_parts(record: Record) -> None:
    """Raises ValueError if the sizes of the parts differ from the sizes in the header."""
    found = [memoryview(part).nbytes for part in record.parts]
    if found != list(record.header.sizes):
        raise ValueError(f'version {record.header.version} has parts of {found} bytes, not {list(record.header.sizes)}')


def is_needed(chain: Sequence[Held], lowest: int, pinned: Collection[int]) -> bool:
    """Whether a reader may still ask for a version of the chain."""
    return any(record.version >= lowest or record.version in pinned for record in chain)


def describe(chains: Sequence[Sequence[Held]]) -> str:
    """Lists the versions of chains for errors: 'versions 4, 5 and 7', 'no version'."""
    versions = sorted({record.version for chain in chains for record in chain})
    if not versions:
        return 'no version'
    first = ', '.join(map(str, versions[:-1]))
    return f'versions {first} and {versions[-1]}' if first else f'version {versions[-1]}'


# The chains that a sender over sockets keeps: bytes in a few buffers, lent to connections that send from them.


Stop = Callable[[], None]  # ends a connection, so that its thread gives back the buffer


class StoredRecord:
    """A record in a buffer. The prefix of each frame is computed once, however many readers there are."""

    def __init__(self, record: Record, header: bytes, content: memoryview):
        self.held = Held(record.header.version, record.header.manifest_hash)
        self.header, self.sizes = header, tuple(record.header.sizes)
        self._content, self._starts, at = content, list[int](), 0
        for size in self.sizes:
            self._starts.append(at)
            at += size
        self._prefixes: dict[tuple[Piece, bool], bytes] = {}

    def frame(self, piece: Piece, *, sums: bool) -> tuple[bytes, memoryview]:
        """Returns (prefix, payload) of the frame that carries a piece; see encode_prefix."""
        start = self._starts[piece.leaf] + piece.offset
        payload = self._content[start : start + piece.n_bytes]
        if (piece, sums) not in self._prefixes:
            self._prefixes[piece, sums] = encode_prefix(
                Kind.PART, payload, self.held.version, piece.leaf, piece.offset, sums=sums
            )
        return self._prefixes[piece, sums], payload


class _Place:
    """A buffer with one chain."""

    def __init__(self, n_bytes: int):
        self.buffer = np.empty(n_bytes, np.uint8)
        self.records: list[StoredRecord] = []
        self.end = 0
        self.lent: list[Stop] = []  # one for each connection that sends from the buffer

    @property
    def chain(self) -> list[Held]:
        return [stored.held for stored in self.records]

    def append(self, record: Record, header: bytes) -> StoredRecord:
        """Copies a record after the others, which are not touched."""
        start = self.end
        for part, size in zip(record.parts, record.header.sizes, strict=True):
            if size:
                np.copyto(self.buffer[self.end : self.end + size], np.frombuffer(part, np.uint8))
            self.end += size
        return StoredRecord(record, header, self.buffer.data[start : self.end].toreadonly())


class StreamChains:
    """Keeps at most `most_places` chains; a new one takes an old one's buffer, after disconnecting its last readers.

    One thread calls `store`, any number of threads call `lend`.
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
        """Stores a record; raises ChainFull for a delta without room, PublicationError for a delta on another base."""
        require_parts(record)
        header = record.header.encode()
        if record.header.base is None:
            place = self._take_place(record.header.n_bytes)
        else:
            place = self._find_end(record)
        stored = place.append(record, header)  # these bytes are not lent yet, so no lock is needed
        with self._changed:
            place.records.append(stored)
            self._newest = place

    def withdraw(self, version: int) -> None:
        """Removes the last record if it is the delta of a version that no reader was told of."""
        with self._changed:
            records = [] if self._newest is None else self._newest.records
            if len(records) > 1 and records[-1].held.version == version:
                records.pop()

    @contextlib.contextmanager
    def lend(self, version: int, known: Held | None, stop: Stop) -> Iterator[StoredRecord | None]:
        """Yields the next record on the way to `version`, or None if none is missing.

        The bytes of the record do not change inside the block. When the buffer is needed, another thread calls `stop`.
        Raises PublicationError if no chain has the version.
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
        unpinned = [place for place in others if not any(held.version in self._pinned for held in place.chain)]
        if candidates := released or unpinned:
            return candidates[0]
        raise PublicationError(
            f'all {len(self._places)} buffers of the sender of weights have versions that the run still needs '
            f'({sorted(self._pinned)}): evaluate less often (evaluation.every)'
        )


MOST_CONNECTIONS = 256  # readers, and connections whose proof is under way
_PAUSE_S = 0.1  # after a failed accept: the process may have no more file descriptors


class StreamSender:
    """record.RecordSender over sockets.

    It keeps the newest chain in one buffer, the chain before it in another, and a third for a chain that `release` pins
    or has not reached: at most `most_places` buffers of (1 + `delta_share`) times the bytes of a whole record. A reader
    that still reads an old chain when its buffer is needed is disconnected; it asks again.

    Args:
      prove: proves the key of the run as the side that listens; raises UserError, OSError or EOFError.
      listen: 'host' or 'host:port' of the interface for readers on other hosts; '' = this host only.
      frame_deadline_s: a reader that takes longer to receive a frame is disconnected.
      directory: where the private directory of the Unix socket is made; None = the system's.
    """

    def __init__(
        self,
        prove: Prove,
        listen: str = '',
        *,
        delta_share: float = 0.5,
        frame_deadline_s: float = 30.0,
        most_places: int = 3,
        directory: pathlib.Path | None = None,
    ):
        self._chains, self._connections = StreamChains(delta_share, most_places), _Connections()
        self._prove, self._frame_deadline_s = prove, frame_deadline_s
        sweep_unix(directory)
        listener, self._path = listen_unix(directory)
        self._listeners, self.address = [listener], f'{UNIX}{self._path}'
        if listen:
            try:
                listener, where = listen_tcp(listen)
            except PublicationError:
                self.close()
                raise
            self._listeners.append(listener)
            self.address += f',{TCP}{where}'
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name='weights listener', daemon=True).start()

    @property
    def n_readers(self) -> int:
        """The number of connected readers that have proved the key."""
        return self._connections.n_readers

    def send(self, record: Record) -> str:
        """See RecordSender. Raises ChainFull if the buffer of the chain has no room for a delta."""
        self._chains.store(record)
        return self.address

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        self._chains.release(version, pinned)

    def withdraw(self, version: int) -> None:
        """See shard_channel.ShardCarrier."""
        self._chains.withdraw(version)

    def held(self) -> Mapping[str, Held]:
        """The version that each connected reader acknowledged last, by name."""
        return self._connections.held()

    def close(self) -> None:
        """Ends all connections and removes the Unix socket."""
        self._connections.end()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        remove_unix(self._path)

    def _accept(self, listener: socket.socket) -> None:
        while not self._connections.has_ended:
            try:
                own, _ = listener.accept()
            except OSError:
                time.sleep(0.0 if self._connections.has_ended else _PAUSE_S)
                continue
            connection = FrameSocket(own, self._frame_deadline_s)
            if not self._connections.add(connection):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(own, connection), name='weights', daemon=True).start()
            except RuntimeError:  # no thread is left
                self._connections.remove(connection)

    def _serve(self, own: socket.socket, connection: FrameSocket) -> None:
        """Serves one reader, until the reader or the sender ends the connection."""
        try:
            own.settimeout(self._frame_deadline_s)
            prepare(own)
            self._prove(own)
            prefix = connection.receive_prefix()
            if prefix.kind is not Kind.HELLO:
                raise FrameError(f'a reader of weights begins with {prefix.kind.name}')
            hello = decode_hello(connection.receive_payload(prefix))
            self._connections.welcome(connection, hello)
            while True:
                self._answer(connection, hello.name)
        except (UserError, EOFError, OSError):  # no reader of this run, or a reader that is gone or will reconnect
            pass
        finally:
            self._connections.remove(connection)

    def _answer(self, connection: FrameSocket, name: str) -> None:
        prefix = connection.receive_prefix(waits=True)
        payload = connection.receive_payload(prefix)
        if prefix.kind is Kind.ACKNOWLEDGE:
            self._connections.note(connection, Hello(name, decode_held(payload)))
            connection.send(Kind.NOTED)
        elif prefix.kind is Kind.NEXT:
            self._send_next(connection, decode_request(payload))
        else:
            raise FrameError(f'a reader of weights sent {prefix.kind.name}')

    def _send_next(self, connection: FrameSocket, request: Request) -> None:
        try:
            with self._chains.lend(request.version, request.known, connection.shut) as stored:
                if stored is None:
                    connection.send(Kind.DONE, version=request.version)
                else:
                    resumes = request.partial == stored.held
                    leaf, offset = (request.leaf, request.offset) if resumes else (0, 0)
                    connection.send(Kind.HEADER, stored.header, stored.held.version, leaf, offset)
                    for piece in cut_pieces(stored.sizes, leaf, offset):
                        connection.send_encoded(*stored.frame(piece, sums=not connection.is_local))
        except PublicationError as error:
            connection.send(Kind.REFUSED, str(error).encode(), version=request.version)


class _Connections:
    """The sockets of a sender, and the versions that the readers at their other ends hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[FrameSocket, Hello | None] = {}  # oldest first; None: the proof is under way
        self.has_ended = False

    def add(self, connection: FrameSocket) -> bool:
        """Keeps a connection. At the limit, ends the oldest one without proof; False if all have proved the key."""
        with self._lock:
            if self.has_ended:
                return False
            if len(self._open) >= MOST_CONNECTIONS:
                strangers = [other for other, hello in self._open.items() if hello is None]
                if not strangers:
                    return False
                strangers[0].shut()
            self._open[connection] = None
            return True

    def welcome(self, connection: FrameSocket, hello: Hello) -> None:
        """Notes that the reader has proved the key. Ends an earlier connection of its name, which is lost."""
        with self._lock:
            for other, known in self._open.items():
                if known is not None and known.name == hello.name:
                    other.shut()
                    self._open[other] = None
            self._open[connection] = hello

    def note(self, connection: FrameSocket, hello: Hello) -> None:
        with self._lock:
            if self._open.get(connection) is not None:
                self._open[connection] = hello

    @property
    def n_readers(self) -> int:
        with self._lock:
            return sum(hello is not None for hello in self._open.values())

    def held(self) -> dict[str, Held]:
        with self._lock:
            return {hello.name: hello.held for hello in self._open.values() if hello and hello.held}

    def remove(self, connection: FrameSocket) -> None:
        with self._lock:
            self._open.pop(connection, None)
        connection.close()

    def end(self) -> None:
        with self._lock:
            self.has_ended = True
            for connection in self._open:
                connection.shut()
