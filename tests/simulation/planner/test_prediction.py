"""Closed forms of a plan: limits that are known, and that they agree with the laws of closed_forms.py."""

import dataclasses

import pytest

from areal_jax.simulation.closed_forms import period_s
from areal_jax.simulation.planner.advice import find_factors, find_interval
from areal_jax.simulation.planner.neighbours import Costs, Outcome, Plan, choose_start, predict, train_s
from tests.simulation.planner.rig import make


def test_equal_lengths_keep_the_eta_law():
    """M_tail = 1, free slots, no prompt: live answers are (eta + 1 - T / P) B / x, so P = (G + T) / (eta + 1)."""
    setting = make(lengths='constant(4000)')
    setting = dataclasses.replace(setting, most_slots=10_000)
    for eta in (0, 1, 2):
        plan = Plan(12, 4, eta, 10_000)
        found = predict(setting, plan)
        answer_s = found.live * 12 / 256 * found.period_s  # Little: live answers are B G / P
        law_s = period_s(answer_s, found.train_s, found.publication_s, eta)
        assert found.period_s == pytest.approx(law_s, rel=0.05)


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
    low, high = find_factors(setting, Plan(12, 4, 8, 256))
    assert 0.39 / 0.40 - 1e-6 <= low < high <= 0.85 / 0.6 * 1.25
    assert find_factors(setting, Plan(12, 4, 8, 256)) == (low, high)


def test_an_interval_has_room_for_what_the_simulation_saw_of_lengths():
    """Twice a scatter of 10%, or of 2% at least, to either side of 1e5 tokens a second."""
    setting, plan = make(), Plan(12, 4, 8, 256)
    low, high = find_factors(setting, plan)
    for scatter, room in ((0.1, 0.2), (0.0, 0.04)):
        found = Outcome(25.0, 1e5, 1.0, 1.0, 2.0, 4.0, scatter=scatter)
        assert find_interval(setting, plan, found) == pytest.approx((low * (1 - room) * 1e5, high * (1 + room) * 1e5))


def test_no_update_is_shorter_than_a_publication():
    """With 300 s to load a version, in place of 2, an update takes these and the transfer."""
    setting = dataclasses.replace(make(lengths='lognormal(500, 0.75)'), costs=Costs(load_s=300.0))
    found = predict(setting, Plan(12, 4, 32, 256))
    assert found.period_s == found.publication_s > 300
    assert max(found.train_s, found.generation_s) < 100


def test_the_start_uses_etas_above_eight_and_pays_their_price():
    """64 answers do not fill 5 to 7 engines of 256 slots by far."""
    devices, lengths = 8, 'lognormal(2000, 0.75)'
    etas = [choose_start(make(devices, 64, lengths, age_price=price)).eta for price in (0.0, 0.02, 0.2)]
    assert etas == sorted(etas, reverse=True)
    assert etas[0] > 16 > 8 > etas[2]
    assert choose_start(make(devices, 64, lengths, most_eta=4)).eta == 4
