"""What the live view reads of a run: each line once, a torn one when it is whole, and the numbers of the report."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax import files
from areal_jax.app.watch.live_run import WINDOW_S, Lane, LineTail, LiveRun, Loop
from areal_jax.report.event_log import Window, busy_share, lane_intervals, load_events
from areal_jax.telemetry.metrics import read_metrics
from tests.report.busy_run import write_answers, write_busy_run

UPDATES = 12


@pytest.fixture(scope='module')
def busy(tmp_path_factory) -> pathlib.Path:
    """A run of 12 updates that no process uses and that has no report: it was killed."""
    workdir = tmp_path_factory.mktemp('watch') / 'busy'
    write_busy_run(workdir, UPDATES)
    write_answers(workdir, UPDATES)
    return workdir


def read_lines(tail: LineTail, restarts: list[int] | None = None) -> list[bytes]:
    return [line for _, line in tail.read(lambda: restarts.append(1) if restarts is not None else None)]


@given(st.lists(st.binary(max_size=20), max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_lines_are_read_once_however_they_are_written(tmp_path_factory, pieces: list[bytes], data: st.DataObject):
    """Any pieces, with line breaks drawn into them: the lines that are whole after each piece, never a torn one."""
    path = tmp_path_factory.mktemp('tail') / 'lines'
    tail, found, content = LineTail(path, data.draw(st.integers(1, 8))), [], b''
    for piece in pieces:
        content += piece.replace(b'x', b'\n') + data.draw(st.sampled_from([b'', b'\n', b'{"a"']))
        path.write_bytes(content) if not path.exists() else path.open('ab').write(content[path.stat().st_size :])
        found += read_lines(tail)
        assert found == content.split(b'\n')[:-1]


def test_what_was_read_is_not_read_again(tmp_path: pathlib.Path):
    """The earlier part is overwritten in place, except for the bytes by which the tail knows its file."""
    path = tmp_path / 'lines'
    path.write_bytes(b'a' * 5000 + b'\n' + b'b' * 100 + b'\n')
    tail, restarts = LineTail(path), []
    assert [len(line) for line in read_lines(tail, restarts)] == [5000, 100]
    with path.open('r+b') as file:
        file.write(b'\n' * 4000)
        file.seek(0, 2)
        file.write(b'new\n')
    assert (read_lines(tail, restarts), restarts) == ([b'new'], [])


def test_a_file_that_was_cut_is_read_from_its_start(tmp_path: pathlib.Path):
    """A resumed run cuts its log, and the log may be longer than before when it is read the next time."""
    path = tmp_path / 'lines'
    path.write_bytes(b'one\ntwo\nthree\n')
    tail, restarts = LineTail(path), []
    read_lines(tail, restarts)
    path.write_bytes(b'one\n')
    assert (read_lines(tail, restarts), len(restarts)) == ([b'one'], 1)
    path.write_bytes(b'ONE\nfour\nfive\n')
    assert (read_lines(tail, restarts), len(restarts)) == ([b'ONE', b'four', b'five'], 2)
    files.write_text(path, 'another file\n')
    assert (read_lines(tail, restarts), len(restarts)) == ([b'another file'], 3)
    path.unlink()
    assert (read_lines(tail, restarts), len(restarts)) == ([], 4)


def test_the_share_of_a_lane():
    """Work from 1 to 3, from 2 to 4 at the same time, from 6 to 7, and some that began at 9 and has not ended."""
    lane = Lane()
    lane.add(1, 3)
    lane.add(2, 4)
    lane.add(6, 7)
    assert lane.share(0, 10) == pytest.approx(0.4)
    lane.open[5] = {'time': 9}
    assert lane.share(0, 10) == pytest.approx(0.5)
    assert lane.share(5, 10) == pytest.approx(0.4)  # what ended before 5 is forgotten
    assert lane.share(0, 10) == pytest.approx(0.2)
    assert lane.share(3, 3) == 0


def test_lanes_are_occupied_as_the_report_says(busy: pathlib.Path):
    run = LiveRun(busy)
    run.read()
    events = load_events(busy / 'events.jsonl')
    window = Window(((max(events[0]['time'], events[-1]['time'] - WINDOW_S), events[-1]['time']),))
    assert run.window == window.spans[0]
    assert set(run.loop.lanes) == {'engine/0', 'engine/1', 'learner'}
    for name, lane in run.loop.lanes.items():
        expected = busy_share(lane_intervals(events), name, window)
        assert lane.share(*run.window) == pytest.approx(expected)
        assert 0 < expected < 1


def test_groups_are_where_the_log_has_them(busy: pathlib.Path, tmp_path: pathlib.Path):
    """Read line by line, so that every state in between is compared too."""
    lines = (busy / 'events.jsonl').read_text().splitlines(keepends=True)
    run = LiveRun(tmp_path)
    admitted, buffered, gone, seen = set(), set(), set(), 0
    with (tmp_path / 'events.jsonl').open('w', buffering=1) as log:
        for line in lines:
            log.write(line)
            event = json.loads(line)
            if event['kind'] == 'admit':
                admitted.add(event['draw'])
            elif event['kind'] == 'buffer':
                buffered.add(event['draw'])
            elif event['kind'] in ('consume', 'drop'):
                gone |= set(event.get('draws', [event.get('draw')]))
            if event['kind'] in ('buffer', 'consume', 'drop', 'publish'):
                run.read()
                seen = max(seen, len(run.loop.buffered))
                assert set(run.loop.buffered) == buffered - gone
                assert set(run.loop.running) == admitted - buffered - gone
    assert seen > 4
    assert run.loop.version == UPDATES


def test_rates_metrics_and_answers(busy: pathlib.Path):
    run = LiveRun(busy)
    run.read()
    low, _ = run.window
    decoded = [e for e in load_events(busy / 'events.jsonl') if e['kind'] == 'decode' and e['time'] >= low]
    assert run.loop.generated(low) == sum(event['tokens'] for event in decoded)
    last = {event['engine']: event for event in decoded}
    for engine, slots in run.loop.slots.items():
        assert slots.used == sum(request is not None for request in last[engine]['slots'])
        assert (slots.slots, slots.version) == (8, last[engine]['version'])
    assert run.rows == read_metrics(busy / 'metrics.jsonl')
    newest = run.answers[-1]
    assert (newest.update, newest.draw, newest.name, newest.versions) == (12, 96, '3', (9, 11))


def test_the_last_dispatch_and_the_tokens_of_a_minute():
    loop = Loop()
    for time, slots, tokens in ((5.0, ['0/1/0', '0/2/0'], 8), (40.0, ['0/1/0', None], 4), (80.0, [None, '0/3/0'], 2)):
        event = {'time': time, 'kind': 'decode', 'engine': 'engine/0', 'slots': slots, 'tokens': tokens, 'version': 3}
        loop.apply(json.dumps(event).encode(), is_recent=True)
    assert (loop.slots['engine/0'].used, loop.slots['engine/0'].slots) == (1, 2)
    assert (loop.generated(0.0), loop.generated(20.0), loop.generated(80.0)) == (14, 6, 2)
    loop.apply(json.dumps(event).encode(), is_recent=False)  # at the start, of long ago
    assert loop.generated(80.0) == 2


def test_a_run_is_read_alike_at_once_and_as_it_is_written(busy: pathlib.Path, tmp_path: pathlib.Path):
    whole, fed = LiveRun(busy), LiveRun(tmp_path / 'fed')
    whole.read()
    fed.read()  # there is nothing yet
    assert not fed.exists
    (tmp_path / 'fed' / 'rollouts').mkdir(parents=True)
    shutil.copy(busy / 'config.json', tmp_path / 'fed')
    names = ('events.jsonl', 'metrics.jsonl', 'rollouts/000001.jsonl')
    contents = {name: (busy / name).read_bytes() for name in names}
    for part in range(7):
        for name, content in contents.items():
            cut = len(content) * part // 6
            (tmp_path / 'fed' / name).open('ab').write(content[len(content) * max(0, part - 1) // 6 : cut])
        fed.read()
    assert (fed.rows, fed.answers, fed.fields) == (whole.rows, whole.answers, whole.fields)
    assert fed.loop.buffered == whole.loop.buffered
    assert fed.loop.unread == whole.loop.unread == 0
    for name, lane in whole.loop.lanes.items():
        assert fed.loop.lanes[name].share(*fed.window) == lane.share(*whole.window)


def test_how_the_run_is(busy: pathlib.Path, tmp_path: pathlib.Path):
    run = LiveRun(busy)
    run.read()
    assert (run.state, run.is_running) == ('killed', False)
    lock = files.DirectoryLock(busy)
    written = (busy / 'metrics.jsonl').stat().st_mtime
    held = LiveRun(busy, wall=lambda: max(written, (busy / 'events.jsonl').stat().st_mtime) + 7.0)
    held.read()
    lock.release()
    assert held.is_running
    assert held.holder.startswith('process ')
    assert held.silent_s == pytest.approx(7.0, abs=1e-3)
    assert held.now == pytest.approx(held.loop.now + 7.0, abs=1e-3)  # the clock of the run is that of the wall
    (tmp_path / 'empty').mkdir()
    empty = LiveRun(tmp_path / 'empty')
    empty.read()
    assert (empty.exists, empty.state) == (True, 'never began')


def test_damaged_lines_are_counted_and_passed_over(busy: pathlib.Path, tmp_path: pathlib.Path):
    lines = (busy / 'events.jsonl').read_bytes().splitlines(keepends=True)
    damaged = [
        *lines[:5],
        b'{"seq": 5, "kind": "admit"}\n',
        b'nothing\n',
        b'{"kind": "publish", "version": \n',
        *lines[5:],
    ]
    (tmp_path / 'events.jsonl').write_bytes(b''.join(damaged))
    run = LiveRun(tmp_path)
    run.read()
    assert run.loop.unread == 3
    assert run.loop.version == UPDATES
