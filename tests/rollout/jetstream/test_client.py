"""The client and the server behind JetStream: the contract of engines."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.lanes import server_lanes
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.jetstream.client import JetstreamDialect
from areal_jax.rollout.jetstream.control import STATUS
from areal_jax.rollout.servers.member import HeldWeights, RefusedError, RequestFailedError
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Segment, Work
from tests.rollout.engine_contract import CHECKS, LONGEST, PROMPT, SAMPLING, Bench, Setting, Subject, request
from tests.rollout.http.clients.test_own import LIMITS, PACE, Factory, check_renewal, check_silence, make_clock
from tests.rollout.jetstream.rig import JetstreamToyServer, needs_jetstream

pytestmark = [pytest.mark.slow, needs_jetstream]
SLOTS = 2  # of the toy server: what is decoded together


class JetstreamFactory(Factory):
    # JetStream gives the ends of one step to as many streams of gRPC, which do not wait for each other
    setting = Setting(make_clock, PACE, slack=SLOTS - 1)

    def __call__(self, clock, log):
        from areal_jax.rollout.jetstream.channel import JetstreamConnection

        self.connection = JetstreamConnection(self.server.url, client='test')
        engine = OwnEngine(
            server_lanes(0), JetstreamDialect(self.lease_s), self.connection, clock, log,
            locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
        )  # fmt: skip

        async def prepare():
            await engine.fence()
            await engine.stage(self.published(0))
            await engine.swap(0)

        served, generate = [], self.server.engine.generate

        def note(asked):
            served.append(asked.sample)
            return generate(asked)

        self.server.engine.generate = note
        return Subject(engine, engine.start, self.published, prepare, engine.close, served=lambda: served)


@pytest.fixture
def server():
    with JetstreamToyServer(slots=SLOTS) as server:
        server.backend.step_s = 0.005 * PACE
        yield server


@pytest.fixture
def factory(server, tmp_path):
    return JetstreamFactory(server, tmp_path)


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds(factory, check):
    check(factory)


def test_a_request_has_the_noise_that_it_has_in_process(factory, server):
    seen = []
    generate = server.engine.generate

    def note(asked):
        seen.append((asked.seed, asked.draw, asked.sample, asked.prompt_tokens.tolist(), asked.sampling))
        return generate(asked)

    server.engine.generate = note
    prefix = (Segment(np.array([4, 5], np.int32), np.zeros(2, np.float32), 0),)
    cut = SamplingParams(LONGEST, temperature=0.7, top_k=3, top_p=0.9, stop_tokens=(9,))

    async def script(bench):
        answers = [
            bench.engine.generate(GenerationRequest(11, 2, 5, PROMPT, SAMPLING)),
            bench.engine.generate(GenerationRequest(12, 3, 2**31 - 1, PROMPT, cut, prefix)),
        ]
        return [[segment async for segment in answer] for answer in answers]

    _, rest = Bench(factory).run(script)
    left = SamplingParams(LONGEST - 2, temperature=0.7, top_k=3, top_p=0.9, stop_tokens=(9,))
    assert seen == [(5, 11, 2, [1, 2, 3], SAMPLING), (2**31 - 1, 12, 3, [1, 2, 3, 4, 5], left)]
    assert all('sampling_logprobs' in segment.columns for segment in rest)


def test_weights_that_the_server_began_with_are_no_version_of_the_run(factory):
    bench = Bench(factory)
    prepare, bench.subject.prepare = bench.subject.prepare, None

    async def script(bench):
        fresh = await bench.engine.ask()
        await prepare()
        return fresh, await bench.engine.ask()

    assert bench.run(script) == (HeldWeights(-1, is_fenced=True), HeldWeights(0, 'digest of 0'))


def test_weights_that_cannot_be_loaded_are_refused_and_the_old_ones_stay(factory):
    async def script(bench):
        with pytest.raises(
            RefusedError, match=r'engine/0: stage of version 3: gRPC .*/Stage answered 400: /nowhere was'
        ):
            await bench.engine.stage(PublishedWeights(3, '', '/nowhere'))
        (answer,) = bench.collect(0)
        await bench.end_of(answer)
        return await bench.engine.ask(), len(answer.tokens())

    assert Bench(factory).run(script) == (HeldWeights(0, 'digest of 0'), LONGEST)


def test_a_record_that_is_too_long_for_the_trailing_metadata_is_fetched(factory, server, monkeypatch):
    from areal_jax.rollout.jetstream.server import open_calls

    async def script(bench):
        return [(s.tokens.tolist(), s.behavior_logprobs.tolist()) async for s in bench.engine.generate(request(0))]

    at_once = Bench(factory).run(script)
    monkeypatch.setattr(open_calls, 'LARGEST_TRAILER', 50)
    assert Bench(factory).run(script) == at_once
    assert len(at_once[0][0]) == LONGEST


def test_a_cancelled_request_closes_its_call_and_the_server_gives_it_up(factory, server):
    """Also one that waits on the server for a slot."""

    async def script(bench):
        found = bench.collect(*range(4), max_new_tokens=300)
        while server.engine.status().waiting < 2:
            await bench.pass_time(0.005)
        for one in found:
            bench.engine.cancel(one.generation.request_id)
        while server.engine.status().running + server.engine.status().waiting:
            await bench.pass_time(0.005)
        return [one.generation.finish_reason for one in found]

    assert Bench(factory).run(script) == ['cancelled'] * 4
    assert server.free_slots() == server.http.relay.slots


def test_a_server_that_ends_fails_what_it_was_answering(factory, server):
    async def script(bench):
        generation = bench.engine.generate(request(0, max_new_tokens=300))
        while not server.engine.status().running:
            await bench.pass_time(0.005)
        await bench.clock.run('publish/0', lambda: server.http.__exit__(), Work('end of the server'))
        with pytest.raises(RequestFailedError, match=r'engine/0: request 0/0/0: .*Decode had no reply'):
            async for _ in generation:
                pass

    Bench(factory).run(script)


# Leases of pauses.


def leased(server, folder, seconds):
    """Whose pauses last so long without a word."""
    factory = JetstreamFactory(server, folder)
    factory.lease_s = seconds
    return factory


def test_a_pause_is_renewed_while_it_is_wanted(server, tmp_path, monkeypatch):
    factory = leased(server, tmp_path, 100.0)

    async def look(bench):
        ask = lambda: factory.connection.act(STATUS)
        return (await bench.clock.call('control/0', ask, Work('control'), 5.0)).values

    check_renewal(factory, look, monkeypatch)


def test_a_run_that_was_silent_for_too_long_drops_what_it_has_and_registers_anew(server, tmp_path, monkeypatch):
    check_silence(leased(server, tmp_path, 0.2), monkeypatch)


def test_a_client_that_is_closed_ends_its_pause(server, tmp_path):
    async def script(bench):
        await bench.engine.pause()
        await bench.engine.close()

    Bench(leased(server, tmp_path, 100.0)).run(script)
    assert server.talk(lambda talk: talk.control(STATUS))['pauses'] == []
