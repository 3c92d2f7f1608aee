"""Recurrent states under an engine: a toy whose states say which tokens they are behind (tests/toy_states.py)."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from areal_jax.rollout.cache_table import CacheTable
from areal_jax.rollout.scheduler import MOST_PREFILLED, DecodeStep, PrefillStep
from areal_jax.rollout.state_pool import StatePool, size_states
from areal_jax.types import Segment
from tests.rollout.decode.test_window_schedules import run as run_host_schedule
from tests.rollout.engine_rig import SAMPLING, Rig, collect, request
from tests.rollout.scripted import scripted
from tests.rollout.test_running_request import NUMBERS
from tests.toys import token


def of_length(new, **fields):
    return dataclasses.replace(SAMPLING, max_new_tokens=new, stop_tokens=(), **fields)


def make_rig(slots=2, snapshots=None, **settings):
    return Rig(slots=slots, context_tokens=64, states=size_states(slots, snapshots), **settings)


def prefilled(rig):
    return [event['tokens'] for event in rig.kinds('prefill')]


def check(rig):
    """Nothing is leaked."""
    rig.check_blocks()
    states = rig.engine.stream.cache.states
    assert states.free + states.snapshots == rig.backend.states.places
    rig.engine.stream.cache.clear(9, [])
    assert states.free == rig.backend.states.places


@scripted(make_rig, slots=16)
async def test_a_group_of_16_computes_its_prompt_once(rig):
    requests = [rig.engine.generate(request(sample, prompt=range(1, 15))) for sample in range(16)]
    for one in requests:
        await collect(one)
    assert sum(prefilled(rig)) == 13
    check(rig)


@pytest.mark.parametrize('decode_steps', [1, 3])
def test_a_turn_computes_what_is_new(decode_steps):
    async def script(rig):
        said, cached = list(range(1, 10)), []
        for turn in range(5):
            one = rig.engine.generate(request(0, draw=turn, prompt=said, sampling=of_length(6)))
            await collect(one)
            cached.append(one.cached_tokens)
            said = [*one.tokens.tolist(), 50, 51]
        assert cached == [0, 14, 22, 30, 38]
        assert prefilled(rig) == [8, 2, 2, 2, 2]
        check(rig)

    rig = make_rig(decode_steps=decode_steps)
    rig.run(script)


@pytest.mark.parametrize('decode_steps', [1, 2, 4, 8])
def test_an_answer_that_a_stop_string_ends_leaves_a_state_only_where_the_device_has_ended_too(decode_steps):
    async def script(rig):
        prompt = range(1, 10)
        drawn = [token(0, 4, 0, position) for position in range(9, 17)]
        string = ','.join(map(str, drawn[2:4]))
        sampling = of_length(8, stop_strings=(string,))
        one = rig.engine.generate(request(0, prompt=prompt, sampling=sampling))
        await collect(one)
        assert (one.matched, len(one)) == (string, 13)
        turn = rig.engine.generate(request(1, prompt=[*one.tokens.tolist(), 50], sampling=of_length(2)))
        await collect(turn)
        # else the last state is that of the prompt, which ended at 8
        assert turn.cached_tokens == (8 if decode_steps == 8 else 12)
        check(rig)

    make_rig(decode_steps=decode_steps, token_bytes=NUMBERS).run(script)


@scripted(make_rig, slots=3, cache_blocks=16, decode_steps=4)
async def test_a_preempted_request_builds_its_state_again(rig):
    requests = [
        rig.engine.generate(request(sample, draw=sample, prompt=[*range(1, 8), sample], sampling=of_length(30)))
        for sample in range(3)
    ]
    answers = [await collect(one) for one in requests]
    assert rig.kinds('preempt')
    assert [sum(len(segment.tokens) for segment in answer) for answer in answers] == [30] * 3
    check(rig)


@pytest.mark.parametrize('kv_policy', ['recompute', 'keep'])
def test_an_interrupted_answer_goes_on_and_is_found_only_where_one_version_has_computed_it(kv_policy):
    async def script(rig):
        requests = [
            rig.engine.generate(request(sample, prompt=range(1, 10), sampling=of_length(9))) for sample in (0, 1)
        ]
        await rig.pass_time(0.035)
        await rig.load(1, (3, 1))
        for one in requests:
            await collect(one)
        cached = []
        for one in requests:
            turn = rig.engine.generate(request(2, prompt=[*one.tokens.tolist(), 50], sampling=of_length(2)))
            await collect(turn)
            cached.append(turn.cached_tokens)
        assert cached == ([17, 17] if kv_policy == 'recompute' else [0, 0])
        check(rig)

    make_rig(kv_policy=kv_policy).run(script)


@scripted(make_rig)
async def test_a_turn_after_a_new_version_finds_nothing_of_the_old_one(rig):
    one = rig.engine.generate(request(0, prompt=range(1, 10), sampling=of_length(6)))
    await collect(one)
    await rig.load(1, (3, 1))
    turn = rig.engine.generate(request(1, prompt=[*one.tokens.tolist(), 50], sampling=of_length(2)))
    await collect(turn)
    assert turn.cached_tokens == 0
    check(rig)


@scripted(make_rig, slots=2, snapshots=1, cache_blocks=60)
async def test_the_conversation_that_was_not_used_for_longest_loses_its_state(rig):
    # five places; a turn needs two, and leaves two snapshots: of its prompt, and of its answer
    said, cached = {name: [10 * name + one for one in range(9)] for name in (1, 2, 3)}, {}
    for turn, name in enumerate((1, 2, 1, 3, 1, 3, 2)):
        one = rig.engine.generate(request(0, draw=turn, prompt=said[name], sampling=of_length(6)))
        await collect(one)
        cached.setdefault(name, []).append(one.cached_tokens)
        said[name] = [*one.tokens.tolist(), 50, 51]
    assert cached == {1: [0, 14, 22], 2: [0, 0], 3: [0, 14]}
    check(rig)


@scripted(make_rig, on_failed_dispatch=lambda error: None)
async def test_a_dispatch_that_fails_takes_all_states_with_it(rig):
    first = rig.engine.generate(request(0, prompt=range(1, 10), sampling=of_length(6)))
    await collect(first)
    generate = rig.backend.generate

    def fail(*arguments):
        rig.backend.generate = generate
        raise ArithmeticError('out of memory')

    rig.backend.generate = fail
    lost = rig.engine.generate(request(1, prompt=range(1, 10), sampling=of_length(6)))
    with pytest.raises(Exception, match='a dispatch failed'):
        await collect(lost)
    assert rig.engine.stream.cache.states.free == rig.backend.states.places
    turn = rig.engine.generate(request(2, prompt=[*first.tokens.tolist(), 50], sampling=of_length(2)))
    await collect(turn)
    assert turn.cached_tokens == 0
    check(rig)


@scripted(make_rig)
async def test_an_answer_that_another_engine_began_builds_its_state(rig):
    begun = (Segment(np.arange(5, 12, dtype=np.int32), np.zeros(7, np.float32), 0),)
    one = rig.engine.generate(request(0, prompt=(1,), prefix=begun, sampling=of_length(12)))
    (segment,) = await collect(one)
    assert (len(segment.tokens), prefilled(rig)) == (5, [7])
    check(rig)


@scripted(make_rig, slots=3, largest_piece=8)
async def test_a_turn_that_enters_before_a_dispatch_of_decoding_has_its_copy_made_there(rig):
    first = rig.engine.generate(request(0, prompt=range(1, 10), sampling=of_length(6)))
    await collect(first)
    stream, sent, steps = rig.engine.stream, [], []
    turn = request(1, prompt=[*first.tokens.tolist(), 50, 51], sampling=of_length(2))
    next_step = stream.next_step

    def watched(**options):
        prefills = itertools.takewhile(lambda step: isinstance(step, PrefillStep), reversed(steps))
        if sum(step.bucket.tokens for step in prefills) >= MOST_PREFILLED * 8 and not sent:  # decoding is next
            sent.append(rig.engine.generate(turn))
        steps.append(next_step(**options))
        return steps[-1]

    others = [rig.engine.generate(request(2, draw=1, prompt=(1, 2), sampling=of_length(30)))]
    await rig.pass_time(0.05)
    stream.next_step = watched
    others.append(rig.engine.generate(request(3, draw=2, prompt=range(8, 53), sampling=of_length(2))))
    await rig.pass_time(0.5)
    stream.next_step = next_step
    for one in (*others, *sent):
        await collect(one)
    assert [one.cached_tokens for one in sent] == [14]
    assert [isinstance(one, DecodeStep) for one in steps if one is not None and one.state_copies] == [True]
    check(rig)


def test_without_states_the_schedule_is_the_same():
    async def script(rig):
        requests = [rig.engine.generate(request(sample, draw=sample % 2, prompt=range(1, 10))) for sample in range(6)]
        await rig.pass_time(0.03)
        await rig.load(1, (3, 1))
        return [await collect(one) for one in requests]

    without, beside = Rig(slots=2, context_tokens=64), make_rig()
    for rig in (without, beside):
        rig.run(script)
    assert without.log.events == beside.log.events  # no request continues an answer, so that states change nothing


# Random schedules.


class Schedule:
    """Groups, late members, turns, forks, cancels, versions and pauses; everything in it is a function of the seed."""

    def __init__(self, seed, requests):
        self.rng, self.left, self.version = np.random.default_rng(seed), requests, 0
        slots, steps = int(self.rng.integers(1, 7)), int(self.rng.integers(1, 5))
        self.rig = make_rig(
            slots, (0, 1, None, 9)[seed % 4], cache_blocks=int(self.rng.integers(16, 17 + 2 * slots)),
            decode_steps=steps, kv_policy=('recompute', 'keep')[seed // 4 % 2], token_bytes=NUMBERS,
            largest_piece=int(self.rng.choice([8, 32])),
        )  # fmt: skip
        self.occurred, self.requests, self.prompts = collections.Counter(), [], []
        self._watch()

    def _watch(self):
        """Checks the places after every dispatch, and counts what prompts find."""
        stream, engine = self.rig.engine.stream, self.rig
        inner, place, close = stream.run, stream.cache.place, stream.cache.close

        async def run(step, weights):
            await inner(step, weights)
            engine.check_blocks()
            self.occurred['copied at the start'] += len(step.state_copies)

        def counted(running, *, at_any_cost):
            placed = place(running, at_any_cost=at_any_cost)
            if placed and (prefix := running.cached.prefix) is not None and prefix.expected == 1:
                self.occurred['snapshot inside a block'] += prefix.copy is not None
                self.occurred['prefix found'] += prefix.is_complete
                self.occurred['part of a prompt found'] += 0 < prefix.filled < len(prefix.tokens)
            return placed

        def counted_close(running, *, keep=False, past_end=False):
            self.occurred['past its end'] += past_end
            close(running, keep=keep, past_end=past_end)

        stream.run, stream.cache.place, stream.cache.close = run, counted, counted_close

    def run(self):
        self.rig.run(lambda rig: self._act())
        for one in self.requests:
            self.occurred[one.finish_reason] += 1
            self.occurred['stop string'] += isinstance(one.matched, str)
            self.occurred['retracted'] += one.retractions > 0
        self.occurred['preempt'] = len(self.rig.kinds('preempt'))
        self.occurred['interrupt'] = len(self.rig.kinds('interrupt'))
        check(self.rig)
        return self.occurred

    async def _act(self):
        while self.left > 0:
            names = ['arrive', 'come_late', 'take_turn', 'cancel', 'swap', 'pause']
            await getattr(self, f'_{self.rng.choice(names, p=[0.2, 0.2, 0.35, 0.15, 0.05, 0.05])}')()
            await self.rig.pass_time(float(self.rng.exponential(0.02)))
            self.rig.check_blocks()
        while any(one.finish_reason is None for one in self.requests):
            await self.rig.pass_time(0.1)

    def _start(self, prompt, samples=1):
        draw = len(self.prompts)
        self.prompts.append((draw, prompt))
        for sample in range(samples):
            self._send(draw, prompt, sample)

    def _send(self, draw, prompt, sample):
        strings = (f',{self.rng.integers(1, 10)},',) if self.rng.random() < 0.4 else ()
        sampling = of_length(int(self.rng.choice([1, 2, 6, 20])), stop_strings=strings)
        if self.rng.random() < 0.5:
            sampling = dataclasses.replace(sampling, stop_tokens=SAMPLING.stop_tokens)
        self.requests.append(self.rig.engine.generate(request(sample, draw=draw, prompt=prompt, sampling=sampling)))
        self.left -= 1

    async def _arrive(self):
        self._start(self.rng.integers(1, 4, self.rng.integers(1, 20)).tolist(), int(self.rng.integers(1, 7)))

    async def _come_late(self):
        if self.prompts:
            draw, prompt = self.prompts[-1 - int(self.rng.integers(min(4, len(self.prompts))))]
            self._send(draw, prompt, 10 + len(self.requests))

    async def _take_turn(self):
        """Goes on behind an answer that has ended, or behind a part of it."""
        if ended := [one for one in self.requests[-12:] if one.finish_reason in ('stop', 'length')]:
            said = ended[int(self.rng.integers(len(ended)))].tokens.tolist()
            if self.rng.random() < 0.3:
                said = said[: int(self.rng.integers(1, len(said) + 1))]
            self._start([*said[:38], *self.rng.integers(1, 9, self.rng.integers(0, 5)).tolist()], 2)

    async def _cancel(self):
        if still := [one for one in self.requests if one.finish_reason is None]:
            self.rig.engine.cancel(still[int(self.rng.integers(len(still)))].request_id)

    async def _swap(self):
        self.version += 1
        await self.rig.load(self.version, (self.version, self.version))

    async def _pause(self):
        await self.rig.engine.pause()
        await self._cancel()
        self.rig.engine.resume()


def test_every_dispatch_of_2000_random_requests_finds_the_states_behind_exactly_its_tokens():
    occurred = collections.Counter()
    for seed in range(8):
        occurred += Schedule(seed, 250).run()
    assert sum(occurred[reason] for reason in ('stop', 'length', 'cancelled')) >= 2000
    wanted = {'stop string', 'preempt', 'retracted', 'interrupt', 'snapshot inside a block', 'prefix found'}
    assert {*wanted, 'part of a prompt found', 'copied at the start', 'cancelled', 'length'} <= set(occurred)


@pytest.mark.slow
def test_many_schedules():
    for seed in range(100, 200):
        Schedule(seed, 250).run()


def test_states_beside_layers_with_a_window_under_random_schedules():
    occurred = collections.Counter()
    for seed in range(10):
        occurred += run_host_schedule(seed, states=size_states(4, seed % 5))
    wanted = ('prefix hit', 'preempted answer goes on', 'block copied', 'resumed engine', 'swap', 'part is gone')
    assert {*wanted, 'kept sequence gone on with', 'state copied', 'resumed answer'} <= set(occurred)


# Faults that these schedules must show.


def evict_needed(monkeypatch):
    monkeypatch.setattr(StatePool, 'need', lambda self, holder: None)


def ignore_past_end(monkeypatch):
    close = CacheTable.close
    without = lambda self, running, *, keep=False, past_end=False: close(self, running, keep=keep)
    monkeypatch.setattr(CacheTable, 'close', without)


def find_too_much(monkeypatch):
    monkeypatch.setattr(StatePool, 'longest', lambda self, version, digests, tokens: len(tokens))


def copy_nothing(monkeypatch):
    monkeypatch.setattr(StatePool, 'take_copies', lambda self: ())


def keep_parts(monkeypatch):
    monkeypatch.setattr(StatePool, 'release', lambda self, holder: None)


def forget_nothing(monkeypatch):
    monkeypatch.setattr(StatePool, 'forget', lambda self: None)


@pytest.mark.parametrize(
    'fault', [evict_needed, ignore_past_end, find_too_much, copy_nothing, keep_parts, forget_nothing]
)
def test_a_fault_shows(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):  # noqa: PT012
        for seed in range(8):
            Schedule(seed, 250).run()
