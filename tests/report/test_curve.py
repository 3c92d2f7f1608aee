"""The curve of evaluations beside training, and their share of the lanes, from a log whose seconds can be added up."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.app.run.reports import alone_seconds
from areal_jax.report import limit
from areal_jax.report.event_log import lane_intervals, lane_seconds, of_training, window
from areal_jax.report.limit import busy_shares
from areal_jax.report.timeline import build_timeline, slot_spans
from areal_jax.telemetry.facts import EvaluationScores, VersionScores
from tests.telemetry.logs import dispatch, event_log, publish

Entry = tuple[float, str, dict[str, Any]]


def evaluated(start: float, end: float, run: int, version: int, request: str) -> list[Entry]:
    """A decode dispatch of an evaluation on engine/0."""
    common = {'lane': 'engine/0', 'run': run, 'work': 'evaluation_decode', 'amount': 4.0}
    fields = {'engine': 'engine/0', 'dispatch': run, 'slots': [request, None], 'bucket': 32, 'steps': 4}
    return [
        (start, 'run_start', {**common, 'version': version}),
        (end, 'run_done', {**common, 'started': start, 'seconds': end - start}),
        (end, 'evaluation_decode', {**fields, 'tokens': 3, 'version': version}),
    ]


def log() -> list[dict[str, Any]]:
    """Window 0..10 s. Training decodes 0..3, 4..6 and 6.5..8, an evaluation of version 1 3..4 and 6..6.5."""
    slots = {'engine': 'engine/0', 'slots': 2, 'bytes': 3 * 2**20}
    entries: list[Entry] = [
        (0, 'evaluation_slots', slots),
        (0, 'evaluation_slots', slots | {'engine': 'engine/1'}),
        (0, 'admit', {'draw': 0}),
        *dispatch(0, 3, 0, ['0/0/0'], 4, 0),
        *evaluated(3, 4, 1, 1, '7/0/0'),
        *dispatch(4, 6, 2, ['0/0/0'], 4, 0),
        *evaluated(6, 6.5, 3, 1, '7/0/0'),
        *dispatch(6.5, 8, 4, ['0/0/0'], 4, 1),
        publish(10, 1),
        *evaluated(10, 14, 5, 1, '7/1/0'),  # after the window: it takes no time from training
    ]
    return event_log(*entries)


ROWS = [
    VersionScores(2, 9.0, EvaluationScores((1.0, 1.0), ((), ()))),
    VersionScores(1, 11.0, EvaluationScores((0.0, 1.0, 1.0, 0.0), ((1.0,), (0.0,), (0.0,), (0.0,)))),
]


def test_shares_are_seconds_of_the_evaluation_over_those_of_the_lanes():
    assert limit.evaluation_lane_share(log()) == pytest.approx(1.5 / 8)
    first, second = limit.evaluation_curve(log(), ROWS)
    assert (first['version'], second['version']) == (1, 2)
    assert first['lane_seconds'] == pytest.approx(1 + 0.5 + 4)
    # from 3 s to 14 s: 5.5 s of the evaluation, 2 + 1.5 s of training
    assert first['lane_share'] == pytest.approx(5.5 / 9)
    assert (first['greedy']['mean'], first['greedy']['n'], first['sampled']['mean']) == (0.5, 4, 0.25)
    assert (second['greedy']['mean'], second['sampled'], second['lane_share']) == (1.0, None, None)


def test_the_ends_are_of_the_problems_and_samples_between_them():
    before = EvaluationScores((1.0, 0.0, 0.0, 0.0, 1.0, 1.0), ((0.0, 1.0),) * 4 + ((1.0, 1.0),) * 2)
    ends = limit.curve_ends(ROWS[1:], before, None)
    assert (ends['greedy']['before']['mean'], ends['greedy']['before']['n']) == (0.25, 4)  # not 3 of 6
    assert ends['sampled']['before']['mean'] == 0.0  # the first of two samples
    assert (ends['greedy']['after'], ends['sampled']['after']) == (None, None)
    assert limit.curve_ends(ROWS[:1], before, before)['sampled'] == {'before': None, 'after': None}
    assert limit.curve_ends([], before, before) is None


def test_without_evaluations_there_is_no_share():
    events = [event for event in log() if event['kind'] != 'evaluation_slots' and event.get('work') == 'decode']
    assert limit.evaluation_lane_share(events) is None
    assert limit.evaluation_cache_bytes(events) is None
    assert limit.evaluation_curve(events, []) == []


def test_the_bytes_are_those_of_all_engines():
    assert limit.evaluation_cache_bytes(log()) == 6 * 2**20


def test_lane_seconds_are_those_of_training_and_busy_shares_of_both():
    events = log()
    training = of_training(lane_intervals(events))
    assert lane_seconds(training, window(events)) == {'engine/0': pytest.approx(6.5)}
    assert busy_shares(events)['rollout'] == pytest.approx(0.8)
    # the median cost of a dispatch (amount 1) alone, 2 s, times three dispatches
    assert alone_seconds(lane_intervals(events), window(events), 1)['generate'] == pytest.approx(6.0)


def test_slots_of_training_and_of_the_evaluation_are_apart():
    events = log()
    assert {span.request for span in slot_spans(events)} == {'0/0/0'}
    found = [(span.request, span.version, span.start, span.end) for span in slot_spans(events, 'evaluation_decode')]
    assert found == [('7/0/0', 1, 3, 6.5), ('7/1/0', 1, 10, 14)]
    names = {entry['args'].get('name') for entry in build_timeline(events)['traceEvents'] if entry['ph'] == 'M'}
    assert {'slot 000', 'evaluation slot 000'} <= names
