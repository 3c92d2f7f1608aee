"""Authenticated frames between two processes of a run, over one socket. handshake.py has the key.

    connect     client: MAGIC, 32 random bytes            server: MAGIC, 32 random bytes, proof of the key
                client: proof of the key                  both: a frame with its Hello
    a frame     length (8 bytes; its highest bit: to be passed on, peers.py), counter (8), SHA-256 of the body (32),
                HMAC-SHA256 of these three (32), the body

A proof is the HMAC of both random values. They also give the connection a key of its own for each direction, so no
frame can be sent again, in another order, on another connection or back to its sender. The body is hashed once, however
many processes it goes to. A length is read from an authenticated prefix only. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence

from areal_jax.config.addresses import join_address
from areal_jax.errors import UserError

MOST_FRAME_BYTES = 1 << 30
MAGIC = b'areal-jax wire 1'  # the first bytes in both directions
_RELAYED = 1 << 63
_RANDOM_BYTES, _DIGEST_BYTES = 32, hashlib.sha256().digest_size
_PREFIX = struct.Struct(f'!QQ{_DIGEST_BYTES}s{_DIGEST_BYTES}s')
_HANDSHAKE_S = 30.0  # for each step of a handshake: a silent peer holds a place no longer
_LEAST_WAIT_S = 1e-3
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # a machine that is gone is noticed in 40 s


class WireError(UserError):
    """A connection or message that is refused; the message names both sides and the fix."""


class WrongKeyError(WireError):
    """The process at the other end does not have the key of this run."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """The body of a message, for any number of connections."""

    body: bytes | bytearray
    digest: bytes
    relayed: bool = False  # who gets it passes it on (peers.py)

    @classmethod
    def of(cls, body: bytes, *, relayed: bool = False) -> Frame:
        return cls(body, hashlib.sha256(body).digest(), relayed)


class Connection:
    """One end of an authenticated connection. Any thread may send; one thread at a time receives."""

    def __init__(self, own: socket.socket, send_key: bytes, receive_key: bytes, most_bytes: int = MOST_FRAME_BYTES):
        self._socket, self._most_bytes = own, most_bytes
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0  # frames
        self.sending = threading.Lock()

    @property
    def most_bytes(self) -> int:
        """Of the body of a frame."""
        return self._most_bytes

    @property
    def address(self) -> str:
        """'host:port' of the other end."""
        host, port = self._socket.getpeername()[:2]
        return join_address(host, port)

    def fileno(self) -> int:
        return self._socket.fileno()

    def seal(self, frame: Frame) -> bytes:
        """The prefix of the frame as the next one on this connection; hold `sending`."""
        size = len(frame.body) | (_RELAYED if frame.relayed else 0)
        head = struct.pack('!QQ', size, self._sent) + frame.digest
        self._sent += 1
        return head + _mac(self._send_key, head)

    def push(self, content: memoryview) -> int:
        """Hands bytes to the system without waiting; returns how many it took. Raises OSError for a lost peer."""
        try:
            return self._socket.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive(self) -> Frame:
        """The next frame. Raises EOFError where the other end has closed, OSError where it is lost.

        Raises WireError, after which nothing more can be read, for a frame that does not come from the other end.
        """
        prefix = _read(self._socket, _PREFIX.size)
        size, counter, digest, tag = _PREFIX.unpack(prefix)
        length, relayed = size & ~_RELAYED, bool(size & _RELAYED)
        expected = _mac(self._receive_key, bytes(prefix[:-_DIGEST_BYTES]))
        if not hmac.compare_digest(tag, expected) or counter != self._received:
            raise WireError('a message is forged, repeated or out of order: something else writes to the connection')
        if length > self._most_bytes:
            raise WireError(too_large(length, self._most_bytes))
        body = _read(self._socket, length)
        if not hmac.compare_digest(hashlib.sha256(body).digest(), digest):
            raise WireError('a message was changed on its way: something else writes to the connection')
        self._received += 1
        return Frame(body, digest, relayed)

    def finish(self) -> None:
        """Sends nothing more; what the other end has sent can still be read."""
        with contextlib.suppress(OSError):  # the other end is gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.finish()
        self._socket.close()


def too_large(size: int, limit: int) -> str:
    return (
        f'a message of {size} bytes is above the limit of {limit}: lower learner.groups_per_update or '
        'rollout.max_new_tokens'
    )


def send_all(connections: Sequence[Connection], frame: Frame, deadline_s: float) -> dict[int, str]:
    """Sends one frame to all at the same time; returns the reason, by index, for each one that it did not reach.

    Raises WireError, with nothing sent, for a frame above the limit.
    """
    for connection in connections:
        if len(frame.body) > connection.most_bytes:
            raise WireError(too_large(len(frame.body), connection.most_bytes))
    for connection in connections:  # in one order everywhere, so that two senders never wait for each other
        connection.sending.acquire()
    try:
        return _send_all(connections, frame, deadline_s)
    finally:
        for connection in connections:
            connection.sending.release()


def _send_all(connections: Sequence[Connection], frame: Frame, deadline_s: float) -> dict[int, str]:
    end, body, lost = time.monotonic() + deadline_s, memoryview(frame.body), dict[int, str]()
    left = {index: [memoryview(c.seal(frame)), body] for index, c in enumerate(connections)}
    with selectors.DefaultSelector() as selector:

        def push(index: int) -> bool:
            """Whether all of the frame is with the system, or lost."""
            parts = left[index]
            try:
                while parts:
                    taken = connections[index].push(parts[0])
                    if taken < len(parts[0]):
                        parts[0] = parts[0][taken:]
                        return False
                    parts.pop(0)
            except OSError:
                lost[index] = 'is gone'
            return True

        for index in [index for index in left if not push(index)]:
            selector.register(connections[index], selectors.EVENT_WRITE, index)
        while waiting := selector.get_map():
            ready = selector.select(max(end - time.monotonic(), _LEAST_WAIT_S))
            for key, _ in ready:
                if push(key.data):
                    selector.unregister(key.fileobj)
            if not ready and time.monotonic() >= end:
                late = {key.data: f'took in no message for {deadline_s:g} s' for key in waiting.values()}
                return lost | late
    return lost


def make_pair(most_bytes: int = MOST_FRAME_BYTES) -> tuple[Connection, Connection]:
    """Two ends of a connection inside this process, for tests and measurements."""
    ours, theirs = socket.socketpair()
    up, down = secrets.token_bytes(_RANDOM_BYTES), secrets.token_bytes(_RANDOM_BYTES)
    return Connection(ours, up, down, most_bytes), Connection(theirs, down, up, most_bytes)


def prove_as_client(own: socket.socket, key: bytes) -> Connection:
    """The first half of a connection, for the side that opened it. Raises WrongKeyError, WireError."""
    ours = secrets.token_bytes(_RANDOM_BYTES)
    own.sendall(MAGIC + ours)
    theirs = _read_greeting(own)
    if not hmac.compare_digest(_read(own, _DIGEST_BYTES), _mac(key, b'server' + ours + theirs)):
        raise WrongKeyError('it has another key')
    own.sendall(_mac(key, b'client' + ours + theirs))
    up, down = _session_keys(key, ours, theirs)
    return Connection(own, up, down)


def prove_as_server(own: socket.socket, key: bytes) -> Connection:
    """The same for the side that listens. An answer is given only to who speaks this protocol."""
    ours = secrets.token_bytes(_RANDOM_BYTES)
    theirs = _read_greeting(own)
    own.sendall(MAGIC + ours + _mac(key, b'server' + theirs + ours))
    try:
        proof = _read(own, _DIGEST_BYTES)
    except EOFError:
        raise WrongKeyError('it has another key') from None  # it closed when it saw the proof of this side
    if not hmac.compare_digest(proof, _mac(key, b'client' + theirs + ours)):
        raise WrongKeyError('it has another key')
    up, down = _session_keys(key, theirs, ours)
    return Connection(own, down, up)


def prepare_socket(own: socket.socket) -> None:
    """Small messages leave at once, a machine that is gone is noticed, and a handshake has a deadline."""
    own.settimeout(_HANDSHAKE_S)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _session_keys(key: bytes, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    """(of what the client sends, of what the server sends)."""
    session = _mac(key, b'session' + client + server)
    return _mac(session, b'client'), _mac(session, b'server')


def _read_greeting(own: socket.socket) -> bytes:
    if (found := bytes(_read(own, len(MAGIC)))) != MAGIC:
        raise WireError(f'it speaks another protocol (it began with {found!r}): it is no role of this version')
    return bytes(_read(own, _RANDOM_BYTES))


def _read(own: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes; raises EOFError where the other end has closed, TimeoutError as the socket says."""
    content = bytearray(size)
    rest = memoryview(content)
    while rest:
        taken = own.recv_into(rest, 0, socket.MSG_WAITALL)
        if not taken:
            raise EOFError('the connection was closed')
        rest = rest[taken:]
    return content


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, 'sha256')
