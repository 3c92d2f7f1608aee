"""`task.filter` with a real engine and learner: full batches of groups with a signal, an end where none has one."""

from __future__ import annotations

import pathlib

import pytest

from areal_jax.control.buffer import NoSignalError
from areal_jax.telemetry.metrics import read_metrics
from tests.app.small import SmallRun, resume_killed
from tests.control.test_controller import assert_admission_bound, assert_conserved

FILTER = {'task__filter': 'equal_rewards', 'checkpoint__every': 2}


def test_a_filtered_run_trains_full_batches_and_resumes_bit_for_bit(tmp_path: pathlib.Path):
    whole, _ = resume_killed(tmp_path, **FILTER)
    assert all(len(batch) == 2 and not any(g.has_equal_rewards() for g in batch) for batch in whole.batches)
    counts = assert_conserved(whole.events)
    assert_admission_bound(whole.events, groups_per_update=2, eta=4)
    groups = whole.report['groups']
    filtered = groups['dropped']['equal_rewards']
    assert (groups['trained'], groups['filtered'], counts['trained']) == (10, 0, 10)
    assert filtered == counts['dropped'] > 0
    # the groups that finished after the last batch was formed are in neither: admission had closed
    assert groups['filtered_rate'] == filtered / (filtered + 10)
    lines = read_metrics(tmp_path / 'whole' / 'metrics.jsonl')
    assert all(0 <= line['reward/filtered_rate'] < 1 for line in lines if 'reward/filtered_rate' in line)
    assert any(line.get('reward/filtered_rate') for line in lines)
    assert '| share of the finished groups that task.filter dropped |' in (tmp_path / 'whole/report.md').read_text()


def test_a_policy_that_answers_everything_alike_is_told_so(tmp_path: pathlib.Path):
    fields = {'rollout__temperature': 1e-3, 'task__filter': 'equal_rewards', 'task__max_filtered_groups': 12}
    message = r"^12 groups in a row \(task\.max_filtered_groups\) were dropped by task\.filter='equal_rewards'"
    with pytest.raises(NoSignalError, match=message):
        SmallRun(tmp_path, **fields).train()
