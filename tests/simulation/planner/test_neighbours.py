"""The search against the case that can be worked out by hand, and against brute force on closed forms."""

import dataclasses

import pytest

from areal_jax.simulation.planner.neighbours import TIE, Outcome, Plan, Search, choose_start, list_plans, refine, worth
from tests.simulation.planner.rig import HAND, gate_law, make, predict_law


def plan_of(engines: int, eta: int) -> Plan:
    return Plan(engines, 16 - engines, eta, 256)


def test_the_law_by_hand():
    """16 devices: x = 12, T = W = 25 s; with eta 0, 1, 2, 3: (60 + 25) / (eta + 1), and 25."""
    simulate, _ = gate_law(make(), **HAND)
    periods = [simulate(plan_of(12, eta)).period_s for eta in range(4)]
    assert periods == pytest.approx([85, 42.5, 28.333, 25], abs=1e-3)


@pytest.mark.parametrize('start', [plan_of(12, 8), plan_of(4, 8), plan_of(15, 4), plan_of(8, 3)])
def test_the_case_by_hand_is_found_from_anywhere(start):
    """x* = 12, P* = 25 s, and the least eta that reaches it is 3."""
    setting = make()
    simulate, asked = gate_law(setting, **HAND)
    search = Search(setting, simulate, most=40, predict=predict_law)
    found = search.run(start)
    assert (found.engines, found.training, found.eta) == (12, 4, 3)
    assert search.tried[found].period_s == 25
    assert len(asked) == len(set(asked))


def test_a_bound_on_the_age_moves_devices_and_never_raises_eta():
    """Mean age <= 1: eta 1 gives 42.5 s with 12 engines, and 37.1 s with 9: (60 + 100 / 7) / 2."""
    setting = make(max_age=1.0)
    simulate, _ = gate_law(setting, **HAND)
    search = Search(setting, simulate, most=40, predict=predict_law)
    found = search.run(plan_of(12, 3))
    fastest = min((plan_of(x, eta) for x in range(1, 16) for eta in (0, 1)), key=lambda plan: simulate(plan).period_s)
    assert (found.engines, found.eta) == (fastest.engines, 1) == (9, 1)
    assert search.tried[found].period_s == pytest.approx((60 + 100 / 7) / 2)


@pytest.mark.parametrize('most_eta', [8, 32, 64])
def test_eta_is_searched_up_to_its_bound(most_eta):
    """G = 600 s: the least period of 25 s needs eta 24, (600 + 25) / 25; below it the largest eta is the fastest."""
    setting = make(most_eta=most_eta)
    hand = {**HAND, 'answer_s': 600.0}
    simulate, _ = gate_law(setting, **hand)
    search = Search(setting, simulate, most=60, predict=lambda *asked: predict_law(*asked, hand=hand))
    found = search.run(plan_of(12, 2))
    plans = [plan_of(x, eta) for x in range(1, 16) for eta in range(most_eta + 1)]
    assert search.tried[found].tokens_s >= (1 - TIE) * max(simulate(plan).tokens_s for plan in plans)
    assert found.eta == 8 if most_eta == 8 else 20 <= found.eta <= 24


@pytest.mark.parametrize('price', [0.0, 0.01, 0.05, 0.2, 0.5])
def test_a_price_of_age_is_paid_as_by_brute_force(price):
    """The law by hand has age eta: worth is tokens a second times (1 - price)^eta."""
    setting = make(age_price=price)
    simulate, _ = gate_law(setting, **HAND)
    search = Search(setting, simulate, most=60, predict=predict_law)
    found = search.run(plan_of(12, 8))
    plans = [plan_of(x, eta) for x in range(1, 16) for eta in range(33)]
    best = max(worth(setting, simulate(plan)) for plan in plans)
    assert worth(setting, search.tried[found]) >= (1 - TIE) * best


def test_devices_that_only_wait_are_left_over():
    """A learner that needs a tenth of its devices: W_t = 20 on 4 devices, engines take 40 s whatever it does."""
    setting = make(most_eta=3)

    def simulate(plan: Plan) -> Outcome:
        train_s = 20 / plan.training
        period_s = max(40.0, train_s)
        return Outcome(period_s, 1e6 / period_s, 1.0, train_s / period_s, 0, 0)

    found = Search(setting, simulate, most=30).run(plan_of(12, 3))
    assert found.training == 1


def test_the_search_ends_with_its_simulations():
    setting = make()
    simulate, asked = gate_law(setting, **HAND)
    search = Search(setting, simulate, most=3)
    assert search.run(plan_of(2, 0)) in search.tried
    assert len(asked) == 3


def test_it_finds_the_best_split_of_closed_forms():
    """What is simulated is slower than the closed forms by a third, as engines were in a prototype."""
    setting = make(most_eta=3)
    simulate, _ = gate_law(setting, generating_s=4 / 3 * 300, training_s=100, answer_s=30)
    search = Search(setting, simulate, most=40)
    found = search.run(choose_start(setting))
    fastest = min(list_plans(setting, found.slots, found.eta), key=lambda plan: simulate(plan).period_s)
    assert abs(found.engines - fastest.engines) <= 1


def test_a_plan_at_full_size_has_as_many_engines_as_keep_pace():
    """An eighth of 128 devices: 12 of 16 generate, but both sides keep pace between 12 and 13: 96 to 104 of 128."""
    setting = make(devices=128, answers=2048)
    small = setting.shrink(8)
    plan = choose_start(small)
    simulate, _ = gate_law(small, generating_s=310, training_s=100, answer_s=30)
    plan = dataclasses.replace(plan, engines=12, training=4)
    full = refine(setting, small, plan, simulate(plan))
    assert 92 <= full.engines <= 104
    assert full.engines + full.training == 128
    assert (full.eta, full.slots) == (plan.eta, plan.slots)
    assert refine(small, small, plan, simulate(plan)) == plan


def test_a_bound_on_the_age_keeps_its_split_at_full_size():
    setting = make(devices=128, answers=2048, max_age=1.0)
    plan = Plan(13, 3, 1, 256)
    full = refine(setting, setting.shrink(8), plan, gate_law(setting.shrink(8), **HAND)[0](plan))
    assert (full.engines, full.training, full.eta) == (104, 24, 1)
