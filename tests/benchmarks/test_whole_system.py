import json
import sys
import time

import pytest

from areal_jax.errors import UserError
from areal_jax.telemetry.devices import cpu_seconds
from benchmarks.whole_system import EventUpdates, PrintedUpdates, System, summarize

BUSY = """
import json, sys, time
for update in range(1, 1000):
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    print(json.dumps({'update': update, 'tokens': 10 * update}), flush=True)
"""


def write(path, *events):
    with path.open('a') as file:
        file.writelines(json.dumps(event) + '\n' for event in events)


def test_an_update_counts_when_its_weights_are_loaded(tmp_path):
    log = tmp_path / 'events.jsonl'
    updates = EventUpdates(log)
    assert list(updates('')) == []
    write(log, {'kind': 'finish', 'draw': 0, 'tokens': 5}, {'kind': 'finish', 'draw': 0, 'tokens': 3})
    write(log, {'kind': 'finish', 'draw': 1, 'tokens': 2}, {'kind': 'consume', 'update': 1, 'draws': [0, 1]})
    assert list(updates('')) == []
    write(log, {'kind': 'load', 'version': 1})
    with log.open('a') as file:
        file.write('{"kind": "fin')  # being written
    assert list(updates('')) == [10]
    assert list(updates('')) == []
    with log.open('a') as file:
        file.write('ish", "draw": 2, "tokens": 7}\n')
    write(log, {'kind': 'consume', 'update': 2, 'draws': [2]}, {'kind': 'load', 'version': 2})
    assert list(updates('')) == [7]


def test_a_stopped_side_takes_no_seconds(tmp_path):
    side = System('busy', [sys.executable, '-c', BUSY], tmp_path, PrintedUpdates())
    try:
        first = side.advance(1)
        cpu = cpu_seconds(side.process.pid)
        time.sleep(0.3)
        assert cpu_seconds(side.process.pid) == cpu
        second = side.advance(4)
    finally:
        side.close()
    assert first['updates'] >= 1
    assert second['updates'] >= 4
    assert second['cpu_s'] > 0.12  # four times 0.05, in ticks of 0.01, less what it had begun
    assert second['tokens'] >= 10 * (2 + 3 + 4 + 5)


def test_a_side_that_ends_is_named_with_what_it_said(tmp_path):
    side = System('broken', [sys.executable, '-c', 'raise SystemExit("no such model")'], tmp_path, PrintedUpdates())
    with pytest.raises(UserError, match=r'broken ended after 0 of 1 updates:\nno such model'):
        side.advance(1)
    side.close()


def test_ratios_are_of_turns():
    ours = [{'tokens': 40.0, 'cpu_s': 2.0, 'wall_s': 1.0, 'updates': 2.0}] * 2
    theirs = [{'tokens': 40.0, 'cpu_s': 8.0, 'wall_s': 4.0, 'updates': 2.0}] * 2
    row = summarize('trl', {'ours': ours, 'trl': theirs}, {'ours': 3, 'trl': 6})
    assert row['ours_over_it_tokens_a_cpu_s']['median'] == 4
    assert row['ours_over_it_cpu_s_an_update']['median'] == 0.25
    assert row['ours_over_it_peak_bytes'] == 0.5
