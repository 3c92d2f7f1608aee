"""Common random numbers: arms with one seed have prompts by draw, and noise by (draw, sample, position), in common."""

import pytest

from tests.app.small import SmallRun, equal

STILL = {'optimizer__learning_rate': 0.0}  # weights never change: equal noise is seen as equal answers


def trained(run):
    return [(group.draw, trajectory) for batch in run.batches for group in batch for trajectory in group.trajectories]


def answers(run):
    return {(draw, trajectory.sample): trajectory.tokens.tolist() for draw, trajectory in trained(run)}


def answers_of_version_0(run):
    """Generated before any update, so the weights are those of every arm."""
    return {
        (draw, trajectory.sample): trajectory.tokens.tolist()
        for draw, trajectory in trained(run)
        if trajectory.policy_versions.max() == 0
    }


def prompts(run):
    return {draw: trajectory.prompt.tokens.tolist() for draw, trajectory in trained(run)}


@pytest.mark.slow
def test_arms_with_another_eta_have_the_same_prompts_and_the_same_noise(tmp_path):
    in_turn = SmallRun(tmp_path / '0', staleness__eta=0.0).train()
    ahead = SmallRun(tmp_path / '4', staleness__eta=4.0).train()
    assert not equal(in_turn.final, ahead.final)
    assert prompts(in_turn) == prompts(ahead)
    assert len(prompts(ahead)) == 5 * 2
    first, more = answers_of_version_0(in_turn), answers_of_version_0(ahead)
    assert len(first) == 2 * 4  # the first batch
    assert len(more) > len(first)  # decoded in other company
    assert first.items() <= more.items()


@pytest.mark.slow
def test_arms_with_other_learning_rates_have_the_same_noise_however_they_were_interrupted(tmp_path):
    still = SmallRun(tmp_path / 'still', staleness__eta=0.0, **STILL).train()
    ahead = SmallRun(tmp_path / 'ahead', staleness__eta=4.0, **STILL).train()
    moving = SmallRun(tmp_path / 'moving', staleness__eta=4.0).train()
    assert still.report['interruptions'] == 0
    assert ahead.report['interruptions'] > 0
    assert ahead.report['token_age']['max'] > 0
    assert answers(still) == answers(ahead)
    assert len(answers(still)) == 5 * 2 * 4
    assert answers_of_version_0(moving).items() <= answers(still).items()
    assert prompts(moving) == prompts(still)
