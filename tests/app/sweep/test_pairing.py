"""Common random numbers: arms with one seed have prompts by draw, and noise by (draw, sample, position), in common."""

import pytest

from tests.app.small import SmallRun, equal

# where weights never change, equal noise is seen as equal answers, whoever decoded them when
STILL = {'optimizer__learning_rate': 0.0}


@pytest.fixture(scope='module')
def still(tmp_path_factory):
    return SmallRun(tmp_path_factory.mktemp('still'), staleness__eta=0.0, **STILL).train()


def trained(run):
    return [(group.draw, trajectory) for batch in run.batches for group in batch for trajectory in group.trajectories]


def answers(run):
    return {(draw, trajectory.sample): trajectory.tokens.tolist() for draw, trajectory in trained(run)}


def prompts(run):
    return {draw: trajectory.prompt.tokens.tolist() for draw, trajectory in trained(run)}


def test_arms_with_another_eta_and_learning_rate_have_the_same_prompts_and_the_same_noise(still, tmp_path):
    moving = SmallRun(tmp_path, staleness__eta=4.0, optimizer__learning_rate=3e-3).train()
    assert not equal(still.final, moving.final)
    assert prompts(still) == prompts(moving)
    before = {
        (draw, trajectory.sample): trajectory.tokens.tolist()
        for draw, trajectory in trained(moving)
        if trajectory.policy_versions.max() == 0  # generated before any update, so weights are equal too
    }
    assert len(before) > 2 * 4  # more than the first batch
    assert before.items() <= answers(still).items()


@pytest.mark.slow
def test_arms_with_another_eta_and_equal_weights_have_the_same_answers(still, tmp_path):
    ahead = SmallRun(tmp_path, staleness__eta=4.0, **STILL).train()
    assert still.report['interruptions'] == 0
    assert ahead.report['interruptions'] > 0  # they were decoded in other company, and rebuilt on the way
    assert ahead.report['token_age']['max'] > 0
    assert answers(still) == answers(ahead)
    assert len(answers(still)) == 5 * 2 * 4
