"""Engines of unequal size and speed in a simulation: what each holds, answers that move, the table by class."""

from __future__ import annotations

import collections
import json

import pytest

from areal_jax import main_check_log
from areal_jax.app.simulate.simulated_site import build_answers, build_prices, cache_blocks
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.errors import ExitCode
from areal_jax.report.rules.log_rules import Limits, find_violation
from tests.app.simulate.test_simulated_run import CLUSTER, kill_and_resume, read_events, simulate
from tests.app.small import small_config

UNEQUAL = {'cluster__engines': '1 x tensor=2 + 2 x tensor=1', 'learner__filter_equal_rewards': False}
WAITING = {  # the learner is the bottleneck: answers of a second, updates of five
    'simulation__engine_chips': '2 x H800, 2 x H800/3', 'cluster__engines': '4 x tensor=1',
    'simulation__update_s': 5.0, 'run__steps': 10, 'learner__filter_equal_rewards': False, 'checkpoint__every': 1,
}  # fmt: skip
SPARE = WAITING | {'rollout__slow_engines': 'spare'}
MIXED = {
    'simulation__engine_chips': '2 x H800, 2 x H800/3', 'cluster__engines': '4 x tensor=1', 'run__steps': 8,
    'staleness__eta': float('inf'), 'learner__filter_equal_rewards': False,
}  # fmt: skip


def test_engines_of_two_sizes_have_prices_devices_and_a_row_of_the_report_each(tmp_path):
    report = simulate(tmp_path, run__steps=4, **UNEQUAL).train()
    assert main_check_log.main([str(tmp_path)]) == ExitCode.FINISHED
    assert report['devices']['engines'] == {'engine/0': [1, 2], 'engine/1': [3], 'engine/2': [4]}
    assert '1 engines on 2 x H800 SXM, 2 engines on 1 x H800 SXM' in report['simulation']
    events = read_events(tmp_path)
    hardware = {event['engine']: event['hardware'] for event in events if event['kind'] == 'join'}
    assert hardware == {'engine/0': '2 x H800 SXM', 'engine/1': '1 x H800 SXM', 'engine/2': '1 x H800 SXM'}
    rows = {row['hardware']: row for row in report['engine_classes']}
    assert {name: row['engines'] for name, row in rows.items()} == {'2 x H800 SXM': 1, '1 x H800 SXM': 2}
    generated = collections.Counter()
    for event in events:
        if event['kind'] == 'decode':
            generated[hardware[event['engine']]] += event['tokens']
    assert {name: row['tokens'] for name, row in rows.items()} == generated
    lengths = {(event['draw'], event['sample']): event['tokens'] for event in events if event['kind'] == 'finish'}
    trained = {draw for event in events if event['kind'] == 'consume' for draw in event['draws']}
    assert sum(row['trained_tokens'] for row in rows.values()) == sum(
        tokens for (draw, _), tokens in lengths.items() if draw in trained
    )
    oldest = max(row['age']['max'] for row in rows.values())
    mean = sum(row['age']['mean'] * row['trained_tokens'] for row in rows.values())
    assert oldest == report['token_age']['max']
    assert mean / sum(row['trained_tokens'] for row in rows.values()) == pytest.approx(report['token_age']['mean'])
    assert '| 2 x H800 SXM | 1 |' in (tmp_path / 'report.md').read_text()


def test_answers_that_moved_are_counted_where_each_token_was_generated(tmp_path):
    """The same sums, where old answers leave slow engines."""
    fields = {'run__steps': 8, 'staleness__eta': float('inf'), 'rollout__slow_versions': 1}
    report = simulate(tmp_path, **WAITING | {'simulation__update_s': 0.0} | fields).train()
    assert any(event['kind'] == 'move' for event in read_events(tmp_path))
    rows = report['engine_classes']
    tokens = sum(row['trained_tokens'] for row in rows)
    assert tokens == report['tokens']['trained']
    mean = sum(row['age']['mean'] * row['trained_tokens'] for row in rows) / tokens
    assert mean == pytest.approx(report['token_age']['mean'])


def test_equal_engines_have_no_rows(tmp_path):
    report = simulate(tmp_path, run__steps=2, rollout__slow_engines='spare').train()
    assert 'engine_classes' not in report
    assert not any('hardware' in event or event['kind'] == 'spare' for event in read_events(tmp_path))


def test_the_cache_of_an_engine_follows_its_own_memory():
    fields = {
        'simulation__model': 'R1-distill-Qwen-32B', 'cluster__engines': '1 x tensor=4 + 1 x tensor=2',
        'rollout__slots': 4096, 'rollout__context_tokens': 1024,
    }  # fmt: skip
    config = TrackedConfig(small_config(**{**CLUSTER, **fields}))
    cluster = build_prices(config, build_answers(config)).cluster
    large, small = (cache_blocks(config, cluster, engine) for engine in (0, 1))
    assert small == cluster.engines[1].cache_tokens() // 16
    assert large == cluster.engines[0].cache_tokens() // 16 > 2 * small  # the weights lie there once
    assert [engine.devices for engine in cluster.engines] == [*parse_engines('1 x tensor=4 + 1 x tensor=2').sizes]


def test_a_slow_class_that_adds_nothing_but_age_is_left_out_where_the_learner_is_the_bottleneck(tmp_path):
    used = simulate(tmp_path / 'used', **WAITING).train()
    spared = simulate(tmp_path / 'spared', **SPARE).train()
    assert main_check_log.main([str(tmp_path / 'spared')]) == ExitCode.FINISHED
    events = read_events(tmp_path / 'spared')
    [start] = [event for event in events if event['kind'] == 'spare']
    assert (start['hardware'], start['engines'], start['mode']) == ('1 x H800 SXM/3', ['engine/2', 'engine/3'], 'start')
    routed = {event['engine'] for event in events if event['kind'] == 'route' and event['seq'] > start['seq']}
    assert routed == {'engine/0', 'engine/1'}
    limits = Limits.of(json.loads((tmp_path / 'spared' / 'config.json').read_text()))
    line = next(i for i, event in enumerate(events) if event['kind'] == 'route' and event['seq'] > start['seq'])
    wrong = [*events[:line], {**events[line], 'engine': 'engine/2'}, *events[line + 1 :]]
    assert find_violation(wrong, limits) == (
        line + 1, f'{events[line]["request"]} goes to engine/2, which gets no new requests'
    )  # fmt: skip
    paces = [one['window_seconds'] / one['steps'] for one in (used, spared)]
    assert paces[1] < paces[0]  # nothing waits for answers of the slow engines
    slow = next(row for row in spared['engine_classes'] if row['hardware'] == '1 x H800 SXM/3')
    assert 0.4 < slow['left_out'] < 0.8
    assert '1 x H800 SXM/3 got no new requests in' in (tmp_path / 'spared' / 'report.md').read_text()


def test_it_stays_where_generation_is_the_bottleneck(tmp_path):
    fields = SPARE | {'simulation__update_s': 0.0, 'staleness__eta': float('inf'), 'checkpoint__every': 0}
    report = simulate(tmp_path, **fields).train()
    assert not any(event['kind'] == 'spare' for event in read_events(tmp_path))
    assert all(row['times_left_out'] == 0 for row in report['engine_classes'])


@pytest.mark.parametrize('step', [pytest.param(3, marks=pytest.mark.slow), 6])
def test_a_run_that_is_killed_leaves_the_class_out_as_the_whole_one(tmp_path, step):
    found = kill_and_resume(tmp_path, step, **SPARE)
    decided = [[event for event in events if event['kind'] == 'spare'] for events in found]
    assert decided[0] == decided[1] != []


@pytest.mark.parametrize('versions', [0, 1])
def test_old_answers_leave_slow_engines_with_every_token(tmp_path, versions):
    simulate(tmp_path, rollout__slow_versions=versions, **MIXED).train()
    assert main_check_log.main([str(tmp_path)]) == ExitCode.FINISHED
    events = read_events(tmp_path)
    moves = [event for event in events if event['kind'] == 'move']
    assert bool(moves) == bool(versions)
    assert {event['from_engine'] for event in moves} <= {'engine/2', 'engine/3'}
    finished = {f'0/{event["draw"]}/{event["sample"]}': event for event in events if event['kind'] == 'finish'}
    generated = sum(event['tokens'] - event.get('discarded', 0) for event in events if event['kind'] == 'decode')
    assert generated >= sum(event['tokens'] for event in finished.values())
    assert not any('discarded' in event for event in events)
    for move in moves:
        assert move['tokens'] > 0
        if move['request'] in finished:  # it goes on behind what it had, in versions that only rise
            end = finished[move['request']]
            assert end['tokens'] >= move['tokens']
            assert end['versions'] == sorted(end['versions'])
            assert len(end['versions']) > 1


def test_the_cluster_of_the_other_tests_has_equal_engines(tmp_path):
    """Nothing moves between engines of one speed."""
    assert 'simulation__engine_chips' not in CLUSTER
    simulate(tmp_path, rollout__slow_versions=1, run__steps=4).train()
    assert not any(event['kind'] == 'move' for event in read_events(tmp_path))


@pytest.mark.parametrize('step', [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_moves_the_answers_of_the_whole_one(tmp_path, step):
    """A resumed run knows how fast its engines are."""
    found = kill_and_resume(tmp_path, step, rollout__slow_versions=1, checkpoint__every=1, **MIXED)
    moved = [[event for event in events if event['kind'] == 'move'] for events in found]
    assert moved[0] == moved[1] != []
