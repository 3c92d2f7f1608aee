import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.logprobs import sum_blocks
from areal_jax.rollout.backend import DecodeRow, SamplingError
from areal_jax.rollout.decode import sampling
from areal_jax.rollout.decode.sampling import MOST_BIASED_TOKENS, adjust_logits, count_tokens, empty_adjustments
from tests.rollout.decode.examples import (
    CONTEXT,
    PROMPT,
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

draw_tokens = jax.jit(lambda z, *given: sampling.draw_tokens(z, *given, sum_blocks(z)))
cut_support = jax.jit(sampling.cut_support)
request_keys = jax.jit(sampling.request_keys)
sample_tokens = jax.jit(sampling.sample_tokens)
PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3], np.float32)


def keys(n, seed=0):
    words = np.zeros((n, 2), np.uint32)
    words[:, 1] = seed
    return request_keys(words, np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))


def draw(z, greedy=False, index=0, seed=0):
    n = z.shape[0]
    return np.asarray(draw_tokens(z, keys(n, seed), np.full(n, index, np.int32), np.full(n, 0.0 if greedy else 1.0)))


def kept(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logits=None):
    """Indices that are left, most probable first."""
    logits = np.log(PROBABILITIES) if logits is None else logits
    one = lambda value: np.array([value], np.float32)
    cut = cut_support(logits[None], one(temperature), np.array([top_k]), one(top_p), one(min_p))[0]
    survivors = np.flatnonzero(np.isfinite(cut))
    np.testing.assert_array_equal(cut[survivors], logits[survivors])
    return sorted(survivors.tolist(), key=lambda i: -logits[i])


@pytest.mark.parametrize('vocab', [4, 256, 600])
def test_frequencies_are_the_softmax(vocab):
    # n = 20 000 independent rows: a frequency strays from p by sqrt(p (1 - p) / n); six times that is out of reach.
    # 600 entries are three blocks, the last one padded.
    n = 20_000
    z = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    counts = np.bincount(draw(jnp.tile(z, (n, 1))), minlength=vocab)
    assert len(counts) == vocab
    assert np.all(np.abs(counts / n - p) < 6 * np.sqrt(p * (1 - p) / n) + 2 / n)


def test_both_levels_have_noise_of_their_own():
    # 512 equal logits, two blocks: block and place in it are independent, so of n = 4000 rows about 4000/512 = 8 fall
    # on each entry; with noise shared by the levels the places would depend on the block
    n = 4000
    tokens = draw(jnp.zeros((n, 512)))
    first, second = tokens[tokens < 256], tokens[tokens >= 256] - 256
    assert abs(len(first) / n - 0.5) < 6 * 0.5 / np.sqrt(n)
    for places in (first, second):  # means of uniform 0..255: 127.5, deviation 73.9 / sqrt(2000) = 1.65
        assert abs(places.mean() - 127.5) < 6 * 1.65


def test_a_token_without_probability_is_never_drawn():
    z = np.full((500, 700), -np.inf, np.float32)  # the first and last block have none at all
    z[:, [300, 310]] = 0.0
    assert set(draw(jnp.asarray(z)).tolist()) == {300, 310}


@pytest.mark.parametrize('best', [0, 255, 256, 699])
def test_greedy_is_the_first_argmax_without_noise(best):
    z = np.zeros((1, 700), np.float32)
    z[0, [best, 699]] = 1.0  # a tie goes to the first
    assert draw(jnp.asarray(z), greedy=True).tolist() == [best]


def test_a_small_error_in_the_logits_does_not_move_a_flat_distribution():
    # 50 000 equal logits, p = 2e-5 each, the first half raised by 1e-4: the cumulative sum moves by up to
    # 1e-4 / 4 = 2.5e-5, more than one entry, so inverting it would change most draws. Here a draw changes if the two
    # best noisy logits are within 1e-4: about one in 10 000.
    z = np.zeros((200, 50_000), np.float32)
    moved = z.copy()
    moved[:, :25_000] += 1e-4
    assert np.mean(draw(z) == draw(moved)) >= 0.99


def test_noise_changes_with_the_index_of_the_token_and_the_seed():
    z = jnp.zeros((8, 500))
    base = draw(z)
    assert (draw(z, index=1) != base).all()
    assert (draw(z, seed=1) != base).all()
    assert (draw(z) == base).all()


def test_keys_are_folded_from_seed_draw_and_sample():
    seed, draw_number, sample = 7 + (3 << 32), 5, 2
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    [key] = sampling.request_keys(words, np.array([draw_number], np.uint32), np.array([sample], np.uint32))
    root = jax.random.wrap_key_data(jnp.array([3, 7], jnp.uint32), impl='threefry2x32')
    expected = jax.random.fold_in(jax.random.fold_in(root, draw_number), sample)
    np.testing.assert_array_equal(key, jax.random.key_data(expected))


def test_tokens_and_logprobs_are_those_of_the_tempered_logits():
    # temperature 2: weights sqrt(.1), sqrt(.4), sqrt(.2), sqrt(.3) = .3162 .6325 .4472 .5477, sum 1.9436
    n = 20_000
    logits = jnp.tile(jnp.log(PROBABILITIES), (n, 1))
    tokens, logprobs, _ = sample_tokens(logits, keys(n), np.zeros(n, np.int32), np.full(n, 2.0, np.float32))
    tokens = np.asarray(tokens)
    p = np.array([0.3162, 0.6325, 0.4472, 0.5477]) / 1.9436
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=2e-4)
    # p of token 0 is .163 and not .1: sqrt(.163 * .837 / 20 000) = .0026
    np.testing.assert_allclose(np.bincount(tokens) / n, p, atol=6 * 0.0035)


@pytest.mark.parametrize(
    ('filters', 'expected'),
    [
        ({}, [1, 3, 2, 0]),
        ({'top_k': 1}, [1]),
        ({'top_k': 2}, [1, 3]),
        ({'top_k': 9}, [1, 3, 2, 0]),
        ({'top_p': 1e-6}, [1]),
        ({'top_p': 0.35}, [1]),  # .4 reaches it
        ({'top_p': 0.6}, [1, 3]),  # .4 < .6 <= .7
        ({'top_p': 0.75}, [1, 3, 2]),  # .7 < .75 <= .9
        ({'top_p': 0.95}, [1, 3, 2, 0]),
        ({'top_p': 0.42}, [1, 3]),  # .4 < .42
        ({'top_p': 0.42, 'top_k': 3}, [1]),  # of what top-k leaves: .4 / .9 = .444 >= .42
        ({'top_p': 0.35, 'temperature': 2.0}, [1, 3]),  # .6325 / 1.9436 = .325 < .35
        ({'top_p': 0.35, 'top_k': 1, 'min_p': 1.0, 'temperature': 0.0}, [1, 3, 2, 0]),  # greedy needs no cut
        ({'min_p': 0.2}, [1, 3, 2, 0]),  # of .4: .08 < .1
        ({'min_p': 0.3}, [1, 3, 2]),  # .1 < .12 <= .2
        ({'min_p': 0.6}, [1, 3]),  # .2 < .24 <= .3
        ({'min_p': 1.0}, [1]),
        ({'min_p': 0.6, 'temperature': 2.0}, [1, 3, 2]),  # weights .3162 .6325 .4472 .5477: .3162 < .3795 <= .4472
        ({'min_p': 0.6, 'top_k': 1}, [1]),
        ({'min_p': 0.6, 'top_p': 0.55}, [1]),  # of what min-p leaves: .4 / .7 = .571 >= .55
    ],
)
def test_support_by_hand(filters, expected):
    assert kept(**filters) == expected


def test_a_cut_support_has_renormalised_logprobs_beside_those_of_the_full_softmax():
    # top-2 of .4 .3 .2 .1: log(.4 / .7) and log(.3 / .7) beside log .4 and log .3
    logits = jnp.tile(jnp.log(PROBABILITIES), (64, 1))
    cut = cut_support(logits, jnp.ones(64), jnp.full(64, 2), jnp.ones(64), jnp.zeros(64))
    tokens, full, renormalised = sample_tokens(logits, keys(64), jnp.zeros(64, jnp.int32), jnp.ones(64), cut)
    tokens = np.asarray(tokens)
    assert set(tokens.tolist()) == {1, 3}
    np.testing.assert_allclose(full, np.log(np.where(tokens == 1, 0.4, 0.3)), atol=1e-5)
    np.testing.assert_allclose(renormalised, np.log(np.where(tokens == 1, 4 / 7, 3 / 7)), atol=1e-5)


def test_without_a_cut_there_is_one_kind_of_logprobs():
    assert sample_tokens(jnp.zeros((2, 4)), keys(2), jnp.zeros(2, jnp.int32), jnp.ones(2))[2] is None


def test_tied_tokens_at_the_threshold_are_all_kept():
    assert sorted(kept(top_k=2, logits=np.array([1.0, 3.0, 1.0, -2.0], np.float32))) == [0, 1, 2]


def test_the_threshold_tells_neighbouring_floats_apart_whatever_the_range():
    above = np.nextafter(np.float32(1), np.float32(2))
    assert kept(top_k=1, logits=np.array([1.0, above, -1e30, -above], np.float32)) == [1]
    assert kept(top_k=3, logits=np.array([-1.0, -above, 1e30, 1e-30], np.float32)) == [2, 3, 0]


@pytest.mark.parametrize('seed', range(4))
def test_support_is_that_of_a_sort(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 300).astype(np.float32) * np.float32(10.0 ** rng.integers(-2, 2))
    top_k, top_p = int(rng.integers(1, 300)), float(rng.uniform(0.05, 0.99))
    order = np.argsort(-logits)
    mass = np.exp((logits[order] - logits.max()).astype(np.float64))[:top_k]
    cumulative = np.cumsum(mass) / mass.sum()
    assert kept(top_k=top_k, logits=logits) == order[:top_k].tolist()
    assert kept(top_k=top_k, top_p=top_p, logits=logits) == order[: np.searchsorted(cumulative, top_p) + 1].tolist()


# Penalties, biases and least lengths.


finish = functools.partial(finished, filtered=True, adjusted=True)
TO_1 = ((1, 3.0), (7, -50.0))
CASES = {
    'bias': {'logit_bias': TO_1},
    'least': {'min_new_tokens': 6, 'stop': tuple(range(0, 24, 2))},
    'repetition': {'repetition_penalty': 1.7},
    'repetition below 1': {'repetition_penalty': 0.6},
    'frequency': {'frequency_penalty': 1.9},
    'presence': {'presence_penalty': -1.5},
    'scale': {'temperature': 0.7, 'logit_scale': 1.6},
    'greedy': {'temperature': 0.0, 'repetition_penalty': 1.3, 'presence_penalty': 0.7},
    'all': {
        'temperature': 0.7, 'logit_bias': TO_1, 'min_new_tokens': 3, 'stop': (2, 9, 11, 30, 17), 'min_p': 0.02,
        'repetition_penalty': 1.2, 'frequency_penalty': 0.4, 'presence_penalty': 0.3, 'top_k': 9, 'top_p': 0.9,
    },
}  # fmt: skip


def softmax_logprobs(z):
    z = z - z.max()
    return z - np.log(np.exp(z).sum())


def cut_by_sorting(z, params):
    """Log-probs behind temperature, min-p, top-k and top-p, -inf where nothing is left."""
    z = softmax_logprobs(z / (params.temperature or 1.0))
    if params.temperature == 0:
        return z
    z = np.where(z >= z.max() + np.log(params.min_p), z, -np.inf) if params.min_p else z
    order = np.argsort(-z)[: params.top_k or None]
    mass = np.exp(z[order] - z.max())
    order = order[: np.searchsorted(np.cumsum(mass) / mass.sum(), params.top_p) + 1]
    left = np.full_like(z, -np.inf)
    left[order] = z[order]
    return softmax_logprobs(left)


def sampled_logprobs(tokens, wanted):
    """Of each token of the answer, in float64 and token by token from the definition in types.SamplingParams."""
    params, start = wanted.sampling, len(wanted.prompt_tokens)
    found = []
    for t in range(start, len(tokens)):
        z = next_token_logits(tokens)[t - 1].astype(np.float64)
        answer = np.bincount(tokens[start:t], minlength=len(z))
        seen = answer + np.bincount(tokens[:start], minlength=len(z)) > 0
        for token, bias in params.logit_bias:
            z[token] += bias
        if t - start < params.min_new_tokens:
            z[list(params.stop_tokens)] = -np.inf
        repeated = np.where(z > 0, z / params.repetition_penalty, z * params.repetition_penalty)
        z = np.where(seen, repeated, z) - params.frequency_penalty * answer - params.presence_penalty * (answer > 0)
        found.append(cut_by_sorting(z * params.logit_scale, params)[tokens[t]])
    return np.array(found)


@pytest.mark.parametrize('case', CASES)
def test_both_logprobs_of_every_token_are_those_of_their_definitions(case):
    wanted = request(3, **CASES[case])
    decoding = finish({0: wanted, 1: request(5), 2: request(6, top_k=3)})
    sequence = decoding.sequences[0]
    np.testing.assert_allclose(sequence.sampling_logprobs, sampled_logprobs(sequence.tokens, wanted), atol=2e-5)
    full = forward_logprobs(sequence.tokens, len(PROMPT), temperature=wanted.sampling.temperature or 1.0)
    np.testing.assert_allclose(sequence.logprobs, full, atol=2e-5)
    assert np.abs(full - sequence.sampling_logprobs).max() > 0.05  # the case changes something


@pytest.mark.parametrize('case', CASES)
def test_dispatches_of_any_length_and_a_rebuild_change_nothing(case):
    wanted = request(3, **CASES[case])
    whole = finish({0: wanted}).sequences[0]
    decoding = Decoding(backend(filtered=True, adjusted=True))
    decoding.start({0: wanted})
    for steps in (1, 2, 1):
        decoding.decode(steps)
    decoding.rebuild(0)
    pieces = decoding.finish(3).sequences[0]
    assert pieces.tokens == whole.tokens
    np.testing.assert_allclose(pieces.sampling_logprobs, whole.sampling_logprobs, atol=2e-5)


def test_company_keeps_its_tokens_and_has_equal_logprobs():
    plain, plain_logprobs = generate(request(0))
    decoding = finish({0: request(0), 1: request(3, **CASES['all']), 2: request(4, **CASES['repetition'])})
    assert decoding.answer(0) == plain
    np.testing.assert_allclose(decoding.logprobs(0), plain_logprobs, atol=2e-5)
    assert decoding.sequences[0].sampling_logprobs == decoding.logprobs(0)
    alone = finish({0: request(0)})
    assert (alone.answer(0), alone.logprobs(0)) == (plain, plain_logprobs)  # the programs without


def test_rows_that_change_the_softmax_or_have_many_stop_tokens_take_their_own_programs():
    sizes = {'batch_buckets': None, 'slots': 64, 'prefill_buckets': (CONTEXT,)}
    one = build(filtered=True, adjusted=True, **sizes)
    asks = [{'top_k': 2}, {'min_p': 0.5}, {'presence_penalty': 0.1}, {'stop': range(5)}]
    bucket = lambda *wanted: one.batch_bucket([DecodeRow(request(**fields), 5, 4, 9, (1, 2, 3)) for fields in wanted])
    assert [bucket(*[{}] * rows) for rows in (9, 17, 33, 64)] == [16, 24, 48, 64]
    fewer = bucket(*[{}] * 16, asks[0])  # they have fewer batches
    assert fewer > 24
    assert [bucket(*[{}] * 16, asked) for asked in asks] == [fewer] * 4
    assert bucket(*[{}] * 15, {'stop': range(4)}, {'temperature': 0.0, 'top_k': 2}) == 24


def test_a_stop_token_comes_behind_the_least_length_and_an_answer_without_any_ignores_eos():
    likely = generate(request(0, temperature=0.0))[0][0]  # greedy begins with it
    stop = {'temperature': 0.0, 'stop': (likely,), 'logit_bias': ((likely, 90.0),)}
    decoding = finish({0: request(0, **stop), 1: request(0, min_new_tokens=4, **stop)})
    assert decoding.answer(0) == [likely]
    assert len(decoding.answer(1)) == 5
    assert decoding.answer(1).count(likely) == decoding.answer(1).index(likely) - 3 == 1
    ignored = finish({0: request(0, temperature=0.0, logit_bias=((likely, 90.0),))})
    assert ignored.answer(0) == [likely] * 12


def one_row(logits, prompt, answer, dispatched=(), stop=(), index=None, **fields):
    """`adjust_logits` of one row whose dispatch began behind `answer` and has generated `dispatched`."""
    vocab = len(logits)
    wanted = request(prompt=prompt, stop=stop, **fields)
    rows = empty_adjustments(1, CONTEXT, penalized=True)
    tokens = [*prompt, *answer]
    rows.fill(0, DecodeRow(wanted, tokens[-1], len(tokens) - 1, CONTEXT, (), tokens))
    generated = np.full((5, 1), vocab - 1, np.int32)  # what stands behind the step does not count
    generated[: len(dispatched), 0] = dispatched

    @jax.jit
    def run(z):
        counts = count_tokens(rows, vocab)
        at = jnp.array([len(tokens) + len(dispatched)])
        return adjust_logits(z, rows, jnp.array([[*stop, -1]]), at, counts, generated, jnp.int32(len(dispatched)))

    return np.asarray(run(jnp.asarray([logits], jnp.float32)))[0]


def test_penalties_by_hand():
    # tokens 0 and 1 in the prompt, 1 and 2 in the answer, 2 of them before this dispatch, twice in all; 3 nowhere
    logits, tokens = [2.0, -2.0, 4.0, 4.0], {'prompt': [0, 1], 'answer': [2], 'dispatched': [1, 2]}
    found = one_row(logits, **tokens, repetition_penalty=2.0)
    np.testing.assert_allclose(found, [1.0, -4.0, 2.0, 4.0])  # of prompt and answer
    found = one_row(logits, **tokens, frequency_penalty=0.5)
    np.testing.assert_allclose(found, [2.0, -2.5, 3.0, 4.0])  # of the answer, as the next
    found = one_row(logits, **tokens, presence_penalty=0.5)
    np.testing.assert_allclose(found, [2.0, -2.5, 3.5, 4.0])


def test_the_order_is_bias_then_repetition_then_what_is_taken_off():
    # (-1 + 4) / 2 - .5 - .25 = .75; the bias last gives -1 * 2 - .75 + 4 = 1.25, repetition last 2.25 / 2 = 1.125
    found = one_row(
        [-1.0, 0.0], prompt=[1], answer=[0], logit_bias=((0, 4.0),), repetition_penalty=2.0, frequency_penalty=0.5,
        presence_penalty=0.25,
    )  # fmt: skip
    np.testing.assert_allclose(found, [0.75, 0.0])


def test_no_bias_lifts_a_stop_token_over_the_least_length():
    banned = one_row([0.0, 0.0, 0.0], prompt=[1], answer=[], stop=(2,), min_new_tokens=1, logit_bias=((2, 90.0),))
    np.testing.assert_array_equal(banned, [0.0, 0.0, -np.inf])
    allowed = one_row([0.0, 0.0, 0.0], prompt=[1], answer=[0], stop=(2,), min_new_tokens=1, logit_bias=((2, 90.0),))
    np.testing.assert_array_equal(allowed, [0.0, 0.0, 90.0])


def test_frequencies_are_those_of_the_adjusted_softmax():
    # p .1 .4 .2 .3 with a bias of log 2 on the first and a presence penalty of log 4 on the second: weights
    # .2 .1 .2 .3 of .8. n = 20 000 rows: a frequency strays by sqrt(p (1 - p) / n) <= .0034; six times is out of reach
    n = 20_000
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    adjusted = one_row(
        logits, prompt=[3], answer=[1], logit_bias=((0, float(np.log(2))),), presence_penalty=float(np.log(4))
    )
    words = np.zeros((n, 2), np.uint32)
    keys = sampling.request_keys(words, np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))
    tile = lambda z: jnp.tile(jnp.asarray(z), (n, 1))
    tokens, full, changed = sampling.sample_tokens(
        tile(logits), keys, jnp.zeros(n, jnp.int32), jnp.ones(n), tile(adjusted)
    )
    tokens, p = np.asarray(tokens), np.array([0.25, 0.125, 0.25, 0.375])
    np.testing.assert_allclose(np.bincount(tokens) / n, p, atol=6 * 0.0035)
    np.testing.assert_allclose(changed, np.log(p)[tokens], atol=1e-5)
    np.testing.assert_allclose(full, logits[tokens], atol=1e-5)


def test_programs_without_adjustments_take_and_compute_nothing_for_them():
    def program(plain=True, **flags):
        one = build(**flags)
        return one.lower_generate(one.prepare(weights()), 4, plain=plain).as_text()

    bare, filtered, adjusted = program(), program(filtered=True), program(False, filtered=True, adjusted=True)
    assert 'stablehlo.case' not in bare
    assert program(filtered=True, adjusted=True) == bare  # for dispatches of plain rows
    assert f'4x{MOST_BIASED_TOKENS}x' not in filtered
    assert f'4x{MOST_BIASED_TOKENS}x' in adjusted


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'presence_penalty': 0.5}, r'request 11/0/0: presence_penalty=0\.5.*adjusted=True'),
        ({'min_new_tokens': 2, 'stop': (1,)}, r'min_new_tokens=2.*adjusted=True'),
        ({'min_p': 0.5}, r'min_p=0\.5.*filtered=True'),
    ],
)
def test_requests_that_the_programs_were_built_without_are_refused(fields, message):
    with pytest.raises(SamplingError, match=message):
        generate(request(**fields))


def test_penalties_without_the_tokens_of_the_sequence_are_refused():
    one = backend(filtered=True, adjusted=True)
    row = DecodeRow(request(presence_penalty=0.5), 5, 4, 9, (1, 2, 3), [1, 2])
    with pytest.raises(ValueError, match='2 tokens, but its penalties need all 5; give them'):
        one.generate(one.prepare(weights()), one.initial_state(), [row], 5)
