"""What a soak finds wrong: in the event log, in the memory of servers, in what took too long or never happened."""

import json

import pytest

from tests.soak.checks import check_events, check_memory, check_seconds, check_seen, check_shared, find_quarantines


def write(path, *events):
    path.write_text(''.join(json.dumps(event) + '\n' for event in events))
    return path


def finish(draw, tokens=5):
    return {'kind': 'finish', 'draw': draw, 'tokens': tokens}


def move(draw, tokens):
    return {'kind': 'move', 'request': f'0/{draw}/0', 'tokens': tokens}


def test_a_whole_ledger(tmp_path):
    assert check_events(write(tmp_path / 'log', move(1, 2), finish(0), move(1, 3), finish(1)), 2) == []


@pytest.mark.parametrize(('events', 'says'), [
    ((finish(0),), '1 draws never ended, the first: [1]'),
    ((finish(0), finish(1), finish(1)), 'draw 1 ended 2 times'),
    ((finish(0), move(1, 4), move(1, 3), finish(1)), 'draw 1 had 4 tokens, and 3 later'),
    ((finish(0), move(1, 4), finish(1, 3)), 'draw 1 ended with fewer tokens than it had'),
])  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, events, says):
    assert check_events(write(tmp_path / 'log', *events), 2) == [says]


def test_a_server_that_was_taken_for_a_wrong_one_is_named(tmp_path):
    state = {'kind': 'engine_state', 'engine': 'engine/1', 'time': 2.04, 'reason': 'the probe failed'}
    path = write(tmp_path / 'log', state | {'state': 'unknown'}, state | {'state': 'quarantined'})
    assert find_quarantines(path) == ['engine/1 at 2.0 s: the probe failed']


@pytest.mark.parametrize(('slopes', 'faults'), [
    ({'a': 0.4, 'b': -3.0}, []),
    ({'a': 1.2, 'b': 0.0}, ['a grows by 1.20 MB a minute']),
    ({'a': 0.4, 'b': None}, ['the memory of 1 servers was measured, not of 2']),
    ({}, ['the memory of 0 servers was measured, not of 2']),
    ({'a': float('nan'), 'b': 0.1}, ['a grows by nan MB a minute']),
])  # fmt: skip
def test_memory_that_grows_or_was_not_measured_is_a_fault(slopes, faults):
    assert check_memory(slopes, 2) == faults


def test_what_took_too_long_or_never_happened_is_a_fault():
    assert check_seconds({'answer': 119.0, 'update': 121.0}, 120.0) == ['the slowest update took 121 s']
    assert check_seen({'kill': 1, 'stop': 0}, ('kill', 'stop', 'cut')) == [
        'never happened: stop',
        'never happened: cut',
    ]


def test_two_segments_may_be_open_at_once():
    assert check_shared(20, 10) == check_shared(0, 0) == []
    assert len(check_shared(21, 10)) == 1
