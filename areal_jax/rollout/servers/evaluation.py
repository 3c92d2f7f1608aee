"""A pool with separate servers for evaluation during training, which keep the evaluated version meanwhile.

app/parts/server_builder.py builds it instead of a ServerPool if evaluation.engines sets servers aside. Between
evaluations they follow training from version to version, so that a probe can compare them with the learner.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Generation
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import EngineStatus, GenerationRequest, PublishedWeights

PATIENCE_S = 60.0  # an evaluation is abandoned after this time without a server that holds its version
_LOOK_S = 0.5
_RENAMED = {'receive': 'evaluation_receive'}
_OF_TRAINING = ('arrive', 'route', 'move', 'load')  # kinds of events that reports count as training's


class EvaluationLog(EventLog):
    """The log for the evaluation servers: drops or renames events that would be counted as training's."""

    def __init__(self, log: EventLog):
        super().__init__(keeps=False)
        self._log = log

    def write(self, kind: str, lane: str | None = None, **fields: object) -> None:
        if kind not in _OF_TRAINING:
            self._log.write(_RENAMED.get(kind, kind), lane, **fields)


class EvaluatedPool:
    """Sends requests of a pinned version to the evaluation servers, all others to the training servers.

    Implements protocols.Pool. One version is pinned at a time.

    Args:
      evaluation: its settings must have max_versions_behind=0, so that no server answers with an earlier version.

    The event `lost` is set when no evaluation server has served the pinned version for `patience_s`. A server that
    comes back after that can not be probed: the learner has other weights.
    """

    def __init__(
        self,
        training: ServerPool,
        evaluation: ServerPool,
        clock: Clock,
        supervisor: Supervisor,
        patience_s: float = PATIENCE_S,
    ):
        self.training, self.evaluation = training, evaluation
        self._clock, self._supervisor, self._patience_s = clock, supervisor, patience_s
        self.lost = clock.event('loss of the servers for evaluation')
        self._newest = evaluation.target
        self._pinned: int | None = None
        self._watch: asyncio.Task[None] | None = None
        self._never = clock.event('next look at the servers for evaluation')

    # Requests.

    def generate(self, request: GenerationRequest, prefer: str = '') -> Generation:
        if request.version is None:
            return self.training.generate(request, prefer)
        if request.version != self._pinned:
            raise RuntimeError(f'a request asks for version {request.version}, and pinned is {self._pinned}')
        return self.evaluation.generate(dataclasses.replace(request, version=None), prefer)

    def cancel(self, request: GenerationRequest) -> None:
        if request.version is None:
            self.training.cancel(request)
        else:
            self.evaluation.cancel(dataclasses.replace(request, version=None))

    def cancel_all(self, version: int | None = None) -> None:
        if version is None:
            self.training.cancel_all()
        if version in (None, self._pinned):
            self.evaluation.cancel_all()

    def open_requests(self) -> int:
        return self.training.open_requests()

    def serving_engines(self) -> int:
        return self.training.serving_engines()

    def watch(self, note_room: Callable[[], None]) -> None:
        self.training.watch(note_room)

    def order(self) -> list[tuple[str, int, int]]:
        return self.training.order()

    def state(self) -> dict[str, Any]:
        return self.training.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.training.restore(state)

    def statuses(self) -> list[EngineStatus]:
        return [*self.training.statuses(), *self.evaluation.statuses()]

    # Weights and pauses.

    async def load_weights(self, published: PublishedWeights) -> float:
        """Loads weights on the training servers; does not wait for the evaluation servers."""
        self._newest = published
        if self._pinned is None:
            self.evaluation.offer(published)
        return await self.training.load_weights(published)

    async def pin(self, published: PublishedWeights) -> None:
        """Returns when no serving server has another version; requests wait for a server that holds this one."""
        if self._pinned is not None:
            raise RuntimeError(f'version {self._pinned} is pinned: servers hold one version')
        self._pinned = published.version
        self.lost.clear()
        self._watch = self._supervisor.start('servers for evaluation: watch', self._watch_for_server())
        await self.evaluation.load_weights(published)

    def unpin(self, version: int) -> None:
        assert version == self._pinned
        assert self._watch is not None
        self._watch.cancel()
        self.cancel_all(version)
        self._pinned = None
        self.evaluation.offer(self._newest)

    def pinned_versions(self) -> Sequence[int]:
        kept = (*self.training.pinned_versions(), self.evaluation.target.version, *self.evaluation.pinned_versions())
        return tuple(dict.fromkeys(kept))

    async def pause(self) -> None:
        """Pauses training alone: of an evaluation, a checkpoint contains only the version."""
        await self.training.pause()

    def resume(self) -> None:
        self.training.resume()

    async def _watch_for_server(self) -> None:
        served_s = self._clock.now()
        while self._clock.now() - served_s < self._patience_s:
            await self._clock.wait(self._never, _LOOK_S)
            if 'serving' in self.evaluation.states().values():
                served_s = self._clock.now()
        self.lost.set()
