"""Engines of two speeds: old answers go on on fast ones when weights are loaded, and no token is generated anew."""

from __future__ import annotations

import pytest

from areal_jax import main_check_log
from areal_jax.errors import ExitCode
from tests.app.simulate.test_simulated_run import CLUSTER, kill_and_resume, read_events, simulate

MIXED = {
    'simulation__engine_chips': '2 x H800, 2 x H800/3', 'cluster__engines': '4 x tensor=1', 'run__steps': 8,
    'staleness__eta': float('inf'), 'learner__filter_equal_rewards': False,
}  # fmt: skip


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


@pytest.mark.parametrize('step', [4, 6])
def test_a_run_that_is_killed_moves_the_answers_of_the_whole_one(tmp_path, step):
    """A resumed run knows how fast its engines are."""
    found = kill_and_resume(tmp_path, step, rollout__slow_versions=1, checkpoint__every=1, **MIXED)
    moved = [[event for event in events if event['kind'] == 'move'] for events in found]
    assert moved[0] == moved[1] != []
