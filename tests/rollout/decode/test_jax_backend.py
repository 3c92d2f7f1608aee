from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.logprobs import sum_blocks
from areal_jax.rollout.backend import DecodeRow, PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.generate import weight_shardings
from areal_jax.rollout.decode.jax_backend import MOST_PROGRAMS, JaxDecodeBackend, compile_ahead, compile_side_by_side
from tests.native import needs_kernels
from tests.rollout.decode.examples import (
    CONTEXT,
    DECODER,
    PROMPT,
    WINDOWED,
    Decoding,
    backend,
    build,
    finished,
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


def poison(state, blocks):
    """The state with NaN in these blocks, which are the first axis of every array."""
    return jax.tree.map(lambda leaf: leaf.at[np.array(blocks)].set(np.nan), state)


def test_every_logprob_is_that_of_a_forward_over_the_whole_sequence_at_the_temperature():
    decoding = finished(company())
    for name, wanted in company().items():
        expected = forward_logprobs(
            decoding.tokens(name), len(wanted.prompt_tokens), temperature=wanted.sampling.temperature
        )
        np.testing.assert_allclose(decoding.logprobs(name), expected, atol=1e-5)
    assert [len(decoding.answer(name)) for name in range(4)] == [12, 7, 15, 1]  # as their limits allow


def test_temperature_0_takes_the_argmax_step_by_step_and_records_logprobs_of_temperature_1():
    tokens, logprobs = generate(request(temperature=0.0))
    sequence = list(PROMPT)
    for _ in range(12):
        sequence.append(int(np.argmax(next_token_logits(sequence)[-1])))
    assert sequence[len(PROMPT) :] == tokens
    np.testing.assert_allclose(logprobs, forward_logprobs(sequence, len(PROMPT)), atol=1e-5)


# Where an answer ends.


def test_steps_bounds_the_tokens_of_a_dispatch():
    decoding = Decoding(backend())
    decoding.start({'only': request(new=7)})
    valid = [decoding.decode(steps).valid[:, 0].tolist() for steps in (2, 1, 5)]
    # 7 = 2 + 1 + 4: the fifth step of the last dispatch is past the limit
    assert valid == [[True] * 2, [True], [True] * 4 + [False]]


@pytest.mark.parametrize('as_second', [False, True])
def test_the_stop_token_is_recorded_and_ends_the_row(as_second):
    free, free_logprobs = generate(request(new=12))
    stop = free[3]
    first = free.index(stop)
    unused = next(token for token in range(32) if token not in free)
    tokens, logprobs = generate(request(new=12, stop=(unused, stop) if as_second else (stop,)))
    assert tokens == free[: first + 1]
    np.testing.assert_array_equal(logprobs, free_logprobs[: first + 1])


def test_a_stop_token_of_one_row_leaves_its_neighbours_alone():
    free, _ = generate(request(0))
    others = {1: request(1), 2: request(2, prompt=np.arange(10, 19), new=15)}
    neighbours, decoding = Decoding(backend()), Decoding(backend())
    decoding.start({0: request(0, stop=(free[0],))})
    for name, wanted in others.items():
        decoding.start({name: wanted})
        neighbours.start({name: wanted})
    decoding.finish()
    assert decoding.answer(0) == free[:1]
    assert {name: decoding.results()[name] for name in others} == neighbours.finish().results()


# A row does not depend on the others.


def test_noise_does_not_depend_on_company_order_or_blocks():
    alone = finished({0: request(0)})
    decoding = Decoding(backend())
    for name, wanted in reversed(company().items()):  # request 0 gets the last blocks
        decoding.start({name: wanted})
    assert decoding.sequences[0].blocks != alone.sequences[0].blocks
    for order in ((0, 1, 2, 3), (2, 1, 0), (1, 0, 2)):  # each is longest, shortest and between them at some time
        decoding.decode(1, order)
    decoding.finish()
    assert decoding.results()[0] == alone.results()[0]  # every bit: the same programs, prefill included


def test_outputs_are_in_the_order_of_the_rows_given():
    forward, backward = Decoding(backend()), Decoding(backend())
    for decoding in (forward, backward):
        decoding.start(company())
    one, other = forward.decode(5, [0, 1, 2, 3]), backward.decode(5, [3, 2, 1, 0])
    for name in ('tokens', 'logprobs', 'valid'):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name)[:, ::-1])


def test_batches_give_the_same_tokens_and_logprobs_to_rounding():
    alone, together = {}, finished(company(), batch_buckets=(1, 2, 3, 4))
    for name, wanted in company().items():
        alone |= finished({name: wanted}, batch_buckets=(1, 2, 3, 4)).results()
    for name, (tokens, logprobs) in alone.items():
        assert tokens == together.tokens(name)
        np.testing.assert_allclose(logprobs, together.logprobs(name), atol=2e-5)


def test_company_in_prefill_changes_rounding_at_most():
    alone, alone_logprobs = generate(request(0))
    decoding = finished(company())  # prefilled in the larger bucket instead of the smaller
    assert decoding.answer(0) == alone
    np.testing.assert_allclose(decoding.logprobs(0), alone_logprobs, atol=2e-5)


def test_samples_of_a_group_differ_and_repeat():
    group = {name: request(sample=name) for name in range(4)}
    first, second = finished(group), finished(group)
    assert len({tuple(first.answer(name)) for name in range(4)}) == 4
    assert second.results() == first.results()


@pytest.mark.parametrize('other', [{'seed': 12}, {'seed': 11 + 2**32}, {'draw': 1}, {'draw': 2**16}, {'sample': 1}])
def test_noise_depends_on_seed_draw_and_sample(other):
    assert generate(request(**other))[0] != generate(request())[0]


def test_noise_of_a_token_is_that_of_its_index_in_the_trajectory():
    # weights 0: all logits are 0, so a token is the argmax of its noise and every log-prob is -log 32
    decoding = Decoding(backend(), DECODER.init(0, scale=0.0))
    decoding.start({0: request(4, 2, new=12)})
    decoding.finish()
    key, zeros = sampling.request_keys(np.array([[0, 11]], np.uint32), np.array([4]), np.array([2])), jnp.zeros((1, 32))
    expected = [
        int(sampling.draw_tokens(zeros, key, np.array([index]), np.ones(1, np.float32), sum_blocks(zeros))[0])
        for index in range(5, 17)
    ]
    assert decoding.answer(0) == expected
    np.testing.assert_allclose(decoding.logprobs(0), -np.log(32), atol=1e-6)


# Interruptions.


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
    np.testing.assert_allclose(decoding.logprobs(0), whole_logprobs, atol=1e-5)


def test_the_rest_of_an_answer_continues_on_another_backend():
    whole, whole_logprobs = generate(request())
    first = Decoding(backend())
    first.start({0: request()})
    first.decode(4)
    second = jax.devices()[1]
    other = Decoding(
        build(slots=2, context_tokens=20, block_tokens=8, prefill_buckets=(20,), batch_buckets=None, devices=[second]),
        jax.device_put(weights(), second),
    )
    sequence = first.sequences[0]
    other.sequences[0] = dataclasses.replace(sequence, blocks=[5, 0, 3])
    other.rebuild(0)
    other.finish()
    assert {leaf.device for leaf in jax.tree.leaves(other.state)} == {second}
    assert other.answer(0) == whole
    np.testing.assert_allclose(other.logprobs(0), whole_logprobs, atol=2e-5)


def test_equal_weights_swapped_in_without_a_rebuild_change_no_bit():
    kept, swapped = Decoding(backend()), Decoding(backend())
    for decoding in (kept, swapped):
        decoding.start(company())
        decoding.decode(3)
    swapped.params = swapped.backend.prepare(jax.tree.map(lambda leaf: leaf + 0, weights()))
    kept.finish()
    swapped.finish()
    assert kept.results() == swapped.results()


@pytest.mark.parametrize('rebuilt', [True, False])
def test_tokens_after_new_weights_have_their_logprobs_only_if_the_cache_is_rebuilt(rebuilt):
    decoding = Decoding(backend())
    decoding.start({0: request()})
    decoding.decode(4)
    decoding.params = decoding.backend.prepare(weights(1))
    if rebuilt:
        decoding.rebuild(0)
    decoding.finish()
    tokens, logprobs = decoding.results()[0]
    np.testing.assert_allclose(logprobs[:4], forward_logprobs(tokens, len(PROMPT))[:4], atol=1e-5)
    error = np.abs(logprobs[4:] - forward_logprobs(tokens, len(PROMPT), weights(1))[4:]).max()
    assert error < 1e-5 if rebuilt else error > 0.1


# The cache.


def test_what_blocks_hold_of_others_reaches_nobody():
    # everything is NaN at first: free blocks, the places behind a sequence in its blocks, and the padding block
    clean, poisoned = Decoding(backend()), Decoding(backend())
    poisoned.state = poison(poisoned.state, range(poisoned.backend.cache_blocks + 1))
    for decoding in (clean, poisoned):
        decoding.start({0: request(), 3: request(1)})
        decoding.decode(2)
        decoding.cancel(3)
    free = [*poisoned.free, poisoned.backend.cache_blocks]
    poisoned.state = poison(poisoned.state, free)
    for decoding in (clean, poisoned):
        decoding.decode(3)
        decoding.start({3: request(2)})  # takes the blocks again
        decoding.finish()
    assert poisoned.results() == clean.results()
    assert np.isfinite(poisoned.logprobs(3)).all()


def test_no_block_is_written_but_those_of_the_rows_and_the_padding_block():
    decoding = Decoding(backend())
    decoding.start({0: request(stop=tuple(generate(request())[0][:1])), 1: request(1, new=2), 2: request(2)})
    before = jax.device_get(decoding.state)
    decoding.decode(5)  # rows 0 and 1 end on the way, and batch 4 has a row of padding
    # positions 4 to 8 of row 2 in its blocks of 4; row 1 goes on to position 5 = 5 + 2 - 2, row 0 to position 4
    written = {
        *decoding.sequences[0].blocks[1:2],
        *decoding.sequences[1].blocks[1:2],
        *decoding.sequences[2].blocks[1:3],
        decoding.backend.cache_blocks,
    }
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(decoding.state), strict=True):
        changed = (old != np.asarray(new)).reshape(len(old), -1).any(axis=1)
        assert set(np.flatnonzero(changed).tolist()) == written


def test_a_copied_block_continues_like_its_source():
    # 8 positions fill blocks 0 and 1 of 4; the samples share both of them, one has a copy of the third
    prompt = np.arange(2, 12)  # 9 positions are prefilled
    one = backend()
    decoding = Decoding(one)
    decoding.start({0: request(0, prompt=prompt)})
    decoding.sequences[1] = dataclasses.replace(
        decoding.sequences[0], request=request(0, 1, prompt=prompt), tokens=prompt.tolist(), logprobs=[]
    )
    own = [decoding.free.pop() for _ in decoding.sequences[0].blocks[2:]]
    decoding.sequences[1].blocks = decoding.sequences[0].blocks[:2] + own
    decoding.state = one.copy(decoding.state, [(decoding.sequences[0].blocks[2], own[0])])
    decoding.finish()
    apart = {name: finished({0: request(0, name, prompt=prompt)}).results()[0] for name in range(2)}
    assert decoding.results() == apart


def test_many_blocks_are_copied_at_once():
    one = build(cache_blocks=40)
    state = poison(one.initial_state(), [2])
    state = one.copy(state, [(2, target) for target in range(10, 29)])
    for leaf in jax.tree.leaves(state):
        assert np.flatnonzero(np.isnan(leaf).reshape(len(leaf), -1).all(axis=1)).tolist() == [2, *range(10, 29)]


def test_states_are_donated():
    one = backend()
    params, state = one.prepare(weights()), one.initial_state()
    prefilled = one.prefill(params, state, [PrefillPiece(PROMPT[:-1], 0, [3])])
    copied = one.copy(prefilled, [(3, 7)])
    one.generate(params, copied, [DecodeRow(request(), 5, 4, 17, [7, 1, 2])], 1)
    for donated in (state, prefilled, copied):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


def program_of(one, batch):
    return one.lower_generate(one.prepare(weights()), batch).compile()


def test_decoding_updates_the_cache_in_place():
    large = build(context_tokens=4096, block_tokens=64, prefill_buckets=(64,))
    state = large.initial_state()
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert cache_bytes == large.state_bytes
    program = program_of(large, 4)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes  # the state returned is the state taken
    assert memory.temp_size_in_bytes < cache_bytes / 4
    shapes = {','.join(map(str, leaf.shape)) for leaf in jax.tree.leaves(state)}
    for shape in shapes:
        assert re.search(rf'f32\[{shape}\]', program.as_text())
        assert not re.search(rf'f32\[{shape}\]\S* copy(-start)?\(', program.as_text())


@pytest.fixture
def compiled():
    """Grows by an entry per program compiled."""
    events = []
    listener = lambda event, seconds, **_: events.append(event) if 'backend_compile' in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield events
    jax.monitoring.unregister_event_duration_listener(listener)


def test_warm_up_compiles_everything_that_is_used_later_whatever_the_weights(compiled):
    fresh = build(slots=3, context_tokens=20, prefill_buckets=(8, 20), batch_buckets=(1, 2, 3), decode_steps=4)
    initial, swapped = weights(), jax.device_put(jax.device_get(weights(1)), jax.devices()[0])  # committed, unlike
    prepared = fresh.prepare(initial)
    prefills = {fresh.prefill_bucket([Span(start, stop)]) for start in range(20) for stop in range(start + 1, 20)}
    compiled.clear()
    seen = []
    # initial state, copy, batches of 1, 2 and 3, and the prefills
    assert fresh.warm_up(prepared, lambda *counts: seen.append(counts)) == len(compiled)
    assert len(compiled) >= 5 + len(prefills)
    assert seen == [(done, len(compiled)) for done in range(len(compiled))]
    compiled.clear()

    def use(params):
        decoding = Decoding(fresh, params)
        decoding.start({name: request(name, prompt=np.arange(1, 4 + name), new=8) for name in range(3)})
        decoding.decode(4)
        decoding.rebuild(0, 1, 2)
        decoding.params = fresh.prepare(swapped)
        decoding.decode(2)
        decoding.rebuild(2)
        decoding.cancel(1)
        decoding.decode(2)
        decoding.start({1: request(prompt=np.arange(15), new=2)})
        decoding.state = fresh.copy(decoding.state, [(3, 4)])
        decoding.decode(1)

    use(initial)
    use(swapped)
    assert compiled == []


def test_what_is_compiled_side_by_side_is_what_warm_up_runs(compiled):
    fresh = build(slots=2, context_tokens=7, prefill_buckets=(7,), batch_buckets=(2,), decode_steps=1)
    prepared = fresh.prepare(weights())
    compiled.clear()
    compile_side_by_side(fresh.lower_all(prepared))
    assert len(compiled) == len(fresh.declared_prefills) + 1
    compiled.clear()
    fresh.warm_up(prepared)
    assert len(compiled) == 2  # initial state, copy


def test_both_kinds_of_programs_are_compiled_beforehand(compiled):
    one = build(filtered=True, adjusted=True, slots=3, batch_buckets=(3,))  # built backends are shared
    params = one.prepare(weights())
    compiled.clear()
    assert one.warm_up(params) == len(compiled) <= MOST_PROGRAMS
    compiled.clear()
    decoding = Decoding(one)
    decoding.start({0: request(0, new=12), 1: request(1, new=3, top_k=2)})
    decoding.finish()
    assert compiled == []


def test_a_step_computes_the_rows_of_its_batch():
    one = build(batch_buckets=None)
    flops = {batch: program_of(one, batch).cost_analysis()['flops'] for batch in (1, 2, 4)}
    # the products of a step are proportional to its rows; what else there is, is small
    assert flops[1] < 0.4 * flops[4]
    assert flops[2] < 0.6 * flops[4]


@needs_kernels
def test_no_batch_is_compiled_that_costs_a_kernel_as_much_as_a_larger_one():
    sizes = {'slots': 16, 'batch_buckets': None, 'small_batches': False}
    kernels, xla = (build(dtype=dtype, **sizes) for dtype in ('float32', 'bfloat16'))
    assert [kernels.batch_bucket([row()] * n) for n in (1, 2, 8, 9)] == [8, 8, 8, 16]
    assert [xla.batch_bucket([row()] * n) for n in (1, 2, 8, 9)] == [1, 2, 8, 16]
    small = build(dtype='float32', **{**sizes, 'small_batches': True})
    assert [small.batch_bucket([row()] * n) for n in (1, 2, 8, 9)] == [1, 2, 8, 16]


def test_a_dispatch_takes_the_smallest_batch_that_holds_its_rows(compiled):
    one = build(batch_buckets=(1, 2, 4))
    assert [one.batch_bucket([row()] * n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    decoding = Decoding(one)
    decoding.start(company())
    compiled.clear()
    counts = []
    for rows in ([0], [1], [0, 1], [0, 1, 2], [1, 2], [0, 1, 2], [2]):
        decoding.decode(1, rows)
        counts.append(len(compiled))
    assert counts == [1, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize('attention', [pytest.param('native', marks=needs_kernels), 'loops'])
def test_the_positions_read_are_few_more_than_the_live_ones(attention):
    # a running engine: prompts of 56 to 72 tokens, answers of lognormal length (mean 64, sigma 1, cap 512), each met as
    # often as it is long, at a uniform place
    one = build(
        slots=32, context_tokens=600, block_tokens=64, prefill_buckets=(64,), batch_buckets=(32,), attention=attention
    )
    params, state, rng = one.prepare(weights()), one.initial_state(), np.random.default_rng(0)
    read = live = blocks = 0
    for _ in range(10):
        answers = np.minimum(rng.lognormal(np.log(64) - 0.5, 1.0, 128), 512)
        place = rng.choice(answers, 32, p=answers / answers.sum()) * rng.uniform(size=32)
        lengths = (rng.integers(56, 73, 32) + place).astype(int).tolist()
        rows = [DecodeRow(request(i), 1, n - 1, 600, range(10 * i, 10 * i + 10)) for i, n in enumerate(lengths)]
        state, output = one.generate(params, state, rows, 3)
        read += output.positions_read
        for step in range(3):
            live += sum(lengths) + step * 32
            blocks += sum(-(-(n + step) // 64) for n in lengths)
    if attention == 'native':
        assert read == live
    else:
        assert 64 * blocks <= read <= 1.5 * live


@needs_kernels
def test_the_native_attention_reads_nothing_for_a_row_that_has_ended():
    one = build(attention='native')
    rows = [DecodeRow(request(), 1, 4, 7, [1, 2]), DecodeRow(request(1), 1, 4, 9, [3, 4])]  # 2 and 4 tokens to come
    _, output = one.generate(one.prepare(weights()), one.initial_state(), rows, 4)
    assert output.valid.sum(0).tolist() == [2, 4]
    assert output.positions_read == (5 + 6) + (5 + 6 + 7 + 8)


def test_the_plain_attention_reads_whole_tables():
    one = build(attention='gather')
    rows = [DecodeRow(request(), 1, 4, 9, [1, 2])]
    _, output = one.generate(one.prepare(weights()), one.initial_state(), rows, 3)
    assert output.positions_read == 3 * 4 * CONTEXT  # steps, rows of the batch


# What is refused.


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'slots': 0}, 'slots=0 must be at least 1'),
        ({'decode_steps': 0}, 'decode_steps=0 must be at least 1'),
        ({'block_tokens': 0}, 'block_tokens=0 must be at least 1'),
        ({'prefill_buckets': (16, 8)}, r'prefill_buckets=\(16, 8\) must be ascending'),
        ({'batch_buckets': (2, 1)}, r'batch_buckets=\(2, 1\) must be ascending'),
        ({'batch_buckets': (1,)}, r'batch_buckets=\(1,\) must end with slots=2'),
        ({'attention': 'dense'}, "rollout.attention='dense' is unknown; use one of auto, gather, loops"),
        ({'cache_blocks': 3}, 'cache_blocks=3 of 4 tokens do not hold one .* context_tokens=16; give at least 4'),
        ({'slots': 20, 'batch_buckets': tuple(range(1, 21))}, r'need \d+ programs, more than 16; declare fewer'),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    sizes = {'slots': 2, 'context_tokens': 16, 'prefill_buckets': (8, 16), 'batch_buckets': None}
    with pytest.raises(ValueError, match=message):
        build(**(sizes | change))


def row(wanted=None, position=4, limit=9, blocks=(1, 2, 3)):
    return DecodeRow(wanted or request(), 5, position, limit, blocks)


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (row(limit=25), 'limit=25 must exceed its 5 tokens and fit context_tokens=24'),
        (row(limit=5), 'limit=5 must exceed its 5 tokens'),
        (row(blocks=[1]), '1 blocks of 4 positions do not hold the 8 that 5 steps from position 4 need'),
        (row(blocks=[1, 24]), r'blocks=\[1, 24\] must lie between 0 and cache_blocks - 1 = 23'),
        (row(request(stop=(1, 2, 3, 4, 5))), '5 stop tokens, but a row holds 4'),
        (row(request(top_k=3)), 'top_k=3.*filtered=True'),
        (row(request(top_p=0.5)), 'top_p=0.5.*filtered=True'),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_the_state_is_touched(wrong, message):
    one = backend()
    params, state = one.prepare(weights()), one.initial_state()
    with pytest.raises(ValueError, match=message):
        one.generate(params, state, [row(), wrong], 5)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_row_needs_blocks_for_what_it_writes_alone():
    # 3 tokens from position 4: written are 4 and 5 in block 1, the last token is not
    one = backend()
    one.generate(one.prepare(weights()), one.initial_state(), [row(limit=8, blocks=[0, 1])], 5)


def test_undeclared_shapes_are_refused():
    one = backend()
    params = one.prepare(weights())
    with pytest.raises(ValueError, match='steps=6 must lie between 1 and decode_steps=5'):
        one.generate(params, one.initial_state(), [row()], 6)
    with pytest.raises(ValueError, match=r'5 rows do not fit batch_buckets=\(4,\)'):
        one.generate(params, one.initial_state(), [row()] * 5, 1)
    with pytest.raises(ValueError, match=r'1 pieces of 25 tokens do not fit prefill_buckets=\(8, 24\); split them'):
        one.prefill(params, one.initial_state(), [PrefillPiece(np.arange(25), 0, range(7))])


def test_a_piece_as_long_as_the_largest_fits_anywhere():
    one = backend()
    assert one.largest_piece == CONTEXT
    assert one.prefill_bucket([Span(0, CONTEXT)]) == PrefillBucket(CONTEXT, 0)
    assert one.prefill_bucket([Span(0, 8)]) == PrefillBucket(8, 0)
    assert one.prefill_bucket([Span(0, CONTEXT + 1)]) is None


def test_filtered_requests_draw_inside_their_support_and_leave_company_alone():
    plain, plain_logprobs = generate(request(0))
    decoding = finished({0: request(0), 1: request(1, top_k=1), 2: request(2, top_k=3, new=12)}, filtered=True)
    cut = {name: sequence.sampling_logprobs for name, sequence in decoding.sequences.items()}
    assert decoding.answer(0) == plain
    np.testing.assert_allclose(decoding.logprobs(0), plain_logprobs, atol=2e-5)
    assert cut[0] == decoding.logprobs(0)
    # one token left: its renormalised probability is 1
    np.testing.assert_allclose(cut[1], 0.0, atol=1e-6)
    for name in range(3):
        full = forward_logprobs(decoding.tokens(name), len(PROMPT))
        np.testing.assert_allclose(decoding.logprobs(name), full, atol=1e-5)
    assert np.min(decoding.logprobs(1)) < -0.1  # far from the renormalised ones
    logits = next_token_logits(decoding.tokens(2))
    for t, logprob in enumerate(cut[2], start=len(PROMPT)):
        three = np.sort(logits[t - 1])[-3:]
        token = logits[t - 1, decoding.tokens(2)[t]]
        assert token >= three[0] - 1e-5
        assert logprob == pytest.approx(token - np.log(np.exp(three).sum()), abs=1e-5)


def test_backends_of_equal_sizes_are_one():
    assert build() is build()
    assert build(slots=3, batch_buckets=(3,)) is not build()
    assert build(WINDOWED) is not build()


# Dtypes.


@pytest.mark.parametrize('dtype', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_logprobs_are_those_of_a_forward_in_the_same_dtype_and_not_of_one_in_float32(dtype):
    decoding = Decoding(backend(dtype=dtype, attention='gather'), weights(0, dtype))
    decoding.start({0: request(0, prompt=[3]), 1: request(1, prompt=[9], temperature=0.7)})
    decoding.finish()
    assert {leaf.dtype for leaf in jax.tree.leaves(decoding.state)} == {jnp.dtype(dtype)}
    same, exact = differences(decoding, dtype)
    # both round at the same places; the order of sums may move one rounding, 2^-9 of a logit of size 1
    assert same < 2e-3
    assert exact > 8e-3


def test_attention_over_blocks_rounds_at_other_places_than_that_of_whole_sequences():
    # the weights of the softmax are rounded before they are divided by their sum, in packed rows and in loops over
    # blocks: the difference is that of bfloat16 itself, not more
    decoding = Decoding(backend(dtype='bfloat16'), weights(0, 'bfloat16'))
    decoding.start({0: request(0), 1: request(1, prompt=PROMPT[::-1], temperature=0.7)})
    decoding.decode(5)
    decoding.rebuild(0, 1)
    decoding.finish()
    same, exact = differences(decoding, 'bfloat16')
    assert same < exact < 0.5


def differences(decoding, dtype):
    """Largest difference of log-probs from those of a forward in the dtype and in float32."""
    largest = np.zeros(2)
    for name, sequence in decoding.sequences.items():
        about = sequence.tokens, len(sequence.request.prompt_tokens)
        temperature = sequence.request.sampling.temperature
        for i, params in enumerate((weights(0, dtype), weights(0))):
            expected = forward_logprobs(*about, params, temperature)
            largest[i] = max(largest[i], np.abs(decoding.logprobs(name) - expected).max())
    return largest


def test_logprobs_are_float32_whatever_the_weights():
    decoding = Decoding(backend(dtype='bfloat16'), weights(0, 'bfloat16'))
    decoding.start({0: request()})
    logprobs = decoding.decode(5).logprobs[:, 0]
    assert logprobs.dtype == np.float32
    assert (logprobs.astype(jnp.bfloat16).astype(np.float32) != logprobs).any()  # finer than bfloat16


@pytest.mark.parametrize(('built', 'given'), [('float32', 'bfloat16'), ('bfloat16', 'float32')])
def test_weights_of_another_dtype_are_refused(built, given):
    one = backend(dtype=built)
    with pytest.raises(
        ValueError, match=f"weights have {given} at embedding, but the backend was built with dtype='{built}'"
    ):
        one.prepare(weights(0, given))
    mixed = weights(0, built) | {'final_norm': weights(0, given)['final_norm']}
    with pytest.raises(ValueError, match=f'weights have {given} at final_norm'):
        one.prepare(mixed)


@pytest.mark.parametrize(
    ('decoder', 'dtype', 'message'),
    [
        (DECODER, 'int8', r"dtype='int8' is unknown; use one of float32, bfloat16, float16"),
        (Decoder(DECODER.config, layers='stacked'), 'float32', "decoding needs a decoder with layers='list'"),
    ],
)
def test_what_cannot_decode_is_refused(decoder, dtype, message):
    with pytest.raises(ValueError, match=message):
        build(decoder, dtype=dtype)


ONE_LAYER = ModelConfig(
    vocab_size=32, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=100.0,
    tie_embeddings=True, qkv_bias=False, output_bias=False, qk_norm=True, family='qwen3',
)  # fmt: skip


def build_one(devices):
    return JaxDecodeBackend(
        Decoder(ONE_LAYER), slots=2, context_tokens=16, block_tokens=8, prefill_buckets=(16,), decode_steps=2,
        filtered=False, dtype='float32', devices=devices,
    )  # fmt: skip


@pytest.mark.parametrize('each', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_engine_on_other_devices_compiles_nothing_that_was_compiled_ahead(each):
    params, devices = Decoder(ONE_LAYER).init(seed=0), jax.devices()
    places = [tuple(devices[start : start + each]) for start in (0, 4)]
    weights = [
        jax.device_put(params, place[0] if each == 1 else weight_shardings(Decoder(ONE_LAYER), place, 1))
        for place in places
    ]
    first, second = map(build_one, places)
    compile_ahead(second, first.prepare(weights[0]))
    prepared = jax.block_until_ready(second.prepare(weights[1]))
    with CompilationCounter() as compilations:
        compilations.reset()
        second.warm_up(prepared)
    assert compilations.count == 0
