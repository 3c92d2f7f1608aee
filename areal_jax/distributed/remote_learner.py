"""The learner of a controller that holds no learner itself: sends commands to all learner processes. jax-free.

    learner process k    Listener(host, port, key, Hello('learner k', digest)) ... follow(..., listener=listener)
    controller           Peers([('learner k', connect(address, key, hello, deadline_s).connection), ...])
                         RemoteLearner(peers), RemoteChannel(peers, directory)

Results come from learner process 0, the first of the peers. It alone gets the groups of `update` and `evaluate`, packs
them, and sends each other learner process its rows (learning/led_passes.py). Weights and optimizer state stay where
they are: `publish` and `save` return descriptions, and the processes write their own parts when they are told to. A
learner process executes the commands in the order of sending; separate threads write checkpoints and publications, so
that commands continue meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import numpy as np

from areal_jax.checkpoint.shards import ArrayShape, Index, named_leaves, write_shards
from areal_jax.distributed.handshake import Listener
from areal_jax.distributed.messages import (
    CHECKPOINT,
    CLOSE,
    LEARNER,
    PUBLICATION,
    ROWS,
    Answer,
    Command,
    Failure,
    RemoteUserError,
    describe_arrays,
    raise_failure,
)
from areal_jax.distributed.peers import CommandError, Connection, OnLost, Peer, Peers, end_process
from areal_jax.errors import UserError
from areal_jax.learning.led_passes import Told
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.publication.shard_versions import Everywhere, SentShards
from areal_jax.publication.versions import PublicationError, remove_old_versions
from areal_jax.types import PublishedWeights, TokenArrays, TrajectoryGroup, Tree

if TYPE_CHECKING:
    from areal_jax.learning.diagnostics.measurement import Metrics
    from areal_jax.learning.learner import SpmdLearner
    from areal_jax.publication.export import PartWriter
    from areal_jax.publication.shard_channel import ShardSender


@dataclasses.dataclass(frozen=True)
class RemoteCopy:
    """A version of the weights, of which each learner process holds its part."""

    version: int


class RemoteLearner:
    """`protocols.Learner` over the learners of all peers. Blocking; for the thread of one lane.

    Errors of learner process 0 are raised here: RemoteUserError if the user can fix it, RemoteValueError for a
    ValueError, else RemoteError. CommandError if a process is lost or late, or failed although process 0 did not.
    """

    def __init__(self, peers: Peers):
        """Lets the learner processes meet, and asks learner process 0 for the price of updates."""
        self._peers = peers
        self.followers = [RemoteWriter(peers, index) for index in range(len(peers))]  # for CheckpointStore.save
        if len(peers) > 1:
            lead = Command(_LEAD, (peers.names[1:], peers.addresses[1:], peers.deadline_s))
            result_of(peers.call_led(lead, Command(_JOIN, (peers.deadline_s,))), peers.names, 'meet')
        self._price = UpdatePrice(*self._call('price'))

    def warm_up(self) -> int:
        """Compiles every program of the learners; returns the number of programs of each learner."""
        return self._call('warm_up')

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Counts as SpmdLearner.update_tokens does, but here: the calling loop must not wait for a batch to be sent."""
        return self._price.tokens(groups)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        return self._call('update', list(groups), version)

    def read_tokens(self, draws: Sequence[int]) -> Sequence[Sequence[TokenArrays]]:
        answer = self._peers.call(0, Command('read_tokens', ([int(draw) for draw in draws],)))
        return result_of([answer], self._peers.names[:1], 'read_tokens')

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return self._call('evaluate', list(groups))

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        return self._call('score', version, prompt_tokens, answer_tokens)

    def publish(self, version: int) -> RemoteCopy:
        """Makes the processes copy their weights; RemoteChannel.transfer then makes them write the copies."""
        self._call('publish', version)
        return RemoteCopy(version)

    def save(self) -> dict[str, Tree]:
        """Makes the processes copy their state; returns nested dicts of ArrayShape, for CheckpointStore.save."""
        return self._call('save')

    def restore(self, saved: Mapping[str, Tree]) -> None:
        """Restores the processes from nested dicts of StoredArray, as CheckpointStore.restore returns them."""
        self._call('restore', dict(saved))

    def require_finite(self, what: str, fix: str) -> None:
        self._call('require_finite', what, fix)

    def close(self) -> None:
        """Lets the learner processes end. A second call does nothing."""
        self._peers.close()

    def _call(self, name: str, *args: Any) -> Any:
        command = Command(name, args)
        is_led = name in _LED
        answers = self._peers.call_led(command, Command(_REPEAT)) if is_led else self._peers.call_all(command)
        return result_of(answers, self._peers.names, name)


class RemoteChannel:
    """`protocols.Channel` whose versions the learner processes write, each process its own files.

    Args:
      directory: of the versions; learners and engines see it under the same path.
    """

    def __init__(self, peers: Peers, directory: pathlib.Path):
        self._peers, self._directory = peers, directory.absolute()

    def transfer(self, version: int, copy: RemoteCopy) -> PublishedWeights:
        """Returns when all files are on the disk and the directory has its name; handle = its path.

        Raises PublicationError as FilesChannel.transfer does, CommandError for a process that is lost or late.
        """
        self._call_first('begin_version', str(self._directory), version)
        answers = self._peers.call_all(Command('write_version', (str(self._directory), version), PUBLICATION))
        for name, answer in zip(self._peers.names, answers, strict=True):
            _require_published(answer, name)
        manifest = {path: leaf for answer in answers for path, leaf in answer.value.items()}
        digest, path = self._call_first('finish_version', str(self._directory), version, manifest)
        return PublishedWeights(version, digest, handle=path)

    def receive(self, published: PublishedWeights) -> Any:
        raise PublicationError(
            f'weights of version {published.version} are in {published.handle}: a controller without a learner holds '
            'none, its engines load them from there'
        )

    def release(self, version: int, pinned: Collection[int] = ()) -> None:
        remove_old_versions(self._directory, version, pinned)

    def _call_first(self, name: str, *args: Any) -> Any:
        answer = self._peers.call(0, Command(name, args, PUBLICATION))
        _require_published(answer, self._peers.names[0])
        return answer.value


class RemoteWriter:
    """`checkpoint.store.Follower`: lets one process write its shards of the last save while commands continue."""

    def __init__(self, peers: Peers, index: int):
        self.name, self._request = peers.names[index], _Request(peers, index)

    def write(self, directory: str) -> None:
        self._request.send(Command('write_shards', (directory,), CHECKPOINT))

    def written(self) -> Index | str:
        return self._request.outcome('its shards')


class RemotePartWriter:
    """`publication.files_channel.VersionWriter`: lets one process write its leaves of a version meanwhile."""

    def __init__(self, peers: Peers, index: int):
        self._request = _Request(peers, index)

    def write(self, directory: str, version: int) -> None:
        self._request.send(Command('write_version', (directory, version), PUBLICATION))

    def written(self) -> Mapping[str, Mapping[str, object]] | str:
        return self._request.outcome('its part of the weights')


class _Request:
    """One command, concurrent with the others; a failure is reported in one sentence."""

    def __init__(self, peers: Peers, index: int):
        self._peers, self._index = peers, index
        self._wait: Callable[[], Answer] | None = None

    def send(self, command: Command) -> None:
        self._wait = self._peers.request(self._index, command)

    def outcome(self, what: str) -> Any:
        """Waits, at most the deadline of a command from this call on; the caller has already done its own part.

        Raises CommandError for a process that is lost.
        """
        assert self._wait is not None, 'nothing was sent'
        try:
            answer = self._wait()
        except queue.Empty:
            return f'no word of {what} for distributed.command_deadline_s={self._peers.deadline_s:g}'
        if answer.failure is None:
            return answer.value
        return answer.failure.text if answer.failure.is_user_error else str(answer.failure)


def publish_everywhere(peers: Peers, own: ShardSender | None = None) -> Everywhere:
    """Returns a function that calls a method of the ShardSender of every process, for shard_channel.ShardChannel.

    `own`: of this process, if it is one of the learner; its result comes first.
    """

    def everywhere(name: str, *args: object, copy: Tree = None) -> list[SentShards]:
        wait = peers.start_all(Command(name, args, PUBLICATION))
        results = []
        try:
            if own is not None:
                results.append(getattr(own, name)(*args, *(() if copy is None else (copy,))))
        finally:
            answers = wait()
        for process, answer in zip(peers.names, answers, strict=True):
            _require_published(answer, process)
            results.append(answer.value)
        return results

    return everywhere


def result_of(answers: Sequence[Answer], names: Sequence[str], command: str) -> Any:
    """Returns the result of the first process; raises its error, else CommandError if another process failed."""
    if (failure := answers[0].failure) is not None:
        raise_failure(failure, f'{names[0]} failed at the command {command!r}')
    require_done(answers, names, command, names[0])
    return answers[0].value


def require_done(answers: Sequence[Answer], names: Sequence[str], command: str, by: str) -> None:
    """Raises CommandError that names the first process that failed although the process `by` did not."""
    for name, answer in zip(names, answers, strict=True):
        if answer.failure is not None:
            raise CommandError(f'{name} failed at the command {command!r} that {by} did: {answer.failure}')


def _require_published(answer: Answer, name: str) -> None:
    try:
        if answer.failure is not None:
            raise_failure(answer.failure, f'{name} failed at publishing')
    except RemoteUserError as error:
        raise PublicationError(str(error)) from None


# Process 0 of a run of several processes: sends each command of the learner to the followers, then executes it itself.
#
# A program over a mesh that spans processes is a collective: it hangs on all of them if one process omits it or starts
# it in another order. So every process holds a learner with the same settings, and process 0 drives its own learner
# only through `CommandLeader`. If a process is lost or exceeds the deadline, all others end with one sentence. The
# followers run `follow`, and get their rows of a batch over the connection of the commands.


_LED = ('update', 'evaluate', 'score')  # process 0 alone executes them, and the others repeat its passes:
_REPEAT = 'repeat_passes'
_LEAD, _JOIN = 'lead_processes', 'join_process_0'  # let the learner processes of a controller meet
_AFTER_FOLLOWERS_S = 1.0  # later than the wait for followers, whose error names the late process
_Args = TypeVarTuple('_Args')
_R = TypeVar('_R')


class CommandLeader:
    """`protocols.Learner` over the learners of all processes. Blocking; for the thread of one lane."""

    def __init__(self, learner: SpmdLearner, peers: Peers):
        """`peers` are the followers, in the order of their numbers."""
        self._learner, self._peers = learner, peers
        learner.lead(functools.partial(_send_rows, peers))
        self.followers = [RemoteWriter(peers, index) for index in range(len(peers))]  # for CheckpointStore.save
        self.writers = [RemotePartWriter(peers, index) for index in range(len(peers))]  # for FilesChannel
        self.publish_everywhere = functools.partial(publish_everywhere, peers)  # for ShardChannel

    def warm_up(self) -> int:
        return self.everywhere(self._learner.warm_up)

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._learner.update_tokens(groups)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        return self.everywhere(self._learner.update, groups, version)

    def read_tokens(self, draws: Sequence[int]) -> Sequence[Sequence[TokenArrays]]:
        """Reads from this process's learner alone: every process has the results of all processes' steps."""
        return self._learner.read_tokens(draws)

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return self.everywhere(self._learner.evaluate, groups)

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        return self.everywhere(self._learner.score, version, prompt_tokens, answer_tokens)

    def publish(self, version: int) -> Tree:
        return self.everywhere(self._learner.publish, version)

    def save(self) -> dict[str, Tree]:
        return self.everywhere(self._learner.save)

    def restore(self, saved: Mapping[str, Tree]) -> None:
        self.everywhere(self._learner.restore, saved)

    def require_finite(self, what: str, fix: str) -> None:
        self.everywhere(self._learner.require_finite, what, fix)

    def close(self) -> None:
        """Tells the followers to return. A second call does nothing."""
        self._peers.close()

    def everywhere(self, method: Callable[[*_Args], _R], *args: *_Args) -> _R:
        """Calls a method of this process's learner; every follower's does the same, or repeats its passes."""
        name = method.__name__
        wait = self._peers.start_all(Command(_REPEAT) if name in _LED else Command(name, args))
        with _deadline(self._peers.deadline_s, f'the command {name!r}', self._peers.report_lost):
            try:
                result = method(*args)
            finally:
                answers = wait()
        require_done(answers, self._peers.names, name, 'process 0')
        return result


@contextlib.contextmanager
def _deadline(seconds: float, what: str, on_lost: OnLost) -> Iterator[None]:
    """Calls `on_lost` if the block has not ended within `seconds` and one second more; the block itself continues."""
    timer = threading.Timer(seconds + _AFTER_FOLLOWERS_S, on_lost, [f'{what} took more than {seconds:g} s'])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _send_rows(peers: Peers, values: Sequence[Told]) -> None:
    peers.send_each([Command('rows', tuple(value), ROWS) for value in values])


def _take_rows(peer: Peer, deadline_s: float | None) -> Told:
    try:
        content = peer.take(ROWS, deadline_s).content
    except queue.Empty:
        raise CommandError(f'{peer.name} sent no rows for distributed.command_deadline_s={deadline_s:g}') from None
    assert isinstance(content, Command)
    return Told(*content.args)


COMMANDS = frozenset(
    {
        *('warm_up', 'price', 'update', 'read_tokens', 'evaluate', 'score', _REPEAT),
        *('publish', 'save', 'restore', 'require_finite'),
    }
)
_SHARD_COMMANDS = frozenset({'send_shards', 'repeat_shards'})
_COPIES = 4  # versions published and not yet written: publication is never further behind


def follow(
    learner: SpmdLearner,
    connection: Connection,
    leader: str = 'process 0',
    *,
    versions: PartWriter | ShardSender | None = None,
    reports: bool = False,
    listener: Listener | None = None,
    deadline_s: float | None = None,
    on_lost: OnLost = end_process,
    commands: Collection[str] = COMMANDS,
) -> None:
    """Executes the commands of `leader`, the process at the other end, until the leader closes.

    An error is reported to the leader, which decides how the run continues; `follow` then waits for the next command.

    Args:
      versions: writes or sends this process's part of publications, if all processes do.
      reports: results are sent back; for learner process 0 of a leader that has no learner itself.
      listener: of a process that a controller leads; learner process 0 connects to the listeners of the others.
      deadline_s: how long this process waits for rows of process 0; None = as long as it lives.
    """
    peer = Peer(connection, leader, on_lost)
    execution = _Execution(learner, versions, reports, commands)
    if listener is None:
        learner.follow(functools.partial(_take_rows, peer, deadline_s))

    def execute(command: Command) -> object:
        if listener is None or command.name not in (_LEAD, _JOIN):
            return execution.command(command)
        return (_lead_processes if command.name == _LEAD else _join_process_0)(learner, listener, *command.args)

    for lane, write in ((CHECKPOINT, execution.write_checkpoint), (PUBLICATION, execution.write_publication)):
        threading.Thread(target=_serve, args=(peer, lane, write), name=lane, daemon=True).start()
    _serve(peer, LEARNER, execute)


def _lead_processes(
    learner: SpmdLearner, listener: Listener, names: Sequence[str], addresses: Sequence[str], deadline_s: float
) -> None:
    """Connects learner process 0 to the others. The controller notices lost processes, and ends the run."""
    found = [listener.connect(address, deadline_s).connection for address in addresses]
    others = Peers(list(zip(names, found, strict=True)), deadline_s=deadline_s, on_lost=lambda reason: None)
    learner.lead(functools.partial(_send_rows, others))


def _join_process_0(learner: SpmdLearner, listener: Listener, deadline_s: float) -> None:
    leader = Peer(listener.accept(deadline_s).connection, 'learner 0', lambda reason: None)
    learner.follow(functools.partial(_take_rows, leader, deadline_s))


def _serve(peer: Peer, lane: str, execute: Callable[[Command], Any]) -> None:
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
    def __init__(
        self,
        learner: SpmdLearner,
        versions: PartWriter | ShardSender | None,
        reports: bool,
        commands: Collection[str],
    ):
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
        if command.name in _SHARD_COMMANDS:
            return self._send_shards(command, cast('ShardSender', self._versions))
        writer = cast('PartWriter', self._versions)
        directory, version, *rest = command.args
        with self._lock:
            copy = self._published[version]
            if command.name == 'finish_version' or not self._reports:  # a process that reports also finishes
                del self._published[version]
        if command.name == 'begin_version':
            return writer.begin(directory, version, copy)
        if command.name == 'write_version':
            return writer.write(directory, version, copy)
        return writer.finish(directory, version, copy, *rest)

    def _send_shards(self, command: Command, sender: ShardSender) -> SentShards:
        if command.name == 'repeat_shards':
            return sender.repeat_shards(*command.args)
        version, whole, lowest, pinned = command.args
        with self._lock:
            copy = self._published.pop(version)
        return sender.send_shards(version, whole, lowest, pinned, copy)

    def _keep(self, version: int, copy: Tree) -> None:
        if self._versions is None:
            return
        with self._lock:
            self._published[version] = copy
            while len(self._published) > _COPIES:
                del self._published[min(self._published)]
