"""The client and the server behind JetStream: the contract of engines."""

from __future__ import annotations

import pytest

from areal_jax.lanes import server_lanes
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.jetstream.client import JetstreamDialect
from tests.rollout.engine_contract import CHECKS, Setting, Subject
from tests.rollout.http.clients.test_own import LIMITS, PACE, Factory, make_clock
from tests.rollout.jetstream.rig import JetstreamToyServer, needs_jetstream

pytestmark = [pytest.mark.slow, needs_jetstream]


class JetstreamFactory(Factory):
    setting = Setting(make_clock, PACE)

    def __call__(self, clock, log):
        from areal_jax.rollout.jetstream.channel import JetstreamConnection

        self.connection = JetstreamConnection(self.server.url)
        engine = OwnEngine(
            server_lanes(0), JetstreamDialect(), self.connection, clock, log,
            locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
        )  # fmt: skip

        async def prepare():
            await engine.fence()
            await engine.stage(self.published(0))
            await engine.swap(0)

        return Subject(engine, engine.start, self.published, prepare, engine.close)


@pytest.fixture
def server():
    with JetstreamToyServer(slots=2) as server:
        server.backend.step_s = 0.005 * PACE
        yield server


@pytest.fixture
def factory(server, tmp_path):
    return JetstreamFactory(server, tmp_path)


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds(factory, check):
    check(factory)
