"""The engine of a server of others: the contract, and everything that a server can do wrong."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from areal_jax.control.clocks.real import RealClock
from areal_jax.errors import UserError
from areal_jax.lanes import server_lanes
from areal_jax.rollout.http.clients.connection import Connection, Reply, StatusError
from areal_jax.rollout.http.clients.engine import ServerEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect
from areal_jax.rollout.pool import (
    EngineError,
    needs_logprobs,
    needs_pause,
    needs_pinned,
    needs_spans,
    needs_update,
    require_capabilities,
)
from areal_jax.rollout.servers.member import OutcomeUnknownError, RefusedError, RequestFailedError
from areal_jax.types import PublishedWeights, SamplingParams
from tests.rollout.engine_contract import CHECKS, LONGEST, Bench, Setting, Subject, request
from tests.rollout.http.clients.fake_server import VOCAB_SIZE, FakeSglang, FakeVllm, write_checkpoint

PACE = 2.0  # a token takes so much longer than in virtual time
LIMITS = ServerLimits(slots=2, vocab_size=VOCAB_SIZE, context_tokens=64, request_s=20, control_s=10, load_s=10, loads=2)
KINDS = {'vllm': (FakeVllm, VllmDialect), 'sglang': (FakeSglang, SglangDialect)}
GENERATE = {'vllm': '/inference/v1/generate', 'sglang': '/generate'}
UPDATE = {'vllm': '/collective_rpc', 'sglang': '/update_weights_from_disk'}
PAUSE = {'vllm': '/pause', 'sglang': '/pause_generation'}
RESUME = {'vllm': '/resume', 'sglang': '/continue_generation'}


def make_clock(log):
    return RealClock({'engine/0': LIMITS.slots + 1, 'publish/0': 1, 'control/0': 4}, log, 30.0, end_of_work_s=1.0)


class Factory:
    """Makes engines of one server, which begins with version 0.

    `asks`: the server has answered before the check, so that the client knows whether its replies have spans.
    """

    setting = Setting(make_clock, PACE)

    def __init__(self, server, dialect, folder, limits=LIMITS, asks=False, receiver=None):
        self.server, self._dialect, self._folder, self._limits = server, dialect, folder, limits
        self._asks, self._receiver = asks, receiver

    def published(self, version, equal=False):
        w = 0 if equal else version
        return PublishedWeights(version, '', write_checkpoint(self._folder / f'v{version}-{w}', w))

    def __call__(self, clock, log):
        engine = ServerEngine(
            server_lanes(0), self._dialect, Connection(self.server.url), clock, log,
            locate=lambda published: published.handle, limits=self._limits,
            receiver=self._receiver,
        )  # fmt: skip

        async def prepare():
            await engine.fence()
            await engine.stage(self.published(0))
            await engine.swap(0)
            if self._asks:
                await engine.ask()

        return Subject(engine, engine.start, self.published, prepare, engine.close, has_begun=self.server.has_begun)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def server(kind):
    with KINDS[kind][0](token_s=0.01 * PACE) as server:
        yield server


@pytest.fixture
def factory(kind, server, tmp_path):
    return Factory(server, KINDS[kind][1](), tmp_path)


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds(server, kind, check, tmp_path):
    check(Factory(server, KINDS[kind][1](), tmp_path, asks=True))


@pytest.fixture
def sglang(tmp_path):
    """(server, factory of engines) of SGLang's protocol, whose replies have been seen."""
    with FakeSglang(token_s=0.01 * PACE) as server:
        yield server, Factory(server, SglangDialect(), tmp_path, asks=True)


def test_where_replies_have_spans_an_answer_stays_on_the_server_over_an_update(sglang):
    server, factory = sglang

    async def script(bench):
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        await bench.load(1)
        await bench.end_of(one)
        return one.versions(), one.tokens()

    versions, tokens = Bench(factory).run(script)
    assert tokens == [1 + (7 * version + 3 + i) % 9 for i, version in enumerate(versions)]
    assert set(versions) == {0, 1}
    # a fence, version 0, version 1: no reply had come before the first two
    assert [body['mode'] for body in server.sent('/pause_generation')] == ['abort', 'abort', 'retract']
    assert len(server.sent('/generate')) == 2  # the question, and the answer in one call


class FakeReceiver:
    """In the place of the receiver beside a server: makes directories of its own, and none for versions from 2 on."""

    def __init__(self, folder):
        self._folder, self.asked = folder, []

    async def require(self, method, path, body):
        self.asked.append((method, path, body))
        version = body['version']
        if version > 1:
            raise StatusError(method, path, Reply(409, 'no room', None))
        return Reply(200, '', {'directory': write_checkpoint(self._folder / f'made{version}', version)})

    async def close(self): ...


def test_a_server_with_a_receiver_loads_what_that_has_made(server, kind, tmp_path):
    """The learner's own files are deltas, which the server could not load."""
    receiver = FakeReceiver(tmp_path)
    one, two = (PublishedWeights(v, f'digest {v}', str(tmp_path / f'v00000{v}.delta')) for v in (1, 2))

    async def script(bench):
        await bench.engine.stage(one)
        assert len(server.sent(UPDATE[kind])) == 1  # it serves version 0 meanwhile
        await bench.engine.swap(1)
        with pytest.raises(RefusedError, match=r'receiver of version 2: POST /versions answered 409: no room'):
            await bench.engine.stage(two)
        (answer,) = bench.collect(0)
        await bench.end_of(answer)
        return set(answer.versions()), answer.tokens()[0]

    factory = Factory(server, KINDS[kind][1](), tmp_path, receiver=receiver)
    assert Bench(factory).run(script) == ({1}, 1 + (7 + 3) % 9)
    assert receiver.asked[1:] == [
        ('POST', '/versions', {'version': 1, 'manifest_hash': 'digest 1'}),
        ('POST', '/versions', {'version': 2, 'manifest_hash': 'digest 2'}),
    ]


def test_a_pause_ends_calls_also_where_replies_have_spans(sglang):
    server, factory = sglang

    async def script(bench):
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        await bench.engine.pause()
        await bench.pass_time(0.001)
        assert 0 < len(one.tokens()) < LONGEST
        await bench.load(1)  # while it is paused
        bench.engine.resume()
        await bench.end_of(one)
        return set(one.versions())

    assert Bench(factory).run(script) == {0, 1}
    assert len(server.sent('/generate')) == 3


def test_a_reply_that_lost_its_spans_over_an_update_is_not_used(sglang):
    server, factory = sglang

    async def script(bench):
        one = bench.engine.generate(request(0))
        await bench.pass_time(0.045)
        await bench.load(1)
        server.spans = False
        with pytest.raises(RequestFailedError, match=r'does not say which of the versions \[0, 1\] generated its tok'):
            await anext(one)
        (again,) = bench.collect(0)
        await bench.pass_time(0.045)
        await bench.load(2)
        await bench.end_of(again)
        return set(again.versions())

    assert Bench(factory).run(script) == {1, 2}
    assert [body['mode'] for body in server.sent('/pause_generation')][2:] == ['retract', 'abort']


def test_no_id_of_a_call_begins_with_another(sglang):
    server, factory = sglang

    async def script(bench):
        for _ in range(12):  # the same request, as one that is sent again after each pause
            await bench.end_of(*bench.collect(0, max_new_tokens=1))

    Bench(factory).run(script)
    ids = [body['rid'] for body in server.sent('/generate') if body.get('rid')]
    assert len(ids) == 12
    assert [(a, b) for a in ids for b in ids if a != b and b.startswith(a)] == []


@pytest.mark.parametrize(
    ('requirement', 'message'),
    [
        (needs_pinned('evaluation.every=8'), 'engine/0 cannot keep the weights of an earlier version'),
        (needs_update('rollout.kv_policy=keep', 'keep'), "engine/0 cannot do 'keep' with unfinished answers"),
        (needs_logprobs('rollout.top_k=4', 'sampling'), "engine/0 cannot give log-probs of kind 'sampling'"),
    ],
)
def test_a_run_that_needs_what_the_server_lacks_is_refused_by_name(factory, requirement, message):
    bench = Bench(factory)
    with pytest.raises(EngineError, match=message):
        require_capabilities([bench.engine], [requirement])
    require_capabilities([bench.engine], [needs_spans('eta=4'), needs_pause('checkpoint.every=1')])


def test_a_fresh_server_holds_no_version_of_ours_and_is_asked_to_generate(factory, server, kind):
    bench = Bench(factory)
    prepare, bench.subject.prepare = bench.subject.prepare, None

    async def script(bench):
        fresh = await bench.engine.ask()
        await prepare()
        return fresh, await bench.engine.ask()

    assert [held.version for held in bench.run(script)] == [-1, 0]
    assert len(server.sent(GENERATE[kind])) == 2


@pytest.mark.parametrize('fault', ['drop', 'cut', 'garbage', 500, 503])
def test_a_lost_answer_fails_its_request_and_no_other(factory, server, kind, fault):
    async def script(bench):
        server.faults.append((GENERATE[kind], fault))
        lost = bench.engine.generate(request(0))
        with pytest.raises(RequestFailedError, match=r'engine/0: request 0/0/0: '):
            await anext(lost)
        (again, other) = bench.collect(0, 1)
        await bench.end_of(again, other)
        return [len(one.tokens()) for one in (again, other)]

    assert Bench(factory).run(script) == [LONGEST, LONGEST]


def test_what_came_before_a_server_died_is_kept_where_the_protocol_streams(factory, server, kind):
    async def script(bench):
        server.faults.append((GENERATE[kind], 'die' if kind == 'vllm' else 'cut'))
        generation, kept = bench.engine.generate(request(0)), []
        with pytest.raises(RequestFailedError, match=r'engine/0: request 0/0/0: '):
            await take_rest(generation, kept)
        (rest,) = bench.collect(0, prefix=kept)
        await bench.end_of(rest)
        return [int(token) for segment in kept for token in segment.tokens], rest.tokens()

    kept, rest = Bench(factory).run(script)
    assert len(kept) == (1 if kind == 'vllm' else 0)
    assert kept + rest == [1 + (3 + i) % 9 for i in range(LONGEST)]
    assert [body['stream'] for body in server.sent(GENERATE[kind])] == [kind == 'vllm'] * 2


async def take_rest(generation, kept):
    async for segment in generation:
        kept.append(segment)


def test_a_dead_server_fails_requests_and_leaves_actions_unknown(factory, server):
    async def script(bench):
        server.__exit__()
        with pytest.raises(RequestFailedError):
            await anext(bench.engine.generate(request(0)))
        for action in (bench.engine.pause, bench.engine.ask):
            with pytest.raises(OutcomeUnknownError, match='engine/0: '):
                await action()

    Bench(factory).run(script)


@pytest.mark.parametrize('fault', ['drop', 'cut', 500])
def test_an_update_without_an_answer_is_sent_again(factory, server, kind, fault):
    async def script(bench):
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        server.faults.append((UPDATE[kind], fault))
        await bench.load(1)
        await bench.end_of(one)
        assert set(one.versions()) == {0, 1}
        return bench.engine.status().policy_version

    assert Bench(factory).run(script) == 1
    assert len(server.sent(UPDATE[kind])) == 3  # of version 0, and twice of version 1


def test_an_update_whose_outcome_stays_unknown_stops_the_engine_until_it_is_asked(factory, server, kind):
    async def script(bench):
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        server.faults += [(UPDATE[kind], 'cut')] * LIMITS.loads
        await bench.engine.stage(bench.subject.published(1, False))
        with pytest.raises(OutcomeUnknownError, match='load of version 1'):
            await bench.engine.swap(1)
        kept, calls = one.tokens(), len(server.sent(GENERATE[kind]))
        await bench.pass_time(0.3)
        assert one.tokens() == kept  # nothing is generated under weights that nobody knows
        assert len(server.sent(GENERATE[kind])) == calls
        assert bench.engine.status().policy_version == -1
        held = await bench.engine.ask()
        await bench.end_of(one)
        return held.version, one.tokens()[: len(kept)] == kept, set(one.versions()), len(one.tokens())

    assert Bench(factory).run(script) == (1, True, {0, 1}, LONGEST)


def test_a_server_that_does_not_confirm_the_version_leaves_the_outcome_unknown(factory, server, kind):
    async def script(bench):
        await bench.engine.stage(bench.subject.published(1, False))
        serve = server.serve

        async def forget(*request):
            found = await serve(*request)
            server.version = '0'
            return found

        server.serve = forget
        with pytest.raises(OutcomeUnknownError, match="calls its weights '0' after the update to version 1"):
            await bench.engine.swap(1)

    Bench(factory).run(script)


def test_weights_that_are_not_there_are_refused_before_the_server_is_asked(factory, server, kind, tmp_path):
    async def script(bench):
        missing = PublishedWeights(1, '', str(tmp_path / 'missing'))
        with pytest.raises(RefusedError, match='missing holds no config'):
            await bench.engine.stage(missing)
        (one,) = bench.collect(0)
        await bench.end_of(one)
        return set(one.versions())

    assert Bench(factory).run(script) == {0}
    assert len(server.sent(UPDATE[kind])) == 1


def test_an_answer_under_another_version_is_not_used(factory, server):
    async def script(bench):
        server.version = '7'
        with pytest.raises(RequestFailedError, match="answered under version '7', and 0 was loaded last"):
            await anext(bench.engine.generate(request(0)))
        return (await bench.engine.ask()).version

    assert Bench(factory).run(script) == 7


def test_without_spans_tokens_are_of_the_version_at_the_time_of_the_call(factory, server):
    async def script(bench):
        server.spans = False
        (one,) = bench.collect(0)
        await bench.pass_time(0.045)
        await bench.load(1)
        await bench.end_of(one)
        ws = [0 if version == 0 else 1 for version in one.versions()]
        assert one.tokens() == [1 + (7 * w + 3 + i) % 9 for i, w in enumerate(ws)]
        return set(ws)

    assert Bench(factory).run(script) == {0, 1}


def test_a_fence_ends_requests_of_earlier_clients_and_a_pause(factory, server, kind):
    async def script(bench):
        server.is_paused = True
        lost = bench.engine.generate(request(0))
        await bench.pass_time(0.05)
        await bench.engine.fence()
        with pytest.raises(RequestFailedError, match='ended by a fence'):
            await anext(lost)
        (one,) = bench.collect(1)
        await bench.end_of(one)
        return server.is_paused, len(one.tokens())

    assert Bench(factory).run(script) == (False, LONGEST)


def test_an_action_that_was_given_up_does_not_hold_the_engine_for_ever(factory, server, kind):
    async def script(bench):
        server.faults.append((PAUSE[kind], 'drop'))
        await bench.engine.stage(bench.subject.published(1, False))
        with pytest.raises(OutcomeUnknownError, match='swap of version 1'):
            await bench.engine.swap(1)
        held = await bench.engine.ask()
        (one,) = bench.collect(0)
        await bench.end_of(one)
        return held.version, set(one.versions())

    assert Bench(factory).run(script) == (0, {0})


def test_the_speed_is_measured_while_other_calls_are_under_way(factory):
    async def script(bench):
        bench.collect(0, max_new_tokens=60)
        (short,) = bench.collect(1)
        await bench.end_of(short)
        status = bench.engine.status()
        bench.engine.cancel(request(0).request_id)
        return status

    status = Bench(factory).run(script)
    assert status.running == 1
    assert 0 < status.tokens_per_s < 2 / (0.01 * PACE)


def test_a_resume_that_the_server_does_not_answer_fails_the_open_requests(factory, server, kind):
    async def script(bench):
        lost = bench.engine.generate(request(0))
        await bench.pass_time(0.045)
        await bench.engine.pause()
        server.faults.append((RESUME[kind], 'drop'))
        bench.engine.resume()
        assert len((await anext(lost)).tokens)
        with pytest.raises(RequestFailedError, match='resume'):
            await anext(lost)

    Bench(factory).run(script)


def test_a_cancelled_request_leaves_its_place_on_the_server(factory, server, kind):
    async def script(bench):
        long, short = bench.collect(0, max_new_tokens=60), bench.collect(1, 2)
        await bench.pass_time(0.03)
        bench.engine.cancel(request(0).request_id)
        await bench.end_of(*long, *short)
        return len(server.jobs)

    assert Bench(factory).run(script) == 0


def test_a_prefix_that_is_the_whole_answer_needs_no_call(factory, server, kind):
    async def script(bench):
        (one,) = bench.collect(0)
        await bench.end_of(one)
        calls = len(server.sent(GENERATE[kind]))
        (again,) = bench.collect(0, prefix=one.segments)
        await bench.end_of(again)
        return again.tokens(), again.generation.finish_reason, len(server.sent(GENERATE[kind])) - calls

    assert Bench(factory).run(script) == ([], 'length', 0)


def test_stop_tokens_end_an_answer_and_are_kept(factory):
    async def script(bench):
        (one,) = bench.collect(0, stop_tokens=(7,))
        await bench.end_of(one)
        return one.tokens(), one.generation.finish_reason

    assert Bench(factory).run(script) == ([4, 5, 6, 7], 'stop')


def test_seeds_differ_along_an_answer_and_between_samples(server, kind, factory):
    async def script(bench):
        found = bench.collect(0, 1)
        await bench.pass_time(0.045)
        await bench.engine.pause()
        bench.engine.resume()
        await bench.end_of(*found)

    Bench(factory).run(script)
    seeds = [body['sampling_params'].get('seed') for body in server.sent(GENERATE[kind])]
    assert len(set(seeds)) == (len(seeds) if kind == 'vllm' else 1)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'prompt_tokens': np.array([1, VOCAB_SIZE], np.int32)}, f'the token {VOCAB_SIZE}, and engine/0 serves'),
        ({'prompt_tokens': np.zeros(60, np.int32)}, 'do not fit the context of engine/0, 64 tokens'),
        ({'prompt_tokens': np.zeros(0, np.int32)}, 'a prompt of 0 tokens'),
        ({'sampling': SamplingParams(4, 1.0, 2, 1.0, ())}, 'no log-probs of a softmax that is cut'),
        ({'sampling': SamplingParams(4, 1.0, 0, 1.0, (), stop_strings=('a',))}, 'watches no stop strings'),
    ],
)
def test_what_would_harm_the_server_or_be_wrong_in_silence_is_refused(factory, server, kind, change, message):
    async def script(bench):
        with pytest.raises(UserError, match=re.escape(message)):
            bench.engine.generate(dataclasses.replace(request(0), **change))

    Bench(factory).run(script)
    assert server.sent(GENERATE[kind]) == []
