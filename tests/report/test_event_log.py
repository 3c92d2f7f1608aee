"""What the reader of the event log takes, and what it refuses with file and line."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from areal_jax.events.schema import VERSION
from areal_jax.files import FileError
from areal_jax.report.event_log import load_events, outside_evaluation
from tests.telemetry.logs import event_log, two_updates


def write(path: pathlib.Path, events: list[dict[str, Any]]) -> pathlib.Path:
    path.write_text(''.join(json.dumps(event) + '\n' for event in events))
    return path


def test_a_torn_last_event_is_dropped(tmp_path: pathlib.Path):
    lines = [json.dumps(event) for event in two_updates()]
    (tmp_path / 'events.jsonl').write_text('\n'.join(lines[:-1]) + '\n' + lines[-1][:20])
    assert load_events(tmp_path / 'events.jsonl') == two_updates()[:-1]
    assert load_events(tmp_path / 'none.jsonl') == []


@pytest.mark.parametrize(
    ('fields', 'fault'),
    [
        ({'kind': 'draw'}, "has no 'draw'"),
        ({'kind': 'draw', 'draw': '5'}, "has draw='5', which is not of type int"),
        ({'kind': 'draw', 'draw': True}, 'has draw=True, which is not of type int'),
        ({'kind': 'draw', 'draw': 5, 'sample': 0}, 'has the unknown field sample=0'),
        ({'kind': 'consume', 'update': 1, 'draws': [5, None]}, 'has draws=[5, None], which is not of type list of int'),
        ({'kind': 'evaluate', 'phase': 'after', 'mode': 'x'}, "has mode='x', which is not of type 'start' or 'done'"),
        ({'kind': 'evaluated'}, "has the unknown kind 'evaluated'"),
        ({'kind': ['draw']}, "has the unknown kind ['draw']"),
        ({}, "has no 'kind'"),
        ({'kind': 'draw', 'draw': 5, 'lane': 3}, 'has lane=3, which is not of type str or null'),
    ],
)
def test_what_is_no_event_of_the_schema_is_named_with_its_line(tmp_path: pathlib.Path, fields: Any, fault: str):
    good = event_log((0.0, 'draw', {'draw': 4}))
    path = write(tmp_path / 'events.jsonl', [*good, {'seq': 1, 'time': 2, 'lane': None, **fields}])
    with pytest.raises(FileError, match=f'^{path}: line 2 {re.escape(fault)}: it was edited or is of another program'):
        load_events(path)


def test_a_log_of_an_earlier_version_is_read_and_of_a_later_one_refused(tmp_path: pathlib.Path):
    def starts(*versions: int) -> pathlib.Path:
        return write(tmp_path / 'events.jsonl', event_log(*((0.0, 'log', {'version': v}) for v in versions)))

    assert load_events(write(tmp_path / 'events.jsonl', two_updates())) == two_updates()  # no `log`: version 1
    assert len(load_events(starts(VERSION - 1, VERSION))) == 2
    message = f'line 2 says that the event log has version {VERSION + 1}; this program reads versions 1 to {VERSION}: '
    with pytest.raises(FileError, match=rf'events\.jsonl: {message}use the one that wrote the log$'):
        load_events(starts(VERSION, VERSION + 1))


def test_events_of_training_are_those_outside_evaluation():
    events = event_log(
        (0, 'draw', {'draw': 0}),
        (5, 'evaluate', {'phase': 'before', 'mode': 'start'}),
        (10, 'admit', {'draw': 0}),
        (12, 'evaluate', {'phase': 'before', 'mode': 'done'}),
        (30, 'draw', {'draw': 1}),
    )
    assert [event['time'] for event in outside_evaluation(events)] == [0, 30]
