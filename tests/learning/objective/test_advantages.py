"""Advantages: of a group, of packed tokens from a critic, and those that need a pass, by hand."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.objectives import BASE, OBJECTIVES
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.advantages import (
    ESTIMATORS,
    Passed,
    generalized_advantages,
    group_advantages,
    optimal_baseline,
    own_advantages,
    squared_norms,
)
from areal_jax.learning.objective.counting import has_signal
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, VALUES
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.packing import empty_batch
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import PackedBatch, TrajectoryGroup
from tests.learning.examples import (
    group,
    make_learner,
    random_groups,
    segment,
    tiny_decoder,
    trajectory,
)
from tests.learning.objective.tokens import group_advantages_of

_ESTIMATORS = ('group', 'group_mean', 'rloo')


def _group(*rewards: float):
    return group([1], [[2]] * len(rewards), rewards)


def test_group_divides_by_the_population_deviation():
    # mean 1/4, variance 1/4 * 3/4 = 3/16, std .4330127: (.75, -.25, -.25, -.25) / (.4330127 + .0001)
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / 0.4331127
    np.testing.assert_allclose(group_advantages_of(_group(1, 0, 0, 0), 'group'), expected, rtol=1e-5)


def test_group_mean_and_leave_one_out():
    # RLOO: 1 - mean(0, 0, 0) = 1 and 0 - mean(1, 0, 0) = -1/3, i.e. 4/3 of the group mean's
    np.testing.assert_allclose(group_advantages_of(_group(1, 0, 0, 0), 'group_mean'), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages_of(_group(1, 0, 0, 0), 'rloo'), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_partial_group_uses_the_rewards_it_has(estimator):
    values = group_advantages_of(_group(1, 0, 0.5), estimator)
    assert values.shape == (3,)
    np.testing.assert_allclose(values.sum(), 0, atol=1e-6)
    assert values[2] == 0  # the mean itself


@pytest.mark.parametrize('estimator', _ESTIMATORS)
@pytest.mark.parametrize('rewards', [(0.7,), (0.1,) * 7, (1.0, 1.0)], ids=['one', 'rounding mean', 'two'])
def test_no_spread_is_exactly_zero(estimator, rewards):
    assert np.mean((0.1,) * 7) != 0.1  # equal rewards whose mean rounds: r - mean would not be 0
    np.testing.assert_array_equal(group_advantages_of(_group(*rewards), estimator), np.zeros(len(rewards)))
    assert not has_signal(_group(*rewards))


def test_shift_changes_nothing_and_scale_little():
    base = group_advantages_of(_group(0.2, 0.9, 0.4), 'group')
    np.testing.assert_allclose(group_advantages_of(_group(5.2, 5.9, 5.4), 'group'), base, rtol=1e-5)
    np.testing.assert_allclose(group_advantages_of(_group(20, 90, 40), 'group'), base, rtol=1e-3)  # up to the 1e-4


def test_has_signal_where_one_reward_differs():
    assert has_signal(_group(0, 0, 1e-9))


# the standard deviation of the second is infinite, so that all advantages would be 0 and nothing learned, silently
@pytest.mark.parametrize('reward', [float('nan'), 1e200])
def test_a_reward_that_is_not_finite_or_whose_square_overflows_is_named(reward):
    said = re.escape(f'draw 0, sample 1: reward is {reward}; verifiers must return finite numbers')
    with pytest.raises(ValueError, match=said):
        group_advantages_of(_group(0, reward), 'group')


def test_unknown_estimator_is_named():
    with pytest.raises(
        ValueError, match=r"loss.advantage='td' is unknown; use one of group, group_mean, length_baseline"
    ):
        group_advantages_of(_group(0, 1), 'td')


def test_an_own_estimator_sees_all_rewards_of_the_update_once_with_the_number_of_their_group():
    seen = []

    def estimate(rewards, groups):
        seen.append((rewards.tolist(), groups.tolist()))
        advantages = rewards - rewards.mean()
        rewards[:] = 9  # must not change the rewards of the update
        return advantages

    # mean of 1, 0, 1, 1, 0, 0 is 1/2
    first, second = own_advantages(
        [_group(1, 0, 1, 1), _group(0, 0)], estimate, PolicyChoices(advantage='f.py:estimate')
    )
    assert seen == [([1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1])]
    np.testing.assert_array_equal(first, np.array([0.5, -0.5, 0.5, 0.5], np.float32))
    np.testing.assert_array_equal(second, np.array([-0.5, -0.5], np.float32))
    assert first.dtype == np.float32
    assert own_advantages([], estimate, PolicyChoices(advantage='f.py:estimate')) == []


@pytest.mark.parametrize(
    ('returned', 'message'),
    [
        (np.ones(3), r'returned the shape \(3,\) for 2 rewards of 1 groups; .* the shape \(2,\)'),
        (np.ones((2, 1)), r'returned the shape \(2, 1\)'),
        ([0, np.inf], r'advantage 1 is inf, for the reward 4; advantages must be finite in float32'),
        ([1e39, 0], r'advantage 0 is 1e\+39, for the reward 2'),
        (None, r'^loss\.advantage=f\.py:g: '),
        (['a', 'b'], r'ValueError: could not convert string'),
    ],
)
def test_what_an_own_estimator_must_not_return_is_named(returned, message):
    with pytest.raises(UserError, match=message):
        own_advantages([_group(2, 4)], lambda rewards, groups: returned, PolicyChoices(advantage='f.py:g'))


# Episodes of several rows.


def _forked():
    """Rewards 1, 0 and 0.5 of episodes with 1, 2 and 3 rows, whose rows have 2, 1, 3, 1, 1 and 2 tokens."""
    rows = []
    for sample, (reward, lengths) in enumerate(((1.0, [2]), (0.0, [1, 3]), (0.5, [1, 1, 2]))):
        for row, length in enumerate(lengths):
            made = trajectory([7], [segment([1] * length, 0)], reward=reward, sample=sample)
            rows.append(dataclasses.replace(made, row=row))
    return TrajectoryGroup(0, tuple(rows))


@pytest.mark.parametrize('estimator', sorted(ESTIMATORS))
def test_the_rows_of_an_episode_have_the_advantage_of_one_row_with_all_their_tokens(estimator):
    whole = [trajectory([7], [segment([1] * n, 0)], reward=r, sample=i) for i, (r, n) in enumerate(_ONE_ROW)]
    expected = group_advantages_of(TrajectoryGroup(0, tuple(whole)), estimator)
    assert group_advantages_of(_forked(), estimator).tolist() == np.repeat(expected, [1, 2, 3]).tolist()


_ONE_ROW = ((1.0, 2), (0.0, 4), (0.5, 4))


def test_an_overlong_penalty_counts_the_tokens_of_all_rows():
    choices = {'overlong_tokens': 2, 'overlong_penalty': 1.0, 'longest_answer': 4}  # begins above 2 tokens, whole at 4
    assert group_advantages_of(_forked(), 'reward', **choices).tolist() == [1, -1, -1, -0.5, -0.5, -0.5]


def test_an_own_estimator_gets_one_reward_an_episode():
    seen = []

    def estimate(rewards, groups, answers):
        seen.append((rewards.tolist(), groups.tolist(), [(a.sample, a.row) for a in answers]))
        return rewards

    (found,) = own_advantages([_forked()], estimate, PolicyChoices(advantage='own'))
    assert seen == [([1.0, 0.0, 0.5], [0, 0, 0], [(0, 0), (1, 0), (2, 0)])]
    assert found.tolist() == [1, 0, 0, 0.5, 0.5, 0.5]


ANCHOR = [0.21712, 0.246, 0.3]  # γ = 0.9, λ = 0.8 of rewards [0, 0, 1] and values [0.5, 0.6, 0.7]


def of_tokens(values, last, mask=None, ids=None, *, rewards=0.0, behind=0.0, discount=0.9, decay=0.8):
    values = np.array(values, float)
    fill = lambda x: np.broadcast_to(np.asarray(x, float), values.shape)
    mask = np.ones(values.shape, bool) if mask is None else np.array(mask, bool)
    ids = np.zeros(values.shape, int) if ids is None else np.array(ids)
    return generalized_advantages(
        values, fill(rewards), fill(last), fill(behind), mask, ids, discount=discount, decay=decay
    )


def test_anchors_of_one_answer():
    np.testing.assert_allclose(of_tokens([0.5, 0.6, 0.7], 1.0), ANCHOR)
    np.testing.assert_allclose(of_tokens([0.5, 0.6, 0.7], 1.0, discount=1.0, decay=1.0), [0.5, 0.4, 0.3])
    np.testing.assert_allclose(of_tokens([0.0] * 3, 1.0, discount=1.0, decay=1.0), [1.0] * 3)


def test_a_token_that_is_not_trained_is_no_step_and_its_numbers_do_not_count():
    found = of_tokens([0.5, np.nan, 0.6, 0.7], 1.0, [1, 0, 1, 1], rewards=[0, np.inf, 0, 0])
    np.testing.assert_allclose(found, [ANCHOR[0], 0.0, *ANCHOR[1:]])


def test_the_reward_comes_with_the_last_trained_token():
    np.testing.assert_allclose(of_tokens([0.0, 0.0, 0.0], 1.0, [1, 1, 0]), [0.72, 1.0, 0.0])


def test_answers_beside_each_other_and_rows_are_alone():
    values = [[0.5, 0.6, 0.7, 0.2, 0.9], [0.1, 0.5, 0.6, 0.7, 0.0]]
    last = [[1.0, 1.0, 1.0, 3.0, 5.0], [2.0, 1.0, 1.0, 1.0, 9.0]]
    found = of_tokens(values, last, [[1] * 5, [1, 1, 1, 1, 0]], [[0, 0, 0, 1, 2], [3, 4, 4, 4, -1]])
    np.testing.assert_allclose(found, [[*ANCHOR, 2.8, 4.1], [1.9, *ANCHOR, 0.0]])


def test_the_value_behind_an_answer_is_that_of_what_would_follow():
    np.testing.assert_allclose(of_tokens([0.5], 0.0, behind=2.0), [0.9 * 2.0 - 0.5])


@pytest.mark.parametrize(('discount', 'decay'), [(0.95, 0.7), (1.0, 0.0), (1.0, 1.0)])
def test_many_answers_against_the_sum_of_the_definition(discount, decay):
    rng = np.random.default_rng(0)
    lengths = [3, 1, 5, 2]
    ids = np.repeat(np.arange(4), lengths)[None]
    values, rewards = rng.normal(size=ids.shape), rng.normal(size=ids.shape)
    last = rng.normal(size=4)[ids]
    found = of_tokens(values, last, ids=ids, rewards=rewards, discount=discount, decay=decay)
    for answer in range(4):
        at = ids[0] == answer
        v, r = values[0][at], rewards[0][at].copy()
        r[-1] += last[0][at][-1]
        delta = r + discount * np.append(v[1:], 0.0) - v
        wanted = [sum((discount * decay) ** k * delta[t + k] for k in range(len(v) - t)) for t in range(len(v))]
        np.testing.assert_allclose(found[0][at], wanted)


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
    return make_learner(make_mesh(*mesh), objective=PolicyObjective(PolicyChoices(**choices)), **changes)


VCPO = OBJECTIVES['vcpo'].choices
RETURNS = {'advantage': 'reward', 'whiten': 'batch', 'kl_coefficient': 0.5, 'kl_estimator': 'k1', 'kl_in': 'reward'}


def _change(learner):
    before = learner.save()['params']
    learner.update(_GROUPS, 2)
    metrics = learner.update(_GROUPS, 3)
    return metrics, jax.tree.map(lambda a, b: a - b, learner.save()['params'], before)


@pytest.mark.parametrize(
    'choices', [pytest.param(VCPO, marks=pytest.mark.slow), RETURNS], ids=['vcpo', 'kl in the reward']
)
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
