"""Routing, the ledger and what is done to all engines; the engines use nothing of rollout/ (toy_engine.py)."""

from __future__ import annotations

import dataclasses
import gc
import sys

import numpy as np
import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import engine_lane, publish_lane
from areal_jax.rollout import pool
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.spare_engines import Ledger
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import GenerationRequest, Prompt, PublishedWeights, SamplingParams, Segment, Work
from tests.rollout.scripted import scripted
from tests.rollout.toy_engine import ToyEngine
from tests.toys import PRICES

PROMPT = np.array([1, 2, 3], np.int32)


def request(draw, sample=0, tokens=8, prefix=()):
    return GenerationRequest(draw, sample, 0, PROMPT, SamplingParams(tokens, 1.0, 0, 1.0, ()), prefix)


def segment(tokens):
    return Segment(np.ones(tokens, np.int32), -np.ones(tokens, np.float32), 0)


class Rig:
    def __init__(self, engines=2):
        self.log = EventLog()
        lanes = {lane(index): 1 for index in range(engines) for lane in (engine_lane, publish_lane)} | {'time': 1}
        self.clock = VirtualClock(lanes, self.log, PRICES | {'time': 1.0})
        self.supervisor = Supervisor(self.clock)
        self.engines = [ToyEngine(index, self.clock) for index in range(engines)]
        self.pool = Pool(self.engines, self.clock, self.log, self.supervisor)

    def run(self, script):
        async def program():
            for engine in self.engines:
                engine.start(self.supervisor)
            return await script(self)

        return self.clock.execute(self.supervisor.run(program()))

    async def pass_time(self, seconds):
        await self.clock.run('time', lambda: None, Work('time', seconds))


@scripted(Rig)
async def test_a_group_shares_an_engine_and_a_new_one_goes_where_least_is_outstanding(rig):
    engines = [
        rig.pool.generate(one).engine
        for one in (
            request(0, tokens=20),  # 0 and 0: the first engine
            request(1, tokens=5),  # 20 and 0: the second
            request(0, sample=1, tokens=20),  # of the group on the first: 40 and 5
            request(2, tokens=30),  # 40 and 5: the second
            request(1, sample=1, tokens=1),  # of the group on the second: 40 and 36
            request(3, tokens=4),  # 40 and 36: the second, with 40 and 40
            request(4, tokens=1),  # equal: the first
        )
    ]
    assert engines == [f'engine/{index}' for index in (0, 1, 0, 1, 1, 1, 0)]


@scripted(Rig)
async def test_delivered_tokens_and_ended_requests_are_not_outstanding(rig):
    (first, second) = (rig.pool.generate(request(draw, tokens=6)) for draw in (0, 1))
    for _ in range(2):
        await anext(first)
    assert rig.pool.ledger.outstanding() == {'engine/0': 4, 'engine/1': 6}
    assert rig.pool.generate(request(2, tokens=9, prefix=(segment(2),))).engine == 'engine/0'
    assert rig.pool.ledger.outstanding() == {'engine/0': 4 + 7, 'engine/1': 6}
    async for _ in second:
        pass
    assert second.finish_reason == 'length'
    assert rig.pool.ledger.outstanding() == {'engine/0': 11, 'engine/1': 0}
    assert len(rig.pool.ledger) == 2


@scripted(Rig)
async def test_a_resumed_episode_prefers_its_engine_while_there_is_one_of_that_name(rig):
    names = [rig.pool.generate(request(0), prefer='engine/1').engine]
    names.append(rig.pool.generate(request(0, sample=1)).engine)  # the group is there now
    names.append(rig.pool.generate(request(1), prefer='engine/7').engine)  # gone
    assert names == ['engine/1', 'engine/1', 'engine/0']


def test_an_open_request_is_not_started_again():
    ledger = Ledger(['engine/0', 'engine/1'])
    entry = ledger.open(request(5), 'engine/1')
    with pytest.raises(RuntimeError, match='request 0/5/0 is open already, on engine/1'):
        ledger.open(request(5), 'engine/0')
    ledger.close(entry)
    again = ledger.open(request(5), 'engine/0')
    ledger.close(entry)  # of the earlier one: nothing
    ledger.note_generated(entry, 3)
    assert ledger.entries() == [again]
    assert ledger.outstanding() == {'engine/0': 8, 'engine/1': 0}


def test_the_ledger_agrees_with_a_recount_after_any_sequence():
    random, ledger, entries = np.random.default_rng(0), Ledger([f'engine/{i}' for i in range(5)]), []
    for draw in range(300):
        one = request(draw // 3, draw % 3, tokens=int(random.integers(1, 50)))
        name = ledger.engine_of_group(one) or ledger.least_outstanding()
        recount = {f'engine/{i}': sum(e.outstanding for e in entries if e.engine == f'engine/{i}') for i in range(5)}
        assert ledger.outstanding() == recount
        group = [e.engine for e in entries if e.group == (0, one.draw)]
        assert name == (group[-1] if group else min(recount, key=lambda engine: recount[engine]))
        entries.append(ledger.open(one, name))
        ledger.note_generated(entries[-1], int(random.integers(0, 2)))
        if random.random() < 0.6:
            ledger.close(entries.pop(int(random.integers(len(entries)))))
    assert ledger.entries() == entries


@scripted(Rig, 3)
async def test_engines_load_at_the_same_time_and_the_longest_pause_counts(rig):
    for engine, pause_s in zip(rig.engines, (0.25, 0.5, 0.125), strict=True):
        swap = engine.swap

        async def slow(version, swap=swap, pause_s=pause_s):
            await swap(version)
            return pause_s

        engine.swap = slow
    before = rig.clock.now()
    longest = await rig.pool.load_weights(PublishedWeights(3, '', 1))
    seconds, versions = rig.clock.now() - before, [engine.version for engine in rig.engines]
    assert (longest, versions) == (0.5, [3, 3, 3])
    assert seconds == pytest.approx(PRICES['load'])  # not three times that
    loads = [e['lane'] for e in rig.log.events if e['kind'] == 'run_start' and e['work'] == 'load']
    assert loads == ['publish/0', 'publish/1', 'publish/2']


def test_with_one_engine_nothing_comes_between_its_swap_and_the_publication():
    """A further coroutine would let others run first, and change which groups a step's metrics count."""

    async def script(rig):
        started, start = [], rig.supervisor.start
        rig.supervisor.start = lambda name, coro: (started.append(name), start(name, coro))[1]
        await rig.pool.load_weights(PublishedWeights(3, '', 1))
        await rig.pool.pause()
        return started

    assert Rig(1).run(script) == []
    assert Rig(2).run(script) == ['engine/1: load of version 3', 'engine/1: pause']


def test_an_engine_joins_with_its_version_and_devices():
    log = EventLog()
    clock = VirtualClock({}, log, {})
    Pool([ToyEngine(0, clock), ToyEngine(1, clock, version=3)], clock, log, Supervisor(clock))
    joined = [(e['kind'], e['engine'], e['version'], e['devices']) for e in log.events if e['kind'] == 'join']
    assert joined == [('join', 'engine/0', 0, ['toy']), ('join', 'engine/1', 3, ['toy'])]
    with pytest.raises(ValueError, match='the pool has no engine'):
        Pool([], clock, log, Supervisor(clock))


def test_an_engine_that_fails_to_load_ends_the_run():
    async def script(rig):
        async def refuse(published):
            raise OSError('no such version')

        rig.engines[1].stage = refuse
        await rig.pool.load_weights(PublishedWeights(3, '', 1))

    with pytest.raises(OSError, match='no such version'):
        Rig().run(script)


@scripted(Rig)
async def test_a_paused_pool_has_delivered_everything_and_lists_what_is_open_in_order(rig):
    generations = [rig.pool.generate(request(draw, tokens=4)) for draw in range(4)]
    await rig.pass_time(0.025)
    await rig.pool.pause()
    order = rig.pool.order()
    now = rig.clock.now()
    await rig.pass_time(1.0)
    assert not [e for e in rig.log.events if e['time'] > now and e['kind'] == 'run_done' and e['work'] == 'decode']
    rig.pool.resume()
    tokens = [sum([len(s.tokens) async for s in generation]) for generation in generations]
    assert order == [('engine/0', 0, 0), ('engine/0', 2, 0), ('engine/1', 1, 0), ('engine/1', 3, 0)]
    assert tokens == [4] * 4


@scripted(Rig)
async def test_a_cancelled_episode_has_no_finish_reason_and_the_ledger_is_empty(rig):
    workflow = SingleTurn(rig.pool, SamplingParams(50, 1.0, 0, 1.0, ()), seed=0)
    episodes = [Episode(sample) for sample in range(3)]
    for episode in episodes:
        rig.supervisor.start('episode', workflow.run(Prompt(0, PROMPT, 'toy', {}), episode))
    rig.pool.generate(request(9))  # nobody iterates
    await rig.pass_time(0.025)
    rig.pool.cancel_all()
    assert (len(rig.pool.ledger), rig.pool.order()) == (0, [])
    await rig.pass_time(0.1)
    assert [episode.finish_reason for episode in episodes] == [None] * 3
    assert sum(len(s.tokens) for s in episodes[0].segments) == 2  # delivered before: 10 ms each


def lines_per_request(engines, open_requests):
    """Lines of rollout/ and control/ that the host's loop runs to route one more request and to end it."""

    async def script(rig):
        for draw in range(open_requests):
            rig.pool.generate(request(draw))
        counted = 0

        def trace(frame, event, _):
            nonlocal counted
            if '/areal_jax/' not in frame.f_code.co_filename:
                return None
            counted += event == 'line'
            return trace

        def count(call, *args):
            before = sys.gettrace()
            gc.disable()  # a collection would run the finalizers of other tests' objects here
            sys.settrace(trace)
            try:
                call(*args)
            finally:
                sys.settrace(before)
                gc.enable()

        count(rig.pool.generate, request(open_requests))
        (*_, entry) = rig.pool.ledger.entries()
        count(rig.pool.ledger.note_generated, entry, 1)
        count(rig.pool.ledger.close, entry)
        return counted

    return Rig(engines).run(script)


def test_a_request_costs_the_same_beside_any_number_of_engines_and_requests():
    assert lines_per_request(2, 3) == lines_per_request(32, 3) == lines_per_request(32, 1000) > 20


def test_an_engine_that_lacks_what_the_run_needs_is_refused_by_name():
    class Limited(ToyEngine):
        capabilities = dataclasses.replace(
            ToyEngine.capabilities, pinned=False, spans=False, pause_modes=('abort',), update=('keep',)
        )

    needed = {
        pool.needs_pinned('evaluation.every=8'): 'keep the weights of an earlier version for an evaluation',
        pool.needs_logprobs('rollout.top_k=4', 'sampling'): "give log-probs of kind 'sampling'",
        pool.needs_update("rollout.kv_policy='recompute'", 'recompute'): "do 'recompute' with unfinished answers",
        pool.needs_spans('learning from its answers'): 'tell the version of each token',
        pool.needs_pause('taking checkpoints'): 'pause without aborting answers',
    }
    log = EventLog()
    clock = VirtualClock({}, log, {})
    engines = [ToyEngine(0, clock), Limited(1, clock)]
    for requirement, what in needed.items():
        name = 'engine/1' if requirement.holds(ToyEngine.capabilities) else 'engine/0'
        message = rf'^{name} cannot {what}.*, which {requirement.setting} needs: change that setting'
        with pytest.raises(pool.EngineError, match=message):
            Pool(engines, clock, log, Supervisor(clock), [requirement])
    Pool([ToyEngine(0, clock)], clock, log, Supervisor(clock), [pool.needs_pinned('evaluation.every=8')])


def test_pinned_requests_do_not_move_those_of_training():
    """The engine of a new group is the one with the fewest outstanding tokens of training."""

    async def script(rig, pinned):
        if pinned:
            await rig.pool.pin(PublishedWeights(1, '', 1))
            for draw in range(100, 103):
                rig.pool.generate(dataclasses.replace(request(draw, tokens=50), version=1))
        engines = [rig.pool.generate(request(draw, tokens=5)).engine for draw in range(4)]
        order = rig.pool.order()
        if pinned:
            assert rig.pool.pinned_versions() == (1,)
            rig.pool.unpin(1)
            assert rig.pool.pinned_versions() == ()
            assert len(rig.pool.pinned_ledger) == 0
        assert len(rig.pool.ledger) == 4
        return engines, order

    assert Rig().run(lambda rig: script(rig, True)) == Rig().run(lambda rig: script(rig, False))
