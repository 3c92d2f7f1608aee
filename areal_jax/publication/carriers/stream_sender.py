"""Sends records of weights over sockets: a Unix socket for readers on this host, TCP for the others.

A thread accepts at each socket, and a thread serves each reader, so that a slow one delays no other. Nothing is sent
before both ends have proved that they have the key of the run.
"""

from __future__ import annotations

import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Collection, Mapping

from areal_jax.errors import UserError
from areal_jax.publication.carriers.stream_sender import StoredRecord, StreamChains
from areal_jax.publication.carriers.stream_socket import (
    TCP,
    UNIX,
    FrameError,
    FrameSocket,
    Hello,
    Kind,
    Prove,
    Request,
    cut_pieces,
    decode_held,
    decode_hello,
    decode_request,
    listen_tcp,
    listen_unix,
    prepare,
    remove_unix,
    sweep_unix,
)
from areal_jax.publication.record import Held, Record
from areal_jax.publication.versions import PublicationError

MOST_CONNECTIONS = 256  # readers, and those whose proof is under way
_PAUSE_S = 0.1  # where the process has no more files or threads


class StreamSender:
    """record.RecordSender over sockets.

    It keeps the newest chain in one buffer, the chain before it in another, and a third where `release` has not reached
    or pins a chain: at most `most_places` times the bytes of a whole record and of `delta_share` more. A reader that
    still reads an old chain when its buffer is needed is cut off; it asks again.

    Args:
      prove: proves the key of the run as the side that listens; raises UserError, OSError or EOFError.
      listen: 'host' or 'host:port' of the interface for readers on other hosts; '' = this host only.
      frame_deadline_s: a reader that takes in no frame for so long is cut off.
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
        """Those that are connected and have proved the key."""
        return self._connections.n_readers

    def send(self, record: Record) -> str:
        """See RecordSender. Raises ChainFull for a delta that the buffer of its chain has no room for."""
        self._chains.store(record)
        return self.address

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        """See RecordSender."""
        self._chains.release(version, pinned)

    def held(self) -> Mapping[str, Held]:
        """What each connected reader has acknowledged last, by its name."""
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
        """One reader, until it or the sender ends the connection."""
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
        except (UserError, EOFError, OSError):  # a stranger, or a reader that has gone, or will connect again
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
                    _send_record(connection, stored, request)
        except PublicationError as error:
            connection.send(Kind.REFUSED, str(error).encode(), version=request.version)


def _send_record(connection: FrameSocket, stored: StoredRecord, request: Request) -> None:
    """From the place on that the reader has not got yet."""
    resumes = request.partial == stored.held
    leaf, offset = (request.leaf, request.offset) if resumes else (0, 0)
    connection.send(Kind.HEADER, stored.header, stored.held.version, leaf, offset)
    for piece in cut_pieces(stored.sizes, leaf, offset):
        connection.send_encoded(*stored.frame(piece))


class _Connections:
    """The sockets of a sender, and what the readers at their other ends hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[FrameSocket, Hello | None] = {}  # None: its proof is under way; the oldest first
        self.has_ended = False

    def add(self, connection: FrameSocket) -> bool:
        """Keeps it; of too many the oldest one without proof must go, and False where all have proved the key."""
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
        """The reader has proved the key. An earlier connection of its name is ended: that one is lost."""
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
