"""What every RolloutEngine must keep: a list of checks, each put to an engine that a factory makes.

A test module parametrizes over CHECKS and gives each check a factory `make(clock, log) -> Subject`. A check that needs
what the engine does not declare in its `capabilities` returns at once; ASSERTED names the checks of each capability.
Time is virtual, and one token takes 10 ms or less, unless the factory has a `setting` of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import numpy as np

from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.protocols import RolloutEngine
from areal_jax.types import LARGEST_LOGPROB, GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.toys import PRICES

LONGEST = 12
PROMPT = np.array([1, 2, 3], np.int32)
SAMPLING = SamplingParams(max_new_tokens=LONGEST, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
# capability, and the value of it where there are several: the checks that hold an engine to it
ASSERTED = {
    ('logprobs', 'behavior'): ['an_answer_is_whole_and_aligned', 'logprobs_are_those_of_the_weights'],
    ('logprobs', 'sampling'): ['a_cut_softmax_has_its_logprobs_where_they_are_declared'],
    'spans': ['a_swap_changes_the_version_of_later_tokens_and_tells_the_pause', 'logprobs_are_those_of_the_weights'],
    'abort': ['a_cancelled_request_ends_as_cancelled_and_the_others_go_on'],
    ('pause_modes', 'retract'): ['a_pause_delivers_everything_and_a_resume_continues'],
    ('pause_modes', 'in_place'): ['a_pause_delivers_everything_and_a_resume_continues'],
    ('pause_modes', 'abort'): ['a_pause_that_aborts_ends_requests_and_keeps_what_was_delivered'],
    'staging': ['staging_does_not_disturb_decoding'],
    ('update', 'recompute'): ['a_recomputed_answer_continues_as_its_prefix_does'],
    ('update', 'keep'): ['interruptions_by_equal_weights_change_no_token'],
    ('update', 'wait'): ['an_engine_that_waits_interrupts_no_answer'],
    'pinned': ['requests_of_a_pinned_version_are_decoded_with_its_weights'],
}


def make_virtual(log: EventLog) -> VirtualClock:
    return VirtualClock({'engine/0': 1, 'publish/0': 1, 'time': 1}, log, PRICES | {'time': 1.0})


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the checks run. `pace` is how much slower than in virtual time a check goes on."""

    clock: Callable[[EventLog], LoopClock] = make_virtual
    pace: float = 1.0
    longest: int = LONGEST
    temperature: float = SAMPLING.temperature  # 0 where an interruption changes the noise
    slack: int = 0  # places by which answers may end out of order: those decoded together end together, in any order


@dataclasses.dataclass
class Subject:
    """An engine that holds version 0.

    `published(version, equal)` gives weights for it, those of version 0 again if `equal`; answers to SAMPLING have
    LONGEST tokens, and a version whose weights differ gives other tokens. `prepare` runs before a check, `close` after
    it. `score(prompt, answer, versions)`, all int [n], gives the log-probs float [n] that the answer has under the
    weights of its versions, each token after everything before it; None: only the engine knows them. `has_begun` says
    whether an answer has a token, for a server in real time that can tell before it delivers. `served` gives the
    samples of the requests in the order in which the engine of a server took them.
    """

    engine: RolloutEngine
    start: Callable[[Supervisor], None]
    published: Callable[[int, bool], PublishedWeights]
    prepare: Callable[[], Awaitable[None]] | None = None
    close: Callable[[], Awaitable[None]] | None = None
    score: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None
    tolerance: float = 1e-5  # of a log-prob
    has_begun: Callable[[], bool] | None = None
    served: Callable[[], list[int]] | None = None


_MOST_WAITS = 200  # of 0.005 s each


class Bench:
    """One engine under a clock, and what a check does to it."""

    def __init__(self, make):
        self.log = EventLog()
        self.setting = getattr(make, 'setting', Setting())
        self.longest = self.setting.longest
        self.clock = self.setting.clock(self.log)
        self.subject = make(self.clock, self.log)
        self.engine = self.subject.engine

    def run(self, script):
        supervisor = Supervisor(self.clock)

        async def program():
            self.subject.start(supervisor)
            if self.subject.prepare is not None:
                await self.subject.prepare()
            found = await script(self)
            if self.subject.close is not None:
                await self.subject.close()
            return found

        self.supervisor = supervisor
        return self.clock.execute(supervisor.run(program()))

    async def pass_time(self, seconds):
        if isinstance(self.clock, VirtualClock):
            await self.clock.run('time', lambda: None, Work('time', seconds))
        else:
            await self.clock.wait(self.clock.event('time'), seconds * self.setting.pace)

    async def pass_until_begun(self):
        """0.045 s, in which a few tokens come; a loaded machine gets more, until the first one is there."""
        await self.pass_time(0.045)
        waits = 0
        while self.subject.has_begun is not None and not self.subject.has_begun() and waits < _MOST_WAITS:
            await self.pass_time(0.005)
            waits += 1

    async def load(self, version, equal=False):
        await self.engine.stage(self.subject.published(version, equal))
        return await self.engine.swap(version)

    def collect(self, *samples, **fields):
        """Requests whose segments are collected by coroutines of their own."""
        fields = {'max_new_tokens': self.longest, 'temperature': self.setting.temperature} | fields
        found = [Collected(sample, self.engine.generate(request(sample, **fields))) for sample in samples]
        for one in found:
            self.supervisor.start('collect', one.run())
        return found

    async def end_of(self, *found):
        step = 0.5 if isinstance(self.clock, VirtualClock) else 0.01  # real time costs the test what it waits
        for _ in range(int(30.0 / step)):
            if all(one.generation.finish_reason is not None for one in found):
                return
            await self.pass_time(step)
        raise AssertionError(f'{[one.sample for one in found if one.generation.finish_reason is None]} never end')


class Collected:
    def __init__(self, sample, generation):
        self.sample, self.generation, self.segments = sample, generation, []
        self.on_end = lambda one: None

    async def run(self):
        async for segment in self.generation:
            self.segments.append(segment)
        self.on_end(self)

    def tokens(self):
        return [int(token) for segment in self.segments for token in segment.tokens]

    def versions(self):
        return [segment.policy_version for segment in self.segments for _ in segment.tokens]


def request(sample, draw=0, prefix=(), version=None, **sampling):
    params = dataclasses.replace(SAMPLING, **sampling)
    return GenerationRequest(draw, sample, 0, PROMPT, params, tuple(prefix), version)


def an_answer_is_whole_and_aligned(make):
    async def script(bench):
        found = bench.collect(0, 1, 2)
        await bench.end_of(*found)
        for one in found:
            assert one.generation.finish_reason == 'length'
            assert one.generation.engine == bench.engine.name
            assert len(one.tokens()) == bench.longest
            assert set(one.versions()) == {0}
            for segment in one.segments:
                assert len(segment.tokens) == len(segment.behavior_logprobs) >= 1
                assert (segment.tokens.dtype, segment.behavior_logprobs.dtype) == (np.int32, np.float32)
                assert 'sampling_logprobs' not in segment.columns
                assert (segment.behavior_logprobs <= LARGEST_LOGPROB).all()
        assert list(bench.engine.open_requests()) == []

    Bench(make).run(script)


def a_cut_softmax_has_its_logprobs_where_they_are_declared(make):
    async def script(bench):
        (one,) = bench.collect(0, top_k=2)
        await bench.end_of(one)
        for segment in one.segments:
            assert len(segment.columns.get('sampling_logprobs', ())) == len(segment.tokens) > 0

    bench = Bench(make)
    assert 'behavior' in bench.engine.capabilities.logprobs
    if 'sampling' in bench.engine.capabilities.logprobs:
        bench.run(script)


def a_cancelled_request_ends_as_cancelled_and_the_others_go_on(make):
    async def script(bench):
        first, second, third = bench.collect(0, 1, 2)
        await bench.pass_until_begun()
        bench.engine.cancel(request(0).request_id)
        bench.engine.cancel(request(2).request_id)
        bench.engine.cancel('0/0/99')  # not here
        await bench.end_of(first, second, third)
        assert [one.generation.finish_reason for one in (first, second, third)] == ['cancelled', 'length', 'cancelled']
        assert len(first.tokens()) < bench.longest
        assert len(second.tokens()) == bench.longest
        (again,) = bench.collect(0)
        await bench.end_of(again)
        assert len(again.tokens()) == bench.longest

    if Bench(make).engine.capabilities.abort:
        Bench(make).run(script)


def a_pause_delivers_everything_and_a_resume_continues(make):
    async def script(bench):
        found = bench.collect(0, 1, 2)
        await bench.pass_until_begun()
        await bench.engine.pause()
        await bench.pass_time(0.001)  # the coroutines take what was delivered
        before = [one.tokens() for one in found]
        assert any(before)
        await bench.pass_time(1.0)
        assert [one.tokens() for one in found] == before
        assert [one.sample for one in bench.engine.open_requests()] == [
            one.sample for one in found if one.generation.finish_reason is None
        ]
        bench.engine.resume()
        await bench.end_of(*found)
        return [one.tokens() for one in found]

    async def undisturbed(bench):
        found = bench.collect(0, 1, 2)
        await bench.end_of(*found)
        return [one.tokens() for one in found]

    if set(Bench(make).engine.capabilities.pause_modes) & {'retract', 'in_place'}:
        assert Bench(make).run(script) == Bench(make).run(undisturbed)


def a_pause_that_aborts_ends_requests_and_keeps_what_was_delivered(make):
    async def script(bench):
        found = bench.collect(0, 1, 2)
        await bench.pass_until_begun()
        await bench.engine.pause()
        await bench.pass_time(0.001)
        assert {one.generation.finish_reason for one in found} == {'cancelled'}
        assert any(one.tokens() for one in found)
        assert list(bench.engine.open_requests()) == []
        bench.engine.resume()
        (again,) = bench.collect(0)
        await bench.end_of(again)
        assert again.tokens()[: len(found[0].tokens())] == found[0].tokens()

    if Bench(make).engine.capabilities.pause_modes == ('abort',):
        Bench(make).run(script)


def staging_does_not_disturb_decoding(make):
    async def script(bench, stages):
        found = bench.collect(0, 1, 2)
        await bench.pass_time(0.025)
        if stages:
            await bench.engine.stage(bench.subject.published(1, False))
        await bench.end_of(*found)
        assert bench.engine.status().policy_version == 0
        decoded = [(e['time'], e['kind']) for e in bench.log.events if e['lane'] == bench.engine.name]
        if not isinstance(bench.clock, VirtualClock):
            decoded = []  # real time does not repeat
        return decoded, [(one.tokens(), one.versions()) for one in found]

    if Bench(make).engine.capabilities.staging:
        assert Bench(make).run(lambda b: script(b, True)) == Bench(make).run(lambda b: script(b, False))


def a_swap_changes_the_version_of_later_tokens_and_tells_the_pause(make):
    async def script(bench):
        found = bench.collect(0, 1, 2)
        await bench.pass_until_begun()
        before = bench.clock.now()
        pause_s = await bench.load(1)
        assert 0 <= pause_s <= bench.clock.now() - before
        assert bench.engine.status().policy_version == 1
        await bench.end_of(*found)
        assert {version for one in found for version in one.versions()} == {0, 1}
        for one in found:
            assert one.versions() == sorted(one.versions())
            assert len(one.tokens()) == bench.longest
        (plain,) = bench.collect(3)
        await bench.end_of(plain)
        assert set(plain.versions()) == {1}
        return [one.tokens() for one in found]

    async def undisturbed(bench):
        found = bench.collect(0, 1, 2)
        await bench.end_of(*found)
        return [one.tokens() for one in found]

    if Bench(make).engine.capabilities.spans:
        assert Bench(make).run(script) != Bench(make).run(undisturbed)


def interruptions_by_equal_weights_change_no_token(make):
    async def script(bench, times):
        found = bench.collect(0, 1, 2, 3)
        for version in range(times):
            await bench.pass_time(0.02)
            await bench.load(version + 1, equal=True)
        await bench.end_of(*found)
        return [one.tokens() for one in found]

    assert Bench(make).run(lambda b: script(b, 3)) == Bench(make).run(lambda b: script(b, 0))


def a_recomputed_answer_continues_as_its_prefix_does(make):
    """After a swap, the rest of an answer is what the new weights give to its beginning."""

    async def script(bench):
        (found,) = bench.collect(0)
        await bench.pass_until_begun()
        await bench.load(1)
        await bench.end_of(found)
        old = [segment for segment in found.segments if segment.policy_version == 0]
        assert 0 < sum(len(segment.tokens) for segment in old) < bench.longest
        (again,) = bench.collect(0, prefix=old)
        await bench.end_of(again)
        assert again.tokens() == [int(t) for s in found.segments if s.policy_version == 1 for t in s.tokens]
        assert set(again.versions()) == {1}

    if 'recompute' in Bench(make).engine.capabilities.update:
        Bench(make).run(script)


def an_engine_that_waits_interrupts_no_answer(make):
    """What has begun ends under the weights before, and what has not begins under the new ones."""

    async def script(bench):
        found = bench.collect(*range(12))
        await bench.pass_time(0.045)
        await bench.load(1)
        begun = {one.sample for one in found if one.tokens()}
        assert all(len(one.tokens()) == bench.longest for one in found if one.sample in begun)
        await bench.end_of(*found)
        assert 0 < len(begun) < 12
        assert [set(one.versions()) for one in found] == [{0 if one.sample in begun else 1} for one in found]

    if 'wait' in Bench(make).engine.capabilities.update:
        Bench(make).run(script)


def logprobs_are_those_of_the_weights(make):
    """Every token, also around a swap, has the log-prob that the weights of its version give it."""

    async def script(bench):
        found = bench.collect(0, 1, temperature=1.0)
        await bench.pass_until_begun()
        await bench.load(1)
        await bench.end_of(*found)
        seen = []
        for one in found:
            answer, versions = np.array(one.tokens()), np.array(one.versions())
            expected = bench.subject.score(PROMPT, answer, versions)
            recorded = np.concatenate([segment.behavior_logprobs for segment in one.segments])
            assert set(versions) == {0, 1}
            assert np.abs(recorded - expected).max() < bench.subject.tolerance
            shifted = np.roll(versions, 1)  # the switch one token later: the check would see it
            shifted[0] = versions[0]
            seen.append(np.abs(recorded - bench.subject.score(PROMPT, answer, shifted)).max())
        assert max(seen) > 1e-2  # of one token it may be less by chance

    if Bench(make).subject.score is not None:
        Bench(make).run(script)


def a_prefix_is_continued_and_not_repeated(make):
    async def whole(bench):
        (one,) = bench.collect(0)
        await bench.end_of(one)
        return one.segments, one.tokens()

    segments, tokens = Bench(make).run(whole)
    first = dataclasses.replace(
        segments[0], tokens=np.array(tokens[:1], np.int32), behavior_logprobs=segments[0].behavior_logprobs[:1]
    )

    async def rest(bench):
        (one,) = bench.collect(0, prefix=[first])
        await bench.end_of(one)
        return one.tokens()

    assert Bench(make).run(rest) == tokens[1:]


def open_requests_are_in_the_order_of_service(make):
    async def script(bench):
        found, ended = bench.collect(*range(9)), []
        for one in found:
            one.on_end = lambda one: ended.append(one.sample)
        await bench.pass_time(0.16)
        while not ended:  # a real server has a speed of its own
            await bench.pass_time(0.02)
        await bench.engine.pause()
        await bench.pass_time(0.001)
        order = [request.sample for request in bench.engine.open_requests()]
        assert sorted([*ended, *order]) == list(range(9))  # none lost, none twice
        assert 1 < len(order) < 9
        bench.engine.resume()
        await bench.end_of(*found)
        await bench.pass_time(0.001)
        assert order == sorted(order)  # of arrival, and so of service
        if bench.subject.served is not None:
            assert list(dict.fromkeys(bench.subject.served())) == list(range(9))
        # answers of one length end in the order of service
        assert sorted(ended) == list(range(9))
        assert all(abs(place - sample) <= bench.setting.slack for place, sample in enumerate(ended)), ended

    if set(Bench(make).engine.capabilities.pause_modes) & {'retract', 'in_place'}:
        Bench(make).run(script)


def requests_of_a_pinned_version_are_decoded_with_its_weights(make):
    async def script(bench):
        await bench.engine.pin(bench.subject.published(1, False))
        training, pinned = bench.collect(0, 1), bench.collect(5, 6, version=1)
        await bench.pass_time(0.035)
        await bench.load(2)
        assert bench.engine.status().policy_version == 2
        await bench.end_of(*training, *pinned)
        assert {version for one in pinned for version in one.versions()} == {1}
        assert {version for one in training for version in one.versions()} <= {0, 2}
        assert [len(one.tokens()) for one in pinned] == [bench.longest] * 2
        bench.engine.unpin(1)
        return [one.tokens() for one in pinned]

    async def plain(bench):
        await bench.load(1)
        found = bench.collect(5, 6)
        await bench.end_of(*found)
        return [one.tokens() for one in found]

    if Bench(make).engine.capabilities.pinned:
        assert Bench(make).run(script) == Bench(make).run(plain)


def a_pause_holds_pinned_requests_too_and_loses_nothing(make):
    async def script(bench):
        await bench.engine.pin(bench.subject.published(1, False))
        found = bench.collect(0, 1, version=1)
        await bench.pass_until_begun()
        await bench.engine.pause()
        await bench.pass_time(0.001)
        before = [one.tokens() for one in found]
        assert any(before)
        assert [one.version for one in bench.engine.open_requests()] == [1, 1]
        await bench.pass_time(1.0)
        assert [one.tokens() for one in found] == before
        bench.engine.resume()
        await bench.pass_time(0.001)
        bench.engine.cancel(request(1, version=1).request_id)
        await bench.end_of(*found)
        assert [one.generation.finish_reason for one in found] == ['length', 'cancelled']
        assert len(found[0].tokens()) == bench.longest
        assert list(bench.engine.open_requests()) == []

    can = Bench(make).engine.capabilities
    if can.pinned and can.abort and set(can.pause_modes) & {'retract', 'in_place'}:
        Bench(make).run(script)


CHECKS = [
    an_answer_is_whole_and_aligned,
    a_cut_softmax_has_its_logprobs_where_they_are_declared,
    a_cancelled_request_ends_as_cancelled_and_the_others_go_on,
    a_pause_delivers_everything_and_a_resume_continues,
    a_pause_that_aborts_ends_requests_and_keeps_what_was_delivered,
    staging_does_not_disturb_decoding,
    a_swap_changes_the_version_of_later_tokens_and_tells_the_pause,
    interruptions_by_equal_weights_change_no_token,
    a_recomputed_answer_continues_as_its_prefix_does,
    an_engine_that_waits_interrupts_no_answer,
    logprobs_are_those_of_the_weights,
    a_prefix_is_continued_and_not_repeated,
    open_requests_are_in_the_order_of_service,
    requests_of_a_pinned_version_are_decoded_with_its_weights,
    a_pause_holds_pinned_requests_too_and_loses_nothing,
]
