"""Closed forms of a plan: limits that are known, and that they agree with the laws of closed_forms/."""

import dataclasses

import pytest

from areal_jax.simulation.closed_forms.gated import period_s
from areal_jax.simulation.planner.plan_setting import Plan
from areal_jax.simulation.planner.prediction import choose_start, predict, train_s
from areal_jax.simulation.planner.published_ranges import find_interval
from tests.simulation.planner.rig import make


def test_equal_lengths_keep_the_eta_law():
    """M_tail = 1, free slots, no prompt: live answers are (eta + 1 - T / P) B / x, so P = (G + T) / (eta + 1)."""
    setting = make(lengths='constant(4000)')
    setting = dataclasses.replace(setting, most_slots=10_000)
    for eta in (0, 1, 2):
        plan = Plan(12, 4, eta, 10_000)
        found = predict(setting, plan)
        answer_s = found.live * 12 / 256 * found.period_s  # Little: live answers are B G / P
        assert found.period_s == pytest.approx(period_s(answer_s, found.train_s, 0, eta), rel=0.05)


def test_more_devices_that_train_take_less_time():
    setting = make()
    assert train_s(setting, 8) == pytest.approx(train_s(setting, 4) / 2)
    assert predict(setting, Plan(8, 8, 8, 256)).train_s == train_s(setting, 8)


def test_the_start_keeps_the_bound_on_the_age():
    free, bound = choose_start(make()), choose_start(make(max_age=1.0))
    assert bound.eta < free.eta or bound.slots < free.slots
    assert predict(make(), bound).age_mean <= 1.0


def test_an_interval_follows_from_the_published_ranges():
    """Bandwidth .6 to .85 and MFU .39 to .46 bound the speed of a plan: from 39 / 40 to 85 / 60."""
    setting = make()
    low, high = find_interval(setting, Plan(12, 4, 8, 256))
    assert 0.39 / 0.40 - 1e-6 <= low < high <= 0.85 / 0.6 * 1.25
    assert find_interval(setting, Plan(12, 4, 8, 256)) == (low, high)
