from __future__ import annotations

import json
import pathlib

import pytest

from areal_jax.telemetry.events import (
    Window,
    busy_share,
    conservation,
    evaluation_spans,
    lane_intervals,
    lane_seconds,
    ledger,
    load_events,
    outside_evaluation,
    window,
)
from tests.telemetry.logs import event_log, publish, two_updates, work


def test_a_torn_last_event_is_dropped(tmp_path: pathlib.Path):
    lines = [json.dumps(event) for event in two_updates()]
    (tmp_path / 'events.jsonl').write_text('\n'.join(lines[:-1]) + '\n' + lines[-1][:20])
    assert load_events(tmp_path / 'events.jsonl') == two_updates()[:-1]


def test_an_interval_is_when_the_lane_worked_not_when_it_was_logged():
    start = {'lane': 'learner', 'run': 1, 'work': 'train', 'amount': 5.0, 'update': 3}
    done = {'lane': 'learner', 'run': 1, 'work': 'train', 'amount': 5.0, 'started': 1.5, 'seconds': 2.0}
    (interval,) = lane_intervals(event_log((1.0, 'run_start', start), (4.0, 'run_done', done)))
    assert (interval.start, interval.end, interval.amount) == (1.5, 3.5, 5.0)
    assert interval.detail == {'update': 3}


def test_work_cut_off_by_a_death_is_no_interval_and_its_number_may_come_again():
    resumed = [*work('learner', 'train', 3, 5, 0), (5, 'restore', {'update': 1}), *work('learner', 'train', 7, 8, 0)]
    intervals = lane_intervals(event_log(work('learner', 'save', 1, 2, 0)[0], *resumed))
    assert [(i.start, i.end) for i in intervals] == [(3, 5), (7, 8)]


def test_window_is_first_admission_to_last_publication():
    assert window(two_updates()) == Window(((10, 30),))


def test_window_leaves_out_evaluation_inside_and_publication_of_the_first_weights():
    # admitted at 10, last trained version at 30; evaluation 5-12 and 20-23 cut 2 s and 3 s: 20 - 5 = 15
    events = event_log(
        publish(0, 0),
        (5, 'evaluate', {'phase': 'before', 'mode': 'start'}),
        (10, 'admit', {'draw': 0}),
        (12, 'evaluate', {'phase': 'before', 'mode': 'done'}),
        (20, 'evaluate', {'phase': 'after', 'mode': 'start'}),
        (23, 'evaluate', {'phase': 'after', 'mode': 'done'}),
        publish(30, 1),
    )
    assert window(events) == Window(((12, 20), (23, 30)))
    assert window(events).seconds == 15
    assert window(events).overlap(11, 24) == 9  # 12-20 and 23-24
    assert [event['time'] for event in outside_evaluation(events)] == [0, 30]


def test_no_publication_no_window():
    events = event_log((1, 'admit', {'draw': 0}), publish(2, 0))
    assert window(events).seconds == 0
    assert busy_share([], 'learner', window(events)) is None


def test_an_evaluation_that_never_ended_lasts_to_the_end():
    events = event_log((1, 'evaluate', {'phase': 'before', 'mode': 'start'}), (4, 'error', {'message': 'x'}))
    assert evaluation_spans(events) == [(1, 4)]


def test_busy_shares_by_hand():
    # engine 18 s, learner 4 + .5 + 5 = 9.5 s, publish .5 + .5 + 1 = 2 s of 20 s; evaluation (0-2, 31-33) is outside
    intervals, within = lane_intervals(two_updates()), window(two_updates())
    assert busy_share(intervals, 'engine/0', within) == pytest.approx(18 / 20)
    assert busy_share(intervals, 'learner', within) == pytest.approx(9.5 / 20)
    assert lane_seconds(intervals, within) == pytest.approx({'engine/0': 18, 'learner': 9.5, 'publish': 2})


def test_a_wide_lane_is_occupied_once_and_shares_its_seconds():
    # 0-4 and 2-6 and 6-8 on a lane of width 2, window 0-10: occupied 8 s, work 4 + 4 + 2 = 10 s on 2 = 5 lane seconds
    entries = [
        *work('reward', 'reward', 0, 4, 0),
        *work('reward', 'reward', 2, 6, 1),
        *work('reward', 'reward', 6, 8, 2),
    ]
    intervals = lane_intervals(event_log(*entries))
    assert busy_share(intervals, 'reward', Window(((0, 10),))) == pytest.approx(0.8)
    assert lane_seconds(intervals, Window(((0, 10),))) == pytest.approx({'reward': 5})


def test_rounding_of_touching_intervals_is_no_second_width():
    # 0.1 + 0.2 > 0.3 in floating point: the first interval seems to end after the second began
    entries = [*work('learner', 'train', 0.3, 0.5, 1)]
    done = {'lane': 'learner', 'run': 0, 'work': 'train', 'amount': 1.0, 'started': 0.1, 'seconds': 0.2}
    intervals = lane_intervals(event_log((0.3, 'run_done', done), *entries))
    assert 0.1 + 0.2 > 0.3
    assert lane_seconds(intervals, Window(((0, 1),))) == pytest.approx({'learner': 0.4})


def test_every_draw_ends_in_one_state():
    found = ledger(two_updates())
    assert found.states == {0: 'trained', 1: 'trained', 2: 'dropped', 3: 'running', 4: 'pending'}
    assert found.reasons == {2: 'over_age'}
    assert [found.count(state) for state in ('pending', 'running', 'buffered', 'trained', 'dropped')] == [1, 1, 0, 2, 1]
    assert conservation(two_updates()) == []


LIFE = [
    ('draw', {'draw': 5}),
    ('admit', {'draw': 5}),
    ('buffer', {'draw': 5}),
    ('consume', {'update': 1, 'draws': [5]}),
]


@pytest.mark.parametrize('missing', range(4))
def test_a_step_that_is_left_out_is_a_violation(missing: int):
    steps = [step for index, step in enumerate(LIFE) if index != missing]
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate(steps)))
    assert len(conservation(events)) == (missing < 3)  # without its last step the draw just is not trained yet


@pytest.mark.parametrize('repeated', range(4))
def test_a_step_that_comes_twice_is_a_violation(repeated: int):
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate([*LIFE, LIFE[repeated]])))
    (violation,) = conservation(events)
    assert violation.startswith(f'event 4 ({LIFE[repeated][0]}): draw 5 goes from trained to')


@pytest.mark.parametrize(('steps', 'allowed'), [(0, False), (1, True), (2, True), (3, True), (4, False)])
def test_a_draw_is_dropped_before_it_is_trained(steps: int, allowed: bool):
    drop = ('drop', {'draw': 5, 'reason': 'over_age'})
    events = event_log(*((float(t), kind, fields) for t, (kind, fields) in enumerate([*LIFE[:steps], drop])))
    assert (conservation(events) == []) is allowed
