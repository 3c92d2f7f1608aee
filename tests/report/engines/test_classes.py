"""Tokens, ages and idle shares by class of engines, from logs whose numbers can be worked out by hand."""

from __future__ import annotations

import pytest

from areal_jax.report.engines.classes import (
    UNKNOWN,
    describe_left_out,
    find_hardware,
    split_batches,
    summarize_classes,
    tabulate_classes,
)
from areal_jax.report.event_log import window
from tests.telemetry.logs import event_log, publish, work

HARDWARE = {'engine/0': 'fast', 'engine/1': 'slow'}


def route(engine, draw=0, sample=0):
    fields = {'request': f'0/{draw}/{sample}', 'draw': draw, 'sample': sample, 'engine': engine}
    return 0, 'route', fields


def move(tokens, draw=0, sample=0):
    fields = {'request': f'0/{draw}/{sample}', 'from_engine': 'engine/1', 'tokens': tokens, 'attempt': 0, 'reason': ''}
    return 0, 'move', fields


def finish(versions, lengths, draw=0, sample=0, reason='stop', **fields):
    tokens = sum(lengths)
    values = {'draw': draw, 'sample': sample, 'tokens': tokens, 'reason': reason, 'versions': versions}
    return 0, 'finish', {**values, 'lengths': lengths, **fields}


def consume(update, *draws):
    return 0, 'consume', {'update': update, 'draws': [*draws]}


def split(*entries):
    return [(batch.update, dict(batch.tokens)) for batch in split_batches(event_log(*entries), HARDWARE)]


def test_an_answer_that_moves_has_the_tokens_before_of_one_class_and_those_after_of_the_other():
    # 30 tokens of version 2 and 20 of version 3; it left behind token 40, in the middle of those of version 3
    found = split(route('engine/1'), move(40), route('engine/0'), finish([2, 3], [30, 20]), consume(5, 0))
    assert found == [(5, {('slow', 2): 30, ('slow', 3): 10, ('fast', 3): 10})]


def test_tokens_of_the_environment_count_for_nobody_and_a_later_turn_elsewhere_is_of_no_class():
    turns = [2, -1, 3], [10, 5, 10]
    stayed = split(route('engine/0'), route('engine/0'), finish(*turns), consume(4, 0))
    assert stayed == [(4, {('fast', 2): 10, ('fast', 3): 10})]
    went = split(route('engine/0'), route('engine/1'), finish(*turns), consume(4, 0))
    assert went == [(4, {(UNKNOWN, 2): 10, (UNKNOWN, 3): 10})]
    rows = split(route('engine/1'), move(5), route('engine/0'), finish([2], [10], rows=[1, 0]), consume(4, 0))
    assert rows == [(4, {(UNKNOWN, 2): 10})]


def test_answers_that_enter_no_batch_are_not_counted():
    found = split(
        route('engine/0', sample=0), finish([0], [4], sample=0),
        route('engine/0', sample=1), finish([0], [8], sample=1, reason='cancelled'),
        route('engine/0', sample=2), finish([0], [16], sample=2),
        (0, 'reward', {'draw': 0, 'sample': 2, 'value': 0.0, 'label': 'timeout', 'attempts': 1}),
        route('engine/0', draw=1), finish([0], [32], draw=1), (0, 'drop', {'draw': 1, 'reason': '', 'detail': ''}),
        consume(1, 0),
    )  # fmt: skip
    assert found == [(1, {('fast', 0): 4})]


def test_a_row_for_each_class():
    """Window 0 to 20 s; the slow class is left out from 10 s to 15 s and from 18 s to the end."""
    decoded = {'dispatch': 1, 'slots': [], 'bucket': 1, 'steps': 1, 'version': 1}
    spare = {'hardware': '1 x b', 'engines': ['engine/1'], 'version': 1, 'open': 1.0, 'slots': 2, 'speed': 0.5}
    spare |= {'update_seconds': 5.0, 'reason': 'fits'}
    events = event_log(
        (0, 'join', {'engine': 'engine/0', 'hardware': '1 x a'}),
        (0, 'join', {'engine': 'engine/1', 'hardware': '1 x b'}),
        (0, 'admit', {'draw': 0}),
        route('engine/0'), route('engine/1', sample=1),
        *work('engine/0', 'decode', 0, 15, 0), (15, 'decode', {'engine': 'engine/0', 'tokens': 30} | decoded),
        *work('engine/1', 'decode', 0, 10, 1), (10, 'decode', {'engine': 'engine/1', 'tokens': 10} | decoded),
        (10, 'spare', {'mode': 'start', **spare}), (15, 'spare', {'mode': 'done', **spare}),
        (18, 'spare', {'mode': 'start', **spare}),
        finish([1], [30]), finish([0], [10], sample=1), consume(2, 0), publish(20, 2),
        consume(3, 1),
    )  # fmt: skip
    metrics = [{}, {'mismatch/of/engine/1/n': 10, 'mismatch/of/engine/1/mean_abs': 0.5, 'mismatch/of/engine/0/n': 1,
                    'mismatch/of/engine/0/mean_abs': 0.1}]  # fmt: skip
    assert find_hardware(events) == {'engine/0': '1 x a', 'engine/1': '1 x b'}
    fast, slow = rows = summarize_classes(events, events, metrics, window(events))
    assert (fast['tokens'], fast['share'], fast['tokens_per_second'], fast['idle']) == (30, 0.75, 1.5, 0.25)
    assert (slow['tokens'], slow['share'], slow['tokens_per_second'], slow['idle']) == (10, 0.25, 0.5, 0.5)
    assert (fast['age'], slow['age']) == ({'mean': 0.0, 'max': 0}, {'mean': 1.0, 'max': 1})
    assert (slow['mismatch'], slow['trained_tokens']) == ({'mean': 0.5, 'n': 10}, 10)
    assert (slow['left_out'], slow['times_left_out'], fast['times_left_out']) == (pytest.approx(7 / 20), 2, 0)
    assert [row[:2] for row in tabulate_classes(rows).rows] == [('1 x a', '1'), ('1 x b', '1')]
    assert describe_left_out(rows).startswith('1 x b got no new requests in 35% of the window')
    assert describe_left_out([fast]) == ''


def test_engines_of_equal_hardware_are_no_classes():
    same = event_log(*((0, 'join', {'engine': f'engine/{index}', 'hardware': '1 x a'}) for index in range(2)))
    assert find_hardware(same) == {}
    assert summarize_classes(same, same, [], window(same)) == []
