"""Recurrent states of an engine on devices: whatever comes between, an answer is what its tokens alone give."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import DeltaState
from areal_jax.models.families import DELTA, LayerKind
from areal_jax.models.layer_parts import DeltaNet
from areal_jax.rollout.decode.jax_backend import JaxScoring
from areal_jax.rollout.scoring import ScoringRequest
from tests.models.family_examples import CONFIGS, tiny
from tests.rollout.decode.delta_examples import (
    CONFIG,
    CONTEXT,
    EXACT,
    PROMPT,
    answers,
    ask,
    assert_near,
    interrupted,
    joined,
    large,
    learner_logprobs,
    prefill_in_parts,
    run,
    small,
    token_by_token,
    weights,
)
from tests.rollout.decode.examples import Decoding
from tests.rollout.engine_rig import collect

LONG = np.random.default_rng(5).integers(0, 300, 200)
SHALLOW = Decoder(dataclasses.replace(CONFIG, n_layers=2, kinds=(DELTA, LayerKind())))
CUTS = (1, 2, 3, 5, 63, 64, 65, 100, 128, 130, 191, 198)  # inside chunks of 64, at their ends, behind one token


def states_of(state):
    """The arrays of the layers with delta nets."""
    return [np.asarray(leaf) for layer in state.layers if isinstance(layer, DeltaState) for leaf in layer]


def fill_states(decoding, change):
    """Replaces the states by change(array), the name of the field beside it."""
    new = lambda layer: DeltaState(*(change(name, leaf) for name, leaf in layer._asdict().items()))
    layers = (new(layer) if isinstance(layer, DeltaState) else layer for layer in decoding.state.layers)
    decoding.state = decoding.state._replace(layers=tuple(layers))


# Prefill in parts, groups, turns.


def test_a_prefill_that_is_cut_is_as_uncut():
    decoding = Decoding(large(), weights())
    asked = ask(prompt=LONG, new=8)
    decoding.start({'whole': asked, **dict.fromkeys(CUTS, asked), 'all': asked})
    for cut in CUTS:
        prefill_in_parts(decoding, cut, (cut,))
    prefill_in_parts(decoding, 'all', CUTS)
    decoding.decode(8)
    tokens, whole = decoding.tokens('whole'), decoding.logprobs('whole')
    assert_near(whole, learner_logprobs(tokens, len(LONG)))
    for name in (*CUTS, 'all'):
        assert decoding.tokens(name) == tokens
        np.testing.assert_allclose(decoding.logprobs(name), whole, rtol=0, atol=EXACT)


def test_a_group_of_16_is_as_each_alone():
    group = [ask(sample) for sample in range(16)]
    for one, found in zip(group, answers(large(), group), strict=True):
        [(tokens, logprobs)] = answers(large(), [one])
        assert found[0] == tokens
        np.testing.assert_allclose(found[1], logprobs, rtol=0, atol=EXACT)
        assert_near(logprobs, learner_logprobs([*PROMPT, *tokens], len(PROMPT)))


@pytest.mark.parametrize('decode_steps', [4, 8])
def test_a_turn_and_another_answer_to_the_prompt_go_on_from_snapshots(decode_steps):
    async def script(rig):
        first = rig.engine.generate(ask(prompt=PROMPT[:65], new=20))
        await collect(first)
        said, found = first.tokens, []
        for draw, prompt in enumerate(([*said, 4, 5, 6], said[:65], [*said[:64], 7, 8], [*said[:50], 9])):
            one = rig.engine.generate(ask(prompt=prompt, draw=draw))
            found.append((prompt, joined(await collect(one)), one.cached_tokens))
        return found

    found = run(large(), script, decode_steps=decode_steps)
    # behind an answer and behind a prompt there is a state, but not inside
    assert [cached for *_, cached in found] == [84, 64, 64, 0]
    for prompt, (tokens, logprobs), _ in found:
        assert_near(logprobs, learner_logprobs([*prompt, *tokens], len(prompt)))


# Preemption and new weights.


def test_preempted_answers_are_as_uninterrupted():
    requests = [ask(prompt=PROMPT[: 10 + draw], new=40, draw=draw) for draw in range(4)]

    async def script(rig):
        open_ = [rig.engine.generate(one) for one in requests]
        found = [joined(await collect(one)) for one in open_]
        return found, rig.kinds('preempt')

    found, preempted = run(small(), script)
    assert len(preempted) >= 2
    for one, expected in zip(found, answers(large(), requests), strict=True):
        assert one[0] == expected[0]
        np.testing.assert_allclose(one[1], expected[1], rtol=0, atol=EXACT)


def test_recomputed_under_equal_weights_is_as_uninterrupted():
    whole = answers(large(), [ask(sample, new=24) for sample in range(3)])
    for segments, expected in zip(interrupted(large(), 'recompute', 0), whole, strict=True):
        assert [one.policy_version for one in segments] == [0, 1]
        tokens, logprobs = joined(segments)
        assert tokens == expected[0]
        np.testing.assert_allclose(logprobs, expected[1], rtol=0, atol=EXACT)


def test_recompute_goes_on_from_a_state_of_the_new_weights_alone():
    for segments in interrupted(large(), 'recompute', 1):
        start = len(PROMPT) + len(segments[0].tokens)
        tokens = [*PROMPT, *joined(segments)[0]]
        expected = learner_logprobs(tokens, start, weights(1))
        assert_near(segments[1].behavior_logprobs, expected)


def test_keep_goes_on_from_a_state_of_both_versions():
    for segments in interrupted(large(), 'keep', 1):
        assert [one.policy_version for one in segments] == [0, 1]
        tokens, logprobs = joined(segments)
        assert_near(logprobs, token_by_token(CONFIG, segments))
        recomputed = learner_logprobs([*PROMPT, *tokens], len(PROMPT), weights(1))
        later = slice(len(segments[0].tokens), None)
        assert np.abs(logprobs - recomputed)[later].max() > 1e-2


# Places of a pool.


def test_a_dispatch_changes_no_state_but_of_its_rows_while_they_live():
    rng = np.random.default_rng(0)
    decoding = Decoding(small(), weights())
    random = lambda name, leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    fill_states(decoding, random)
    before = states_of(decoding.state)
    decoding.start(
        {0: ask(prompt=PROMPT[:9], new=2), 1: ask(1, prompt=PROMPT[:7], new=20), 2: ask(2, prompt=[5], new=20)}
    )
    padding, own = decoding.backend.states.padding, [one.state for one in decoding.sequences.values()]
    others = np.setdiff1d(np.arange(padding), own)
    after_two = states_after(decoding, 2)
    decoding.decode(4)  # the first row ends behind two; a row is padding
    assert not decoding.sequences[0].live
    assert decoding.sequences[1].live
    for old, two, new in zip(before, after_two, states_of(decoding.state), strict=True):
        np.testing.assert_array_equal(new[others], old[others])
        np.testing.assert_array_equal(new[own[0]], two[own[0]])
        assert all(np.any(new[place] != two[place]) for place in own[1:])


def states_after(decoding, steps):
    """The states behind `steps` tokens of every sequence, from a copy of what the engine has."""
    rows, state = [one.row() for one in decoding.sequences.values()], jax.tree.map(jnp.copy, decoding.state)
    return states_of(decoding.backend.generate(decoding.params, state, rows, steps)[0])


@pytest.mark.parametrize('spoiled', [('rule',), ('query', 'key', 'value')])
def test_a_sequence_reads_nothing_that_was_at_its_place_before(spoiled):
    """By a prefill, by the decoding of a prompt of one token, and in places that NaN was written to."""
    asked = {0: ask(prompt=PROMPT[:9], new=9), 1: ask(1, prompt=[5], new=9)}
    clean, used, bad = (Decoding(small(), weights()) for _ in range(3))
    used.start({2: ask(2, prompt=PROMPT[20:40], new=12), 3: ask(3, prompt=[9], new=12)})
    used.decode(4)
    places = [one.state for one in used.sequences.values()]
    for name in (2, 3):
        used.cancel(name)
    fill_states(bad, lambda name, leaf: jnp.full_like(leaf, jnp.nan) if name in spoiled else leaf)
    found = []
    for decoding in (clean, used, bad):
        decoding.start(asked)
        found.append(decoding.finish(4).results())
    assert {one.state for one in used.sequences.values()} == {*places}
    for results in found[1:]:
        for name, (tokens, logprobs) in found[0].items():
            assert results[name][0] == tokens
            np.testing.assert_array_equal(results[name][1], logprobs)
    assert_near(found[0][0][1], learner_logprobs(found[0][0][0], 9))


def test_a_prefill_changes_no_state_but_of_its_pieces():
    rng = np.random.default_rng(1)
    decoding = Decoding(small(), weights())
    fill_states(decoding, lambda name, leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype))
    before = states_of(decoding.state)
    decoding.start({0: ask(prompt=PROMPT[:40], new=8), 1: ask(prompt=PROMPT[:5], new=8)})
    others = np.setdiff1d(np.arange(decoding.backend.states.places), [one.state for one in decoding.sequences.values()])
    for old, new in zip(before, states_of(decoding.state), strict=True):
        np.testing.assert_array_equal(new[others], old[others])


# Numbers.


def test_1000_tokens_do_not_drift_from_the_learners_chunks():
    asked = ask(prompt=PROMPT[:4], new=1000)
    one = small(
        slots=1, context_tokens=1024, cache_blocks=256, batch_buckets=(1,), prefill_buckets=(16,), decode_steps=50
    )
    decoding = Decoding(one, weights())
    decoding.start({0: asked})
    decoding.finish(50)
    assert len(decoding.logprobs(0)) == 1000
    assert_near(decoding.logprobs(0), learner_logprobs(decoding.tokens(0), 4), largest=1e-3)


def test_bfloat16_keeps_states_and_decays_in_float32():
    half = weights(dtype='bfloat16')
    dtypes = {name: leaf.dtype for name, leaf in half['layers']['0']['delta'].items() if not isinstance(leaf, dict)}
    assert {name for name, dtype in dtypes.items() if dtype == 'float32'} == {'log_rate', 'rate_bias'}
    decoding = Decoding(small(dtype='bfloat16', cache_blocks=64), half)
    layer = decoding.state.layers[0]
    assert (layer.rule.dtype, layer.query.dtype, layer.key.dtype, layer.value.dtype) == ('float32', *['bfloat16'] * 3)
    requests = {sample: ask(sample, prompt=PROMPT[:20], new=44) for sample in range(4)}
    decoding.start(requests)
    decoding.finish(4)
    single, differences, rounding = jax.tree.map(lambda leaf: leaf.astype('float32'), half), [], []
    for name in requests:
        expected, exact = (learner_logprobs(decoding.tokens(name), 20, params) for params in (half, single))
        differences.append(np.abs(decoding.logprobs(name) - expected))
        rounding.append(np.abs(expected - exact))
    assert np.mean(differences) <= 1e-2
    assert np.mean(differences) < np.mean(rounding)  # less than bfloat16 changes the learner's own numbers
    assert decoding.state.layers[0].rule.dtype == 'float32'
    wrong = jax.tree.map(lambda leaf: leaf.astype('bfloat16'), half)
    with pytest.raises(ValueError, match=r'log_rate.* float32 in every copy of the weights: do not cast it'):
        decoding.backend.prepare(wrong)


@pytest.mark.parametrize('name', ['gpt_oss', 'qwen3_5', pytest.param('qwen3_next', marks=pytest.mark.slow)])
def test_scores_are_those_of_the_learner(name):
    decoder, params = Decoder(CONFIGS[name]), weights(config=CONFIGS[name])
    backend = small(decoder)
    scoring, rng = JaxScoring(backend), np.random.default_rng(2)
    requests = [
        ScoringRequest('', rng.integers(0, 300, length).astype(np.int32), 1, np.ones(length - 1, np.float32), 1)
        for length in (2, 30, 17)
    ]
    program = scoring.program_for([len(one.tokens) for one in requests], 1)
    for one, found in zip(requests, scoring.score(program, backend.prepare(params), requests), strict=True):
        assert_near(found.logprobs, learner_logprobs(one.tokens, 1, params, decoder))


# Sizes.


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_bytes_are_those_of_states_and_of_the_keys_and_values_of_attention(dtype):
    one, size = large(dtype=dtype), jnp.dtype(dtype).itemsize
    states = (2 * 16 + 8 + 1) * CONFIG.n_delta_layers * CONFIG.delta.state_bytes(size)
    blocks = (16 * CONTEXT // 16 + 1) * 16 * 2 * CONFIG.n_kv_heads * CONFIG.head_dim * size
    assert one.state_bytes == states + blocks
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(one.initial_state())) == states + blocks


def test_key_heads_that_devices_cannot_share_are_refused():
    odd = tiny('qwen3_5_text', kinds=(DELTA, LayerKind()), n_layers=2, delta=DeltaNet(3, 3, 8, 8), rotary_dim=4)
    with pytest.raises(ConfigError) as refused:
        small(Decoder(odd), devices=jax.devices()[:2])
    message = (
        'tensor=2 of cluster.engines does not divide the 3 key heads of the delta nets of the model; use a divisor'
    )
    assert str(refused.value) == message


# Many requests.


async def send_many(rig, count, seed):
    """Prompts, groups, turns and cancels at random; returns the answers that ended by themselves."""
    rng, opened = np.random.default_rng(seed), []
    while len(opened) < count:
        ended = [one for one in opened[-30:] if one.finish_reason in ('stop', 'length') and len(one) < 40]
        if ended and rng.random() < 0.4:
            prompt = [*ended[int(rng.integers(len(ended)))].tokens, *rng.integers(0, 300, rng.integers(1, 5))]
        else:
            prompt = rng.integers(0, 300, rng.integers(1, 30))
        for sample in range(int(rng.integers(1, 5))):
            asked = ask(sample, prompt, int(rng.integers(1, 16)), len(opened), stop=(1, 2, 3, 4))
            opened.append(rig.engine.generate(asked))
        still = [one for one in opened if one.finish_reason is None]
        if still and rng.random() < 0.5:
            rig.engine.cancel(still[int(rng.integers(len(still)))].request_id)
        await rig.pass_time(float(rng.exponential(0.1)))
        rig.check_blocks()
    while any(one.finish_reason is None for one in opened):
        await rig.pass_time(0.5)
    return opened


@pytest.mark.parametrize('count', [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_requests_leave_no_place_behind(count):
    opened = run(small(SHALLOW), lambda rig: send_many(rig, count, 1), params=weights(config=SHALLOW.config))
    reasons = [one.finish_reason for one in opened]
    assert {*reasons} == {'stop', 'length', 'cancelled'}
    assert sum(one.cached_tokens > 0 for one in opened if one.cached_tokens) > count / 10
