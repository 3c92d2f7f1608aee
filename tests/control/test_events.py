"""The event log of a run that goes on: what it keeps, and what it refuses to go on from."""

import json

import pytest

from areal_jax.control.events import EventLog, truncate_events
from areal_jax.files import FileError


def write_log(path, count):
    log = EventLog(path)
    for draw in range(count):
        log.write('draw', draw=draw)
    log.close()
    return path.read_bytes().splitlines(keepends=True)


def test_what_a_resumed_run_writes_again_is_cut_off(tmp_path):
    path = tmp_path / 'events.jsonl'
    lines = write_log(path, 5)
    for kept in range(6):
        path.write_bytes(b''.join(lines))
        truncate_events(path, kept)
        assert path.read_bytes() == b''.join(lines[:kept])
    truncate_events(tmp_path / 'none.jsonl', 0)
    assert not (tmp_path / 'none.jsonl').exists()


@pytest.mark.parametrize('content', [None, b'', b'\x00\x01\xff'], ids=['no file', 'empty', 'binary'])
def test_a_log_that_lacks_events_before_the_cut_is_refused(tmp_path, content):
    path = tmp_path / 'events.jsonl'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=rf'^{path} has 0 events, the checkpoint was saved after 3; restore the file'):
        truncate_events(path, 3)


def test_a_torn_last_line_and_damage_after_the_cut_are_cut_off(tmp_path):
    path = tmp_path / 'events.jsonl'
    lines = write_log(path, 5)
    for cut in range(1, len(lines[4])):
        path.write_bytes(b''.join(lines[:4]) + lines[4][:cut])
        truncate_events(path, 4)
        assert path.read_bytes() == b''.join(lines[:4])
        path.write_bytes(b''.join(lines[:4]) + lines[4][:cut])
        if cut == len(lines[4]) - 1:  # only the line break is missing
            truncate_events(path, 5)
            assert path.read_bytes() == b''.join(lines)
        else:
            with pytest.raises(FileError, match='has 4 events, the checkpoint was saved after 5'):
                truncate_events(path, 5)
    path.write_bytes(b''.join(lines[:3]) + b'\xff\n' + lines[4])
    truncate_events(path, 3)
    assert path.read_bytes() == b''.join(lines[:3])


DAMAGE = {
    b'{"seq": 2\n': 'line 3 is no JSON',
    b'\n': 'line 3 is no JSON',
    b'[2]\n': 'line 3 holds a list, not an object',
    b'{"seq": 2, "kind": "\xff"}\n': 'line 3 is no JSON: it is not UTF-8',
    b'{"kind": "draw"}\n': 'line 3 has seq=None, where event 2 is expected',
    b'': 'line 3 has seq=3, where event 2 is expected',
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_damage_in_the_part_to_keep_is_refused_and_nothing_is_cut(tmp_path, damage):
    path = tmp_path / 'events.jsonl'
    lines = write_log(path, 5)
    content = b''.join(lines[:2]) + damage + b''.join(lines[3:])
    path.write_bytes(content)
    with pytest.raises(FileError, match=rf'^{path}: {DAMAGE[damage]}.*; restore the file .* or start anew in another'):
        truncate_events(path, 5)
    assert path.read_bytes() == content


def test_an_event_is_one_line_with_its_number(tmp_path):
    lines = write_log(tmp_path / 'events.jsonl', 2)
    assert [json.loads(line)['seq'] for line in lines] == [0, 1]
