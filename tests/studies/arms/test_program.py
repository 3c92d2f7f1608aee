"""Arms in one program: they do not see each other, and a batch waits as long as its delay says."""

import types

import jax
import numpy as np
import pytest

from areal_jax.studies.arms import arm_training
from areal_jax.studies.arms.arm_training import plan
from tests.studies.arms.small import Compiled, are_equal, largest_difference, make_arm, of_arm

EPS = {'optimizer__eps': 1e-4}  # see test_single_run.py
ARMS = [
    make_arm('plain', loss__proximal='behavior', **EPS),
    make_arm('fast', optimizer__learning_rate=1e-2, learner__filter_equal_rewards=False, **EPS),
    make_arm('other seed', run__seed=1, model__embedding_scale=2.0, loss__advantage='group_mean', **EPS),
    make_arm('late', staleness__schedule='fixed(2)', loss__clip_epsilon=0.1, loss__entropy_coefficient=0.03, **EPS),
]


@pytest.fixture(scope='module')
def compiled():
    return Compiled(*ARMS)


@pytest.fixture(scope='module')
def result(compiled):
    return compiled.run()


def test_arms_are_different_runs(result):
    _, state = result
    weights = [of_arm(state.params, index) for index in range(len(ARMS))]
    assert all(not are_equal(weights[0], other) for other in weights[1:])


def test_permuted_arms_have_permuted_results(compiled, result):
    order = np.array([2, 0, 3, 1])
    assert are_equal(compiled.run(order), jax.tree.map(lambda x: x[order], result))


def test_nan_in_one_arm_leaves_the_others_as_they_are(compiled, result):
    state = jax.tree.map(np.copy, compiled.state)
    state.params['embedding'][1] = np.nan
    sums, after = compiled.run(state=state)
    for index in (0, 2, 3):
        assert are_equal(of_arm((sums, after), index), of_arm(result, index))
    assert sums['skip_count'][1].sum() == sums['steps'][1].sum() > 0  # no step was taken on such a gradient


@pytest.mark.slow
def test_an_arm_alone_has_the_weights_that_it_has_beside_others(result):
    # a program of one arm without delay has no steps before its first update; that of all arms has two
    alone = Compiled(ARMS[0], updates_per_call=1)
    assert alone.program.setting.ring == 1
    before, (_, after), (_, beside) = alone.state, alone.run(), result
    assert largest_difference(of_arm(after.params, 0), of_arm(beside.params, 0)) <= 1e-6
    assert largest_difference(of_arm(before.params, 0), of_arm(beside.params, 0)) > 1e-3


@pytest.mark.slow
def test_blocks_of_arms_have_the_results_of_one(result, monkeypatch):
    monkeypatch.setattr(arm_training, 'MOST_SIDE_BY_SIDE', 2)  # three arms: two blocks of two, the last arm twice
    sums, state = Compiled(*ARMS[1:]).run()
    assert len(state.waiting.tokens) == len(sums['right']) == 3
    assert largest_difference(state.params, jax.tree.map(lambda x: x[1:], result[1].params)) <= 3e-6  # rate 1e-2


def test_steps_before_the_first_update_only_generate():
    setting = types.SimpleNamespace(longest_delay=2, shortest_delay=1, updates=4)
    calls = plan(setting, per_call=4)
    assert [call.number.tolist() for call in calls] == [[-2, -1, 0, 1], [2, 3, 4, 5]]
    # the batch of update 3 of the arm with delay 1 is generated at step 2
    assert [call.generates.tolist() for call in calls] == [[True] * 4, [True, False, False, False]]
    assert [call.trains.tolist() for call in calls] == [[False, False, True, True], [True, True, False, False]]
