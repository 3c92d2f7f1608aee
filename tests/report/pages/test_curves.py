"""Which curves a page draws, what it says of the others, and how curves are smoothed."""

from __future__ import annotations

import pytest

from areal_jax.report.pages.curves import (
    CURVES,
    SPLIT,
    Curve,
    curve_points,
    describe_undrawn,
    moving_mean,
    smoothing_window,
)
from areal_jax.telemetry.names import is_declared


def test_every_curve_is_of_metrics_that_exist_and_has_a_name_of_its_own():
    assert [name for curve in (*CURVES, SPLIT) for _, name in curve.metrics if not is_declared(name)] == []
    assert len({curve.name for curve in (*CURVES, SPLIT)}) == len(CURVES) + 1


def test_points_are_the_updates_that_have_the_metric():
    lines = [{'step': 1, 'loss/value': 2.0}, {'step': 2, 'loss/value': None}, {'step': 3}, {'step': 4, 'loss/value': 0}]
    assert curve_points(lines, 'loss/value') == ([1, 4], [2.0, 0])
    assert curve_points(lines, 'loss/entropy') == ([], [])


@pytest.mark.parametrize(
    ('values', 'logarithmic', 'said'),
    [
        ([1.0, 2.0], False, ''),
        ([], False, 'Title: not measured.'),
        ([0.5], False, 'Title (share): measured at update 1 only, label 0.5.'),
        ([0.25, 0.25, 0.25], False, 'Title (share): the same in all 3 updates that measured it, label 0.25.'),
        ([0.0, 0.0], True, 'Title: never above 0.'),
        ([0.0, 1.0], True, ''),
    ],
)
def test_what_would_be_an_empty_panel_or_a_straight_line_is_told(values: list[float], logarithmic: bool, said: str):
    lines = [{'step': update, 'a': value} for update, value in enumerate(values, start=1)]
    assert describe_undrawn(lines, Curve('Title', 'share', (('label', 'a'),), '', logarithmic)) == said


def test_a_moving_mean_is_of_a_value_and_those_before_it():
    # (3), (3 + 5) / 2, (3 + 5 + 1) / 3, (5 + 1 + 6) / 3
    assert moving_mean([3, 5, 1, 6], 3) == [3, 4, 3, 4]
    assert moving_mean([3, 5], 1) == [3, 5]
    assert moving_mean([], 5) == []


def test_short_curves_are_not_smoothed_and_long_ones_over_a_20th():
    assert [smoothing_window(points) for points in (0, 9, 10, 100, 200, 1000)] == [1, 1, 5, 5, 10, 50]
