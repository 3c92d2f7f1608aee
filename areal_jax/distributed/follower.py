"""A process that holds a learner and executes the commands of another process, in the order of sending.

Separate threads write checkpoints and publications, so that commands continue meanwhile. The other process runs
remote_learner.py.
"""

from __future__ import annotations

import collections
import pathlib
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from areal_jax.checkpoint.shards import ArrayShape, named_leaves, write_shards
from areal_jax.distributed.handshake import Listener
from areal_jax.distributed.messages import (
    CHECKPOINT,
    CLOSE,
    LEARNER,
    PUBLICATION,
    RELAY,
    Answer,
    Command,
    Failure,
    describe_arrays,
)
from areal_jax.distributed.peers import CommandError, Connection, OnLost, Peer, end_process
from areal_jax.errors import UserError
from areal_jax.types import Tree

if TYPE_CHECKING:
    from areal_jax.learning.learner import SpmdLearner
    from areal_jax.publication.export import PartWriter

COMMANDS = frozenset(
    {'warm_up', 'price', 'update', 'read_tokens', 'evaluate', 'score', 'publish', 'save', 'restore', 'require_finite'}
)
_RELAY_S = 60.0  # deadline for processes that pass commands on to connect to each other
_COPIES = 4  # versions published and not yet written: publication is never further behind


def follow(
    learner: SpmdLearner,
    connection: Connection,
    leader: str = 'process 0',
    *,
    versions: PartWriter | None = None,
    reports: bool = False,
    listener: Listener | None = None,
    on_lost: OnLost = end_process,
    commands: Collection[str] = COMMANDS,
) -> None:
    """Executes the commands of `leader`, the process at the other end, until the leader closes.

    An error is reported to the leader, which decides how the run continues; `follow` then waits for the next command.

    Args:
      versions: writes this process's part of publications, if all processes write them.
      reports: results are sent back; for learner process 0 of a leader that has no learner itself.
      listener: the one that the leader connected to; a parent in the relay tree connects there too.
    """
    peer = Peer(connection, leader, on_lost)
    execution = _Execution(learner, versions, reports, commands)

    def join(command: Command) -> bool:
        children, has_parent = command.args
        if listener is None:
            return False
        peer.relay_to = [listener.connect(address, _RELAY_S).connection for address in children]
        if has_parent:  # executes the parent's commands as if the leader had sent them
            peer.read_also(listener.accept(_RELAY_S).connection)
        return True

    beside = {
        CHECKPOINT: execution.write_checkpoint,
        PUBLICATION: execution.write_publication,
        RELAY: join,
    }
    for lane, execute in beside.items():
        threading.Thread(target=_serve, args=(peer, lane, execute), name=lane, daemon=True).start()
    _serve(peer, LEARNER, execution.command)


def _serve(peer: Peer, lane: str, execute: Callable[[Command], Any]) -> None:
    """Executes the commands of one lane until the leader closes or is lost."""
    while True:
        try:
            message = peer.take(lane)
        except CommandError:
            return
        command = message.content
        assert isinstance(command, Command)
        if command.name == CLOSE:
            peer.close()
            return
        try:
            answer = Answer(execute(command))
        except Exception as error:
            answer = Answer(None, Failure.of(error))
        peer.answer(lane, message.number, answer)


class _Execution:
    """Executes each command, and keeps copies of the weights between commands."""

    def __init__(self, learner: SpmdLearner, versions: PartWriter | None, reports: bool, commands: Collection[str]):
        self._learner, self._versions, self._reports, self._commands = learner, versions, reports, commands
        self._saved: collections.deque[Tree] = collections.deque(maxlen=1)  # from `save` until it is written
        self._published: dict[int, Tree] = {}  # by version, until it is written
        self._lock = threading.Lock()  # of `_published`

    def command(self, command: Command) -> Any:
        if command.name not in self._commands:
            raise UserError(f'{command.name!r} is no command of a learner: start all roles of one code version')
        result = getattr(self._learner, command.name)(*command.args)
        if command.name == 'save':
            self._saved.append(result)
            return describe_arrays(result) if self._reports else None
        if command.name == 'publish':
            self._keep(int(command.args[0]), result)
            return None
        return result if self._reports else None

    def write_checkpoint(self, command: Command) -> Any:
        (directory,) = command.args
        leaves = named_leaves(self._saved.pop())
        return write_shards(
            pathlib.Path(directory), {name: x for name, x in leaves.items() if not isinstance(x, ArrayShape)}
        )

    def write_publication(self, command: Command) -> Any:
        if self._versions is None:
            raise UserError("publication.channel='device' is of one process: use 'files' where learners are apart")
        directory, version, *rest = command.args
        with self._lock:
            copy = self._published[version]
            if command.name == 'finish_version' or not self._reports:  # a process that reports also finishes
                del self._published[version]
        if command.name == 'begin_version':
            return self._versions.begin(directory, version, copy)
        if command.name == 'write_version':
            return self._versions.write(directory, version, copy)
        return self._versions.finish(directory, version, copy, *rest)

    def _keep(self, version: int, copy: Tree) -> None:
        if self._versions is None:
            return
        with self._lock:
            self._published[version] = copy
            while len(self._published) > _COPIES:
                del self._published[min(self._published)]
