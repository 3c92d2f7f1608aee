"""What is lost on the way to the loss: its lengths and rewards beside those of what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from areal_jax.report.report import build_report
from areal_jax.report.token_fates import censoring, ks_distance, warn_of_censoring
from tests.report.test_token_fates import START, rows, run
from tests.telemetry.logs import event_log, two_facts, two_metrics
from tests.telemetry.test_token_ledger import fates, finish


def _distance(a: list[float], b: list[float]) -> float:
    return ks_distance(np.array(a), np.array(b), np.ones(len(a)), np.ones(len(b)))


def test_the_distance_by_hand():
    assert _distance([1, 2, 3], [1, 2, 3]) == 0
    assert _distance([1, 2], [3, 4]) == 1
    assert _distance([1, 2, 3, 4], [3, 4]) == 0.5
    assert _distance([0, 0, 1], [0, 1, 1]) == pytest.approx(1 / 3)
    weighted = ks_distance(np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([1.0, 3.0]), np.array([3.0, 1.0]))
    assert weighted == 0.5


def test_the_distance_is_that_of_scipy():
    stats = pytest.importorskip('scipy.stats')
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=40).round(1).tolist(), rng.normal(0.3, size=25).round(1).tolist()
    assert _distance(a, b) == pytest.approx(stats.ks_2samp(a, b).statistic, abs=1e-12)


def test_answers_by_hand():
    # 4 tokens trained; 5 tokens, of which 3 are trained and 2 masked; 1 token dropped
    found = censoring(run(), rows())
    assert found is not None
    spreads = found['spreads']
    assert list(spreads) == ['generated', 'trained', 'masked', 'dropped']
    assert [spreads[fate]['answers'] for fate in spreads] == pytest.approx([3, 1.6, 0.4, 1])
    assert [spreads[fate]['length_mean'] for fate in spreads] == pytest.approx([10 / 3, 7 / 1.6, 5, 1])
    # of all, 1/3 each of 1, 4, 5 tokens; of the masked, all of 5: distance 2/3
    assert spreads['masked']['length_distance'] == pytest.approx(2 / 3)
    assert spreads['generated']['length_distance'] == 0
    assert warn_of_censoring(found) == ''  # three answers say nothing


def long_ones_lost(rewards: tuple[float, float], reason: str = 'over_age') -> list[dict[str, Any]]:
    """30 groups trained with answers of 2 tokens, 30 dropped with answers of 8."""
    entries: list[tuple[float, str, dict[str, Any]]] = [START]
    for draw in range(60):
        lost = draw >= 30
        entries.append(finish(draw, 0, [0], [8 if lost else 2]))
        value = rewards[lost]
        entries.append((0, 'reward', {'draw': draw, 'sample': 0, 'value': value, 'label': 'ok', 'attempts': 1}))
        if lost:
            entries.append((0, 'drop', {'draw': draw, 'reason': reason, 'detail': ''}))
    entries.append((0, 'consume', {'update': 1, 'draws': list(range(30))}))
    return event_log(*entries)


def test_a_sentence_where_the_long_answers_are_lost():
    lines = [two_metrics()[0] | fates(trained=[60])]
    found = censoring(long_ones_lost((1.0, 1.0)), lines)
    assert warn_of_censoring(found) == (
        'The trained data are not a fair sample of what was generated: trained answers had a length of 2 on average, '
        'those masked or dropped 8 (KS distance 1.00, by chance at most 0.42).'
    )
    both = warn_of_censoring(censoring(long_ones_lost((1.0, 0.0)), lines))
    assert '; trained answers had a reward of 1 on average, those masked or dropped 0 (KS' in both
    assert any(
        warning.startswith('The trained data')
        for warning in build_report(long_ones_lost((1.0, 1.0)), lines, two_facts())['warnings']
    )


def test_a_filter_of_rewards_is_no_bias_of_rewards():
    lines = [two_metrics()[0] | fates(trained=[60])]
    sentence = warn_of_censoring(censoring(long_ones_lost((1.0, 0.0), 'equal_rewards'), lines))
    assert 'a length of 2' in sentence
    assert 'a reward' not in sentence


def test_a_filtered_group_is_not_a_trained_one():
    lines = [two_metrics()[0] | fates(filtered=[60])]  # every group of one has equal rewards
    found = censoring(long_ones_lost((1.0, 1.0)), lines)
    assert found is not None
    assert list(found['spreads']) == ['generated', 'filtered', 'dropped']
    assert found['length_bias'] is None
