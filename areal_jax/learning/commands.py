"""Arrow 7 over several processes: process 0 says what is done next, and all do it in that order.

Programs over a mesh of several processes are collectives: one that a process leaves out, or starts in another order,
hangs all. So every process holds a learner of the same settings; process 0 drives its own through `CommandLeader`,
which first sends each command with its numpy arguments to the followers, and these run `follow`. A process that is
gone, or longer at one command than the deadline, ends all others with one sentence: a collective that waits for it
cannot be cancelled. Beside the commands, over the same connections, go the requests to write what `save` has copied; a
thread of the follower serves them, while commands go on.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from areal_jax.checkpoint.shards import Index, brief, named_leaves, write_shards
from areal_jax.errors import ExitCode, LostPeerError
from areal_jax.learning.learner import SpmdLearner
from areal_jax.types import TrajectoryGroup

_INVITATION_BYTES = 512
_CLOSE = 'close'
_COMMANDS, _WRITES = 'commands', 'writes'  # what a message is about, and answers
OnLost = Callable[[str], None]


class CommandError(LostPeerError):
    """A follower that failed where process 0 did not, or could not be reached; names the process and the command."""


def end_process(reason: str) -> None:
    """Ends this process at once: its main thread may wait in a collective for ever."""
    print(f'error: {reason}', file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


class CommandLeader:
    """`types.Learner` over the learners of all processes; for process 0, blocking, for one lane's thread."""

    def __init__(
        self, learner: SpmdLearner, followers: Sequence[Connection], *, deadline_s: float, on_lost: OnLost = end_process
    ):
        """`followers` are connections from `invite`; `deadline_s` bounds every command."""
        self._learner, self._deadline_s, self._on_lost = learner, deadline_s, on_lost
        self._peers = [_Peer(connection, f'follower {i + 1}', self._lost) for i, connection in enumerate(followers)]
        self.followers = [_RemoteWriter(peer, deadline_s) for peer in self._peers]  # for CheckpointStore.save
        self._closed = False

    def warm_up(self) -> int:
        return self._everywhere('warm_up')

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._learner.update_tokens(groups)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        return self._everywhere('update', groups, version)

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return self._everywhere('evaluate', groups)

    def publish(self, version: int) -> Any:
        return self._everywhere('publish', version)

    def save(self) -> dict[str, Any]:
        return self._everywhere('save')

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._everywhere('restore', saved)

    def require_finite(self, what: str, fix: str) -> None:
        self._everywhere('require_finite', what, fix)

    def close(self) -> None:
        """Lets the followers go; nothing the second time."""
        if self._closed:
            return
        self._closed = True
        for peer in self._peers:
            peer.send(_COMMANDS, (_CLOSE, ()))
            peer.close()

    def _everywhere(self, name: str, *args: Any) -> Any:
        for peer in self._peers:
            peer.send(_COMMANDS, (name, args))
        with _Deadline(self._deadline_s, f'the command {name!r}', self._lost):
            try:
                result = getattr(self._learner, name)(*args)
            finally:
                outcomes = [peer.receive(self._deadline_s) for peer in self._peers]
        for peer, outcome in zip(self._peers, outcomes, strict=True):
            if outcome is not None:
                raise CommandError(f'{peer.name} failed at the command {name!r} that process 0 did: {outcome}')
        return result

    def _lost(self, reason: str) -> None:
        if not self._closed:
            self._on_lost(f'{reason}; the run ends here, go on from the last checkpoint with --resume')


class _RemoteWriter:
    """`checkpoint.store.Follower`: the writing of one follower's shards, beside commands."""

    def __init__(self, peer: _Peer, deadline_s: float):
        self.name, self._peer, self._deadline_s = peer.name, peer, deadline_s

    def write(self, directory: str) -> None:
        self._directory = directory
        self._peer.send(_WRITES, directory)

    def written(self) -> Index | str:
        """Waits no longer than the deadline from here on, when process 0 has written its own part."""
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                directory, outcome = self._peer.take(_WRITES, max(end - time.monotonic(), 0.0))
            except queue.Empty:
                return f'no word of its shards for distributed.command_deadline_s={self._deadline_s:g}'
            if directory == self._directory:  # else of a step that was given up
                return outcome


def follow(learner: SpmdLearner, leader: Connection, *, on_lost: OnLost = end_process) -> None:
    """Runs the commands of process 0 until it closes; an error is reported to it and the next command awaited."""
    peer = _Peer(leader, 'process 0', on_lost)
    copies: collections.deque[Any] = collections.deque(maxlen=1)  # the last that `save` made, until it is written
    threading.Thread(target=_write_copies, args=(peer, copies), daemon=True).start()
    while True:
        name, args = peer.receive(None)
        if name == _CLOSE:
            peer.close()
            return
        try:
            if name == 'save':
                copies.append(learner.save())
            else:
                getattr(learner, name)(*args)
            peer.send(_COMMANDS, None)
        except Exception as error:  # process 0 decides what becomes of the run
            peer.send(_COMMANDS, f'{type(error).__name__}: {error}')


def _write_copies(peer: _Peer, copies: collections.deque[Any]) -> None:
    """Writes the last copy where process 0 says, and answers what lies where, or what went wrong; does so for ever."""
    while True:
        directory = peer.take(_WRITES, None)
        try:
            outcome: Index | str = write_shards(pathlib.Path(directory), named_leaves(copies.pop()))
        except Exception as error:  # process 0 decides what becomes of the run
            outcome = brief(error)
        peer.send(_WRITES, (directory, outcome))


def invite(host: str, deadline_s: float) -> list[Connection]:
    """Connections to all other processes; call `accept_invitation` there at the same time. For process 0.

    `host` is the name or address of this machine as the others know it. A collective.
    Raises CommandError when not all have come within `deadline_s`.
    """
    key = secrets.token_bytes(32)
    with Listener((host, 0), authkey=key, backlog=jax.process_count()) as listener:
        text = f'{host}\n{listener.address[1]}\n{key.hex()}'.encode()
        multihost_utils.broadcast_one_to_all(np.frombuffer(text.ljust(_INVITATION_BYTES), np.uint8))
        return _accept_all(listener, jax.process_count() - 1, deadline_s)


def accept_invitation() -> Connection:
    """The connection to process 0, which calls `invite`; for every other process. A collective."""
    blank = np.zeros(_INVITATION_BYTES, np.uint8)
    text = bytes(np.asarray(multihost_utils.broadcast_one_to_all(blank))).decode().strip()
    host, port, key = text.split('\n')
    return Client((host, int(port)), authkey=bytes.fromhex(key))


def _accept_all(listener: Listener, count: int, deadline_s: float) -> list[Connection]:
    accepted: queue.Queue[Connection] = queue.Queue()

    def accept() -> None:
        for _ in range(count):
            accepted.put(listener.accept())

    threading.Thread(target=accept, daemon=True).start()
    end = time.monotonic() + deadline_s
    connections: list[Connection] = []
    while len(connections) < count:
        try:
            connections.append(accepted.get(timeout=max(end - time.monotonic(), 0.0)))
        except queue.Empty:
            raise CommandError(
                f'{count - len(connections)} of {count} followers did not come within {deadline_s:g} s: start all '
                'processes of the run, and let them reach process 0'
            ) from None
    return connections


class _Peer:
    """The other end of a connection; a thread reads, so that its loss is noticed whatever this process does."""

    def __init__(self, connection: Connection, name: str, on_lost: OnLost):
        self.name, self._connection, self._on_lost = name, connection, on_lost
        self._received: dict[str, queue.Queue[Any]] = {about: queue.Queue() for about in (_COMMANDS, _WRITES)}
        self._closing, self._sending = False, threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, about: str, message: Any) -> None:
        try:
            with self._sending:
                self._connection.send((about, message))
        except OSError:
            self._gone()

    def take(self, about: str, timeout_s: float | None) -> Any:
        """The next message; raises queue.Empty when none came in time."""
        return self._received[about].get(timeout=timeout_s)

    def receive(self, timeout_s: float | None) -> Any:
        """The next command, or the answer to one."""
        try:
            return self.take(_COMMANDS, timeout_s)
        except queue.Empty:
            self._on_lost(f'{self.name} gave no answer for {timeout_s:g} s')
            raise CommandError(f'{self.name} gave no answer for {timeout_s:g} s') from None

    def close(self) -> None:
        self._closing = True
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                about, message = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: closed by this side while it was reading
                self._gone()
                return
            self._received[about].put(message)
            if about == _COMMANDS and isinstance(message, tuple) and message[0] == _CLOSE:
                self._closing = True
                return

    def _gone(self) -> None:
        if not self._closing:
            self._on_lost(f'{self.name} is gone')


@dataclasses.dataclass
class _Deadline:
    """Calls `on_lost` when its block has not ended in time."""

    seconds: float
    what: str
    on_lost: OnLost

    def __enter__(self) -> None:
        self._timer = threading.Timer(self.seconds, self.on_lost, [f'{self.what} took more than {self.seconds:g} s'])
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
