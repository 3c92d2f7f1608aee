"""The servers of a run: their pool, and what the session tells it. Made by server_builder.py, which needs aiohttp."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from areal_jax import protocols
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import LostPeerError
from areal_jax.rollout.servers.evaluation import EvaluatedPool
from areal_jax.rollout.servers.mismatch import MismatchWatch
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.telemetry.values import Line


class EndedBy:
    """Why a run ends whose servers are gone: `note` asks it to save its state and stop."""

    def __init__(self, stop: Callable[[], None]):
        self._stop, self._reason = stop, ''

    def note(self, reason: str) -> None:
        self._reason = reason
        self._stop()

    def require_nothing(self) -> None:
        """Raises LostPeerError where the servers ended the run."""
        if self._reason:
            raise LostPeerError(f'{self._reason}; start servers, and go on with --resume')


class Watch(Protocol):
    """Tells a pool which servers there are."""

    async def run(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class ServersBeside:
    """Those for the evaluation beside training."""

    pool: EvaluatedPool
    watch: Watch


@dataclasses.dataclass(frozen=True)
class Servers:
    """Of one run."""

    pool: ServerPool
    watch: Watch
    mismatches: MismatchWatch
    ended_by: EndedBy
    beside: ServersBeside | None = None

    @property
    def whole(self) -> protocols.Pool:
        """What the controller generates with."""
        return self.beside.pool if self.beside else self.pool

    def start(self, supervisor: Supervisor) -> None:
        self.pool.start()
        supervisor.start('registry', self.watch.run())
        if self.beside:
            supervisor.start('registry of evaluation', self.beside.watch.run())

    async def close(self) -> None:
        """Ends what the run has paused, and lets the servers go."""
        await self.pool.close()
        if self.beside:
            await self.beside.pool.evaluation.close()

    def note_update(self, step: int, metrics: Line) -> None:
        """Takes an engine out of service if its log-probs differ from the learner's."""
        self.mismatches.note_update(metrics)
