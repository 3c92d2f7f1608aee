"""The processes at the other ends of connections, and commands to all of them. jax-free.

The main thread of a learner may be waiting in a collective that another process will never join, and a collective
cannot be cancelled. A thread for each peer therefore reads its connection all the time, and reports a lost process at
once.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import hmac
import itertools
import os
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from areal_jax.config.addresses import join_address
from areal_jax.distributed.messages import (
    CLOSE,
    LANES,
    LEARNER,
    Answer,
    Buffer,
    CodecError,
    Command,
    Failure,
    Message,
    decode_message,
    encode_message,
)
from areal_jax.errors import ExitCode, LostPeerError, UserError

MOST_PART_BYTES = 32 << 20  # of a message on its way: it is sent, checked and received part by part
MOST_MESSAGE_BYTES = 1 << 36
MAGIC = b'areal-jax wire 2'  # the first bytes in both directions
_RANDOM_BYTES, _DIGEST_BYTES = 32, hashlib.sha256().digest_size
_PREFIX = struct.Struct(f'!QQQ{_DIGEST_BYTES}s{_DIGEST_BYTES}s')
_MOST_BUFFERS = 512  # that the system takes in one call; it may refuse more than 1,024
_HANDSHAKE_S = 30.0  # for each step of a handshake: a silent peer occupies a thread no longer
_LEAST_WAIT_S = 1e-3
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # a machine that is gone is noticed in 40 s


class WireError(UserError):
    """A connection or message is refused; the text names both sides and the fix."""


class WrongKeyError(WireError):
    """The process at the other end does not have the key of this run."""


class Part(NamedTuple):
    """A part of a message, for any number of connections."""

    content: Sequence[memoryview]
    size: int
    left: int  # bytes of the message that come after this part
    digest: bytes


def cut_parts(message: Sequence[Buffer], most_bytes: int) -> Iterator[Part]:
    """Yields a message in parts of at most `most_bytes`, without a copy; a part is hashed when it is asked for."""
    buffers = collections.deque(memoryview(buffer) for buffer in message if len(buffer))
    left = sum(map(len, buffers))
    while True:
        size = room = min(left, most_bytes)
        left, content, digest = left - size, [], hashlib.sha256()
        while room:
            if len(buffers[0]) > room:
                buffers.appendleft(buffers[0][:room])
                buffers[1] = buffers[1][room:]
            content.append(buffers.popleft())
            digest.update(content[-1])
            room -= len(content[-1])
        yield Part(content, size, left, digest.digest())
        if not left:
            return


class Connection:
    """One end of an authenticated connection. Any thread may send; one thread at a time receives."""

    def __init__(
        self,
        own: socket.socket,
        send_key: bytes,
        receive_key: bytes,
        most_bytes: int = MOST_MESSAGE_BYTES,
        part_bytes: int = MOST_PART_BYTES,
    ):
        """`most_bytes` and `part_bytes` limit a message and its parts, in both directions."""
        self._socket, self.most_bytes, self.part_bytes = own, most_bytes, part_bytes
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0  # parts
        self.sending = threading.Lock()

    @property
    def address(self) -> str:
        """'host:port' of the other end."""
        host, port = self._socket.getpeername()[:2]
        return join_address(host, port)

    def fileno(self) -> int:
        return self._socket.fileno()

    def seal(self, part: Part) -> bytes:
        """Returns the prefix that makes the part the next one on this connection; the caller must hold `sending`."""
        head = struct.pack('!QQQ', part.size, part.left, self._sent) + part.digest
        self._sent += 1
        return head + _mac(self._send_key, head)

    def push(self, content: Sequence[memoryview]) -> int:
        """Sends bytes without waiting; returns how many the system took. Raises OSError for a lost peer."""
        try:
            return self._socket.sendmsg(content, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive(self) -> bytearray:
        """Receives the next message. Raises EOFError if the other end has closed, OSError if it is lost.

        Raises WireError for a part that does not come from the other end, does not follow the part before it or is too
        large; after it, nothing more can be read.
        """
        size, left, digest = self._receive_prefix()
        message, filled = self._make_room(size + left), 0
        while True:
            if filled + size + left != len(message):
                raise WireError('a part does not continue its message: something else writes to the connection')
            if size > self.part_bytes:
                raise WireError(too_large(size, self.part_bytes))
            part = memoryview(message)[filled : filled + size]
            _fill(self._socket, part)
            if not hmac.compare_digest(hashlib.sha256(part).digest(), digest):
                raise WireError('a message was changed on its way: something else writes to the connection')
            filled += size
            if not left:
                return message
            size, left, digest = self._receive_prefix()

    def _receive_prefix(self) -> tuple[int, int, bytes]:
        """(bytes of the next part, bytes of the message after it, digest of the part)."""
        prefix = _read(self._socket, _PREFIX.size)
        size, left, counter, digest, tag = _PREFIX.unpack(prefix)
        expected = _mac(self._receive_key, bytes(prefix[:-_DIGEST_BYTES]))
        if not hmac.compare_digest(tag, expected) or counter != self._received:
            raise WireError('a message is forged, repeated or out of order: something else writes to the connection')
        self._received += 1
        return size, left, digest

    def _make_room(self, size: int) -> bytearray:
        if size <= self.most_bytes:
            with contextlib.suppress(MemoryError):
                return bytearray(size)
        raise WireError(too_large(size, self.most_bytes))

    def finish(self) -> None:
        """Ends sending; messages that the other end has sent can still be read."""
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


def send_all(connections: Sequence[Connection], message: Sequence[Buffer], deadline_s: float) -> dict[int, str]:
    """Sends one message to all at the same time; returns, by index, why it did not reach a connection.

    Raises WireError, with nothing sent, for a message above the limit.
    """
    size = sum(map(len, message))
    for connection in connections:
        if size > connection.most_bytes:
            raise WireError(too_large(size, connection.most_bytes))
    for connection in connections:  # in one order everywhere, so that two senders never wait for each other
        connection.sending.acquire()
    try:
        end, left, lost = time.monotonic() + deadline_s, dict(enumerate(connections)), dict[int, str]()
        for part in cut_parts(message, min((c.part_bytes for c in connections), default=MOST_PART_BYTES)):
            gone, late = _send_part(left, part, end)
            lost |= dict.fromkeys(gone, 'is gone') | dict.fromkeys(late, f'took in no message for {deadline_s:g} s')
            left = {index: connection for index, connection in left.items() if index not in lost}
        return lost
    finally:
        for connection in connections:
            connection.sending.release()


def _send_part(connections: Mapping[int, Connection], part: Part, end: float) -> tuple[set[int], set[int]]:
    """Sends a part to all until `end`; returns which connections are lost, and which have not taken it."""
    left = {index: [memoryview(c.seal(part)), *part.content] for index, c in connections.items()}
    gone: set[int] = set()
    with selectors.DefaultSelector() as selector:

        def push(index: int) -> bool:
            """Sends as much as the system takes; True if the whole part is sent, or if the connection is lost."""
            try:
                while left[index]:
                    taken = connections[index].push(left[index][:_MOST_BUFFERS])
                    if not taken:
                        return False
                    left[index] = _drop(left[index], taken)
            except OSError:
                gone.add(index)
            return True

        for index in [index for index in left if not push(index)]:
            selector.register(connections[index], selectors.EVENT_WRITE, index)
        while waiting := selector.get_map():
            ready = selector.select(max(end - time.monotonic(), _LEAST_WAIT_S))
            for key, _ in ready:
                if push(key.data):
                    selector.unregister(key.fileobj)
            if not ready and time.monotonic() >= end:
                return gone, {key.data for key in waiting.values()}
    return gone, set()


def _drop(buffers: Sequence[memoryview], taken: int) -> list[memoryview]:
    """The buffers without their first `taken` bytes."""
    for index, buffer in enumerate(buffers):
        if taken < len(buffer):
            return [buffer[taken:], *buffers[index + 1 :]]
        taken -= len(buffer)
    return []


def make_pair(most_bytes: int = MOST_MESSAGE_BYTES, part_bytes: int = MOST_PART_BYTES) -> tuple[Connection, Connection]:
    """Makes the two ends of a connection inside this process, for tests and measurements."""
    ours, theirs = socket.socketpair()
    up, down, limits = secrets.token_bytes(_RANDOM_BYTES), secrets.token_bytes(_RANDOM_BYTES), (most_bytes, part_bytes)
    return Connection(ours, up, down, *limits), Connection(theirs, down, up, *limits)


def prove_as_client(own: socket.socket, key: bytes) -> Connection:
    """Proves the key both ways, for the side that opened the connection. Raises WrongKeyError, WireError."""
    ours = secrets.token_bytes(_RANDOM_BYTES)
    own.sendall(MAGIC + ours)
    theirs = _read_greeting(own)
    if not hmac.compare_digest(_read(own, _DIGEST_BYTES), _mac(key, b'server' + ours + theirs)):
        raise WrongKeyError('it has another key')
    own.sendall(_mac(key, b'client' + ours + theirs))
    up, down = _session_keys(key, ours, theirs)
    return Connection(own, up, down)


def prove_as_server(own: socket.socket, key: bytes) -> Connection:
    """Proves the key both ways, for the side that listens. Answers only a peer that speaks this protocol."""
    ours = secrets.token_bytes(_RANDOM_BYTES)
    theirs = _read_greeting(own)
    own.sendall(MAGIC + ours + _mac(key, b'server' + theirs + ours))
    try:
        proof = _read(own, _DIGEST_BYTES)
    except EOFError:
        raise WrongKeyError('it has another key') from None  # it closed the connection after this side's proof
    if not hmac.compare_digest(proof, _mac(key, b'client' + theirs + ours)):
        raise WrongKeyError('it has another key')
    up, down = _session_keys(key, theirs, ours)
    return Connection(own, down, up)


def prepare_socket(own: socket.socket) -> None:
    """Sets a socket to send small messages at once and notice a lost machine, with a deadline for the handshake."""
    own.settimeout(_HANDSHAKE_S)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _session_keys(key: bytes, client: bytes, server: bytes) -> tuple[bytes, bytes]:
    session = _mac(key, b'session' + client + server)
    return _mac(session, b'client'), _mac(session, b'server')


def _read_greeting(own: socket.socket) -> bytes:
    if (found := bytes(_read(own, len(MAGIC)))) != MAGIC:
        raise WireError(f'it speaks another protocol (it began with {found!r}): it is no role of this version')
    return bytes(_read(own, _RANDOM_BYTES))


def _read(own: socket.socket, size: int) -> bytearray:
    content = bytearray(size)
    _fill(own, memoryview(content))
    return content


def _fill(own: socket.socket, rest: memoryview) -> None:
    while rest:
        taken = own.recv_into(rest, 0, socket.MSG_WAITALL)
        if not taken:
            raise EOFError('the connection was closed')
        rest = rest[taken:]


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, 'sha256')


OnLost = Callable[[str], None]  # gets one sentence that names the process
_ANSWER_S = 60.0  # how long the other end may take to receive an answer
_SENDERS = 8  # threads of `Peers.send_each`: each hashes and sends, both without the lock of the interpreter


class CommandError(LostPeerError):
    """A process failed although others did not, or could not be reached; names the process and the command."""


def end_process(reason: str) -> None:
    """Ends this process at once: its main thread may be waiting in a collective that cannot be cancelled."""
    print(f'error: {reason}', file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


class Peer:
    """The process at the other end of a connection. `on_lost` is called once, from another thread."""

    def __init__(self, connection: Connection, name: str, on_lost: OnLost):
        self.name, self.connection, self._on_lost = name, connection, on_lost
        self._received: dict[str, queue.Queue[Message | None]] = {lane: queue.Queue() for lane in LANES}
        self._closing, self._lock = False, threading.Lock()
        self.lost = ''  # why the process is lost, in one sentence
        threading.Thread(target=self._read, name=f'peer {name}', daemon=True).start()

    def answer(self, lane: str, number: int, answer: Answer) -> None:
        """Sends the answer to a command; sends a failure if the answer cannot be encoded or is too large."""
        try:
            failed = send_all([self.connection], encode_message(Message(lane, number, answer)), _ANSWER_S)
        except (CodecError, WireError) as error:
            self.answer(lane, number, Answer(None, Failure.of(error)))
            return
        if failed:
            self.report_lost(f'{self.name} {failed[0]}')

    def take(self, lane: str, timeout_s: float | None = None) -> Message:
        """Takes the next message of the lane. Raises queue.Empty if none came in time, CommandError for a lost peer."""
        message = self._received[lane].get(timeout=timeout_s)
        if message is None:
            self._received[lane].put(None)  # for the next caller
            raise CommandError(self.lost or f'{self.name} has ended')
        return message

    def close(self) -> None:
        """Ends sending; messages that the other end has sent are still read."""
        self._closing = True
        self.connection.finish()

    def report_lost(self, reason: str) -> None:
        if self.give_up(reason):
            self._on_lost(reason)

    def give_up(self, reason: str) -> bool:
        """Ends every wait for this process; False if it was given up or closed before."""
        with self._lock:
            if self._closing or self.lost:
                return False
            self.lost = reason
        self._end_lanes()
        return True

    def _end_lanes(self) -> None:
        for received in self._received.values():
            received.put(None)

    def _read(self) -> None:
        try:
            while True:
                message = decode_message(self.connection.receive())
                if isinstance(message.content, Command) and message.content.name == CLOSE:
                    self._closing = True
                self._received[message.lane].put(message)
                if self._closing and isinstance(message.content, Command):
                    return
        except (EOFError, OSError):
            self.report_lost(f'{self.name} is gone')
        except (WireError, CodecError) as error:
            self.report_lost(f'{self.name} cannot be understood: {error}')
        finally:
            self._end_lanes()
            with self.connection.sending:
                self.connection.close()


class Peers:
    """All other processes that execute the commands of this process.

    If one is lost, all are, because the others wait in collectives that it will not join. `on_lost` is called once,
    from another thread and with one sentence. If it returns, every call, waiting ones included, raises CommandError
    with that sentence. Calls of one lane come from one thread at a time.
    """

    def __init__(
        self, connections: Sequence[tuple[str, Connection]], *, deadline_s: float, on_lost: OnLost = end_process
    ):
        """`connections` by the names of the processes, 'learner 0'; `deadline_s` bounds every command."""
        self.deadline_s, self._on_lost, self._closed = deadline_s, on_lost, False
        self._numbers, self._lock, self._lost = itertools.count(), threading.Lock(), ''
        self._peers: list[Peer] = []
        for name, connection in connections:
            self._peers.append(Peer(connection, name, self.report_lost))
        if self._lost:  # a process was lost while the list was filled
            self._give_up()

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self._peers]

    @property
    def addresses(self) -> list[str]:
        """'host:port' at which each process was reached."""
        return [peer.connection.address for peer in self._peers]

    def call_all(self, command: Command) -> list[Answer]:
        """Sends the command to all at the same time and returns the answers, in the order of the processes.

        Raises CommandError if one is lost or exceeds the deadline, after calling `on_lost`. Raises WireError for a
        command that is too large and CodecError for arguments that cannot be encoded, with nothing sent.
        """
        return self.start_all(command)()

    def start_all(self, command: Command) -> Callable[[], list[Answer]]:
        """Sends the command as `call_all` does; returns a function that waits for the answers."""
        return self._start(self._peers, command)

    def call_led(self, command: Command, others: Command) -> list[Answer]:
        """Sends `command` to the first process and `others` to all others; returns and raises as `call_all`."""
        waits = self._start(self._peers[:1], command), self._start(self._peers[1:], others)
        return [answer for wait in waits for answer in wait()]

    def send_each(self, commands: Sequence[Command]) -> None:
        """Sends each process its own command, to all at the same time; there are no answers.

        Raises CommandError if a process is lost or takes nothing in until the deadline, after calling `on_lost`.
        """
        with concurrent.futures.ThreadPoolExecutor(min(len(commands), _SENDERS)) as senders:
            for _ in senders.map(lambda peer, command: self._send([peer], command), self._peers, commands):
                pass
        if lost := [peer.lost for peer in self._peers if peer.lost]:
            raise CommandError(lost[0])

    def call(self, index: int, command: Command) -> Answer:
        """Sends the command to one process and returns its answer; raises the errors of `call_all`."""
        return self._start([self._peers[index]], command)()[0]

    def request(self, index: int, command: Command) -> Callable[[], Answer]:
        """Sends a command whose late answer does not end the run.

        The returned function waits for the answer, at most `deadline_s` from its own call; then raises queue.Empty.
        """
        peer = self._peers[index]
        number = self._send([peer], command)
        return lambda: _wait(peer, command.lane, number, time.monotonic() + self.deadline_s)

    def close(self) -> None:
        """Tells the other ends to return. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        alive = [peer for peer in self._peers if not peer.lost]
        message = encode_message(Message(LEARNER, next(self._numbers), Command(CLOSE)))
        send_all([peer.connection for peer in alive], message, _ANSWER_S)
        for peer in self._peers:
            peer.close()

    def report_lost(self, reason: str) -> None:
        """Records that a process of the run is lost, and calls `on_lost`; also for losses that the caller notices."""
        with self._lock:
            if self._closed or self._lost:
                return
            self._lost = reason
        self._give_up()
        self._on_lost(f'{reason}; the run ends here, go on from the last checkpoint with --resume')

    def _give_up(self) -> None:
        for peer in self._peers:
            peer.give_up(self._lost)

    def _start(self, peers: Sequence[Peer], command: Command) -> Callable[[], list[Answer]]:
        end = time.monotonic() + self.deadline_s
        number = self._send(peers, command)
        return lambda: [self._answer_of(peer, command.lane, number, end) for peer in peers]

    def _send(self, peers: Sequence[Peer], command: Command) -> int:
        if lost := [peer.lost for peer in peers if peer.lost]:
            raise CommandError(lost[0])
        number = next(self._numbers)
        message = encode_message(Message(command.lane, number, command))
        failed = send_all([peer.connection for peer in peers], message, self.deadline_s)
        for index, reason in failed.items():
            peers[index].report_lost(f'{peers[index].name} {reason}')
        return number

    def _answer_of(self, peer: Peer, lane: str, number: int, end: float) -> Answer:
        try:
            return _wait(peer, lane, number, end)
        except queue.Empty:
            late = f'{peer.name} gave no answer for {self.deadline_s:g} s'
            self.report_lost(late)
            raise CommandError(late) from None


def _wait(peer: Peer, lane: str, number: int, end: float) -> Answer:
    while True:
        message = peer.take(lane, max(end - time.monotonic(), 0.0))
        if message.number == number and isinstance(message.content, Answer):
            return message.content
        # else it is the late answer to a command that was given up
