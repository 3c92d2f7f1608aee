"""Process 0 of a run of several: sends each command of the learner to the followers, then executes it itself.

A program over a mesh that spans processes is a collective: it hangs on all of them if one process leaves it out or
starts it in another order. So every process holds a learner of the same settings, and process 0 drives its own only
through `CommandLeader`. If a process is lost or exceeds the deadline, all others end with one sentence. The followers
run follower.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import numpy as np

from areal_jax.distributed.messages import Command
from areal_jax.distributed.peers import OnLost, Peers
from areal_jax.distributed.remote_learner import RemotePartWriter, RemoteWriter, require_done
from areal_jax.types import TokenArrays, TrajectoryGroup, Tree

if TYPE_CHECKING:
    from areal_jax.learning.diagnostics.measurement import Metrics
    from areal_jax.learning.learner import SpmdLearner

_AFTER_FOLLOWERS_S = 1.0  # the wait for a follower ends first, and names it
_Args = TypeVarTuple('_Args')
_R = TypeVar('_R')


class CommandLeader:
    """`protocols.Learner` over the learners of all processes. Blocking; for the thread of one lane."""

    def __init__(self, learner: SpmdLearner, peers: Peers):
        """`peers` are the followers, in the order of their numbers."""
        self._learner, self._peers = learner, peers
        self.followers = [RemoteWriter(peers, index) for index in range(len(peers))]  # for CheckpointStore.save
        self.writers = [RemotePartWriter(peers, index) for index in range(len(peers))]  # for FilesChannel

    def warm_up(self) -> int:
        return self.everywhere(self._learner.warm_up)

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        return self._learner.update_tokens(groups)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        return self.everywhere(self._learner.update, groups, version)

    def read_tokens(self, draws: Sequence[int]) -> Sequence[Sequence[TokenArrays]]:
        """Of this process's learner alone: every process has what the steps of all gave."""
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
        """Calls a method of this process's learner and, by its name, the same method of every follower's."""
        name = method.__name__
        wait = self._peers.start_all(Command(name, args))
        with _deadline(self._peers.deadline_s, f'the command {name!r}', self._peers.report_lost):
            try:
                result = method(*args)
            finally:
                answers = wait()
        require_done(answers, self._peers.names, name, 'process 0')
        return result


@contextlib.contextmanager
def _deadline(seconds: float, what: str, on_lost: OnLost) -> Iterator[None]:
    """Calls `on_lost` if the block has not ended a second after its time; the block itself goes on."""
    timer = threading.Timer(seconds + _AFTER_FOLLOWERS_S, on_lost, [f'{what} took more than {seconds:g} s'])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
