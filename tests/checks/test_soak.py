"""What a soak finds wrong in logs, memory and answers, and the proxy that makes connections slow and cuts them."""

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

from areal_jax.types import Segment
from checks.soak.abuse import Proxy
from checks.soak.checks import (
    MemoryTrack,
    check_events,
    check_memory,
    check_seconds,
    check_seen,
    check_shared,
    find_quarantines,
    slope,
    window_medians,
)
from checks.soak.scores import Scores

PROMPT, TOKENS = np.array([1, 2, 1], np.int32), np.array([2, 1, 1, 0, 2], np.int32)


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


def test_one_wild_point_does_not_move_the_slope():
    points = [(0.0, 0.0), (1.0, 2.0), (2.0, 4.0), (3.0, 600.0), (4.0, 8.0)]
    assert slope(points) == 2.0
    assert slope(points[:1]) is None


def test_windows_have_the_median_of_their_samples():
    assert window_medians([(1.0, 5.0), (2.0, 900.0), (3.0, 6.0), (31.0, 7.0)]) == [(15.0, 6.0), (45.0, 7.0)]


def test_growth_is_that_of_processes_that_live_at_the_end():
    track = MemoryTrack()
    for second in range(600):
        track.add('steady', second, 1e8 + 1e5 * (second % 7))
        track.add('leaks', second, 1e8 + 50e3 * second)
        if second < 100:
            track.add('dead', second, 1e8 * second)
    found = track.megabytes_a_minute(300.0)
    assert found.keys() == {'steady', 'leaks'}
    assert found['steady'] == pytest.approx(0.0, abs=0.1)
    assert found['leaks'] == pytest.approx(3.0)


@pytest.fixture
def echo():
    """The port of a server that sends everything back."""
    listener = socket.create_server(('127.0.0.1', 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=send_back, args=(connection,), daemon=True).start()

    def send_back(connection):
        with connection:
            while content := connection.recv(4096):
                connection.sendall(content)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def connect(proxy):
    host, _, port = proxy.url.removeprefix('http://').partition(':')
    return socket.create_connection((host, int(port)), 10)


def read_rest(connection):
    """Everything until the end of the connection, which may be a reset."""
    found = b''
    with contextlib.suppress(ConnectionResetError):
        while content := connection.recv(4096):
            found += content
    return found


def test_it_carries_and_can_be_slow_and_cut(echo):
    with Proxy(echo) as proxy, connect(proxy) as connection:
        connection.sendall(b'hello')
        assert connection.recv(100) == b'hello'
        proxy.bytes_s = 50.0
        began = time.monotonic()
        connection.sendall(b'x' * 10)
        assert connection.recv(100) == b'x' * 10
        assert time.monotonic() - began > 0.3
        proxy.cut()
        assert not read_rest(connection)  # it has ended; nothing that was on its way arrives


def test_a_server_that_is_dead_cuts_the_connection():
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    with Proxy(port) as proxy, connect(proxy) as connection:
        assert not read_rest(connection)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_answer_of_two_versions_is_right_only_under_its_versions(dtype):
    scores = Scores(dtype)
    old, new = (scores.logprobs(version, PROMPT, TOKENS) for version in (3, 4))
    right = [Segment(TOKENS[:2], old[:2], 3), Segment(TOKENS[2:3], new[2:3], 4), Segment(TOKENS[3:], new[3:], 4)]
    assert scores.fault(PROMPT, right) == ''
    wrong = [*right[:2], Segment(TOKENS[3:], old[3:], 4)]
    assert 'of version 4 differ by' in scores.fault(PROMPT, wrong)
