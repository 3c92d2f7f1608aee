"""Scores by hand, and of weights of a real decoder."""

import jax
import numpy as np
import pytest

from areal_jax.app.model.model import build_model
from areal_jax.app.parts.task_builder import build_task
from areal_jax.config import TrackedConfig
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.controls import shuffled_advantages
from areal_jax.studies.score_runs import make_scorer, share_right
from tests.app.small import small_config


def test_share_of_right_places_by_hand():
    answers = np.array([[[1, 2, 1], [2, 2, 2]]])
    assert share_right(answers, np.array([[1, 2, 2]]), None) == 4 / 6


def test_nothing_is_right_behind_an_end():
    answers = np.array([[[1, 0, 2, 0]]])  # 0 = the end
    truth = np.array([[1, 2, 2, 0]])
    assert share_right(answers, truth, 0) == 1 / 4
    assert share_right(answers, truth, None) == 3 / 4
    assert share_right(truth[:, None], truth, 0) == 1.0


def test_a_scorer_gives_equal_weights_one_score_whatever_the_seed_of_the_run():
    configs = [small_config(model__n_layers=1, run__seed=seed) for seed in (0, 1)]
    params = build_model(TrackedConfig(configs[0])).params
    first, second = (make_scorer(Arm('arm', config))(params) for config in configs)
    assert first == second
    assert 0 < first < 0.6


@pytest.mark.parametrize('field', [
    {'loss__advantage': 'areal_jax.studies.controls:shuffled_advantages'}, {'rollout__kv_policy': 'keep'},
    *(pytest.param(field, marks=pytest.mark.slow) for field in (
        {'rollout__kv_policy': 'wait'}, {'learner__n_minibatches': 4}, {'staleness__eta': float('inf')},
    )),
])  # fmt: skip
def test_a_score_depends_on_no_field_of_training(field):
    """The arms of the study differ in such fields, and each is scored."""
    plain = small_config(model__n_layers=1)
    params = build_model(TrackedConfig(plain)).params
    arm = small_config(model__n_layers=1, **field)
    assert make_scorer(Arm('arm', arm))(params) == make_scorer(Arm('arm', plain))(params)


def test_weights_that_always_say_one_symbol_score_its_share_in_the_answers():
    config = TrackedConfig(small_config(model__n_layers=1, rollout__ignore_eos=True))
    model = build_model(config)
    params = jax.tree.map(np.array, model.params)
    layer = params['layers']['0']
    layer['attention']['output']['weight'] *= 0
    layer['mlp']['down']['weight'] *= 0
    wanted = int(model.tokenizer.encode('a')[0])
    params['embedding'][:] = np.where(np.arange(len(params['embedding'])) == wanted, 10, 0.01)[:, None]
    answers = [problem['answer'] for problem in build_task(config, model.tokenizer).problems['train']]
    score = make_scorer(Arm('arm', small_config(model__n_layers=1, rollout__ignore_eos=True)))(params)
    assert score == sum(answer.count('a') for answer in answers) / (4 * len(answers))


def test_shuffled_advantages_are_those_of_the_answer_before():
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.5, 0.5]), np.array([0, 0, 0, 1, 1])
    found = shuffled_advantages(rewards, groups)
    assert found[1] > 0 > found[0]
    assert found[1] > 0 > found[2]
    np.testing.assert_array_equal(found[3:], 0)
