"""The processes at the other ends of connections, and commands to all of them. jax-free.

The main thread of a learner may be waiting in a collective that another process will never join, and a collective
cannot be cancelled. A thread for each peer therefore reads its connection all the time, and reports a lost process at
once.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Callable, Sequence

from areal_jax.config.addresses import join_address
from areal_jax.distributed.messages import (
    CLOSE,
    LANES,
    LEARNER,
    RELAY,
    Answer,
    CodecError,
    Command,
    Failure,
    Message,
    decode_message,
    encode_message,
)
from areal_jax.errors import ExitCode, LostPeerError, UserError

MOST_FRAME_BYTES = 1 << 30
MAGIC = b'areal-jax wire 1'  # the first bytes in both directions
_RELAYED = 1 << 63
_RANDOM_BYTES, _DIGEST_BYTES = 32, hashlib.sha256().digest_size
_PREFIX = struct.Struct(f'!QQ{_DIGEST_BYTES}s{_DIGEST_BYTES}s')
_HANDSHAKE_S = 30.0  # for each step of a handshake: a silent peer occupies a thread no longer
_LEAST_WAIT_S = 1e-3
_KEEPALIVE = {'TCP_KEEPIDLE': 10, 'TCP_KEEPINTVL': 5, 'TCP_KEEPCNT': 6}  # a machine that is gone is noticed in 40 s


class WireError(UserError):
    """A connection or message is refused; the text names both sides and the fix."""


class WrongKeyError(WireError):
    """The process at the other end does not have the key of this run."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """The body of a message, for any number of connections."""

    body: bytes | bytearray
    digest: bytes
    relayed: bool = False  # the receiver passes it on

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
        """The limit on the body of a frame, in bytes."""
        return self._most_bytes

    @property
    def address(self) -> str:
        """'host:port' of the other end."""
        host, port = self._socket.getpeername()[:2]
        return join_address(host, port)

    def fileno(self) -> int:
        return self._socket.fileno()

    def seal(self, frame: Frame) -> bytes:
        """Returns the prefix that makes the frame the next one on this connection; the caller must hold `sending`."""
        size = len(frame.body) | (_RELAYED if frame.relayed else 0)
        head = struct.pack('!QQ', size, self._sent) + frame.digest
        self._sent += 1
        return head + _mac(self._send_key, head)

    def push(self, content: memoryview) -> int:
        """Sends bytes without waiting; returns how many the system took. Raises OSError for a lost peer."""
        try:
            return self._socket.send(content, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def receive(self) -> Frame:
        """Receives the next frame. Raises EOFError if the other end has closed, OSError if it is lost.

        Raises WireError for a frame that does not come from the other end; after it, nothing more can be read.
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


def send_all(connections: Sequence[Connection], frame: Frame, deadline_s: float) -> dict[int, str]:
    """Sends one frame to all at the same time; returns, by index, why it did not reach a connection.

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
            """Sends as much as the system takes; True if the whole frame is sent, or if the connection is lost."""
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
    """Makes the two ends of a connection inside this process, for tests and measurements."""
    ours, theirs = socket.socketpair()
    up, down = secrets.token_bytes(_RANDOM_BYTES), secrets.token_bytes(_RANDOM_BYTES)
    return Connection(ours, up, down, most_bytes), Connection(theirs, down, up, most_bytes)


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
    rest = memoryview(content)
    while rest:
        taken = own.recv_into(rest, 0, socket.MSG_WAITALL)
        if not taken:
            raise EOFError('the connection was closed')
        rest = rest[taken:]
    return content


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, 'sha256')


OnLost = Callable[[str], None]  # gets one sentence that names the process
FANOUT = 4  # processes to which one process passes large commands on
LEAST_BYTES = 1 << 20  # of a command that is passed on: smaller commands cost little, and arrive sooner directly
_ANSWER_S = 60.0  # how long the other end may take to receive an answer


class CommandError(LostPeerError):
    """A process failed although others did not, or could not be reached; names the process and the command."""


def children_of(index: int, count: int) -> range:
    """The processes to which process `index` of `count` passes large commands on; index -1 = the controller.

    Sending a batch to each of 64 processes costs a controller 16 times as much as sending it to 4, in CPU time and on
    its network link. Small commands and all answers are sent directly, and lost processes are noticed directly.
    """
    return range(min(FANOUT * (index + 1), count), min(FANOUT * (index + 2), count))


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
        self.relay_to: list[Connection] = []  # children in the relay tree: they get its large commands
        threading.Thread(target=self._read, name=f'peer {name}', daemon=True).start()

    def answer(self, lane: str, number: int, answer: Answer) -> None:
        """Sends the answer to a command; sends a failure if the answer cannot be encoded or is too large."""
        try:
            body = encode_message(Message(lane, number, answer))
            failed = send_all([self.connection], Frame.of(body), _ANSWER_S)
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

    def read_also(self, connection: Connection) -> None:
        """Also reads messages that a parent in the relay tree passes on; if that connection ends, no peer is lost."""
        threading.Thread(target=self._read_relayed, args=(connection,), name='relay', daemon=True).start()

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
                message = self._take_in(self.connection)
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
            for connection in (self.connection, *self.relay_to):
                with connection.sending:
                    connection.close()

    def _read_relayed(self, connection: Connection) -> None:
        try:
            while True:
                message = self._take_in(connection)
                self._received[message.lane].put(message)
        except (EOFError, OSError, WireError, CodecError):  # the leader notices: an answer is missing, or the process
            connection.close()

    def _take_in(self, connection: Connection) -> Message:
        """Receives the next message, and passes it on before decoding it."""
        frame = connection.receive()
        if frame.relayed and self.relay_to:
            send_all(self.relay_to, frame, _ANSWER_S)  # failures are ignored: the leader itself notices lost processes
        return decode_message(frame.body)


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
        self._relays = False
        if self._lost:  # a process was lost while the list was filled
            self._give_up()

    def arrange_relays(self) -> None:
        """Lets the processes pass large commands on, if there are more than FANOUT and all have a listener."""
        count = len(self._peers)
        if count <= FANOUT:
            return
        addresses = [peer.connection.address for peer in self._peers]
        end, waits = time.monotonic() + self.deadline_s, []
        for index, peer in enumerate(self._peers):
            children = [addresses[child] for child in children_of(index, count)]
            command = Command('join_relays', (children, index >= FANOUT), RELAY)
            waits.append((peer, self._send([peer], command)))
        answers = [self._answer_of(peer, RELAY, number, end) for peer, number in waits]
        for peer, answer in zip(self._peers, answers, strict=True):
            if answer.failure is not None:
                raise CommandError(f'{peer.name} cannot pass commands on: {answer.failure}')
        self._relays = all(answer.value for answer in answers)

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def names(self) -> list[str]:
        return [peer.name for peer in self._peers]

    def call_all(self, command: Command) -> list[Answer]:
        """Sends the command to all at the same time and returns the answers, in the order of the processes.

        Raises CommandError if one is lost or exceeds the deadline, after calling `on_lost`. Raises WireError for a
        command that is too large and CodecError for arguments that cannot be encoded, with nothing sent.
        """
        return self.start_all(command)()

    def start_all(self, command: Command) -> Callable[[], list[Answer]]:
        """Sends the command as `call_all` does; returns a function that waits for the answers."""
        return self._start(self._peers, command)

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
        body = encode_message(Message(LEARNER, next(self._numbers), Command(CLOSE)))
        send_all([peer.connection for peer in alive], Frame.of(body), _ANSWER_S)
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
        body = encode_message(Message(command.lane, number, command))
        relayed = self._relays and len(peers) == len(self._peers) and len(body) >= LEAST_BYTES
        if relayed:
            peers = [peers[index] for index in children_of(-1, len(peers))]
        frame = Frame.of(body, relayed=relayed)
        failed = send_all([peer.connection for peer in peers], frame, self.deadline_s)
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
