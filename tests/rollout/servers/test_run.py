"""The production controller around a pool of servers that fail: every draw ends in one place, and only sound answers
are trained.
"""

from __future__ import annotations

import pytest

from areal_jax.report.aggregates import conservation, ledger
from areal_jax.report.report import lost_answers
from areal_jax.rollout.servers.member import ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.simulation.simulated_servers import ServerLog
from tests.rollout.servers.local_server import LocalServer
from tests.rollout.servers.rig import FAST
from tests.toys import ToyRun, length


class ServerRun(ToyRun):
    """`deaths`: (seconds, server, dead) in the order of time."""

    def __init__(self, deaths=(), bad_draws=(), **settings):
        self.deaths, self.bad_draws = deaths, bad_draws
        super().__init__(**{'engines': 2, 'delays': (0.1,)} | settings)

    def engine_log(self):
        return ServerLog(self.log)

    def build_pool(self, published):
        self.servers = [LocalServer(engine, self.bad_draws) for engine in self.engines]
        settings = ServerSettings(**FAST | {'health_every_s': 0.05, 'retry_s': 0.02, 'max_retries': 2})
        return ServerPool(
            self.clock, self.log, self.supervisor, settings,
            published=published, score=None, on_no_server=lambda text: None,
        )  # fmt: skip

    async def program(self):
        self.pool.start()
        for server in self.servers:
            self.pool.join(server, 1, 'local')
        self.supervisor.start('deaths', self._kill())
        return await super().program()

    async def _kill(self):
        event = self.clock.event('never')
        for at_s, index, is_dead in self.deaths:
            await self.clock.wait(event, at_s - self.clock.now())
            self.servers[index].is_dead = is_dead


def check_groups(run):
    """Each answer is whole, with tokens of the versions that it says."""
    for group in run.groups:
        for trajectory in group.trajectories:
            tokens = trajectory.answer_tokens
            assert len(tokens) == length(group.draw, trajectory.sample)
            assert tokens[-1] == 0
            assert (tokens[:-1] > 0).all()
            assert trajectory.engine in {'engine/0', 'engine/1'}


@pytest.mark.parametrize(
    'deaths',
    [
        (),
        [(0.3, 0, True)],
        [(0.3, 0, True), (0.9, 0, False)],
        [(0.2, 0, True), (0.4, 1, True), (0.8, 0, False), (1.0, 1, False)],
        [(0.0, 1, True), (0.5, 1, False), (0.6, 0, True)],
    ],
)
def test_a_run_goes_on_through_the_deaths_of_its_servers(deaths):
    run = ServerRun(deaths, steps=8, checkpoint_every=3).run()
    assert run.finished
    assert len(run.steps) == 8
    assert conservation(run.log.events) == []
    check_groups(run)
    draws = [group.draw for group in run.groups]
    assert len(draws) == len(set(draws)) == 24
    assert bool(deaths) == any(e.get('state') == 'unknown' for e in run.log.events)
    assert ServerRun(deaths, steps=8, checkpoint_every=3).run().log.events == run.log.events


def test_a_group_whose_answer_no_server_finishes_is_dropped_with_the_reason_and_the_lengths():
    run = ServerRun(bad_draws=(4,), steps=4).run()
    assert run.finished
    (drop,) = [e for e in run.log.events if e['kind'] == 'drop']
    assert (drop['draw'], drop['reason']) == (4, 'engine_lost')
    assert drop['detail'] == 'lost answers of [0, 0] tokens, finished ones of []'
    assert 4 not in [group.draw for group in run.groups]
    assert ledger(run.log.events).reasons == {4: 'engine_lost'}
    check_groups(run)
    lost = lost_answers(run.log.events)
    assert (lost['lost'], lost['lost_tokens_mean']) == (2, 0.0)
    assert lost['finished'] == sum(e['kind'] == 'finish' and e['reason'] == 'stop' for e in run.log.events)
    assert lost['finished_tokens_mean'] > 1
