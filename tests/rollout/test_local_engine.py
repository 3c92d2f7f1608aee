"""The scheduler between two dispatches, with a backend whose tokens are known (tests/toys.py)."""

import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.backend import DecodeOutput, SamplingError
from areal_jax.rollout.local_engine import MOST_FAILED
from areal_jax.rollout.stream import IN_A_SERVER, DispatchError, LogprobError
from areal_jax.types import PublishedWeights, Segment
from tests.rollout.engine_rig import DRAW, SAMPLING, Rig, collect, request
from tests.rollout.scripted import scripted
from tests.toys import PRICES, STOP, length, token


@scripted(Rig, slots=2)
async def test_the_prompt_of_a_group_is_prefilled_once_even_when_its_samples_come_in_turns(rig):
    running = [rig.engine.generate(request(sample)) for sample in range(6)]
    segments = [await collect(r) for r in running]
    assert [sum(len(s.tokens) for s in one) for one in segments] == [length(DRAW, sample) for sample in range(6)]
    assert rig.backend.prefills == [[[1, 2]]]  # the prompt without its last token, once for six samples


@scripted(Rig, slots=2)
async def test_slots_are_refilled_while_others_decode(rig):
    for one in [rig.engine.generate(request(sample)) for sample in range(4)]:
        await collect(one)
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


@scripted(Rig, slots=2)
async def test_a_paused_engine_has_delivered_everything_and_goes_on_in_the_same_order(rig):
    running = [rig.engine.generate(request(sample)) for sample in range(3)]
    await rig.pass_time(0.025)
    await rig.engine.pause()
    before, dispatches = [r.tokens[3:].tolist() for r in running], len(rig.kinds('decode'))
    delivered = [(await anext(r)).tokens.tolist() if begun else [] for r, begun in zip(running, before, strict=True)]
    await rig.pass_time(1.0)
    assert len(rig.kinds('decode')) == dispatches
    assert [r.sample for r in rig.engine.open_requests()] == [0, 1, 2][: len(rig.engine.open_requests())]
    rig.engine.resume()
    segments = [await collect(r) for r in running]
    assert before == delivered
    assert any(before)
    sizes = [len(first) + sum(len(s.tokens) for s in rest) for first, rest in zip(delivered, segments, strict=True)]
    assert sizes == [length(DRAW, sample) for sample in range(3)]


@scripted(Rig)
async def test_an_engine_that_stands_is_paused_at_once_and_after_a_resume_again(rig):
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
    assert sum(len(s.tokens) for s in await collect(running)) == length(DRAW, 0)


@pytest.mark.parametrize('after_s', [0.0, 0.025])  # before and between its dispatches
@scripted(Rig, slots=1)
async def test_cancel_frees_the_slot_and_keeps_what_was_generated(rig, after_s):
    first, second = rig.engine.generate(request(0)), rig.engine.generate(request(2))
    await rig.pass_time(after_s)
    rig.engine.cancel(first.request_id)
    rig.engine.cancel('0/4/99')  # not here: ignored
    again = rig.engine.generate(request(0))  # of the same id, and not cancelled
    running, (first, second, again) = (first, second, again), [await collect(one) for one in (first, second, again)]
    # 8 ms of prefill, 10 ms a token: after 25 ms one dispatch is complete, and the one under way is lost
    assert sum(len(s.tokens) for s in first) == (1 if after_s else 0)
    assert sum(len(s.tokens) for s in second) == length(DRAW, 2)
    assert sum(len(s.tokens) for s in again) == length(DRAW, 0)
    assert [one.finish_reason for one in running] == ['cancelled', 'stop', 'stop']


@scripted(Rig)
async def test_a_request_that_is_open_is_not_accepted_again(rig):
    rig.engine.generate(request(0))
    with pytest.raises(RuntimeError, match=r'engine/0: request 0/4/0 is open already'):
        rig.engine.generate(request(0))


@scripted(Rig)
async def test_only_the_staged_version_is_swapped_in(rig):
    with pytest.raises(RuntimeError, match=r'engine/0: version 1 is to be swapped in, and nothing is staged'):
        await rig.engine.swap(1)
    await rig.engine.stage(PublishedWeights(2, '', (3, 2)))
    with pytest.raises(RuntimeError, match='and version 2 is staged'):
        await rig.engine.swap(1)


@scripted(Rig, slots=2)
async def test_the_status_counts_requests_and_the_speed_of_decoding(rig):
    running = [rig.engine.generate(request(sample)) for sample in range(3)]
    await rig.pass_time(0.02)  # 8 ms of prefill, one dispatch of 10 ms
    before = rig.engine.status()
    for one in running:
        await collect(one)
    after = rig.engine.status()
    assert (before.name, before.policy_version, before.running, before.waiting) == ('engine/0', 0, 2, 1)
    assert (before.tokens_per_s, before.devices) == (pytest.approx(200), ('toy',))  # 2 tokens in 10 ms
    # lengths 7, 3, 6: slots decode 7 and 3 + 6 = 9 tokens in 9 dispatches of 10 ms
    assert after.tokens_per_s == pytest.approx(16 / 0.09)
    assert (after.running, after.waiting) == (0, 0)


def test_a_prompt_that_does_not_fit_is_named_with_the_fix():
    with pytest.raises(ValueError, match=r'draw 4: a prompt of 30 tokens and 7 new ones.*=32; raise it to 37'):
        Rig().engine.generate(request(0, prompt=range(30)))


@scripted(Rig)
async def test_a_cut_request_has_both_logprobs_and_any_other_has_one(rig):
    cut = rig.engine.generate(request(0, sampling=dataclasses.replace(SAMPLING, top_k=2)))
    whole, greedy = (
        rig.engine.generate(request(sample, sampling=dataclasses.replace(SAMPLING, **fields)))
        for sample, fields in ((1, {}), (3, {'top_p': 0.5, 'temperature': 0.0}))
    )
    await rig.pass_time(0.025)
    await rig.load(1, (3, 1))
    cut, whole, greedy = [await collect(running) for running in (cut, whole, greedy)]
    assert [segment.policy_version for segment in cut] == [0, 1]
    for segment in cut:
        drawn = segment.columns['sampling_logprobs']
        assert drawn.dtype == np.float32
        np.testing.assert_allclose(drawn, segment.behavior_logprobs + np.log(2), rtol=1e-6)
    assert [segment.columns for segment in whole + greedy] == [{}] * len(whole + greedy)


@scripted(Rig)
async def test_a_greedy_request_with_a_bias_has_both_logprobs(rig):
    biased = dataclasses.replace(SAMPLING, temperature=0.0, logit_bias=((1, 2.0),))

    (segment,) = await collect(rig.engine.generate(request(0, sampling=biased)))
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


@scripted(Rig)
async def test_a_swap_during_a_pause_needs_no_resume(rig):
    running = rig.engine.generate(request(0))
    await rig.pass_time(0.035)
    await rig.engine.pause()
    await rig.load(1, (5, 1))
    assert rig.engine.status().policy_version == 1
    decoded = len(rig.kinds('decode'))
    await rig.pass_time(1.0)
    assert len(rig.kinds('decode')) == decoded  # it still stands
    rig.engine.resume()
    assert [segment.policy_version for segment in await collect(running)] == [0, 1]


@pytest.mark.parametrize(('mode', 'policy', 'rebuilt'), [
    ('in_place', None, False), ('in_place', 'keep', False), ('in_place', 'recompute', True), ('retract', 'keep', True),
])  # fmt: skip
@scripted(Rig)
async def test_a_pause_in_place_keeps_the_cache_unless_a_swap_recomputes_it(rig, mode, policy, rebuilt):
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
    assert (len(rig.kinds('prefill')) > before) is rebuilt


@scripted(Rig, decode_steps=2)
async def test_an_answer_that_streams_comes_dispatch_by_dispatch(rig):
    running = rig.engine.generate(request(0))
    running.streams = True
    assert [len(segment.tokens) for segment in await collect(running)] == [2, 2, 2, 1]


@scripted(Rig)
async def test_two_requests_of_equal_noise_are_told_apart_by_their_names(rig):
    first, second = (rig.engine.generate(dataclasses.replace(request(0), name=name)) for name in 'ab')
    one, two = await collect(first), await collect(second)
    assert one[0].tokens.tolist() == two[0].tokens.tolist()
    assert rig.engine.open_requests() == []


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


# Dispatches that fail.


def fail_at(rig, *calls, of='generate'):
    """The named calls of the backend raise, counted from 1, after they have consumed the state."""
    dispatch, counted = getattr(rig.backend, of), []

    def broken(*arguments):
        counted.append(1)
        outcome = dispatch(*arguments)
        if len(counted) in calls:
            raise ArithmeticError('out of memory')
        return outcome

    setattr(rig.backend, of, broken)


async def outcome(running):
    """(tokens delivered, the error or None)."""
    segments = []
    try:
        async for segment in running:
            segments.append(segment)
    except DispatchError as error:
        return [int(token) for s in segments for token in s.tokens], str(error)
    return [int(token) for s in segments for token in s.tokens], None


async def answer_all(rig, samples):
    running = [rig.engine.generate(request(sample)) for sample in samples]
    return [await outcome(one) for one in running]


@pytest.mark.parametrize('of', ['generate', 'prefill'])
def test_the_answers_in_slots_end_and_the_others_are_what_they_always_are(of):
    told = []
    rig, sound = Rig(slots=2, on_failed_dispatch=told.append), Rig(slots=2)
    fail_at(rig, 1, of=of)
    found = rig.run(lambda rig: answer_all(rig, range(4)))
    expected = sound.run(lambda rig: answer_all(rig, range(4)))
    message = 'engine/0, request 0/4/{}: a dispatch failed (ArithmeticError: out of memory); send the request again'
    # both slots were taken; samples 2 and 3 waited, share the prompt, and find none of its blocks that were lost
    assert found[:2] == [([], message.format(0)), ([], message.format(1))]
    assert found[2:] == expected[2:]
    assert [str(error) for error in told] == ['out of memory']
    rig.check_blocks()
    assert rig.backend.prefills[-1][0] == [1, 2]  # the prompt was computed again


@scripted(Rig, on_failed_dispatch=lambda error: None)
async def test_what_was_delivered_before_stays_and_a_new_request_of_the_same_name_is_whole(rig):
    fail_at(rig, 4)
    # the toy backend goes on from what it has drawn for a request, which is another one the second time
    (lost, error), (whole, none) = [await outcome(rig.engine.generate(request(0))) for _ in range(2)]
    assert (len(lost), len(whole), none) == (3, 7, None)
    assert lost == whole[:3]
    assert 'a dispatch failed' in error


def test_an_engine_that_fails_again_and_again_ends():
    told = []
    rig = Rig(on_failed_dispatch=told.append)
    fail_at(rig, *range(1, 10))

    async def script(rig):
        return [await outcome(rig.engine.generate(request(sample))) for sample in range(9)]

    with pytest.raises(ArithmeticError, match='out of memory'):
        rig.run(script)
    assert len(told) == MOST_FAILED - 1


@scripted(Rig, on_failed_dispatch=lambda error: None)
async def test_a_dispatch_that_succeeds_begins_the_count_again(rig):
    fail_at(rig, 1, 2, 4, 5)
    # sample 5 has one token; its third dispatch succeeds, and two more failures are not three in a row
    succeeded = [(await outcome(rig.engine.generate(request(sample))))[1] is None for sample in (0, 1, 5, 5, 5, 5)]
    assert succeeded == [False, False, True, False, False, True]


def test_without_somebody_to_tell_the_engine_ends_at_once():
    rig = Rig()
    fail_at(rig, 1)
    with pytest.raises(ArithmeticError, match='out of memory'):
        rig.run(lambda rig: collect(rig.engine.generate(request(0))))


WRONG = {
    'temperature': (1e-9, 'temperature=1e-09 must lie between 1e-05 and 100000, or be 0'),
    'top_k': (-1, 'top_k=-1 must not be negative; use 0'),
    'top_p': (1.5, r'top_p=1\.5 must lie between 0 and 1$'),
    'min_p': (np.nan, 'min_p=nan must lie between 0 and 1'),
    'repetition_penalty': (0.0, r'repetition_penalty=0\.0 must lie between 0\.01 and 100'),
    'frequency_penalty': (3.0, r'frequency_penalty=3\.0 must lie between -2 and 2'),
    'presence_penalty': (np.inf, 'presence_penalty=inf must lie between -2 and 2'),
    'logit_scale': (0.0, r'logit_scale=0\.0 must lie between 1e-05 and 100000'),
    'min_new_tokens': (8, 'min_new_tokens=8 must lie between 0 and max_new_tokens=7'),
    'logit_bias': (((64, 1.0),), 'logit_bias has token 64; use tokens from 0 to 63'),
    'logit_bias ': (((1, np.nan),), 'logit_bias of token 1 is nan; use values from -100 to 100'),
    'logit_bias  ': (((1, 1.0), (1, 2.0)), 'names a token twice'),
    'logit_bias   ': (tuple((i, 1.0) for i in range(5)), 'logit_bias has 5 tokens, but a row holds 4; use fewer'),
    'stop_tokens': ((1, 2, 3, 4, 5), '5 stop tokens, but a row holds 4; use fewer'),
    'stop_strings': (('',), 'has an empty string; leave it out'),
    'stop_strings ': (('x',), 'engine/0 has no tokenizer to find them with; use stop tokens'),
}


@pytest.mark.parametrize('field', WRONG)
def test_sampling_parameters_that_no_row_can_have_are_refused_when_they_arrive(field):
    value, message = WRONG[field]
    with pytest.raises(SamplingError, match='^request 0/4/0: .*' + message):
        Rig().engine.generate(request(0, sampling=dataclasses.replace(SAMPLING, **{field.strip(): value})))
