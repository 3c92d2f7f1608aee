"""Common random numbers: arms with one seed have prompts by draw, and noise by (draw, sample, position), in common."""

import pytest

from tests.app.small import SmallRun, equal

# of learning rate 0, weights never change, so equal noise is seen as equal answers, whoever decoded them when
ARMS = {
    'eta 0': {'staleness__eta': 0.0, 'optimizer__learning_rate': 0.0},
    'eta 4': {'staleness__eta': 4.0, 'optimizer__learning_rate': 0.0},
    'a learning rate': {'staleness__eta': 4.0},
}


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return {name: SmallRun(tmp_path_factory.mktemp('arm'), **fields).train() for name, fields in ARMS.items()}


def trained(run):
    return [(group.draw, trajectory) for batch in run.batches for group in batch for trajectory in group.trajectories]


def answers(run):
    return {(draw, trajectory.sample): trajectory.tokens.tolist() for draw, trajectory in trained(run)}


def prompts(run):
    return {draw: trajectory.prompt.tokens.tolist() for draw, trajectory in trained(run)}


def test_arms_with_other_etas_have_the_same_prompts_and_answers(runs):
    none, some = runs['eta 0'], runs['eta 4']
    assert none.report['interruptions'] == 0
    assert some.report['interruptions'] > 0  # they decoded in other company, and were rebuilt on the way
    assert some.report['token_age']['max'] > 0
    assert answers(none) == answers(some)
    assert len(answers(none)) == 5 * 2 * 4


def test_arms_with_other_learning_rates_have_the_same_prompts_and_the_same_noise(runs):
    still, moving = runs['eta 4'], runs['a learning rate']
    assert not equal(still.final, moving.final)
    assert prompts(still) == prompts(moving)
    before = {
        (draw, trajectory.sample): trajectory.tokens.tolist()
        for draw, trajectory in trained(moving)
        if trajectory.policy_versions.max() == 0  # generated before any update, so weights are equal too
    }
    assert len(before) >= 2 * 4  # the first batch at least
    assert before.items() <= answers(still).items()
