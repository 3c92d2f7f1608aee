"""The processes at the other ends of connections, and commands to all of them; peers.py carries the bytes. jax-free.

The main thread of a learner may be waiting in a collective that another process will never join, and a collective
cannot be cancelled. A thread of each peer therefore reads its connection all the time and reports a lost process at
once.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

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
from areal_jax.distributed.peers import Connection, Frame, WireError, send_all
from areal_jax.errors import ExitCode, LostPeerError

OnLost = Callable[[str], None]  # gets one sentence that names the process
FANOUT = 4  # processes that one passes large commands on to
LEAST_BYTES = 1 << 20  # of a command that is passed on: smaller ones cost little, and arrive sooner directly
_ANSWER_S = 60.0  # for which the other end may take in no answer


class CommandError(LostPeerError):
    """A process that failed where others did not, or could not be reached; names the process and the command."""


def children_of(index: int, count: int) -> range:
    """To whom process `index` of `count` passes large commands on; -1 = the controller.

    To send a batch to 64 processes one by one costs a controller 16 times what 4 cost, in CPU time and on its network
    link. Small commands, all answers and the watch over lost processes go directly.
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
        self.lost = ''  # why it is, in one sentence
        self.relay_to: list[Connection] = []  # children in the relay tree: they get its large commands
        threading.Thread(target=self._read, name=f'peer {name}', daemon=True).start()

    def answer(self, lane: str, number: int, answer: Answer) -> None:
        """Sends the answer to a command; an answer that cannot travel is sent as a failure."""
        try:
            body = encode_message(Message(lane, number, answer))
            failed = send_all([self.connection], Frame.of(body), _ANSWER_S)
        except (CodecError, WireError) as error:
            self.answer(lane, number, Answer(None, Failure.of(error)))
            return
        if failed:
            self.report_lost(f'{self.name} {failed[0]}')

    def take(self, lane: str, timeout_s: float | None = None) -> Message:
        """The next message of the lane. Raises queue.Empty when none came in time, CommandError for a lost peer."""
        message = self._received[lane].get(timeout=timeout_s)
        if message is None:
            self._received[lane].put(None)  # for the next caller
            raise CommandError(self.lost or f'{self.name} has ended')
        return message

    def read_also(self, connection: Connection) -> None:
        """Also takes messages that a parent in the relay tree passes on; the end of that connection is no loss."""
        threading.Thread(target=self._read_relayed, args=(connection,), name='relay', daemon=True).start()

    def close(self) -> None:
        """Ends the connection in this direction; what the other end has sent is still read."""
        self._closing = True
        self.connection.finish()

    def report_lost(self, reason: str) -> None:
        if self.give_up(reason):
            self._on_lost(reason)

    def give_up(self, reason: str) -> bool:
        """Ends every wait for this process; False where it was given up or closed before."""
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
        except (EOFError, OSError, WireError, CodecError):  # the leader misses the answer, or the process
            connection.close()

    def _take_in(self, connection: Connection) -> Message:
        """The next message, passed on before it is read."""
        frame = connection.receive()
        if frame.relayed and self.relay_to:
            send_all(self.relay_to, frame, _ANSWER_S)  # the leader notices by itself who is gone
        return decode_message(frame.body)


class Peers:
    """All other processes that execute the commands of this one.

    The loss of one is the loss of all, because the others wait in collectives that it will not join. `on_lost` is
    called once, from another thread and with one sentence. Where it returns, every call raises CommandError with that
    sentence, those that are waiting too. Calls of one lane come from one thread at a time.
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
        if self._lost:  # while they were made
            self._give_up()

    def arrange_relays(self) -> None:
        """Lets the processes pass large commands on, where there are many of them and all listen."""
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
        """Sends the command to all at the same time and waits for the answers, in the order of the processes.

        Raises CommandError where one is lost or exceeds the deadline, which `on_lost` has then been told too; WireError
        for a command that is too large and CodecError for arguments that do not travel, with nothing sent.
        """
        return self.start_all(command)()

    def start_all(self, command: Command) -> Callable[[], list[Answer]]:
        """The first half of `call_all`; the function that it returns is the second."""
        return self._start(self._peers, command)

    def call(self, index: int, command: Command) -> Answer:
        """The same for one process."""
        return self._start([self._peers[index]], command)()[0]

    def request(self, index: int, command: Command) -> Callable[[], Answer]:
        """Sends a command that may fail to be executed in time without an end of the run.

        The function that it returns waits for the answer, at most `deadline_s` from its own call on: queue.Empty.
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
        """Says that a process of the run is lost; also for losses that the caller notices."""
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
        # else the late answer to a command that was given up
