"""Process 0 of a run of several: sends each command of the learner to the followers, then executes it itself.

A program over a mesh that spans processes is a collective: it hangs on all of them if one process leaves it out or
starts it in another order. So every process holds a learner of the same settings, and process 0 drives its own only
through `CommandLeader`. If a process is lost or exceeds the deadline, all others end with one sentence. Used by
app/processes.py; uses peers.py. The followers run follower.py.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar, TypeVarTuple

import numpy as np

from areal_jax.checkpoint.shards import Index
from areal_jax.distributed.messages import CLOSE, Answer, Command, WriteAnswer, WriteRequest
from areal_jax.distributed.peers import CommandError, OnLost, Peer, end_process
from areal_jax.learning.diagnostics import Metrics
from areal_jax.learning.learner import SpmdLearner
from areal_jax.types import TrajectoryGroup, Tree

_Args = TypeVarTuple('_Args')
_R = TypeVar('_R')


class CommandLeader:
    """`protocols.Learner` over the learners of all processes. Blocking; for the thread of one lane."""

    def __init__(
        self, learner: SpmdLearner, followers: Sequence[Connection], *, deadline_s: float, on_lost: OnLost = end_process
    ):
        """`followers` are connections from `invite`; `deadline_s` bounds every command."""
        self._learner, self._deadline_s, self._on_lost = learner, deadline_s, on_lost
        self._peers = [Peer(connection, f'follower {i + 1}', self._lost) for i, connection in enumerate(followers)]
        self.followers = [RemoteWriter(peer, deadline_s) for peer in self._peers]  # for CheckpointStore.save
        self._closed = False

    def warm_up(self) -> int:
        return self._everywhere(self._learner.warm_up)

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._learner.update_tokens(groups)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        return self._everywhere(self._learner.update, groups, version)

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return self._everywhere(self._learner.evaluate, groups)

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        return self._everywhere(self._learner.score, version, prompt_tokens, answer_tokens)

    def publish(self, version: int) -> Tree:
        return self._everywhere(self._learner.publish, version)

    def save(self) -> dict[str, Tree]:
        return self._everywhere(self._learner.save)

    def restore(self, saved: Mapping[str, Tree]) -> None:
        self._everywhere(self._learner.restore, saved)

    def require_finite(self, what: str, fix: str) -> None:
        self._everywhere(self._learner.require_finite, what, fix)

    def close(self) -> None:
        """Tells the followers to return. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for peer in self._peers:
            peer.send(Command(CLOSE))
            peer.close()

    def _everywhere(self, method: Callable[[*_Args], _R], *args: *_Args) -> _R:
        """Calls a method of this process's learner and, by its name, the same method of every follower's."""
        name = method.__name__
        for peer in self._peers:
            peer.send(Command(name, args))
        with _deadline(self._deadline_s, f'the command {name!r}', self._lost):
            try:
                result = method(*args)
            finally:
                answers = [self._answer(peer) for peer in self._peers]
        for peer, answer in zip(self._peers, answers, strict=True):
            if answer.error is not None:
                raise CommandError(f'{peer.name} failed at the command {name!r} that process 0 did: {answer.error}')
        return result

    def _answer(self, peer: Peer) -> Answer:
        try:
            return peer.take(Answer, self._deadline_s)
        except queue.Empty:
            late = f'{peer.name} gave no answer for {self._deadline_s:g} s'
            self._lost(late)
            raise CommandError(late) from None

    def _lost(self, reason: str) -> None:
        if not self._closed:
            self._on_lost(f'{reason}; the run ends here, go on from the last checkpoint with --resume')


class RemoteWriter:
    """`checkpoint.store.Follower`: lets one follower write its shards while commands go on."""

    def __init__(self, peer: Peer, deadline_s: float):
        self.name, self._peer, self._deadline_s = peer.name, peer, deadline_s

    def write(self, directory: str) -> None:
        self._directory = directory
        self._peer.send(WriteRequest(directory))

    def written(self) -> Index | str:
        """Waits at most `deadline_s` from this call on: process 0 has written its own shards by then."""
        end = time.monotonic() + self._deadline_s
        while True:
            try:
                answer = self._peer.take(WriteAnswer, max(end - time.monotonic(), 0.0))
            except queue.Empty:
                return f'no word of its shards for distributed.command_deadline_s={self._deadline_s:g}'
            if answer.directory == self._directory:  # else the late answer to a step that was given up
                return answer.outcome


@contextlib.contextmanager
def _deadline(seconds: float, what: str, on_lost: OnLost) -> Iterator[None]:
    """Calls `on_lost` if the block has not ended in time; the block itself goes on."""
    timer = threading.Timer(seconds, on_lost, [f'{what} took more than {seconds:g} s'])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
