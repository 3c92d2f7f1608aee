"""The rows of a mixture's sources, from an event log and metrics by hand."""

from __future__ import annotations

import pytest

from areal_jax.report.sources import summarize_sources, tabulate_source_scores, tabulate_sources
from areal_jax.telemetry.facts import EvaluationScores

SOURCE_OF = ['a', 'a', 'b', 'a', 'b']  # by draw


def make_events():
    draws = [{'kind': 'draw', 'draw': draw, 'source': source} for draw, source in enumerate(SOURCE_OF)]
    admits = [{'kind': 'admit', 'draw': draw} for draw in range(5)]
    ends = [
        {'kind': 'buffer', 'draw': 0},
        {'kind': 'drop', 'draw': 1, 'reason': 'equal_rewards'},
        {'kind': 'buffer', 'draw': 2},
        {'kind': 'buffer', 'draw': 3},
        {'kind': 'drop', 'draw': 3, 'reason': 'over_age'},
        {'kind': 'consume', 'draws': [0, 2]},
    ]
    return [{'seq': seq, **event} for seq, event in enumerate([*draws, *admits, *ends])]


METRICS = [
    {
        'source/a/groups': 1, 'source/a/equal_rewards': 1, 'source/a/reward_mean': 0.5, 'source/a/tokens': 0,
        'source/a/answer_tokens_mean': 4.0, 'source/b/groups': 0, 'source/b/equal_rewards': 0, 'source/b/tokens': 0,
    },
    {
        'source/a/groups': 3, 'source/a/equal_rewards': 0, 'source/a/reward_mean': 0.75, 'source/a/tokens': 30,
        'source/a/answer_tokens_mean': 8.0, 'source/b/groups': 1, 'source/b/equal_rewards': 0, 'source/b/tokens': 10,
        'source/b/reward_mean': 0.25, 'source/b/answer_tokens_mean': 2.0,
    },
]  # fmt: skip


def test_what_became_of_the_draws_of_each_source():
    a, b = summarize_sources(make_events(), METRICS, None, None)
    assert (a['source'], a['drawn'], a['drawn_share'], a['trained']) == ('a', 3, 0.6, 1)
    assert (b['source'], b['drawn'], b['drawn_share'], b['trained']) == ('b', 2, 0.4, 1)
    assert (a['dropped'], b['dropped']) == ({'equal_rewards': 1, 'over_age': 1}, {})
    assert (a['filtered_rate'], b['filtered_rate']) == (pytest.approx(1 / 3), None)  # draws 0 and 3 were kept


def test_rewards_lengths_and_tokens_are_those_of_the_updates_with_a_group():
    a, b = summarize_sources(make_events(), METRICS, None, None)
    assert (a['reward'], b['reward']) == ({'first': 0.5, 'last': 0.75}, {'first': 0.25, 'last': 0.25})
    assert a['answer_tokens_mean'] == pytest.approx((1 * 4 + 3 * 8) / 4)  # weighted by groups
    assert (a['equal_rewards'], b['equal_rewards']) == (0.25, 0.0)
    assert (a['token_share'], b['token_share']) == (0.75, 0.25)
    assert a['accuracy'] is None


def test_held_out_scores_are_those_of_the_problems_of_the_source():
    before = EvaluationScores((0.0, 1.0, 0.0), ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)), sources=('a', 'b', 'a'))
    after = EvaluationScores((1.0, 1.0, 0.0), ((1.0, 1.0), (1.0, 1.0), (0.0, 1.0)), sources=('a', 'b', 'a'))
    a, b = summarize_sources(make_events(), METRICS, before, after)
    assert (a['accuracy']['greedy']['before']['mean'], a['accuracy']['greedy']['after']['mean']) == (0.0, 0.5)
    assert a['accuracy']['sampled']['before']['mean'] == 0.25
    assert a['accuracy']['sampled']['gain']['mean'] == pytest.approx(0.5)
    assert (b['accuracy']['sampled']['after']['mean'], b['accuracy']['sampled']['after']['n']) == (1.0, 1)
    table = tabulate_source_scores([a, b])
    assert [row[0] for row in table.rows] == ['a, greedy', 'a, sampled', 'b, greedy', 'b, sampled']
    assert '0.250' in table.rows[1][1]


def test_the_table_has_a_row_for_each_source():
    rows = tabulate_sources(summarize_sources(make_events(), METRICS, None, None)).rows
    assert [row[:4] for row in rows] == [
        ('a', '3 (60%)', '1', 'equal_rewards: 1, over_age: 1'),
        ('b', '2 (40%)', '1', '0'),
    ]


def test_a_run_of_one_task_has_no_rows():
    events = [{key: value for key, value in event.items() if key != 'source'} for event in make_events()]
    assert summarize_sources(events, METRICS, None, None) == []
    assert not tabulate_source_scores([])
    assert EvaluationScores((0.0,), ((0.0,),)).by_source() == {}
    assert 'sources' not in EvaluationScores((0.0,), ((0.0,),)).as_values()
