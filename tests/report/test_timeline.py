from __future__ import annotations

import json
import pathlib

from areal_jax.report.timeline import build_timeline, write_timeline
from tests.telemetry.logs import event_log, two_updates, work


def _names(trace: dict, kind: str) -> dict[tuple[int, int], str]:
    return {(e['pid'], e['tid']): e['args']['name'] for e in trace['traceEvents'] if e['name'] == kind}


def test_the_file_is_what_a_trace_viewer_reads(tmp_path: pathlib.Path):
    trace = json.loads(write_timeline(two_updates(), tmp_path).read_text())
    processes = _names(trace, 'process_name')
    assert list(processes.values()) == [
        'lanes: engine', 'lanes: learner', 'lanes: publish', 'slots: engine/0', 'events', 'counters',
    ]  # fmt: skip
    threads = _names(trace, 'thread_name')
    for entry in trace['traceEvents']:
        assert {'name', 'ph', 'pid', 'tid'} <= entry.keys()
        assert (entry['pid'], 0) in processes
        assert entry['ph'] in 'MXiC'
        assert entry['ph'] == 'M' or entry['ts'] >= 0
        assert entry['ph'] not in 'Xi' or (entry['pid'], entry['tid']) in threads


def test_work_of_a_lane_in_microseconds():
    trace = build_timeline(two_updates())
    threads = _names(trace, 'thread_name')
    learner = [e for e in trace['traceEvents'] if threads.get((e['pid'], e['tid'])) == 'learner' and e['ph'] == 'X']
    assert [(e['name'], e['ts'], e['dur']) for e in learner] == [
        ('train', 18e6, 4e6), ('snapshot', 22e6, 0.5e6), ('train', 24e6, 5e6),
    ]  # fmt: skip


def test_requests_lie_on_the_track_of_their_slot():
    trace = build_timeline(two_updates())
    threads = _names(trace, 'thread_name')
    slot = [e for e in trace['traceEvents'] if threads.get((e['pid'], e['tid'])) == 'slot 001' and e['ph'] == 'X']
    assert [(e['name'], e['ts'], e['dur']) for e in slot] == [('0/1/0 v0', 10e6, 8e6)]


def test_counters_follow_buffer_and_version():
    # two groups buffered at 18 s, one consumed at 18, one at 24, one buffered at 28 and dropped at 29
    trace = build_timeline(two_updates())
    samples = [(e['ts'] / 1e6, e['args']) for e in trace['traceEvents'] if e['ph'] == 'C']
    buffered = [(ts, a['buffered groups']) for ts, a in samples if 'buffered groups' in a]
    assert buffered == [(18, 1), (18, 2), (18, 1), (24, 0), (28, 1), (29, 0)]
    assert [(ts, a['version']) for ts, a in samples if 'version' in a] == [(23, 1), (30, 2)]


def test_instants():
    found = [(e['name'], e['ts'] / 1e6) for e in build_timeline(two_updates())['traceEvents'] if e['ph'] == 'i']
    assert ('interrupt', 24) in found
    assert ('publish', 30) in found
    assert ('load', 24.5) in found


def test_work_that_overlaps_on_a_wide_lane_lies_on_rows_of_its_own():
    # 0-4 on row 0, 2-6 on row 1, 4-5 on row 0 again
    entries = [
        *work('reward', 'reward', 0, 4, 0),
        *work('reward', 'reward', 2, 6, 1),
        *work('reward', 'reward', 4, 5, 2),
    ]
    trace = build_timeline(event_log(*entries))
    threads = _names(trace, 'thread_name')
    rows = {e['ts'] / 1e6: threads[e['pid'], e['tid']] for e in trace['traceEvents'] if e['ph'] == 'X'}
    assert rows == {0: 'reward', 2: 'reward +1', 4: 'reward'}


def test_lanes_of_one_kind_share_a_process():
    entries = [
        *work('publish', 'publish', 0, 1, 0),
        *work('publish/0', 'load', 1, 3, 1),
        *work('disk', 'save', 1, 3, 2),
    ]
    trace = build_timeline(event_log(*entries))
    assert list(_names(trace, 'process_name').values()) == ['lanes: publish', 'lanes: disk', 'counters']
    assert list(_names(trace, 'thread_name').values()) == ['publish', 'publish/0', 'disk']


def test_an_empty_log_is_an_empty_trace():
    assert [e for e in build_timeline([])['traceEvents'] if e['ph'] != 'M'] == []
