"""The ledger of a soak: what a lost answer, one that ended twice and lost tokens look like in the event log."""

import json

import pytest

from tests.soak.checks import check_events


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
