"""Advantages that need a pass: the baseline of least variance, and a divergence in the reward, by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.objectives import BASE, OBJECTIVES
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.advantages import Passed, group_advantages, optimal_baseline
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, VALUES
from areal_jax.learning.objective.packed_advantages import squared_norms
from areal_jax.learning.objective.policy_objective import PolicyObjective
from areal_jax.learning.packing.packing import empty_batch
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import PackedBatch
from tests.learning.examples import group, learner_settings, make_optimizer, random_groups, tiny_decoder

W, NORMS = np.log([2.0, 1.0, 1.0, 0.5]), np.array([1.0, 4.0, 1.0, 4.0])  # the squares of [1, 2, 1, 2]


@pytest.mark.parametrize(('rewards', 'baseline'), [([1, 0, 1, 0], 0.5), ([1, 0, 0, 0], 0.4)])
def test_the_baseline_weighs_rewards_by_the_squares_of_weights_and_gradients(rewards, baseline):
    # w² ‖g‖² = [4, 4, 1, 1]: 5 / 10 and 4 / 10, where the means are 0.5 and 0.25
    rewards = np.array(rewards, float)
    found = optimal_baseline(rewards, W, NORMS)
    np.testing.assert_allclose(found * (rewards.std() + 1e-6), rewards - baseline, rtol=1e-6)


def test_weights_of_any_size_and_answers_without_tokens_make_a_baseline():
    rewards = np.array([1.0, 0.0, 0.5])
    spread = rewards.std() + 1e-6
    np.testing.assert_allclose(
        optimal_baseline(rewards, W[:3] + 900, NORMS[:3]), optimal_baseline(rewards, W[:3], NORMS[:3]), atol=1e-9
    )
    np.testing.assert_allclose(
        optimal_baseline(rewards, [700.0, 0.0, 0.0], np.array([0.0, 1.0, 1.0])) * spread, rewards - 0.25
    )
    np.testing.assert_allclose(optimal_baseline(rewards, np.zeros(3), np.zeros(3)) * spread, rewards - 0.5)


def test_equal_rewards_have_exactly_no_advantage():
    choices = PolicyChoices(advantage='optimal_baseline')
    found = group_advantages(group([1], [[2]] * 3, [0.1] * 3), choices, Passed(np.zeros(3), W[:3], NORMS[:3]))
    np.testing.assert_array_equal(found, np.zeros(3))


def test_the_norm_of_a_token_is_that_of_its_gradient_at_the_logits():
    logits = jnp.array([0.3, -1.0, 2.0, 0.0])
    logp = lambda z: jax.nn.log_softmax(z)[2]
    gradient, p = jax.grad(logp)(logits), jax.nn.softmax(logits)
    norm = squared_norms(np.asarray(logp(logits)), np.log(np.asarray(jnp.sum(p**2))))
    np.testing.assert_allclose(norm, np.sum(np.asarray(gradient) ** 2), rtol=1e-5)


def two_answers(behavior=-1.0) -> PackedBatch:
    """A row with answers of three and of two loss tokens, and padding; the second token of the first is masked."""
    batch = empty_batch(1, 1, 8, 6, ())
    batch.trajectory_ids[0, 0] = [0, 0, 0, 1, 1, -1]
    batch.loss_mask[0, 0] = [True, False, True, True, True, False]
    batch.behavior_logprobs[0, 0] = behavior
    return batch


def objective_of(**choices) -> PolicyObjective:
    return PolicyObjective(PolicyChoices(**choices))


def test_the_baseline_of_packed_tokens_has_products_and_sums_over_loss_tokens():
    batch = two_answers()
    policy = np.array([[[-1.0 + np.log(2), np.nan, -1.0, -1.0, -1.0 + np.log(0.5), np.inf]]], np.float32)
    collision = np.full((1, 1, 6), np.log(0.5), np.float32)
    objective = objective_of(advantage='optimal_baseline')
    groups = [group([1], [[2, 3, 4], [5, 6]], [1.0, 0.0])]
    ((found, _),) = objective.token_advantages(groups, [batch], [{POLICY: policy, COLLISION: collision}])
    e = np.exp(-1.0)
    norms = np.array([1.5 - 4 * e, 1.5 - 2 * e]), np.array([1.5 - 2 * e, 1.5 - e])
    shares = np.array([4.0 * norms[0].sum(), 0.25 * norms[1].sum()])
    baseline = shares[0] / shares.sum()
    expected = np.array([1 - baseline, 0, 1 - baseline, -baseline, -baseline, 0]) / (0.5 + 1e-6)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-5)
    assert objective.replaces_advantages
    assert {COLLISION} <= objective.reads


REF = np.array([[[-1.5, np.nan, -2.0, 0.0, -1.25, np.nan]]], np.float32)  # k1: .5, -, 1, -1, .25


def test_a_divergence_in_the_reward_is_taken_from_an_answer_before_its_group_is_compared():
    objective = objective_of(advantage='group_mean', kl_coefficient=0.1, kl_estimator='k1', kl_in='reward')
    groups = [group([1], [[2, 3, 4], [5, 6]], [1.0, 1.0])]
    ((found, _),) = objective.token_advantages(groups, [two_answers()], [{REFERENCE: REF}])
    # rewards 1 - 0.1 · 1.5 and 1 + 0.1 · 0.75, mean 0.9625: equal rewards teach now, and are not filtered
    np.testing.assert_allclose(found[0, 0], [-0.1125, 0, -0.1125, 0.1125, 0.1125, 0], rtol=1e-6)
    assert not objective.contrasts


@pytest.mark.parametrize('whiten', ['none', 'batch'])
def test_the_return_of_a_token_has_the_divergence_from_it_on(whiten):
    objective = objective_of(advantage='reward', kl_coefficient=0.1, kl_estimator='k1', kl_in='reward', whiten=whiten)
    groups = [group([1], [[2, 3, 4], [5, 6]], [1.0, 0.0])]
    ((found, _),) = objective.token_advantages(groups, [two_answers()], [{REFERENCE: REF}])
    returns = np.array([1 - 0.15, 1 - 0.1, 0.075, -0.025])
    expected = returns if whiten == 'none' else (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(found[0, 0][two_answers().loss_mask[0, 0]], expected, rtol=1e-5)
    np.testing.assert_array_equal(found[0, 0][[1, 5]], 0.0)


@pytest.mark.parametrize(('choices', 'behind'), [({}, 0.0), ({'truncated_value': 'last'}, 2.0)])
def test_an_answer_at_its_limit_ends_there_or_goes_on_with_the_value_behind_it(choices, behind):
    objective, batch = objective_of(advantage='gae', **choices), two_answers()
    whole = group([1], [[2, 3, 4], [5, 6]], [1.0, 0.25])
    cut = tuple(dataclasses.replace(t, finish_reason='length') for t in whole.trajectories)
    known = {VALUES: np.random.default_rng(0).normal(size=(1, 1, 6)).astype(np.float32)}
    if END_VALUES in objective.reads:
        known[END_VALUES] = np.full((1, 1, 6), 2.0, np.float32)
    groups = [dataclasses.replace(whole, trajectories=cut)]
    ((_, returns),) = objective.token_advantages(groups, [batch], [known])
    expected = np.array([1.0, 0, 1.0, 0.25, 0.25, 0]) + behind * batch.loss_mask[0, 0]
    np.testing.assert_allclose(returns[0, 0], expected, atol=1e-6)


_DECODER = tiny_decoder(n_layers=1)
_GROUPS = random_groups(5, 5)


def learner_of(mesh=(1, 1), **changes):
    """A learner with the choices of a method, or others, and weights that are not those of the reference."""
    choices = dict(BASE) | changes.pop('choices')
    settings = learner_settings(
        row_tokens=40, row_loss_tokens=24, objective=PolicyObjective(PolicyChoices(**choices)), **changes
    )
    return SpmdLearner(
        _DECODER, _DECODER.init(seed=2, scale=2.0), make_mesh(*mesh), optimizer=make_optimizer('sgd', clip_norm=0),
        learning_rate=0.1, settings=settings,
    )  # fmt: skip


VCPO = OBJECTIVES['vcpo'].choices
RETURNS = {'advantage': 'reward', 'whiten': 'batch', 'kl_coefficient': 0.5, 'kl_estimator': 'k1', 'kl_in': 'reward'}


def _change(learner):
    before = learner.save()['params']
    learner.update(_GROUPS, 2)
    metrics = learner.update(_GROUPS, 3)
    return metrics, jax.tree.map(lambda a, b: a - b, learner.save()['params'], before)


@pytest.mark.parametrize('choices', [VCPO, RETURNS], ids=['vcpo', 'kl in the reward'])
def test_the_update_does_not_depend_on_packing_or_program_and_compiles_nothing_later(choices):
    first = learner_of(choices=choices)
    compiled = first.warm_up()
    metrics, expected = _change(first)
    assert len(first.programs.compiled) == compiled
    assert ('loss/reference_kl' in metrics) == ('kl_coefficient' in choices)
    other = {'accumulate': 'scan', 'rows_per_microbatch': 2, 'packing': 'ordinary', 'max_microbatches': 8}
    _, found = _change(learner_of(choices=choices, **other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), found, expected)


@pytest.mark.parametrize(
    'choices',
    [
        {'advantage': 'optimal_baseline'},
        {'advantage': 'group', 'kl_coefficient': 0.1, 'kl_in': 'reward'},
        {'advantage': 'gae', 'whiten': 'batch'},
    ],
    ids=['optimal_baseline', 'kl', 'gae'],
)
def test_an_update_without_a_group_has_no_advantages(choices):
    assert objective_of(**choices).token_advantages([], [], []) == []
