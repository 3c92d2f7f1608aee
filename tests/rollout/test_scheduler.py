"""Slots and their queue, and what an engine does next, seen from its log and from a backend that knows every position
(tests/toys.py)."""

import dataclasses
import random

import numpy as np
import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.rollout.blocks import BlockIndex, BlockPool, Match
from areal_jax.rollout.cache_table import CacheBudgetError
from areal_jax.rollout.running_request import RunningRequest
from areal_jax.rollout.scheduler import SlotTable
from areal_jax.rollout.stream import IN_A_SERVER, LogprobError
from areal_jax.types import GenerationRequest, SamplingParams, Segment
from tests.rollout.engine_rig import SAMPLING, Rig, collect, request
from tests.rollout.scripted import scripted
from tests.toys import PRICES, logprob, token


def of_length(new):
    """Answers of so many tokens."""
    return dataclasses.replace(SAMPLING, max_new_tokens=new, stop_tokens=())


def prompt_of(tokens):
    return range(1, tokens + 1)


def tokens_of(segments):
    return [int(one) for segment in segments for one in segment.tokens]


def prefilled(rig):
    return [(event['tokens'], event['rebuilt']) for event in rig.kinds('prefill')]


# Prompts are shared.


@scripted(Rig, slots=16, context_tokens=1024, block_tokens=64, largest_piece=1024)
async def test_a_group_of_16_over_three_admissions_with_an_interruption_prefills_its_prompt_twice(rig):
    start = lambda samples: [
        rig.engine.generate(request(sample, prompt=prompt_of(512), sampling=of_length(20))) for sample in samples
    ]
    running = start(range(6))
    await rig.pass_time(0.56)  # 512 ms of prefill, then 10 ms a token
    running += start(range(6, 11))
    await rig.pass_time(0.02)
    await rig.load(1, (3, 1))
    running += start(range(11, 16))
    segments = [await collect(one) for one in running]
    assert [len(tokens_of(one)) for one in segments] == [20] * 16
    (interrupt,) = rig.kinds('interrupt')
    assert len(interrupt['requests']) == 11
    own = sum(len(one[0].tokens) for one in segments[:11])  # generated before, computed again: the prompt's last
    #   token and all but the last of the answer
    shared = sum(tokens for tokens, _ in prefilled(rig))
    assert shared == 511 + 511 + own
    assert sum(rebuilt for _, rebuilt in prefilled(rig)) == 511 + own
    separate = 16 * 511 + 11 * 511 + own
    assert shared <= separate / 10


@scripted(Rig, slots=2)
async def test_members_that_wait_for_a_slot_find_the_prompt(rig):
    running = [rig.engine.generate(request(sample, prompt=prompt_of(14), sampling=of_length(5))) for sample in range(9)]
    for one in running:
        await collect(one)
    assert rig.backend.prefills == [[list(prompt_of(13))]]
    assert [len(event['requests']) for event in rig.kinds('prefill')] == [2, 2, 2, 2, 1]


@scripted(Rig)
async def test_the_same_prompt_in_another_draw_is_found_and_another_version_is_not(rig):
    for draw, version in ((1, 0), (2, 0), (3, 1)):
        if version:
            await rig.load(version, (3, 1))
        await collect(rig.engine.generate(request(0, draw=draw)))
    assert rig.backend.prefills == [[[1, 2]], [[1, 2]]]


# Turns of a conversation.


def talk(turns, *, samples=1, fork=False, swap_after=None, salts=('',), kv_policy='recompute', **rig):
    """Each turn is behind the one before, its answer and two further tokens; returns the rig and cached tokens."""

    async def script(rig):
        cached = []
        for sample in range(samples):
            said = list(prompt_of(9))
            for turn in range(turns):
                one = request(sample, draw=turn, prompt=said, sampling=of_length(6))
                one = dataclasses.replace(one, cache_salt=salts[turn % len(salts)])
                running = rig.engine.generate(one)
                if swap_after == turn:
                    await rig.pass_time(0.02)
                    await rig.load(1, (3, 1))
                await collect(running)
                cached.append(running.cached_tokens)
                said = [*running.tokens.tolist(), 50, 51]
            if fork:
                running = rig.engine.generate(request(9, draw=9, prompt=[*prompt_of(9), 60], sampling=of_length(2)))
                await collect(running)
                cached.append(running.cached_tokens)
        rig.check_blocks()
        return cached

    rig = Rig(slots=2, context_tokens=64, kv_policy=kv_policy, **rig)
    return rig, rig.run(script)


def test_a_turn_computes_what_is_new_and_the_last_token_of_the_answer():
    # prompt 9, answer 6: 14 positions are in the cache, and the next prompt, of 17 tokens, needs 16
    rig, cached = talk(5)
    assert [tokens for tokens, _ in prefilled(rig)] == [8, 2, 2, 2, 2]
    assert cached == [0, 14, 22, 30, 38]
    assert sum(event['prompt_tokens'] for event in rig.kinds('prefill')) == 16


def test_a_fork_shares_whole_blocks_and_another_salt_nothing():
    _, cached = talk(2, fork=True)
    assert cached == [0, 14, 8]  # its prefix of 9 tokens ends inside the third block of 4
    assert talk(3, salts='ab')[1] == [0, 0, 14]  # the third begins as the first


def test_an_answer_that_was_interrupted_is_kept_as_far_as_it_was_computed_again():
    for kv_policy, cached in (('recompute', [0, 14, 22]), ('keep', [0, 0, 22])):
        rig, found = talk(3, swap_after=0, kv_policy=kv_policy)
        assert rig.kinds('interrupt')
        assert found == cached


@scripted(Rig, slots=2, cache_blocks=14, context_tokens=56)
async def test_the_conversation_that_was_not_used_for_longest_gives_its_blocks(rig):
    said, cached = {name: [10 * name + one for one in range(9)] for name in range(1, 4)}, {}
    for turn, name in enumerate((1, 2, 1, 3, 1, 3, 2)):  # up to 25, 31 and 25 tokens, in 14 blocks of 4
        running = rig.engine.generate(request(0, draw=turn, prompt=said[name], sampling=of_length(6)))
        await collect(running)
        cached.setdefault(name, []).append(running.cached_tokens)
        said[name] = [*running.tokens.tolist(), 50, 51]
    rig.check_blocks()
    assert cached == {1: [0, 14, 22], 2: [0, 0], 3: [0, 14]}
    assert not rig.kinds('preempt')


def test_prefill_of_a_turn_is_paid_by_what_it_computes():
    amounts = []
    note = lambda lane, work: amounts.append((work.amount, work.size['tokens'], work.size['positions'])) or 0.01
    talk(2, prices=PRICES | {'prefill': note})
    assert amounts == [(8, 8, 36), (8, 2, 15 + 16)]


@scripted(Rig, failure=IN_A_SERVER)
async def test_an_answer_that_fails_is_not_kept(rig):
    generate = rig.backend.generate

    def broken(weights, state, rows, steps):
        state, output = generate(weights, state, rows, steps)
        if rows[0].position >= 12:
            output.logprobs[:] = np.nan
        return state, output

    rig.backend.generate = broken
    failing = rig.engine.generate(request(0, prompt=prompt_of(9), sampling=of_length(6)))
    with pytest.raises(LogprobError):
        await collect(failing)
    rig.backend.generate = generate
    turn = rig.engine.generate(request(1, prompt=[*failing.tokens.tolist(), 50], sampling=of_length(2)))
    await collect(turn)
    assert turn.cached_tokens == 8  # the prompt alone


# Prefill goes in pieces.


@pytest.mark.parametrize('company', [False, True])
@scripted(Rig, context_tokens=128, largest_piece=16)
async def test_a_long_prefill_is_cut_at_the_same_places_and_stops_nobody(rig, company):
    begun = (Segment(np.array(range(5, 40), np.int32), np.zeros(35, np.float32), 0),)
    running = [rig.engine.generate(request(1, draw=1, sampling=of_length(40)))] if company else []
    await rig.pass_time(0.035)
    long = request(0, prompt=prompt_of(71), prefix=begun, sampling=of_length(40))
    running.append(rig.engine.generate(long))
    for one in running:
        await collect(one)
    pieces = [piece for prefill in rig.backend.prefills for piece in prefill if len(piece) > 2]
    # 70 tokens of prompt, then its last one and 34 of the answer
    assert [len(piece) for piece in pieces] == [16, 16, 16, 16, 6, 16, 16, 3]
    assert [one for piece in pieces for one in piece] == [*prompt_of(71), *range(5, 39)]
    kinds = [event['kind'] for event in rig.log.events if event['kind'] in ('prefill', 'decode')]
    first = kinds.index('prefill', 1) if company else 0
    expected = [*['prefill'] * 4, 'decode'] * 2 if company else ['prefill'] * 8  # 4 of the longest pieces at a time
    assert kinds[first : first + len(expected)] == expected
    if company:
        assert rig.backend.batches[-1] == 1
        assert set(rig.backend.batches) == {1, 2}  # a row decodes when its tokens are in the cache


@scripted(Rig, slots=5, largest_piece=16)
async def test_as_many_pieces_go_at_once_as_one_bucket_holds(rig):
    running = [
        rig.engine.generate(request(0, draw=draw, prompt=range(draw, draw + 7), sampling=of_length(2)))
        for draw in range(5)
    ]
    for one in running:
        await collect(one)
    assert [len(pieces) for pieces in rig.backend.prefills] == [2, 2, 1]  # 6 tokens each
    assert [event['bucket'] for event in rig.kinds('prefill')] == [16, 16, 8]
    assert rig.backend.batches[:2] == [5, 5]  # every slot is taken before the first dispatch of decoding


@pytest.mark.parametrize(
    ('prompts', 'buckets'), [((7, 5), [8, 8]), ((7, 7), [16]), ((9, 2), [8, 8]), ((10, 2), [16]), ((10, 2, 7), [16])]
)
@scripted(Rig, slots=5, largest_piece=16)
async def test_pieces_that_would_fill_a_bucket_badly_go_in_smaller_ones(rig, prompts, buckets):
    running = [
        rig.engine.generate(request(0, draw=draw, prompt=range(20 * draw, 20 * draw + n), sampling=of_length(2)))
        for draw, n in enumerate(prompts)
    ]
    for one in running:
        await collect(one)
    # buckets of 8 and 16; the last token of a prompt is not prefilled
    assert [event['bucket'] for event in rig.kinds('prefill')] == buckets


@pytest.mark.parametrize('cancelled', [0, 1])
@scripted(Rig, slots=2, context_tokens=128, largest_piece=16)
async def test_cancelling_a_request_whose_prefill_is_under_way_leaves_the_prompt_to_its_group(rig, cancelled):
    running = [rig.engine.generate(request(sample, prompt=prompt_of(71), sampling=of_length(9))) for sample in range(2)]
    await rig.pass_time(0.04)  # 16 ms a piece: two of five
    rig.engine.cancel(running[cancelled].request_id)
    rig.check_blocks()
    segments = [await collect(one) for one in running]
    assert [len(tokens_of(one)) for one in segments] == ([0, 9] if cancelled == 0 else [9, 0])
    assert sum(tokens for tokens, _ in prefilled(rig)) == 70
    rig.check_blocks()


@scripted(Rig, kv_policy='keep', context_tokens=128, largest_piece=16)
async def test_a_swap_begins_a_prefill_again_even_where_the_cache_is_kept(rig):
    running = rig.engine.generate(request(0, prompt=prompt_of(71), sampling=of_length(9)))
    await rig.pass_time(0.04)  # two of five pieces, and the third is under way
    await rig.load(1, (3, 1))
    (segment,) = await collect(running)
    assert segment.behavior_logprobs.min() > -1000  # nothing of the old version is read
    assert sum(tokens for tokens, _ in prefilled(rig)) == 3 * 16 + 70


# The cache is full.


def contest(cache_blocks):
    """Two requests of 3 + 29 tokens, 4 steps a dispatch; one alone needs 8 blocks of 4."""

    async def script(rig):
        running = [rig.engine.generate(request(0, draw=draw, sampling=of_length(29))) for draw in range(2)]
        return [await collect(one) for one in running]

    rig = Rig(slots=2, decode_steps=4, cache_blocks=cache_blocks)
    return rig, [tokens_of(one) for one in rig.run(script)]


def test_the_request_that_was_admitted_last_gives_way_and_none_is_lost():
    rig, tokens = contest(cache_blocks=8)
    plain, expected = contest(cache_blocks=None)
    assert tokens == expected
    assert [len(one) for one in tokens] == [29, 29]
    # before the dispatch n both have 3 + 4 (n - 1) tokens and need ceil((2 + 4 n) / 4) blocks: 4 each for the third,
    # 5 for the fourth
    (preempt,) = rig.kinds('preempt')
    assert (preempt['request'], preempt['tokens'], preempt['engine']) == ('0/1/0', 15, 'engine/0')
    assert rig.backend.batches == [2] * 3 + [1] * 10
    assert prefilled(rig) == [(2, 0), (12, 12)]  # both have the same prompt, which is found again
    assert not plain.kinds('preempt')


def test_a_cache_that_can_not_hold_one_sequence_is_refused_when_the_engine_is_built():
    with pytest.raises(CacheBudgetError, match=r'rollout.cache_tokens=28 .*rollout.context_tokens=32'):
        Rig(cache_blocks=7)


@scripted(Rig, slots=1, cache_blocks=8, decode_steps=2)
async def test_the_prompt_of_waiting_requests_is_given_up_before_a_running_answer(rig):
    group = [rig.engine.generate(request(sample, sampling=of_length(5))) for sample in range(2)]
    long = rig.engine.generate(request(0, draw=1, prompt=(7, 8, 9), sampling=of_length(29)))
    for one in (*group, long):
        await collect(one)
    # one slot: the first of the group, its prompt waits in one block for the second; later the long one needs all eight
    assert [len(piece) for pieces in rig.backend.prefills for piece in pieces] == [2, 2]
    assert not rig.kinds('preempt')


@pytest.mark.parametrize('group', [1, 4])
@scripted(Rig, slots=4, decode_steps=3)
async def test_the_default_cache_preempts_nobody(rig, group):
    running = [
        rig.engine.generate(request(sample, draw=draw, prompt=range(draw, draw + 6), sampling=of_length(26)))
        for draw in range(6)
        for sample in range(group)
    ]
    for one in running:
        await collect(one)
    assert not rig.kinds('preempt')


# What the log and the totals say.


@scripted(Rig, decode_steps=2)
async def test_positions_seen_and_read_are_counted(rig):
    await collect(rig.engine.generate(request(0, sampling=of_length(3))))

    # the last token of the prompt, at position 2, sees 3, the next one 4; the third and last sees 5. The toy reads
    # whole blocks of 4: one in the first dispatch, two in the second, in both steps
    assert [(e['positions'], e['positions_read'], e['bucket']) for e in rig.kinds('decode')] == [(7, 8, 1), (5, 16, 1)]
    totals = rig.engine.stream.totals
    assert (totals.positions, totals.positions_read) == (12, 24)


@scripted(Rig)
async def test_what_is_rebuilt_is_counted_apart_from_first_prefills(rig):
    running = [rig.engine.generate(request(sample, sampling=of_length(20))) for sample in range(2)]
    await rig.pass_time(0.03)
    await rig.load(1, (3, 1))
    running.append(rig.engine.generate(request(0, draw=1, prompt=(7, 8, 9))))
    for one in running:
        await collect(one)
    totals = rig.engine.stream.totals
    assert totals.prefilled_tokens == 2 + 2
    assert (totals.prefilled_tokens + totals.rebuilt_tokens) == sum(tokens for tokens, _ in prefilled(rig))
    assert totals.rebuilt_tokens == sum(rebuilt for _, rebuilt in prefilled(rig)) > 0
    seconds = sum(e['seconds'] for e in rig.kinds('run_done') if e['work'] == 'prefill')
    assert totals.prefilled_s + totals.rebuilt_s == pytest.approx(seconds)
    assert totals.prefilled_s > 0 < totals.rebuilt_s


# Everything together.


class Schedule:
    """Random arrivals, ends, cancels, swaps and pauses on an engine whose cache is small."""

    def __init__(self, seed, kv_policy, cache_blocks):
        self.chance, self.open, self.done = random.Random(seed), [], []
        self.rig = Rig(
            slots=6, kv_policy=kv_policy, decode_steps=3, cache_blocks=cache_blocks, context_tokens=64,
            largest_piece=self.chance.choice([4, 16, 64]),
        )  # fmt: skip
        for name in ('prefill', 'generate', 'copy'):
            setattr(self.rig.backend, name, self.checked(getattr(self.rig.backend, name)))
        self.weights = [0]  # w of each version

    def checked(self, call):
        def check_and_call(*args):
            self.rig.check_blocks()
            return call(*args)

        return check_and_call

    async def script(self, rig):
        for draw in range(30):
            action = self.chance.choice(['group', 'group', 'turn', 'turn', 'cancel', 'swap', 'pause', 'time', 'time'])
            if action == 'group':
                self.start_group(draw, range(draw, draw + self.chance.choice([1, 2, 5, 9, 17, 40])))
            elif action == 'turn' and self.open:
                self.take_turn(draw)
            elif action == 'cancel' and self.open:
                rig.engine.cancel(self.chance.choice(self.open)[1].request_id)
            elif action == 'swap':
                self.weights.append(self.chance.randrange(9))
                await rig.load(len(self.weights) - 1, (self.weights[-1], len(self.weights) - 1))
            elif action == 'pause':
                await rig.engine.pause()
                rig.check_blocks()
                rig.engine.resume()
            await rig.pass_time(self.chance.choice([0.001, 0.02, 0.1]))
            rig.check_blocks()
        for _, running in self.open:
            self.done.append(await collect(running))

    def take_turn(self, draw):
        """Goes on behind an answer, whether it has ended or not, or behind a part of it."""
        said = self.chance.choice(self.open[-4:])[1].tokens.tolist()
        said = said[: self.chance.choice([len(said), len(said), self.chance.randint(1, len(said))])][:60]
        self.start_group(draw, [*said, *range(40, 40 + self.chance.randint(1, 3))])

    def start_group(self, draw, prompt):
        for sample in range(self.chance.randint(1, 5)):
            new = self.chance.randint(1, 64 - len(prompt))
            one = request(sample, draw=draw, prompt=prompt, sampling=of_length(new))
            self.open.append((one, self.rig.engine.generate(one)))

    def check(self, kv_policy):
        for (one, running), segments in zip(self.open, self.done, strict=True):
            position = len(one.prompt_tokens)
            assert kv_policy != 'wait' or len({segment.policy_version for segment in segments}) < 2
            for segment in segments:
                w = self.weights[segment.policy_version]
                for found, said in zip(segment.tokens, segment.behavior_logprobs, strict=True):
                    assert found == token(w, one.draw, one.sample, position)
                    assert said == pytest.approx(logprob(w, position)) or kv_policy == 'keep'
                    position += 1
            assert running.finish_reason in ('length', 'cancelled')
            assert position == running.limit or running.finish_reason == 'cancelled'
        self.rig.check_blocks()
        stream = self.rig.engine.stream
        assert stream.table.is_empty
        assert stream.cache.pool.free == self.rig.backend.cache_blocks  # no block is lost


@pytest.mark.parametrize('kv_policy', ['recompute', 'keep', 'wait'])
@pytest.mark.parametrize('seed', range(12))
def test_any_schedule_gives_every_request_its_own_tokens_and_loses_no_block(seed, kv_policy):
    schedule = Schedule(seed, kv_policy, cache_blocks=16 + seed % 3 * 10)
    schedule.rig.run(schedule.script)
    schedule.check(kv_policy)


@pytest.mark.parametrize('seed', range(6))
def test_no_schedule_preempts_where_every_slot_has_the_cache_of_a_whole_sequence(seed):
    schedule = Schedule(seed, 'recompute', cache_blocks=None)
    schedule.rig.run(schedule.script)
    assert not schedule.rig.kinds('preempt')


@pytest.mark.parametrize('cache_blocks', [16, 26])
def test_what_is_kept_delays_and_preempts_nobody(cache_blocks, monkeypatch):
    """Where no prompt finds what is kept, every decision is that of an engine that keeps nothing."""
    monkeypatch.setattr(BlockIndex, 'find', lambda *args: Match((), None, 0, goes_on=False))

    def logs():
        schedules = [Schedule(seed, 'recompute', cache_blocks) for seed in range(3)]
        for schedule in schedules:
            schedule.rig.run(schedule.script)
        return [schedule.rig.log.events for schedule in schedules]

    keeping = logs()
    for name in ('keep', 'keep_prompt'):
        monkeypatch.setattr(BlockPool, name, lambda *args: None)
    assert logs() == keeping
    assert any(event['kind'] == 'preempt' for events in keeping for event in events)


def test_the_schedules_preempt_interrupt_rebuild_and_share():
    rigs = []
    for seed in range(12):
        schedule = Schedule(seed, 'recompute', cache_blocks=16)
        schedule.rig.run(schedule.script)
        rigs.append(schedule.rig)
    for kind in ('preempt', 'interrupt'):
        assert sum(len(rig.kinds(kind)) for rig in rigs) > 5
    assert sum(rebuilt for rig in rigs for _, rebuilt in prefilled(rig)) > 100
    assert sum(not tokens for rig in rigs for tokens, _ in prefilled(rig)) > 5  # admitted without any computation


# Slots and the queue before them.


def running(sample, draw=0):
    request = GenerationRequest(draw, sample, 0, np.array([draw, 2], np.int32), SamplingParams(9, 1.0, 0, 1.0, ()))
    return RunningRequest(request, VirtualClock({}, EventLog(), {}), 'engine/0', 11)


def pinned(sample, version):
    one = running(sample)
    one.request = dataclasses.replace(one.request, version=version)
    return one


def samples(requests):
    return [one.request.sample for one in requests]


def table_of(slots, count):
    table, requests = SlotTable(slots), [running(sample) for sample in range(count)]
    for one in requests:
        table.add(one)
    return table, requests


def fill(table):
    """Admits all that can be; their samples."""
    entered = []
    while (one := table.next_waiting()) is not None:
        table.enter(one)
        entered.append(one.request.sample)
    return entered


def by_slot(table):
    return [one and one.request.sample for one in table.slots]


def test_free_slots_are_filled_first_come_first_served_and_the_lowest_first():
    table, requests = table_of(3, 5)
    assert (fill(table), by_slot(table)) == ([0, 1, 2], [0, 1, 2])
    table.leave(requests[2])
    table.leave(requests[0])
    assert (fill(table), by_slot(table)) == ([3, 4], [3, 1, 4])
    assert (samples(table.open_requests()), table.taken, table.waiting) == ([3, 1, 4], 3, 0)
    assert (samples(table.admitted()), table.youngest()) == ([1, 3, 4], requests[4])


def test_a_request_is_removed_wherever_it_is():
    table, requests = table_of(2, 4)
    fill(table)
    assert table.remove(requests[1].request_id) is requests[1]
    assert table.remove(requests[3].request_id) is requests[3]  # it waited
    assert table.remove(requests[3].request_id) is None
    assert (samples(table.open_requests()), by_slot(table)) == ([0, 2], [0, None])
    assert (table.has_slot(requests[0]), table.has_slot(requests[2])) == (True, False)


def test_requeued_requests_come_first_in_slot_order():
    table, requests = table_of(3, 5)
    fill(table)
    table.remove(requests[1].request_id)
    fill(table)
    table.requeue()
    assert samples(table.open_requests()) == [0, 3, 2, 4]  # slots 0, 1, 2 and the one that waited
    assert (fill(table), by_slot(table)) == ([0, 3, 2], [0, 3, 2])


def test_a_request_that_gives_its_slot_up_is_the_next_to_get_one():
    table, _ = table_of(3, 5)
    fill(table)
    for expected in (2, 1):
        assert table.youngest().request.sample == expected
        table.return_to_queue(table.youngest())
    assert samples(table.open_requests()) == [0, 1, 2, 3, 4]
    assert fill(table) == [1, 2]


def test_slots_hold_requests_of_one_version_at_a_time():
    table = SlotTable(3)
    requests = [pinned(sample, version) for sample, version in enumerate((2, 2, 4, 2, 4))]
    for one in requests:
        table.add(one)
    assert (table.version(), fill(table)) == (2, [0, 1])  # 2 is next, and of another version
    table.leave(requests[0])
    assert (table.version(), fill(table)) == (2, [])
    table.leave(requests[1])
    assert (table.version(), fill(table)) == (4, [2])
    table.leave(requests[2])
    assert (table.version(), fill(table)) == (2, [3])
    assert not table.is_empty
    table.leave(requests[3])
    fill(table)
    table.leave(requests[4])
    assert table.is_empty
