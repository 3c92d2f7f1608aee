from __future__ import annotations

from areal_jax.report.metric_curves import CURVES, SPLIT, Curve, curve_points, has_points
from areal_jax.telemetry.names import is_declared


def test_every_curve_is_of_metrics_that_exist_and_has_a_name_of_its_own():
    assert [name for curve in (*CURVES, SPLIT) for _, name in curve.metrics if not is_declared(name)] == []
    assert len({curve.name for curve in (*CURVES, SPLIT)}) == len(CURVES) + 1


def test_points_are_the_updates_that_have_the_metric():
    lines = [{'step': 1, 'loss/value': 2.0}, {'step': 2, 'loss/value': None}, {'step': 3}, {'step': 4, 'loss/value': 0}]
    assert curve_points(lines, 'loss/value') == ([1, 4], [2.0, 0])
    assert curve_points(lines, 'loss/entropy') == ([], [])


def test_zero_is_not_on_a_logarithmic_axis():
    lines = [{'step': 1, 'a': 0.0}]
    assert has_points(lines, Curve('t', '', (('l', 'a'),)))
    assert not has_points(lines, Curve('t', '', (('l', 'a'),), logarithmic=True))
    assert not has_points(lines, Curve('t', '', (('l', 'b'),)))
