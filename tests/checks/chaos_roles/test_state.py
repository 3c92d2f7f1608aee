"""What is seen of a workdir that is written to, cut off and begun anew."""

import itertools
import json

import pytest

from areal_jax.registry import Entry, Registration
from checks.chaos_roles.state import EventTail, View


def lines(*numbers, start=0):
    return ''.join(json.dumps({'seq': n, 'kind': 'draw', 'start': start}) + '\n' for n in numbers)


def numbers(events):
    return [(event['seq'], event['start']) for event in events]


def test_a_tail_reads_whole_lines_once(tmp_path):
    path = tmp_path / 'events.jsonl'
    tail = EventTail(path)
    assert tail.read() == []
    path.write_text(lines(0, 1) + '{"seq": 2, ')
    assert numbers(tail.read()) == [(0, 0), (1, 0)]
    with path.open('a') as file:
        file.write('"kind": "draw", "start": 0}\n')
    assert numbers(tail.read()) == [(2, 0)]
    assert tail.read() == []


@pytest.mark.parametrize('added', [(), (2,), (2, 3, 4, 5)])  # shorter than before, as long, longer
def test_a_log_that_was_cut_off_goes_on(tmp_path, added):
    path, replacement = tmp_path / 'events.jsonl', tmp_path / 'partial'
    tail = EventTail(path)
    path.write_text(lines(0, 1, 2))
    tail.read()
    replacement.write_text(lines(0, 1) + lines(*added, start=1))
    replacement.rename(path)
    assert numbers(tail.read()) == [(n, 1) for n in added]
    assert len(tail.lines) == 2 + len(added)


@pytest.fixture
def view(tmp_path):
    (tmp_path / 'logs').mkdir()
    clock = itertools.count()
    return View(tmp_path, lambda: float(next(clock)))


def seen(view):
    """What the next look adds."""
    before = len(view.marks)
    view.look()
    return [(mark.what, mark.process or mark.event['seq']) for mark in view.marks[before:]]


def test_starts_and_entries_are_seen_once_each(tmp_path, view):
    assert seen(view) == []
    (tmp_path / 'logs' / 'learner-0.1.log').touch()
    assert seen(view) == [('start', 'learner-0')]
    first = Registration(tmp_path, Entry('learner-0', 0, ''))
    assert seen(view) == [('registered', 'learner-0')]
    first.beat()
    assert seen(view) == []
    first.update(address='127.0.0.1:1')
    assert seen(view) == [('built', 'learner-0')]
    assert view.state.registered == {'learner-0': True}
    (tmp_path / 'checkpoints' / 'step_00000003').mkdir(parents=True)
    (tmp_path / 'logs' / 'learner-0.2.log').touch()
    assert seen(view) == [('start', 'learner-0')]
    assert view.state.registered == {}  # the entry is of the process before
    first.update(is_leaving=True)
    assert seen(view) == []
    Registration(tmp_path, Entry('learner-0', 0, '', address='127.0.0.1:2'))
    assert seen(view) == [('registered', 'learner-0'), ('built', 'learner-0')]
    assert [(mark.number, mark.update) for mark in view.marks if mark.what == 'start'] == [(1, None), (2, 3)]


def test_events_that_were_cut_off_stay_marks(tmp_path, view):
    path, replacement = tmp_path / 'events.jsonl', tmp_path / 'partial'
    path.write_text(lines(0, 1, 2))
    assert seen(view) == [('event', 0), ('event', 1), ('event', 2)]
    replacement.write_text(lines(0) + lines(1, 2, start=1))
    replacement.rename(path)
    assert seen(view) == [('event', 1), ('event', 2)]
    assert numbers(view.state.events) == [(0, 0), (1, 1), (2, 1)]
    assert len(view.marks) == 5


def test_what_is_being_written_is_seen(tmp_path, view):
    for directory, name in (('publication', '.v000001.partial'), ('checkpoints', '.step_00000003.partial')):
        (tmp_path / directory / name).mkdir(parents=True)
    view.look()
    assert view.state.is_writing_version
    assert view.state.is_writing_checkpoint
