"""When a lane was occupied, and for how much of the window."""

from __future__ import annotations

import pytest

from areal_jax.report.event_log import Window, busy_share, lane_intervals, lane_seconds, window
from tests.telemetry.logs import event_log, two_updates, work


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
