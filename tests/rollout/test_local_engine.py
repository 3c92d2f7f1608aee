"""The scheduler between two dispatches, with a backend whose tokens are known (tests/toys.py)."""

import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.backend import DecodeOutput
from areal_jax.rollout.stream import IN_A_SERVER, LogprobError
from areal_jax.types import PublishedWeights, Segment
from tests.rollout.engine_rig import DRAW, SAMPLING, Rig, collect, request
from tests.toys import PRICES, STOP, length, token


def test_the_prompt_of_a_group_is_prefilled_once_even_when_its_samples_come_in_turns():
    async def script(rig):
        running = [rig.engine.generate(request(sample)) for sample in range(6)]
        return [await collect(r) for r in running]

    rig = Rig(slots=2)
    segments = rig.run(script)
    assert [sum(len(s.tokens) for s in one) for one in segments] == [length(DRAW, sample) for sample in range(6)]
    assert rig.backend.prefills == [[[1, 2]]]  # the prompt without its last token, once for six samples


def test_slots_are_refilled_while_others_decode():
    async def script(rig):
        for one in [rig.engine.generate(request(sample)) for sample in range(4)]:
            await collect(one)

    rig = Rig(slots=2)
    rig.run(script)
    # lengths 7, 3, 6, 2: slot 0 serves 7 tokens, slot 1 serves 3 and then 6, slot 0 the last 2: 9 dispatches, not 13
    assert len(rig.kinds('decode')) == 9


@pytest.mark.parametrize('kv_policy', ['recompute', 'keep'])
@pytest.mark.parametrize('after', [1, 3, 5])
def test_new_weights_split_the_answer_into_segments_at_a_dispatch(kv_policy, after):
    async def script(rig):
        running = rig.engine.generate(request(0))
        await rig.pass_time(after * PRICES['decode'])
        await rig.load(1, (3, 1))
        return await collect(running)

    rig = Rig(kv_policy=kv_policy)
    first, second = rig.run(script)
    assert (first.policy_version, second.policy_version) == (0, 1)
    split = len(first.tokens)
    assert 1 <= split <= 6
    expected = [token(0 if i < split else 3, DRAW, 0, 3 + i) for i in range(6)] + [STOP]
    assert [*first.tokens, *second.tokens] == expected
    (interrupt,) = rig.kinds('interrupt')
    assert interrupt['requests'] == [f'0/{DRAW}/0']
    rebuilt = [[[1, 2]], [[3, *first.tokens[:-1].tolist()]]]  # the prompt of the group, then what is its own
    assert rig.backend.prefills == [[[1, 2]], *(rebuilt if kv_policy == 'recompute' else [])]
    stale = second.behavior_logprobs.min() < -1000
    assert stale == (kv_policy == 'keep')


@pytest.mark.parametrize('kv_policy', ['recompute', 'keep'])
def test_interrupting_with_equal_weights_changes_nothing_but_versions(kv_policy):
    async def script(rig, times):
        running = [rig.engine.generate(request(sample)) for sample in range(5)]
        for version in range(times):
            await rig.pass_time(0.013)
            await rig.load(version + 1, (0, 0))
        return [np.concatenate([s.tokens for s in await collect(r)]).tolist() for r in running]

    rig = Rig(slots=3, kv_policy=kv_policy)
    assert rig.run(lambda r: script(r, 4)) == Rig(slots=3).run(lambda r: script(r, 0))
    assert len(rig.kinds('interrupt')) >= 2


def test_new_weights_that_wait_are_not_held_up_by_what_has_not_begun():
    """A begun answer behind one that has not begun gets a slot and ends; a pause ends the wait."""

    async def script(rig, pauses):
        begun = Segment(np.array([token(0, DRAW, 1, 3)], np.int32), np.zeros(1, np.float32), 0)
        running = [rig.engine.generate(request(0)), rig.engine.generate(request(2))]
        await rig.pass_time(0.015)
        running.append(rig.engine.generate(request(1, prefix=(begun,))))  # as from an engine that has died
        await rig.engine.stage(PublishedWeights(1, '', (3, 1)))
        if pauses:
            await rig.engine.pause()
        await rig.engine.swap(1)
        rig.engine.resume()
        return [[s.policy_version for s in await collect(one)] for one in running]

    assert Rig(slots=1, kv_policy='wait').run(lambda rig: script(rig, False)) == [[0], [1], [0]]
    assert Rig(slots=1, kv_policy='wait').run(lambda rig: script(rig, True)) == [[0, 1], [1], [1]]


def test_a_request_with_a_prefix_goes_on_after_it():
    prefix = Segment(np.array([5, 6], np.int32), np.zeros(2, np.float32), 0)

    async def script(rig):
        return await collect(rig.engine.generate(request(0, prefix=(prefix,))))

    (segment,) = Rig().run(script)
    assert len(segment.tokens) == 7 - 2  # the budget counts what was there
    assert segment.tokens[0] == token(0, DRAW, 0, 5)


def test_a_paused_engine_has_delivered_everything_and_goes_on_in_the_same_order():
    async def script(rig):
        running = [rig.engine.generate(request(sample)) for sample in range(3)]
        await rig.pass_time(0.025)
        await rig.engine.pause()
        before, dispatches = [r.tokens[3:].tolist() for r in running], len(rig.kinds('decode'))
        delivered = [
            (await anext(r)).tokens.tolist() if begun else [] for r, begun in zip(running, before, strict=True)
        ]
        await rig.pass_time(1.0)
        assert len(rig.kinds('decode')) == dispatches
        assert [r.sample for r in rig.engine.open_requests()] == [0, 1, 2][: len(rig.engine.open_requests())]
        rig.engine.resume()
        return before, delivered, [await collect(r) for r in running]

    before, delivered, segments = Rig(slots=2).run(script)
    assert before == delivered
    assert any(before)
    sizes = [len(first) + sum(len(s.tokens) for s in rest) for first, rest in zip(delivered, segments, strict=True)]
    assert sizes == [length(DRAW, sample) for sample in range(3)]


def test_an_engine_that_stands_is_paused_at_once_and_after_a_resume_again():
    async def script(rig):
        running = rig.engine.generate(request(0))
        for resume in (False, True, True):
            await rig.engine.pause()
            assert not rig.engine.status().running
            if resume:
                rig.engine.resume()
        await rig.engine.pause()  # before the engine has noticed that it may continue
        await rig.pass_time(1.0)
        assert not rig.kinds('decode')
        rig.engine.resume()
        return await collect(running)

    assert sum(len(s.tokens) for s in Rig().run(script)) == length(DRAW, 0)


@pytest.mark.parametrize('after_s', [0.0, 0.025])  # before and between its dispatches
def test_cancel_frees_the_slot_and_keeps_what_was_generated(after_s):
    async def script(rig):
        first, second = rig.engine.generate(request(0)), rig.engine.generate(request(2))
        await rig.pass_time(after_s)
        rig.engine.cancel(first.request_id)
        rig.engine.cancel('0/4/99')  # not here: ignored
        again = rig.engine.generate(request(0))  # of the same id, and not cancelled
        return [await collect(running) for running in (first, second, again)], first.finish_reason, again.finish_reason

    (first, second, again), reason, reason_of_again = Rig(slots=1).run(script)
    # 8 ms of prefill, 10 ms a token: after 25 ms one dispatch is complete, and the one under way is lost
    assert sum(len(s.tokens) for s in first) == (1 if after_s else 0)
    assert sum(len(s.tokens) for s in second) == length(DRAW, 2)
    assert sum(len(s.tokens) for s in again) == length(DRAW, 0)
    assert (reason, reason_of_again) == ('cancelled', 'stop')


def test_a_request_that_is_open_is_not_accepted_again():
    async def script(rig):
        rig.engine.generate(request(0))
        with pytest.raises(RuntimeError, match=r'engine/0: request 0/4/0 is open already'):
            rig.engine.generate(request(0))

    Rig().run(script)


def test_only_the_staged_version_is_swapped_in():
    async def script(rig):
        with pytest.raises(RuntimeError, match=r'engine/0: version 1 is to be swapped in, and nothing is staged'):
            await rig.engine.swap(1)
        await rig.engine.stage(PublishedWeights(2, '', (3, 2)))
        with pytest.raises(RuntimeError, match='and version 2 is staged'):
            await rig.engine.swap(1)

    Rig().run(script)


def test_the_status_counts_requests_and_the_speed_of_decoding():
    async def script(rig):
        running = [rig.engine.generate(request(sample)) for sample in range(3)]
        await rig.pass_time(0.02)  # 8 ms of prefill, one dispatch of 10 ms
        before = rig.engine.status()
        for one in running:
            await collect(one)
        return before, rig.engine.status()

    before, after = Rig(slots=2).run(script)
    assert (before.name, before.policy_version, before.running, before.waiting) == ('engine/0', 0, 2, 1)
    assert (before.tokens_per_s, before.devices) == (pytest.approx(200), ('toy',))  # 2 tokens in 10 ms
    # lengths 7, 3, 6: slots decode 7 and 3 + 6 = 9 tokens in 9 dispatches of 10 ms
    assert after.tokens_per_s == pytest.approx(16 / 0.09)
    assert (after.running, after.waiting) == (0, 0)


def test_a_prompt_that_does_not_fit_is_named_with_the_fix():
    with pytest.raises(ValueError, match=r'draw 4: a prompt of 30 tokens and 7 new ones.*=32; raise it to 37'):
        Rig().engine.generate(request(0, prompt=range(30)))


def test_a_cut_request_has_both_logprobs_and_any_other_has_one():
    # the toy keeps half of the mass: log(p / .5) = log p + log 2
    async def script(rig):
        cut = rig.engine.generate(request(0, sampling=dataclasses.replace(SAMPLING, top_k=2)))
        whole, greedy = (
            rig.engine.generate(request(sample, sampling=dataclasses.replace(SAMPLING, **fields)))
            for sample, fields in ((1, {}), (3, {'top_p': 0.5, 'temperature': 0.0}))
        )
        await rig.pass_time(0.025)
        await rig.load(1, (3, 1))
        return [await collect(running) for running in (cut, whole, greedy)]

    cut, whole, greedy = Rig().run(script)
    assert [segment.policy_version for segment in cut] == [0, 1]
    for segment in cut:
        drawn = segment.columns['sampling_logprobs']
        assert drawn.dtype == np.float32
        np.testing.assert_allclose(drawn, segment.behavior_logprobs + np.log(2), rtol=1e-6)
    assert [segment.columns for segment in whole + greedy] == [{}] * len(whole + greedy)


def test_a_greedy_request_with_a_bias_has_both_logprobs():
    biased = dataclasses.replace(SAMPLING, temperature=0.0, logit_bias=((1, 2.0),))

    async def script(rig):
        return await collect(rig.engine.generate(request(0, sampling=biased)))

    (segment,) = Rig().run(script)
    np.testing.assert_allclose(segment.columns['sampling_logprobs'], segment.behavior_logprobs + np.log(2), rtol=1e-6)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 2.0**-6])
@pytest.mark.parametrize('kind', ['logprobs', 'sampling_logprobs'])
def test_a_logprob_that_no_policy_has_ends_the_run_before_it_is_delivered(value, kind):
    delivered = []

    async def script(rig):
        generate = rig.backend.generate

        def broken(weights, state, rows, steps):
            state, output = generate(weights, state, rows, steps)
            if weights.version == 2:
                (output.columns | {'logprobs': output.logprobs})[kind][0, 1] = value
            return state, output

        rig.backend.generate = broken
        first, second = rig.engine.generate(request(0)), rig.engine.generate(request(2))
        await rig.pass_time(0.015)
        await rig.load(2, (3, 2))
        async for segment in second:
            delivered.append(segment.policy_version)
        await collect(first)

    message = rf'^engine/0, request 0/4/2, version 2: the log-prob of a generated token is {value}; lower optimizer'
    with pytest.raises(LogprobError, match=message):
        Rig().run(script)
    assert delivered == [0]


@pytest.mark.parametrize('steps', [1, 3])
def test_a_request_fails_alone_where_the_engine_is_a_server_s(steps):
    delivered = []

    async def take(running):
        async for segment in running:
            delivered.append(len(segment.tokens))

    async def script(rig):
        generate = rig.backend.generate

        def broken(weights, state, rows, steps):
            state, output = generate(weights, state, rows, steps)
            for row, one in enumerate(rows):
                if one.request.sample == 2 and one.position >= 4:
                    output.logprobs[:, row] = np.nan
            return state, output

        rig.backend.generate = broken
        failing = rig.engine.generate(request(2))
        others = [rig.engine.generate(request(sample)) for sample in (0, 1)]
        with pytest.raises(LogprobError, match=r'request 0/4/2, version 0: .* is nan; get the files'):
            await take(failing)
        tokens = [await collect(one) for one in others]
        assert rig.engine.status().running == 0
        rig.backend.generate = generate
        return tokens, await collect(rig.engine.generate(request(2)))

    rig = Rig(decode_steps=steps, slots=3, failure=IN_A_SERVER)
    others, again = rig.run(script)
    sound = Rig(decode_steps=steps, slots=3)

    async def plain(rig):
        return [await collect(one) for one in [rig.engine.generate(request(sample)) for sample in (0, 1, 2)]]

    tokens_of = lambda answers: [[one.tokens.tolist() for one in segments] for segments in answers]
    assert tokens_of([*others, again]) == tokens_of(sound.run(plain))
    # prompt of 3 tokens: the first dispatch, which begins at position 2, is sound; what it brought is delivered
    assert delivered == ([2] if steps == 1 else [3])


def test_what_stands_in_dead_places_is_not_looked_at():
    logprobs = np.array([[-1.0, np.nan], [np.nan, 0.005]], np.float32)  # rounding may exceed 0 by that much
    valid = np.array([[True, False], [False, True]])
    assert DecodeOutput(np.zeros((2, 2), np.int32), logprobs, valid).unsound() == []
    assert [slot for slot, _ in DecodeOutput(np.zeros((2, 2), np.int32), logprobs, ~valid).unsound()] == [1, 0]


def test_a_swap_during_a_pause_needs_no_resume():
    async def script(rig):
        running = rig.engine.generate(request(0))
        await rig.pass_time(0.035)
        await rig.engine.pause()
        await rig.load(1, (5, 1))
        assert rig.engine.status().policy_version == 1
        decoded = len(rig.kinds('decode'))
        await rig.pass_time(1.0)
        assert len(rig.kinds('decode')) == decoded  # it still stands
        rig.engine.resume()
        return [segment.policy_version for segment in await collect(running)]

    assert Rig().run(script) == [0, 1]


@pytest.mark.parametrize(('mode', 'policy', 'rebuilt'), [
    ('in_place', None, False), ('in_place', 'keep', False), ('in_place', 'recompute', True), ('retract', 'keep', True),
])  # fmt: skip
def test_a_pause_in_place_keeps_the_cache_unless_a_swap_recomputes_it(mode, policy, rebuilt):
    async def script(rig):
        running = rig.engine.generate(request(0))
        await rig.pass_time(0.035)
        await rig.engine.pause(mode)
        assert rig.engine.status().running == (mode == 'in_place')
        before = len(rig.kinds('prefill'))
        if policy:
            await rig.engine.stage(PublishedWeights(1, '', (0, 0)))
            await rig.engine.swap(1, policy)
        rig.engine.resume()
        await collect(running)
        return len(rig.kinds('prefill')) > before

    assert Rig().run(script) is rebuilt


def test_an_answer_that_streams_comes_dispatch_by_dispatch():
    async def script(rig):
        running = rig.engine.generate(request(0))
        running.streams = True
        return [len(segment.tokens) for segment in await collect(running)]

    assert Rig(decode_steps=2).run(script) == [2, 2, 2, 1]


def test_two_requests_of_equal_noise_are_told_apart_by_their_names():
    async def script(rig):
        first, second = (rig.engine.generate(dataclasses.replace(request(0), name=name)) for name in 'ab')
        one, two = await collect(first), await collect(second)
        return one[0].tokens.tolist() == two[0].tokens.tolist(), rig.engine.open_requests()

    assert Rig().run(script) == (True, [])


def test_work_says_how_many_rows_and_positions_it_is():
    """Two prompts of 3 tokens, of which the last is decoded: a row that has n tokens sees n positions."""
    sizes = {'decode': [], 'prefill': []}
    note = lambda lane, work: sizes[work.kind].append((work.amount, *list(work.size.values())[:2])) or 0.01

    async def script(rig):
        first = rig.engine.generate(request(0, prompt=(1, 2, 3)))
        second = rig.engine.generate(request(3, prompt=(2, 2, 3)))
        await collect(first)
        await collect(second)

    Rig(decode_steps=2, prices={'decode': note, 'prefill': note}).run(script)
    [(_, tokens, positions)] = sizes['prefill']
    assert (tokens, positions) == (4, 2 * (1 + 2))
    assert sizes['decode'] == [(2, 2, 6), (2, 1, 5), (2, 1, 7), (2, 1, 9)]
