from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.errors import UserError
from areal_jax.learning.objective.advantages import ESTIMATORS, own_advantages
from areal_jax.learning.objective.rewards import has_signal
from areal_jax.types import TrajectoryGroup
from tests.learning.examples import group, segment, trajectory
from tests.learning.objective.tokens import group_advantages_of as group_advantages

_ESTIMATORS = ('group', 'group_mean', 'rloo')


def _group(*rewards: float):
    return group([1], [[2]] * len(rewards), rewards)


def test_group_divides_by_the_population_deviation():
    # mean 1/4, variance 1/4 * 3/4 = 3/16, std .4330127: (.75, -.25, -.25, -.25) / (.4330127 + .0001)
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / 0.4331127
    np.testing.assert_allclose(group_advantages(_group(1, 0, 0, 0), 'group'), expected, rtol=1e-5)


def test_group_mean_and_leave_one_out():
    # RLOO: 1 - mean(0, 0, 0) = 1 and 0 - mean(1, 0, 0) = -1/3, i.e. 4/3 of the group mean's
    np.testing.assert_allclose(group_advantages(_group(1, 0, 0, 0), 'group_mean'), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages(_group(1, 0, 0, 0), 'rloo'), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_partial_group_uses_the_rewards_it_has(estimator):
    values = group_advantages(_group(1, 0, 0.5), estimator)
    assert values.shape == (3,)
    np.testing.assert_allclose(values.sum(), 0, atol=1e-6)
    assert values[2] == 0  # the mean itself


@pytest.mark.parametrize('estimator', _ESTIMATORS)
@pytest.mark.parametrize('rewards', [(0.7,), (0.1,) * 7, (1.0, 1.0)], ids=['one', 'rounding mean', 'two'])
def test_no_spread_is_exactly_zero(estimator, rewards):
    assert np.mean((0.1,) * 7) != 0.1  # equal rewards whose mean rounds: r - mean would not be 0
    np.testing.assert_array_equal(group_advantages(_group(*rewards), estimator), np.zeros(len(rewards)))
    assert not has_signal(_group(*rewards))


def test_shift_changes_nothing_and_scale_little():
    base = group_advantages(_group(0.2, 0.9, 0.4), 'group')
    np.testing.assert_allclose(group_advantages(_group(5.2, 5.9, 5.4), 'group'), base, rtol=1e-5)
    np.testing.assert_allclose(group_advantages(_group(20, 90, 40), 'group'), base, rtol=1e-3)  # up to the 1e-4


def test_has_signal_where_one_reward_differs():
    assert has_signal(_group(0, 0, 1e-9))


def test_infinite_reward_is_named():
    with pytest.raises(ValueError, match='draw 0, sample 1: reward is nan'):
        group_advantages(_group(0, float('nan')), 'group')


def test_a_reward_whose_square_overflows_is_named():
    # its standard deviation is infinite, so that all advantages would be 0 and nothing learned, silently
    with pytest.raises(ValueError, match=r'draw 0, sample 1: reward is 1e\+200; verifiers must return finite numbers'):
        group_advantages(_group(0, 1e200), 'group')


def test_unknown_estimator_is_named():
    with pytest.raises(
        ValueError, match=r"loss.advantage='td' is unknown; use one of group, group_mean, length_baseline"
    ):
        group_advantages(_group(0, 1), 'td')


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
    expected = group_advantages(TrajectoryGroup(0, tuple(whole)), estimator)
    assert group_advantages(_forked(), estimator).tolist() == np.repeat(expected, [1, 2, 3]).tolist()


_ONE_ROW = ((1.0, 2), (0.0, 4), (0.5, 4))


def test_an_overlong_penalty_counts_the_tokens_of_all_rows():
    choices = {'overlong_tokens': 2, 'overlong_penalty': 1.0, 'longest_answer': 4}  # begins above 2 tokens, whole at 4
    assert group_advantages(_forked(), 'reward', **choices).tolist() == [1, -1, -1, -0.5, -0.5, -0.5]


def test_an_own_estimator_gets_one_reward_an_episode():
    seen = []

    def estimate(rewards, groups, answers):
        seen.append((rewards.tolist(), groups.tolist(), [(a.sample, a.row) for a in answers]))
        return rewards

    (found,) = own_advantages([_forked()], estimate, PolicyChoices(advantage='own'))
    assert seen == [([1.0, 0.0, 0.5], [0, 0, 0], [(0, 0), (1, 0), (2, 0)])]
    assert found.tolist() == [1, 0, 0, 0.5, 0.5, 0.5]
