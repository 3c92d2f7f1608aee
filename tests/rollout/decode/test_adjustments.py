"""Penalties, biases and least lengths: exact probabilities, whatever the dispatches and the company."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
