"""Sizes of a step, the passes of a method, and the array that no program may have."""

import jax
import jax.numpy as jnp
import pytest

from areal_jax.errors import UserError
from areal_jax.models.logprobs import token_logprobs
from benchmarks.objectives import (
    DEFAULT,
    METHODS,
    largest_array,
    make_objective,
    make_size,
    measure,
    read_options,
    row_of,
)

VOCABULARY, TOKENS = 16_384, 1024


def compiled(loss):
    hidden, head, targets = jnp.zeros((TOKENS, 8)), jnp.zeros((VOCABULARY, 8)), jnp.zeros(TOKENS, int)
    return jax.jit(jax.grad(loss)).lower(hidden, head, targets).compile().as_text()


def test_all_logits_are_seen():
    def naive(hidden, head, targets):
        return jax.nn.log_softmax(hidden @ head.T)[jnp.arange(TOKENS), targets].sum()

    tiled = compiled(lambda hidden, head, targets: token_logprobs(hidden, head, targets, 1.0)[0].sum())
    assert largest_array(compiled(naive), VOCABULARY) >= TOKENS * VOCABULARY
    assert 0 < largest_array(tiled, VOCABULARY) < TOKENS * VOCABULARY


def test_rows_are_full():
    size = make_size(0, small=False)
    assert (size.tokens, size.rows, size.row_loss_tokens) == (8192, 8, 896)
    assert (size.model.n_layers, size.model.d_model, size.model.vocab_size) == (4, 256, 32_000)


def run(seconds):
    return {'cpu_s': seconds, 'wall_s': seconds, 'checks': {'tokens': 8}}


def test_a_ratio_is_judged_where_a_method_needs_no_pass():
    calls = {'gspo': [run(1.1), run(1.1)], DEFAULT: [run(1.0), run(1.0)], 'grpo': [run(1.3), run(1.4)]}
    row = row_of('gspo', make_objective('gspo'), calls)
    assert (row['ratio_cpu'], row['passes'], row['met']) == (1.1, [], False)
    referred = row_of('grpo', make_objective('grpo'), calls)
    assert referred['passes'] == ['log-probs of the reference']
    assert 'met' not in referred


def test_methods_are_those_that_learn_from_answers():
    assert not {DEFAULT, 'sft', 'distillation'} & set(METHODS)
    judged = {name: row_of(name, make_objective(name), {name: [run(1)], DEFAULT: [run(1)]}) for name in METHODS}
    assert {name for name, row in judged.items() if row['passes']} == {'grpo', 'm2po', 'vcpo', 'aent', 'ppo_critic'}
    bars = {name: row.get('bar') for name, row in judged.items() if row['passes']}
    assert bars == {'grpo': None, 'm2po': None, 'vcpo': None, 'aent': None, 'ppo_critic': 1.15}


@pytest.mark.slow
def test_a_small_measurement():
    [row] = measure(read_options(['--small', '--methods=m2po']))
    assert row['passes'] == ['log-probs of the weights']
    assert row['ratio_cpu'] > 0


def test_an_unknown_method_is_named():
    with pytest.raises(UserError, match="--methods has 'nothing'"):
        measure(read_options(['--small', '--methods=nothing']))
