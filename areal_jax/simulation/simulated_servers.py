"""Servers of a simulation: engines that die, and that the server pool drives like engines in other processes.

Deaths and returns are drawn by (seed, server, number of starts), in seconds of the clock: they are equal in two
simulations that differ in a setting, and in a resumed one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from areal_jax.config.drawn_lengths import Lengths
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import Clock, Generation
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.running_request import SegmentIterator
from areal_jax.rollout.servers.member import HeldWeights, OutcomeUnknownError, RequestFailedError
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import EngineStatus, GenerationRequest, PublishedWeights

ADDRESS = 'simulated'


class ServerLog(EventLog):
    """The log for the engine of a server; drops 'load' events, because the pool logs what the engine acknowledges."""

    def __init__(self, log: EventLog):
        super().__init__(keeps=False)
        self._log = log

    def write(self, kind: str, lane: str | None = None, **fields: object) -> None:
        if kind != 'load':
            self._log.write(kind, lane, **fields)


class SimulatedServer:
    """One incarnation of a server. Implements rollout.servers.member.RemoteEngine."""

    def __init__(self, engine: LocalEngine, clock: Clock):
        self.name, self.capabilities = engine.name, engine.capabilities
        self._engine, self._clock, self._is_dead = engine, clock, False

    def start(self, supervisor: Supervisor) -> None:
        self._engine.start(supervisor)

    async def die(self) -> None:
        """Dies at the end of the dispatch under way, whose tokens still arrive; fails the open requests."""
        self._is_dead = True
        await self._engine.pause('in_place')
        for running in self._engine.stream.table.open_requests():
            running.fail(RequestFailedError(self._describe('the request')))
        self._engine.stop()

    def generate(self, request: GenerationRequest) -> Generation:
        if not self._is_dead:
            return self._engine.generate(request)
        refused = SegmentIterator(request, self._clock, self.name)
        refused.fail(RequestFailedError(self._describe('the request')))
        return refused

    def cancel(self, request_id: str) -> None:
        if not self._is_dead:
            self._engine.cancel(request_id)

    def status(self) -> EngineStatus:
        return self._engine.status()

    def open_requests(self) -> list[GenerationRequest]:
        return [] if self._is_dead else self._engine.open_requests()

    async def stage(self, published: PublishedWeights) -> None:
        self._require_alive('stage')
        await self._engine.stage(published)

    async def swap(self, version: int) -> float:
        self._require_alive('swap')
        return await self._engine.swap(version)

    async def pin(self, published: PublishedWeights) -> None:
        await self._engine.pin(published)

    def unpin(self, version: int) -> None:
        self._engine.unpin(version)

    async def pause(self) -> None:
        self._require_alive('pause')
        await self._engine.pause()

    def resume(self) -> None:
        if not self._is_dead:
            self._engine.resume()

    async def ask(self) -> HeldWeights:
        self._require_alive('question')
        return HeldWeights(self.status().policy_version)

    async def fence(self) -> None:
        self._require_alive('fence')
        for request in self._engine.open_requests():
            self._engine.cancel(request.request_id)
        self._engine.resume()

    async def close(self) -> None:
        """Does nothing: the pool has no use for the server any more."""

    def _require_alive(self, action: str) -> None:
        if self._is_dead:
            raise OutcomeUnknownError(self._describe(action))

    def _describe(self, what: str) -> str:
        return f'{self.name}: {what}: no connection'


class SimulatedRegistry:
    """Starts the servers, lets each die and come back, and joins each started server to the pool.

    Args:
      build_engine: builds an engine from (index of the server, whether it is the first there); later ones have no
        weights.
      up: seconds from a start to the death; None = servers do not die.
      down: seconds from a death to the next start.
    """

    def __init__(
        self,
        clock: Clock,
        pool: ServerPool,
        supervisor: Supervisor,
        build_engine: Callable[[int, bool], LocalEngine],
        *,
        count: int,
        seed: int,
        up: Lengths | None,
        down: Lengths,
    ):
        self._clock, self._pool, self._supervisor, self._build_engine = clock, pool, supervisor, build_engine
        self._count, self._seed, self._up, self._down = count, seed, up, down
        self._never = clock.event('next death or start of a server')

    async def run(self) -> None:
        for index in range(self._count):
            self._supervisor.start(f'server {index}', self._live(index))

    async def _live(self, index: int) -> None:
        start_s = 0.0
        for incarnation in itertools.count(1):
            up_s = math.inf if self._up is None else self._up.draw(self._seed, index, incarnation, 'up')
            death_s = start_s + up_s
            if self._clock.now() < death_s:
                await self._wait_until(start_s)
                server = SimulatedServer(self._build_engine(index, incarnation == 1), self._clock)
                server.start(self._supervisor)
                self._pool.join(server, incarnation, ADDRESS)
                if self._up is None:
                    return
                await self._wait_until(death_s)
                await server.die()
            start_s = death_s + self._down.draw(self._seed, index, incarnation, 'down')

    async def _wait_until(self, time_s: float) -> None:
        if (left_s := time_s - self._clock.now()) > 0:
            await self._clock.wait(self._never, left_s)
