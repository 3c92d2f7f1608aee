"""Whole runs whose scorer misbehaves."""

import pytest

from areal_jax.control.failures import UnverifiedError
from areal_jax.tasks import token_reversal
from tests.app.small import SmallRun
from tests.tasks import hostile_scorers
from tests.tasks.process_table import all_end


@pytest.mark.parametrize('verifier', ['inline', 'process'])
def test_a_scorer_that_always_exits_ends_the_first_evaluation(verifier, tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.exits)
    fields = {'task__verifier': verifier, 'task__max_failed_groups': 5, 'evaluation__problems': 4}
    run = SmallRun(tmp_path, **fields, evaluation__samples=2)
    message = r"^5 answers of the evaluation 'before' in a row \(task\.max_failed_groups\).* ended in: error\."
    with pytest.raises(UnverifiedError, match=message):
        run.train()
    assert run.session.verifier.attempts_by_label['error'] < 12  # of 4 problems x 3 answers


def test_a_scorer_that_always_exits_ends_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.exits)
    with pytest.raises(UnverifiedError, match=r'^3 groups in a row \(task\.max_failed_groups\).* ended in: error\.'):
        SmallRun(tmp_path, task__max_failed_groups=3).train()


def test_a_run_whose_scorer_forks_and_leaves_daemons_ends_with_the_rewards_of_its_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(token_reversal, 'score', hostile_scorers.forks_leaves_a_daemon_and_returns_the_length)
    run = SmallRun(tmp_path, task__verifier='process', task__verifier_memory_mb=512, run__steps=2)
    workers = [worker._process.pid for worker in run.session.verifier._workers]
    assert run.session.verifier._memory_mb == 512
    run.train()
    decode = run.session.verifier._decode
    answers = [t for groups in run.batches for group in groups for t in group.trajectories]
    assert len(answers) == 2 * 2 * 4
    for trajectory in answers:
        tokens = [token for segment in trajectory.segments for token in segment.tokens]
        assert trajectory.reward == len(decode(tokens))
    assert all_end(workers, within_s=0.0)
