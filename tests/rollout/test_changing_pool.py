"""Engines that join and leave a pool in this process: no token is generated anew, none is lost, the ledger follows."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog, check_types
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.rollout.scripted import scripted
from tests.toys import PRICES, ToyBackend, token

TOKENS, W = 12, 3
FIRST = PublishedWeights(0, 'first', (W, 0))


def request(draw, sample=0, version=None):
    prompt = np.arange(1, 3 + draw % 3, dtype=np.int32)
    return GenerationRequest(draw, sample, 0, prompt, SamplingParams(TOKENS, 1.0, 0, 1.0, ()), version=version)


def expected(one, w=W):
    first = len(one.prompt_tokens)
    return [token(w, one.draw, one.sample, first + i) for i in range(TOKENS)]


class Rig:
    def __init__(self, engines=2, slots=2, prices=PRICES, hardware=('',) * 4, **settings):
        self.log = EventLog()
        self.log.listeners.append(check_types)
        lanes = {lane(index): 1 for index in range(4) for lane in (engine_lane, publish_lane)} | {'time': 1}
        self.clock = VirtualClock(lanes, self.log, prices | {'time': 1.0})
        self.supervisor, self.slots, self.hardware = Supervisor(self.clock), slots, hardware
        self.engines = [self.build(index) for index in range(engines)]
        self.pool = Pool(self.engines, self.clock, self.log, self.supervisor, **settings)
        self.answers = collections.defaultdict(list)

    def build(self, index, published=FIRST):
        return LocalEngine(
            index, ToyBackend(self.slots), self.clock, self.log, receive=lambda published: published.handle,
            version=published.version, params=published.handle, rollout=RolloutSection(decode_steps=2),
            evaluation=ToyBackend(2), hardware=self.hardware[index],
        )  # fmt: skip

    async def read(self, one):
        generation = self.pool.generate(one)
        async for segment in generation:
            self.answers[one.draw, one.sample].append(segment)
        return generation

    def start(self, *requests):
        return [self.supervisor.start(f'read {one.request_id}', self.read(one)) for one in requests]

    async def pass_time(self, seconds):
        await self.clock.run('time', lambda: None, Work('time', seconds))

    def run(self, script):
        async def program():
            for engine in self.engines:
                engine.start(self.supervisor)
            await script(self)

        self.clock.execute(self.supervisor.run(program()))

    def tokens(self, one):
        return [int(t) for segment in self.answers[one.draw, one.sample] for t in segment.tokens]

    def of_kind(self, kind):
        return [event for event in self.log.events if event['kind'] == kind]


REQUESTS = [request(draw, sample) for draw in range(3) for sample in range(2)]


@pytest.mark.parametrize('after_s', [0.0, 0.0005, 0.012, 0.02, 0.031, 0.05, 0.08])
@scripted(Rig, engines=2)
async def test_what_a_leaving_engine_has_goes_on_elsewhere_and_no_token_is_generated_anew(rig, after_s):
    tasks = rig.start(*REQUESTS)
    await rig.pass_time(after_s)
    left = await rig.pool.leave('engine/0', 'a test')
    assert left.open_requests() == []
    left.stop()
    assert rig.pool.serving_engines() == 1
    assert rig.pool.ledger.outstanding().keys() == {'engine/1'}
    for task in tasks:
        assert (await task).finish_reason == 'length'
    assert rig.pool.open_requests() == 0
    assert rig.pool.ledger.outstanding() == {'engine/1': 0}
    for one in REQUESTS:
        assert rig.tokens(one) == expected(one)
    generated = sum(event['tokens'] for event in rig.of_kind('decode'))
    assert generated == TOKENS * len(REQUESTS)
    assert not any(event.get('discarded') for event in rig.of_kind('decode'))
    begun = [event for event in rig.of_kind('run_start') if event['work'] == 'decode']
    assert len(begun) == len(rig.of_kind('decode'))  # no dispatch was given up


@scripted(Rig, engines=2)
async def test_what_a_workflow_has_not_read_when_the_engine_leaves_is_read_later(rig):
    generations = [rig.pool.generate(one) for one in REQUESTS]
    await rig.pass_time(0.05)
    (await rig.pool.leave('engine/0', 'a test')).stop()
    await rig.pass_time(0.03)
    for one, generation in zip(REQUESTS, generations, strict=True):
        async for segment in generation:
            rig.answers[one.draw, one.sample].append(segment)
        assert generation.engine == 'engine/1'
    assert rig.pool.ledger.outstanding() == {'engine/1': 0}
    for one in REQUESTS:
        assert rig.tokens(one) == expected(one)
    assert sum(event['tokens'] for event in rig.of_kind('decode')) == TOKENS * len(REQUESTS)  # none of them anew


@scripted(Rig, engines=1)
async def test_requests_wait_while_no_engine_is_there_and_go_on_when_one_joins(rig):
    tasks = rig.start(*REQUESTS[:3])
    await rig.pass_time(0.02)
    (await rig.pool.leave('engine/0', 'a test')).stop()
    assert rig.pool.open_requests() == 3
    assert {name for name, *_ in rig.pool.order()} == {''}
    tasks += rig.start(REQUESTS[3])  # comes while none is there
    cancelled = rig.pool.generate(REQUESTS[4])
    rig.pool.cancel(REQUESTS[4])
    assert [segment async for segment in cancelled] == []
    assert cancelled.finish_reason == 'cancelled'
    await rig.pass_time(1.0)
    engine = rig.build(0)
    engine.start(rig.supervisor)
    await rig.pool.join(engine)
    for task in tasks:
        await task
    for one in REQUESTS[:4]:
        assert rig.tokens(one) == expected(one)
    assert sum(event['tokens'] for event in rig.of_kind('decode')) == TOKENS * 4


@scripted(Rig, engines=1)
async def test_an_engine_joins_with_the_newest_version_and_every_pinned_one(rig):
    second, pinned = PublishedWeights(1, 'second', (5, 1)), PublishedWeights(1, 'second', (5, 1))
    await rig.pool.load_weights(second)
    await rig.pool.pin(pinned)
    engine = rig.build(1, FIRST)  # late
    engine.start(rig.supervisor)
    await rig.pool.join(engine)
    assert engine.status().policy_version == 1
    (await rig.pool.leave('engine/0', 'a test')).stop()
    (task,) = rig.start(request(7, version=1))
    await task
    assert rig.tokens(request(7)) == expected(request(7), w=5)
    assert [(event['engine'], event['version']) for event in rig.of_kind('join')] == [('engine/0', 0), ('engine/1', 1)]


@scripted(Rig, engines=2)
async def test_watchers_learn_that_engines_came_and_went(rig):
    seen = []
    rig.pool.watch(lambda: seen.append(rig.pool.serving_engines()))
    engine = await rig.pool.leave('engine/1', 'a test')
    engine.stop()
    again = rig.build(1)
    again.start(rig.supervisor)
    await rig.pool.join(again)
    with pytest.raises(RuntimeError, match='engine/1 joins, and an engine of that name is there'):
        await rig.pool.join(again)
    assert seen[0] == 1
    assert seen[-1] == 2


@scripted(Rig, engines=2)
async def test_an_answer_is_moved_twice_and_back(rig):
    tasks = rig.start(*REQUESTS)
    for name in ('engine/0', 'engine/1', 'engine/0'):
        await rig.pass_time(0.021)
        (await rig.pool.leave(name, 'a test')).stop()
        engine = rig.build(int(name[-1]))
        engine.start(rig.supervisor)
        await rig.pool.join(engine)
    for task in tasks:
        await task
    for one in REQUESTS:
        assert rig.tokens(one) == expected(one)
    assert sum(event['tokens'] for event in rig.of_kind('decode')) == TOKENS * len(REQUESTS)
    assert len(rig.of_kind('move')) > len(REQUESTS)
