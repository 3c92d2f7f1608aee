"""A pool of toy servers under the virtual clock, and what a script does to it."""

from __future__ import annotations

import numpy as np

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.groups import RequestLostError
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.rollout.servers.member import ProbeSettings, ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.rollout.servers.toy_server import ToyServer
from tests.toys import PRICES

PROMPT = np.array([1, 2, 3], np.int32)
PROBE = ProbeSettings(PROMPT, max_difference=1e-3, max_mean=1e-3, new_tokens=4, again_s=5.0)
FAST = {
    'stage_s': 2.0, 'swap_s': 2.0, 'pause_s': 2.0, 'ask_s': 0.5, 'probe_s': 2.0, 'drain_s': 1.0, 'retry_s': 0.2,
    'health_every_s': 0.5, 'no_server_s': 20.0,
}  # fmt: skip


def request(draw, sample=0, tokens=8, prefix=()):
    return GenerationRequest(draw, sample, 0, PROMPT, SamplingParams(tokens, 1.0, 0, 1.0, ()), prefix)


def weights(version, w=None):
    return PublishedWeights(version, f'digest {version}', version if w is None else w)


class Answer:
    """A request that a coroutine iterates over."""

    def __init__(self, generation):
        self.generation, self.segments, self.error, self.ended = generation, [], None, False

    async def run(self):
        try:
            async for segment in self.generation:
                self.segments.append(segment)
        except RequestLostError as error:
            self.error = error
        self.ended = True

    @property
    def tokens(self):
        return [int(token) for segment in self.segments for token in segment.tokens]

    @property
    def versions(self):
        return [segment.policy_version for segment in self.segments for _ in segment.tokens]


class ServerRig:
    def __init__(self, servers=2, *, step_s=(), probe=None, requirements=(), score=None, join=True, **settings):
        self.log, self.joins = EventLog(), join
        self.log.listeners.append(check_types)
        names = {lane(index): 1 for index in range(servers) for lane in (engine_lane, publish_lane)}
        self.clock = VirtualClock(
            names | {'time': 99, 'registry': 1}, self.log, PRICES | {'time': 1.0, 'registry': 0.01}
        )
        self.supervisor = Supervisor(self.clock)
        speeds = [*step_s, *[0.01] * (servers - len(step_s))]
        self.servers = [ToyServer(index, self.clock, step_s=speeds[index]) for index in range(servers)]
        self.no_server, self.warnings = [], []

        self.pool = ServerPool(
            self.clock, self.log, self.supervisor, ServerSettings(**FAST | {'probe': probe} | settings),
            published=weights(0), score=score or self.truth, on_no_server=self.no_server.append,
            requirements=requirements, warn=self.warnings.append,
        )  # fmt: skip

    async def truth(self, version, prompt, tokens):
        """Log-probs of toy servers."""
        return -np.ones(len(tokens), np.float32)

    def run(self, script):
        async def program():
            self.pool.start()
            for server in self.servers:
                server.start(self.supervisor)
                if self.joins:
                    self.pool.join(server, 1, f'toy:{server.name}')
            if self.joins:
                await self.until(lambda: set(self.pool.states().values()) == {'serving'})
            return await script(self)

        return self.clock.execute(self.supervisor.run(program()))

    async def pass_time(self, seconds):
        await self.clock.run('time', lambda: None, Work('time', seconds))

    async def until(self, holds, seconds=30.0):
        end_s = self.clock.now() + seconds
        while not holds():
            assert self.clock.now() < end_s, (self.pool.states(), self.kinds('engine_state')[-5:])
            await self.pass_time(0.01)

    def ask(self, *requests):
        found = [Answer(self.pool.generate(one)) for one in requests]
        for answer in found:
            self.supervisor.start('answer', answer.run())
        return found

    async def end_of(self, answers, seconds=60.0):
        await self.until(lambda: all(answer.ended for answer in answers), seconds)

    def load(self, version):
        """Starts to load the version; returns a list that gets the pause when all engines have settled."""
        done = []

        async def run():
            done.append(await self.pool.load_weights(weights(version)))

        self.supervisor.start('load', run())
        return done

    def kinds(self, kind):
        return [e for e in self.log.events if e['kind'] == kind]

    def reasons(self, name):
        return [(e['state'], e['reason']) for e in self.kinds('engine_state') if e['engine'] == name]

    def check_closed(self):
        """Every ledger is empty."""
        assert (len(self.pool.ledger), self.pool.open_requests(), self.pool.order()) == (0, 0, [])
        assert set(self.pool.ledger.outstanding().values()) <= {0}
