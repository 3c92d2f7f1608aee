import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.rollout.backend import SlotInit
from areal_jax.rollout.decode import backend as decode_backend
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from tests.rollout.decode.examples import (
    CONTEXT,
    DECODER,
    PROMPT,
    Decoding,
    backend,
    forward_logprobs,
    generate,
    next_token_logits,
    request,
    weights,
)


def company():
    """Four requests of different prompts, temperatures and lengths."""
    return {
        0: request(0, new=12),
        1: request(1, prompt=[9], new=7, temperature=0.7),
        2: request(2, prompt=np.arange(10, 19), new=15, temperature=1.6),
        3: request(3, prompt=[2, 30], new=1),
    }


def finished(requests, **kwargs):
    decoding = Decoding(backend(**kwargs))
    decoding.start(requests)
    return decoding.finish()


def test_every_logprob_is_that_of_a_forward_over_the_whole_sequence_at_the_temperature():
    decoding = finished(company())
    for slot, wanted in company().items():
        expected = forward_logprobs(
            decoding.tokens[slot], len(wanted.prompt_tokens), temperature=wanted.sampling.temperature
        )
        np.testing.assert_allclose(decoding.logprobs[slot], expected, atol=1e-5)


def test_temperature_changes_the_recorded_logprob():
    # the same tokens scored at temperature 1 are far from what was recorded at 1.6
    wanted = request(2, temperature=1.6)
    tokens, logprobs = generate(wanted)
    wrong = forward_logprobs([*PROMPT, *tokens], len(PROMPT), temperature=1.0)
    assert np.abs(wrong - logprobs).max() > 0.1


def test_temperature_0_takes_the_argmax_step_by_step_and_records_logprobs_of_temperature_1():
    tokens, logprobs = generate(request(temperature=0.0))
    sequence = list(PROMPT)
    for _ in range(12):
        sequence.append(int(np.argmax(next_token_logits(sequence)[-1])))
    assert sequence[len(PROMPT) :] == tokens
    np.testing.assert_allclose(logprobs, forward_logprobs(sequence, len(PROMPT)), atol=1e-5)


def test_an_answer_has_exactly_the_tokens_its_limit_allows():
    decoding = finished(company())
    assert [len(decoding.answer(slot)) for slot in range(4)] == [12, 7, 15, 1]


def test_steps_bounds_the_tokens_of_a_dispatch():
    decoding = Decoding(backend())
    decoding.start({1: request(new=7)})
    valid = [decoding.decode(steps).valid[:, 1].tolist() for steps in (2, 1, 5)]
    # 7 = 2 + 1 + 4: the fifth step of the last dispatch is past the limit
    assert valid == [[True] * 2, [True], [True] * 4 + [False]]


@pytest.mark.parametrize('as_second', [False, True])
def test_the_stop_token_is_recorded_and_ends_the_slot(as_second):
    free, free_logprobs = generate(request(new=12))
    stop = free[3]
    first = free.index(stop)
    unused = next(token for token in range(32) if token not in free)
    tokens, logprobs = generate(request(new=12, stop=(unused, stop) if as_second else (stop,)))
    assert tokens == free[: first + 1]
    np.testing.assert_array_equal(logprobs, free_logprobs[: first + 1])


def test_a_stop_token_of_one_slot_leaves_its_neighbour_alone():
    free, _ = generate(request(0))
    neighbour, _ = generate(request(1), slot=1)
    decoding = finished({0: request(0, stop=(free[0],)), 1: request(1)})
    assert decoding.answer(0) == free[:1]
    assert decoding.answer(1) == neighbour


def test_noise_does_not_depend_on_slot_or_company():
    alone, alone_logprobs = generate(request(0), slot=3)
    decoding = Decoding(backend())
    for slot, wanted in company().items():
        decoding.start({slot: wanted})
    decoding.finish()
    assert decoding.answer(0) == alone
    assert decoding.logprobs[0] == alone_logprobs  # every bit: the same programs, prefill included


def test_company_in_prefill_changes_rounding_at_most():
    alone, alone_logprobs = generate(request(0))
    decoding = finished(company())  # prefilled as four rows in the larger bucket instead of one in the smaller
    assert decoding.answer(0) == alone
    np.testing.assert_allclose(decoding.logprobs[0], alone_logprobs, atol=1e-6)


def test_samples_of_a_group_differ_and_repeat():
    group = {slot: request(sample=slot) for slot in range(4)}
    first, second = finished(group), finished(group)
    answers = [tuple(first.answer(slot)) for slot in range(4)]
    assert len(set(answers)) == 4
    assert [tuple(second.answer(slot)) for slot in range(4)] == answers
    assert [second.logprobs[slot] for slot in range(4)] == [first.logprobs[slot] for slot in range(4)]


@pytest.mark.parametrize('other', [{'seed': 12}, {'seed': 11 + 2**32}, {'draw': 1}, {'draw': 2**16}, {'sample': 1}])
def test_noise_depends_on_seed_draw_and_sample(other):
    assert generate(request(**other))[0] != generate(request())[0]


def test_noise_of_a_token_is_that_of_its_index_in_the_trajectory():
    # weights 0: all logits are 0, so a token is the argmax of its noise and every log-prob is -log 32
    wanted = request(4, 2, new=12)
    decoding = Decoding(backend(), DECODER.init(0, scale=0.0))
    decoding.start({1: wanted})
    decoding.finish()
    key = sampling.request_keys(np.array([[0, 11]], np.uint32), np.array([4]), np.array([2]))
    expected = [
        int(sampling.draw_tokens(np.zeros((1, 32), np.float32), key, np.array([index]), np.array([False]))[0])
        for index in range(5, 17)
    ]
    assert decoding.answer(1) == expected
    np.testing.assert_allclose(decoding.logprobs[1], -np.log(32), atol=1e-6)


@pytest.mark.parametrize('stops_at', [1, 4, 7])
def test_an_interruption_under_equal_weights_is_invisible(stops_at):
    whole, whole_logprobs = generate(request())
    decoding = Decoding(backend())
    decoding.start({0: request(), 2: request(5, prompt=[7, 7])})
    for _ in range(stops_at):
        decoding.decode(1)
    decoding.rebuild(0, 2)
    decoding.finish()
    assert decoding.answer(0) == whole
    np.testing.assert_allclose(decoding.logprobs[0], whole_logprobs, atol=1e-5)


def test_the_rest_of_an_answer_continues_in_another_slot_of_another_backend():
    whole, whole_logprobs = generate(request())
    first = Decoding(backend())
    first.start({1: request()})
    first.decode(4)
    other = JaxDecodeBackend(
        DECODER, slots=2, context_tokens=20, prefill_buckets=(20,), decode_steps=8, filtered=False, dtype='float32',
        device=jax.devices()[1],
    )  # fmt: skip
    tokens = np.array(first.tokens[1], np.int32)
    params = jax.device_put(weights(), jax.devices()[1])
    [prefix] = other.prefill(params, [tokens[:-1]])
    state = other.insert(prefix, other.initial_state(), [SlotInit(0, request(), tokens, 17)])
    _, output = other.generate(params, state, 8, 20)
    assert first.answer(1) + output.tokens[:, 0].tolist() == whole
    np.testing.assert_allclose(first.logprobs[1] + output.logprobs[:, 0].tolist(), whole_logprobs, atol=1e-5)


def test_equal_weights_swapped_in_without_a_rebuild_change_no_bit():
    kept, swapped = Decoding(backend()), Decoding(backend())
    for decoding in (kept, swapped):
        decoding.start(company())
        decoding.decode(3)
    swapped.weights = jax.tree.map(lambda leaf: leaf + 0, weights())
    kept.finish()
    swapped.finish()
    assert (kept.tokens, kept.logprobs) == (swapped.tokens, swapped.logprobs)


@pytest.mark.parametrize('rebuilt', [True, False])
def test_tokens_after_new_weights_have_their_logprobs_only_if_the_cache_is_rebuilt(rebuilt):
    decoding = Decoding(backend())
    decoding.start({0: request()})
    decoding.decode(4)
    decoding.weights = weights(1)
    if rebuilt:
        decoding.rebuild(0)
    decoding.finish()
    before, after = decoding.logprobs[0][:4], decoding.logprobs[0][4:]
    np.testing.assert_allclose(before, forward_logprobs(decoding.tokens[0], len(PROMPT))[:4], atol=1e-5)
    error = np.abs(after - forward_logprobs(decoding.tokens[0], len(PROMPT), weights(1))[4:]).max()
    assert error < 1e-5 if rebuilt else error > 0.1


def test_a_prompt_of_one_token_needs_no_prefix():
    [prefix] = backend().prefill(weights(), [np.zeros(0, np.int32)])
    assert prefix.length == 0
    tokens, logprobs = generate(request(prompt=[9], new=6))
    np.testing.assert_allclose(logprobs, forward_logprobs([9, *tokens], 1), atol=1e-5)


@pytest.mark.parametrize(
    ('lengths', 'shapes'),
    [
        ((5, 0, 3, 14), [(4, 24)] * 4),  # more than half as many as slots: one batch in the bucket of the longest
        ((2, 9), [(1, 8), (1, 24)]),  # one row each, in their own buckets
    ],
)
def test_prefixes_prefilled_together_are_those_prefilled_alone(lengths, shapes):
    sequences = [np.arange(1, length + 1, dtype=np.int32) for length in lengths]
    together = backend().prefill(weights(), sequences)
    assert [(k.shape[0], k.shape[2]) for ((k, _), *_) in (prefix.rows for prefix in together)] == shapes
    for sequence, prefix in zip(sequences, together, strict=True):
        [alone] = backend().prefill(weights(), [sequence])
        assert prefix.length == alone.length == len(sequence)
        for a, b in zip(jax.tree.leaves(prefix.rows), jax.tree.leaves(alone.rows), strict=True):
            kept = slice(0, prefix.length)
            np.testing.assert_allclose(a[prefix.row, :, kept], b[alone.row, :, kept], atol=1e-5)


def test_a_large_prefill_is_computed_in_parts(monkeypatch):
    sequences = [PROMPT, PROMPT[:3], PROMPT[::-1], PROMPT[1:]]  # a row for each of 4 slots, in the bucket of 8
    whole = backend().prefill(weights(), sequences)
    monkeypatch.setattr(decode_backend, '_PREFILL_TOKENS', 17)  # 2 rows of 8 at once
    in_parts = backend.__wrapped__()
    parts = in_parts.prefill(weights(), sequences)
    for one, other in zip(jax.tree.leaves(whole[0].rows), jax.tree.leaves(parts[0].rows), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert 'scan' in str(jax.make_jaxpr(in_parts._prefill_rows)(weights(), np.zeros((4, 8), np.int32)))


def test_a_narrow_decode_width_gives_the_tokens_of_the_wide_one():
    narrow, wide = Decoding(backend()), Decoding(backend())
    for decoding, width in ((narrow, 12), (wide, CONTEXT)):
        decoding.start({0: request(new=7), 2: request(1, new=7)})  # 5 + 7 = 12 tokens
        decoding.decode(5, width)
        decoding.decode(2, width)
    assert narrow.tokens == wide.tokens
    for slot in (0, 2):
        np.testing.assert_allclose(narrow.logprobs[slot], wide.logprobs[slot], atol=1e-6)


def test_what_a_dead_slot_left_behind_reaches_nobody():
    clean, poisoned = Decoding(backend()), Decoding(backend())
    for decoding in (clean, poisoned):
        decoding.start({0: request(), 3: request(1)})
        decoding.decode(2)
        decoding.state = decoding.backend.release(decoding.state, [3])
    cache = jax.tree.map(lambda leaf: leaf.at[3].set(np.nan), poisoned.state.cache)
    poisoned.state = dataclasses.replace(poisoned.state, cache=cache)
    for decoding in (clean, poisoned):
        decoding.decode(3)  # slot 3 is computed along, on what is there
        decoding.start({3: request(2)})  # and used again: what stands behind the new prefix has weight 0
        decoding.finish()
    assert (poisoned.tokens, poisoned.logprobs) == (clean.tokens, clean.logprobs)
    assert np.isfinite(poisoned.logprobs[3]).all()


def test_a_released_slot_generates_nothing():
    decoding = Decoding(backend())
    decoding.start({0: request(), 1: request(1)})
    decoding.state = decoding.backend.release(decoding.state, [1])
    assert decoding.decode(5).valid.sum(axis=0).tolist() == [5, 0, 0, 0]


@pytest.fixture
def compiled():
    """Grows by an entry per program compiled."""
    events = []
    listener = lambda event, seconds, **_: events.append(event) if 'backend_compile' in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


def test_warm_up_compiles_everything_that_is_used_later_whatever_the_weights(compiled):
    fresh = JaxDecodeBackend(
        DECODER, slots=3, context_tokens=20, prefill_buckets=(8, 20), decode_steps=4, filtered=False, dtype='float32',
        decode_widths=(10, 20),
    )  # fmt: skip
    initial, swapped = weights(), jax.device_put(jax.device_get(weights(1)), jax.devices()[0])  # committed, unlike
    compiled.clear()
    # initial state, release, 2 widths, and prefill and insert for {1, 3} rows x {8, 20} tokens: 1 + 1 + 2 + 2 * 4 = 12
    assert fresh.warm_up(initial) == 12
    assert len(compiled) == 12

    def use(params):
        decoding = Decoding(fresh, params)
        decoding.start({slot: request(slot, prompt=np.arange(1, 4 + slot), new=8) for slot in range(3)})
        decoding.decode(4, 10)
        decoding.rebuild(0, 1, 2)
        decoding.weights = swapped
        decoding.decode(2, 20)
        decoding.rebuild(2)
        decoding.start({0: request(prompt=np.arange(15), new=2), 1: request(prompt=[1], new=2)})
        decoding.decode(2, 20)

    use(initial)
    use(swapped)
    assert len(compiled) == 12


def test_decoding_updates_the_cache_in_place():
    large = JaxDecodeBackend(
        DECODER, slots=4, context_tokens=4096, prefill_buckets=(4096,), decode_steps=4, filtered=False, dtype='float32'
    )
    state = large.initial_state()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    program = large._generate_program.lower(weights(), state, np.int32(4), 4096).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes  # the state returned is the state taken
    # beside it: scores and weights [slots, heads, width] of a layer and small things, no array of the cache's size
    assert memory.temp_size_in_bytes < cache_bytes / 2


def test_a_state_is_donated_and_a_prefix_is_not():
    one = backend()
    state = one.initial_state()
    [prefix] = one.prefill(weights(), [PROMPT[:-1]])
    inserted = one.insert(prefix, state, [SlotInit(0, request(), PROMPT, 9)])
    released = one.release(inserted, [1])
    one.generate(weights(), released, 1, CONTEXT)
    for donated in (state, inserted, released):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated.cache))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(prefix.rows))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'slots': 0}, 'slots=0 must be at least 1'),
        ({'decode_steps': 0}, 'decode_steps=0 must be at least 1'),
        ({'prefill_buckets': (16, 8)}, r'prefill_buckets=\(16, 8\) must be ascending'),
        ({'prefill_buckets': (8, 14)}, 'end below context_tokens - 1 = 15'),
        ({'decode_widths': (8,)}, r'decode_widths=\(8,\) must end with context_tokens=16'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    sizes = {'slots': 2, 'context_tokens': 16, 'prefill_buckets': (8, 16), 'decode_steps': 2} | change
    with pytest.raises(ValueError, match=message):
        JaxDecodeBackend(DECODER, **sizes, filtered=False, dtype='float32')


@pytest.mark.parametrize(
    ('init', 'message'),
    [
        (SlotInit(4, request(), PROMPT, 9), 'in slot 4: there are slots=4'),
        (SlotInit(0, request(), PROMPT[:3], 9), '3 tokens need a prefix of 2, not of 4'),
        (SlotInit(0, request(), PROMPT, 25), 'limit=25 must exceed its 5 tokens and fit context_tokens=24'),
        (SlotInit(0, request(), PROMPT, 5), 'limit=5 must exceed its 5 tokens'),
        (SlotInit(0, request(stop=(1, 2, 3, 4, 5)), PROMPT, 9), '5 stop tokens, but a slot holds 4'),
        (SlotInit(0, request(top_k=3), PROMPT, 9), 'top_k=3.*filtered=True'),
        (SlotInit(0, request(top_p=0.5), PROMPT, 9), 'top_p=0.5.*filtered=True'),
    ],
)
def test_inits_that_do_not_fit_are_refused_before_the_state_is_touched(init, message):
    one = backend()
    state = one.initial_state()
    [prefix] = one.prefill(weights(), [PROMPT[:-1]])
    with pytest.raises(ValueError, match=message):
        one.insert(prefix, state, [init])
    assert not state.slots.live.is_deleted()


def test_undeclared_shapes_are_refused():
    one = backend()
    with pytest.raises(ValueError, match=r'25 tokens do not fit decode_widths=\(12, 24\)'):
        one.width_for(25)
    with pytest.raises(ValueError, match=r'25 tokens do not fit prefill_buckets=\(8, 24\)'):
        one.prefill_bucket(25)
    with pytest.raises(ValueError, match='steps=6'):
        one.generate(weights(), one.initial_state(), 6, 12)
    with pytest.raises(ValueError, match='width=13'):
        one.generate(weights(), one.initial_state(), 1, 13)
    with pytest.raises(ValueError, match='5 sequences to prefill, but slots=4'):
        one.prefill(weights(), [PROMPT] * 5)


def test_buckets_are_the_smallest_that_hold():
    assert [backend().width_for(n) for n in (1, 12, 13, 24)] == [12, 12, 24, 24]
    assert [backend().prefill_bucket(n) for n in (0, 8, 9, 24)] == [8, 8, 24, 24]


def test_filtered_requests_draw_inside_their_support_and_leave_company_alone():
    plain, plain_logprobs = generate(request(0))
    decoding = finished({0: request(0), 1: request(1, top_k=1), 2: request(2, top_k=3, new=12)}, filtered=True)
    assert decoding.answer(0) == plain
    np.testing.assert_allclose(decoding.logprobs[0], plain_logprobs, atol=1e-6)
    assert decoding.sampling_logprobs[0] == decoding.logprobs[0]
    # one token left: its renormalised probability is 1
    np.testing.assert_allclose(decoding.sampling_logprobs[1], 0.0, atol=1e-6)
    for slot in range(3):
        full = forward_logprobs(decoding.tokens[slot], len(PROMPT))
        np.testing.assert_allclose(decoding.logprobs[slot], full, atol=1e-5)
    assert np.min(decoding.logprobs[1]) < -0.1  # far from the renormalised ones
    logits = next_token_logits(decoding.tokens[2])
    for t, logprob in enumerate(decoding.sampling_logprobs[2], start=len(PROMPT)):
        three = np.sort(logits[t - 1])[-3:]
        token = logits[t - 1, decoding.tokens[2][t]]
        assert token >= three[0] - 1e-5
        assert logprob == pytest.approx(token - np.log(np.exp(three).sum()), abs=1e-5)
