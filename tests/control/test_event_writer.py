"""What the writer of the event log takes; what a run that goes on keeps of its log, and what it refuses."""

import json

import pytest

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import TEXT_CHARACTERS, EventLog, check_types, truncate_events
from areal_jax.events.schema import KINDS, VERSION
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


def test_the_first_event_of_each_start_is_the_version_at_the_time_of_the_clock():
    log = EventLog(next_seq=7)
    VirtualClock({}, log, {}, start_s=2.5)
    assert log.events == [{'seq': 7, 'time': 2.5, 'lane': None, 'kind': 'log', 'version': VERSION}]


@pytest.mark.parametrize(
    ('kind', 'fields', 'message'),
    [
        (
            'drawn',
            {'draw': 1},
            r"^event kind 'drawn' is not in the schema \(areal_jax/events/schema\.py\); known: ",
        ),
        ('draw', {}, r"^event 'draw': fields left out: \['draw'\], not in the schema .*: \[\]$"),
        ('draw', {'draw': 1, 'sample': 2}, r"fields left out: \[\], not in the schema .*: \['sample'\]$"),
        ('evaluate', {'phase': 'after'}, r"fields left out: \['mode'\]"),
        ('run_start', {'run': 0, 'work': 'x', 'amount': 1, 'tokens': 3}, r"not in the schema .*: \['tokens'\]$"),
    ],
)
def test_an_event_that_the_schema_lacks_is_refused_and_leaves_no_line(kind, fields, message):
    log = EventLog()
    with pytest.raises(ValueError, match=message):
        log.write(kind, **fields)
    assert (log.events, log.next_seq) == ([], 0)


def test_optional_fields_may_be_left_out_one_by_one():
    log = EventLog()
    log.listeners.append(check_types)
    log.write('evaluate', phase='after', mode='start')
    log.write('evaluate', phase='after', mode='done', unverified=['timeout'])
    detail = {'update': 1, 'version': 2, 'draw': 3, 'sample': 0, 'tool': 'add', 'attempt': 1, 'worker': 'start'}
    assert detail.keys() == {field.name for field in KINDS['run_start'].fields if field.optional}
    for name in detail:
        log.write('run_start', 'learner', run=0, work='train', amount=5, **{name: detail[name]})
    assert [set(event) & detail.keys() for event in log.events[2:]] == [{name} for name in detail]


def test_a_field_of_none_is_left_out():
    log = EventLog()
    log.write('admit', draw=1, open=None, wanted=None)
    assert log.events == [{'seq': 0, 'time': 0.0, 'lane': None, 'kind': 'admit', 'draw': 1}]
    with pytest.raises(ValueError, match=r"^event 'draw': fields left out: \['draw'\]"):
        log.write('draw', draw=None)


def test_the_listener_for_tests_refuses_a_wrong_type():
    log = EventLog()
    log.listeners.append(check_types)
    with pytest.raises(TypeError, match=r"^event 'draw' has draw='1', which is not of type int$"):
        log.write('draw', draw='1')


def test_a_log_of_a_later_version_is_not_continued(tmp_path):
    path = tmp_path / 'events.jsonl'
    event = {'seq': 0, 'time': 0.0, 'lane': None, 'kind': 'log', 'version': VERSION + 1}
    path.write_text(json.dumps(event) + '\n')
    with pytest.raises(FileError, match=rf'^{path}: line 1 says that the event log has version {VERSION + 1}; this'):
        truncate_events(path, 1)
    assert json.loads(path.read_text()) == event


LONG = '\U0001f600' * 10**6
VALUES = {'int': 1, 'float': 1.0, 'str': LONG, 'bool': True}


@pytest.mark.parametrize('kind', sorted(KINDS.keys() - {'run_done', 'deadline', 'signal'}))  # they have a check sum
def test_no_text_of_an_event_is_longer_than_a_line_holds(tmp_path, kind):
    path = tmp_path / 'events.jsonl'
    log = EventLog(path)
    written = [field for field in KINDS[kind].fields if field.name not in ('seq', 'time', 'lane', 'kind')]
    log.write(kind, **{field.name: VALUES.get(field.type_name, []) for field in written})
    log.close()
    (line,) = path.read_bytes().splitlines()
    texts = [value for name, value in json.loads(line).items() if name not in ('kind', 'lane') and type(value) is str]
    assert len(texts) == sum(field.type_name == 'str' for field in written)
    assert all(len(text) <= TEXT_CHARACTERS and text.endswith(' more characters') for text in texts)
    assert len(line) < 13 * TEXT_CHARACTERS * len(texts) + 1000
