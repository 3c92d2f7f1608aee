"""The client of our own servers: the contract, the noise of a run, and what is kept of a server that dies."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from areal_jax.control.clocks.real import RealClock
from areal_jax.errors import UserError
from areal_jax.lanes import server_lanes
from areal_jax.rollout.http.clients import own
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.vllm import LEASE_S, OwnDialect
from areal_jax.rollout.servers.member import FencedError, HeldWeights, RefusedError, RequestFailedError
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Segment, Work
from tests.rollout.engine_contract import CHECKS, LONGEST, PROMPT, SAMPLING, Bench, Setting, Subject, request
from tests.rollout.http.server.rig import CONTEXT, ToyServer, write_weights

PACE = 2.0  # a token takes so much longer than in virtual time
LIMITS = ServerLimits(slots=8, vocab_size=10, context_tokens=CONTEXT, request_s=20, control_s=10, load_s=10)


def make_clock(log):
    return RealClock({'engine/0': LIMITS.slots + 1, 'publish/0': 1, 'control/0': 4}, log, 30.0, end_of_work_s=1.0)


class Factory:
    setting = Setting(make_clock, PACE)
    lease_s = LEASE_S

    def __init__(self, server, folder):
        self.server, self._folder = server, folder

    def published(self, version, equal=False):
        w = 0 if equal else version
        directory = self._folder / f'v{version}-{w}'
        path = str(directory) if directory.exists() else write_weights(directory, w)
        return PublishedWeights(version, f'digest of {w}', path)

    def __call__(self, clock, log):
        engine = OwnEngine(
            server_lanes(0), OwnDialect(self.lease_s), Connection(self.server.url, client='test'), clock, log,
            locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
        )  # fmt: skip

        async def prepare():
            await engine.fence()
            await engine.stage(self.published(0))
            await engine.swap(0)

        return Subject(engine, engine.start, self.published, prepare, engine.close)


@pytest.fixture
def server():
    with ToyServer(slots=2) as server:
        server.backend.step_s = 0.005 * PACE
        yield server


@pytest.fixture
def factory(server, tmp_path):
    return Factory(server, tmp_path)


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
    plain = SamplingParams(LONGEST, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
    left = SamplingParams(LONGEST - 2, temperature=0.7, top_k=3, top_p=0.9, stop_tokens=(9,))
    assert seen == [(5, 11, 2, [1, 2, 3], plain), (2**31 - 1, 12, 3, [1, 2, 3, 4, 5], left)]
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
        with pytest.raises(RefusedError, match=r'engine/0: stage of version 3: POST /update_weights answered 400'):
            await bench.engine.stage(PublishedWeights(3, '', '/nowhere'))
        (answer,) = bench.collect(0)
        await bench.end_of(answer)
        return await bench.engine.ask(), len(answer.tokens())

    assert Bench(factory).run(script) == (HeldWeights(0, 'digest of 0'), LONGEST)


def test_a_server_decodes_while_it_loads_weights(factory, server):
    receive = server.receive
    server.receive = lambda published: (time.sleep(0.8 * published.version), receive(published))[1]

    async def script(bench):
        generation, staged = bench.engine.generate(request(0)), []

        async def stage():
            await bench.engine.stage(factory.published(5))
            staged.append(True)

        bench.supervisor.start('stage', stage())
        before = [segment async for segment in generation if not staged]
        while not staged:
            await bench.pass_time(0.05)
        return sum(len(segment.tokens) for segment in before)

    assert Bench(factory).run(script) == LONGEST


async def take_rest(generation, kept):
    async for segment in generation:
        kept.append(segment)


def test_what_a_server_streamed_before_it_died_is_kept(factory, server):
    server.backend.step_s = 0.2

    async def script(bench):
        generation = bench.engine.generate(request(0))
        kept = [await anext(generation), await anext(generation)]
        server.cut_connections()
        with pytest.raises(RequestFailedError, match=r'engine/0: request 0/0/0: POST /inference/v1/generate'):
            await take_rest(generation, kept)
        return kept

    kept = Bench(factory).run(script)
    assert 2 <= sum(len(segment.tokens) for segment in kept) < LONGEST
    assert {segment.policy_version for segment in kept} == {0}


def test_what_a_continued_answer_would_get_wrong_is_refused(factory):
    penalised = SamplingParams(4, 1.0, 0, 1.0, (), repetition_penalty=2.0)

    async def script(bench):
        with pytest.raises(UserError, match='engine/0 continues answers as a part of their prompts'):
            bench.engine.generate(GenerationRequest(0, 0, 0, PROMPT, penalised))

    Bench(factory).run(script)


# Leases of pauses.


class Leased(Factory):
    """Whose pauses last so long without a word."""

    def __init__(self, server, folder, lease_s):
        super().__init__(server, folder)
        self.lease_s = lease_s


async def look(bench, url):
    """What the server says of its weights, and who has paused it."""
    ask = lambda: Connection(url).require('GET', '/weight_info')
    return (await bench.clock.call('control/0', ask, Work('control'), 5.0)).fields().values


async def post(bench, url, path, client=''):
    act = lambda: Connection(url, client=client).require('POST', path)
    await bench.clock.call('control/0', act, Work('control'), 5.0)


async def wait_until(bench, holds):
    for _ in range(1000):
        if await holds():
            return
        await bench.pass_time(0.01)
    raise AssertionError('it did not come true')


def check_renewal(factory, look, monkeypatch):
    """A pause lasts as long as it is wanted; `look(bench)` is what the server says of itself."""
    monkeypatch.setattr(own, 'RENEWAL', 0.001)

    async def script(bench):
        async def is_renewed():
            (pause,) = (await look(bench))['pauses']
            return pause['paused_seconds'] + pause['lease_seconds'] > 100.2

        await bench.engine.pause()
        await wait_until(bench, is_renewed)
        bench.engine.resume()
        (answer,) = bench.collect(0)
        await bench.end_of(answer)
        return (await look(bench))['client']

    assert Bench(factory).run(script) == 'test'


def check_silence(factory, monkeypatch):
    """A run that was silent for too long drops what it has, and registers anew."""
    monkeypatch.setattr(own, 'RENEWAL', 1000)

    async def script(bench):
        async def is_fenced():
            return (await bench.engine.ask()).is_fenced

        engine = bench.engine
        await engine.pause()
        await wait_until(bench, is_fenced)
        assert engine.status().policy_version == -1  # no call is sent with what it was thought to hold
        for act in (engine.pause, lambda: engine.stage(bench.subject.published(1))):
            with pytest.raises(FencedError, match=r'test is fenced \(its lease has lapsed'):
                await act()
        await bench.subject.prepare()
        (answer,) = bench.collect(0)
        await bench.end_of(answer)
        return len(answer.tokens())

    assert Bench(factory).run(script) == LONGEST


def test_a_pause_is_renewed_while_it_is_wanted(server, tmp_path, monkeypatch):
    check_renewal(Leased(server, tmp_path, 100.0), lambda bench: look(bench, server.url), monkeypatch)


def test_a_run_that_was_silent_for_too_long_drops_what_it_has_and_registers_anew(server, tmp_path, monkeypatch):
    check_silence(Leased(server, tmp_path, 0.2), monkeypatch)


def test_a_renewal_that_is_refused_fails_the_requests_that_wait(server, tmp_path, monkeypatch):
    monkeypatch.setattr(own, 'RENEWAL', 0.001)

    async def script(bench):
        await bench.engine.pause()
        answer = bench.engine.generate(request(0))
        await post(bench, server.url, '/register_client', 'another')
        with pytest.raises(RequestFailedError, match='another has registered since'):
            await anext(answer)

    Bench(Leased(server, tmp_path, 100.0)).run(script)


def test_a_client_that_is_closed_ends_its_pause(server, tmp_path):
    async def script(bench):
        await bench.engine.pause()
        await bench.engine.close()
        return (await look(bench, server.url))['pauses']

    assert Bench(Leased(server, tmp_path, 600.0)).run(script) == []


def test_a_stranger_who_has_paused_is_told_of(server, tmp_path):
    async def script(bench):
        await post(bench, server.url, '/pause')
        found = await bench.engine.ask()
        await post(bench, server.url, '/resume')
        return found.paused, (await bench.engine.ask()).paused

    said, after = Bench(Leased(server, tmp_path, 600.0)).run(script)
    assert re.fullmatch(r'for \d+ s by a client without a lease: POST /resume ends it', said)
    assert after == ''
