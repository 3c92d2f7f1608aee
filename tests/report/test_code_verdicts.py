"""What the report tells of answers of code."""

from __future__ import annotations

import pytest

from areal_jax.app.run.observer import CodeChecks, evaluation_row
from areal_jax.labels import CODE
from areal_jax.report.engine_work import summarize_code, tabulate_code
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import EvaluationScores, visible_only_share
from tests.telemetry.logs import two_facts


def scores(**labels):
    return EvaluationScores((1.0, 0.0), ((1.0,), (0.0,)), None, labels)


def line(**shares):
    return {f'code/{label}': shares.get(label, 0.0) for label in ('ok', *CODE)} | {
        names.CODE_CPU: 0.01, names.CODE_WALL: 0.02, names.CODE_WAITING: 1.0
    }  # fmt: skip


def test_shares_of_labels_and_the_rate_of_hacks_before_and_after():
    facts = two_facts(evaluation_before=scores(ok=3, wrong=1), evaluation_after=scores(ok=1, visible_only=3))
    found = summarize_code([line(ok=0.25, wrong=0.75), line(ok=0.5, visible_only=0.5)], facts)
    assert found['labels'] == {
        'ok': {'first': 0.25, 'last': 0.5, 'mean': 0.375}, 'wrong': {'first': 0.75, 'last': 0.0, 'mean': 0.375},
        'visible_only': {'first': 0.0, 'last': 0.5, 'mean': 0.25},
    }  # fmt: skip
    assert found['visible_only'] == {'before': 0.0, 'after': 0.75}
    rows = {row[0]: row[1:] for row in tabulate_code(found).rows}
    assert rows['held out: passes that fail a hidden test, before and after'][:2] == ('0%', '75%')
    assert rows['CPU ms of a check'][-1] == '10'


def test_a_run_without_code_has_no_table():
    assert summarize_code([{names.REWARD_MEAN: 1.0}], two_facts()) is None
    assert tabulate_code(None).rows == []


@pytest.mark.parametrize(
    ('labels', 'share'),
    [({'ok': 3}, None), ({'wrong': 3}, None), ({'ok': 3, 'wrong': 1}, 0.0), ({'ok': 1, 'visible_only': 1}, 0.5)],
)
def test_the_share_of_passes_that_fail_a_hidden_test(labels, share):
    assert visible_only_share(labels) == share
    row = evaluation_row(scores(**labels), 7)
    assert row.get(names.VISIBLE_ONLY_SHARE) == share


def test_checks_are_counted_from_events_and_kept_in_a_checkpoint():
    checks = CodeChecks()
    assert checks.metrics() == {}
    for label in ('ok', 'wrong', 'wrong', 'timeout'):
        checks.note({'kind': 'reward', 'label': label})
    checks.note({'kind': 'check', 'cpu_s': 0.25, 'wall_s': 0.5, 'waiting': 2})
    again = CodeChecks(checks.state())
    again.note({'kind': 'check', 'cpu_s': 0.75, 'wall_s': 0.5, 'waiting': 0})
    found = again.metrics()
    assert (found[names.CODE_CPU], found[names.CODE_WALL], found[names.CODE_WAITING]) == (0.5, 0.5, 1.0)
    assert (found['code/ok'], found['code/wrong'], found['code/syntax']) == (1 / 3, 2 / 3, 0.0)
