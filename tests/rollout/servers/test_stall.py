"""A run whose servers say that they are well and send nothing ends; one whose servers are gone ends before that."""

from __future__ import annotations

import asyncio

import pytest

from areal_jax.control.clocks.loop import StallError
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.running_request import GrowingAnswer
from areal_jax.rollout.servers.member import HeldWeights, OutcomeUnknownError, ServerSettings
from areal_jax.rollout.servers.server_entries import RegistryWatch, ServerEntry
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import EngineStatus, Work
from tests.rollout.servers.rig import FAST, request, weights
from tests.rollout.toy_engine import ToyEngine

LANES = {'registry': 1, 'control/0': 2, 'engine/0': 4, 'publish/0': 1}
FOR_EVER_S = 3600.0


class SilentAnswer(GrowingAnswer):
    """Says nothing."""


class SilentServer:
    """It takes requests and generates nothing; `is_dead`: it does not answer either."""

    name, capabilities = 'engine/0', ToyEngine.capabilities

    def __init__(self, clock, supervisor):
        self._clock, self._supervisor, self.is_dead = clock, supervisor, False

    def generate(self, request):
        call = self._clock.call('engine/0', lambda: asyncio.sleep(FOR_EVER_S), Work('generate'), FOR_EVER_S)
        self._supervisor.start('call', call)
        return SilentAnswer(request, self._clock, 'engine/0')

    def cancel(self, request_id): ...

    def resume(self): ...

    def status(self):
        return EngineStatus(self.name, 0, 0, 0, 0.0, ('silent',))

    async def stage(self, published): ...

    async def swap(self, version):
        return 0.0

    async def pause(self): ...

    async def ask(self):
        await self._clock.call('control/0', lambda: asyncio.sleep(0), Work('control'), 5.0)
        if self.is_dead:
            raise OutcomeUnknownError('engine/0: connection refused')
        return HeldWeights(0)

    async def fence(self): ...

    async def close(self): ...


def run_with_server(script, stall_timeout_s, **settings):
    log = EventLog()
    clock = RealClock(LANES, log, stall_timeout_s, end_of_work_s=0.1)
    supervisor = Supervisor(clock)

    async def program():
        server, ended = SilentServer(clock, supervisor), clock.event('the end of the run')
        clock.inbox('streamed tokens')  # as the clients make them
        pool = ServerPool(
            clock, log, supervisor, ServerSettings(**FAST | {'health_every_s': 0.05, 'retry_s': 0.05} | settings),
            published=weights(0), score=None, on_no_server=lambda sentence: ended.set(),
        )  # fmt: skip
        pool.start()
        entries = [ServerEntry('0', 1, 'silent:0', 'own', 1)]
        watch = RegistryWatch(clock, pool, lambda: entries, lambda entry: server, every_s=0.05)
        supervisor.start('registry', watch.run())
        return await script(pool, server, ended, clock)

    return clock.execute(supervisor.run(program()))


def test_a_server_that_is_well_and_sends_nothing_is_a_stall():
    async def script(pool, server, ended, clock):
        await anext(pool.generate(request(0)))

    with pytest.raises(StallError, match=r"no completion for 0\.5 s .*lane 'engine/0' busy with 'generate'"):
        run_with_server(script, 0.5)


def test_a_program_that_waits_for_itself_is_a_stall_beside_a_server_that_is_well():
    async def script(pool, server, ended, clock):
        await clock.wait(clock.event('what nobody sets'))

    with pytest.raises(StallError, match="'what nobody sets' awaited by program"):
        run_with_server(script, 0.5)


def test_a_run_whose_server_died_ends_in_order_before_it_stalls():
    async def script(pool, server, ended, clock):
        answer = pool.generate(request(0))
        server.is_dead = True
        await clock.wait(ended)
        return pool.states(), answer.finish_reason

    assert run_with_server(script, 2.0, no_server_s=0.5) == ({'engine/0': 'unknown'}, None)
