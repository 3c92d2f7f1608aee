"""What is said of a plan: which side binds, when to train synchronously, joules from published watts."""

import dataclasses
import re

import pytest

from areal_jax.simulation.planner.advice import (
    advise,
    count_devices,
    count_running_groups,
    describe_binding,
    describe_next,
    device_hours,
    find_binding,
    joules_a_token,
    list_trades,
)
from areal_jax.simulation.planner.cluster_load import LAYOUTS, MEASURED, Peak
from areal_jax.simulation.planner.neighbours import Costs, Outcome, Plan, worth
from areal_jax.simulation.prices import H100
from tests.simulation.planner.rig import make

OUTCOME = Outcome(25.0, 1e5, 0.8, 0.99, 2.0, 4.0)
PLAN = Plan(12, 4, 8, 256)
LOAD = Peak(LAYOUTS[0]).load(MEASURED)


def outcome(**changes: float) -> Outcome:
    return dataclasses.replace(OUTCOME, **changes)


@pytest.mark.parametrize(
    ('changed', 'busy', 'live', 'binding', 'said'),
    [
        ({}, (0.8, 0.99), 250, 'learner', 'the learner binds'),
        ({}, (0.97, 0.6), 250, 'engines', 'the engines bind: .* with 250 of 256 slots filled'),
        ({'most_slots': 64}, (0.97, 0.6), 60, 'memory', 'the memory of the engines binds: .* more than 64 answers do'),
        ({'costs': Costs(load_s=24.0)}, (0.97, 0.6), 250, 'publication', 'the publication binds, which takes 24.1 s'),
        ({'most_eta': 8}, (0.97, 0.6), 20, 'max_eta', r'the staleness bound binds \(--max_eta=8\): .* 20 of 256 slots'),
        (
            {'most_eta': 8},
            (0.6, 0.5),
            250,
            'max_eta',
            r'the staleness bound binds .*: .* both wait for it',
        ),
        ({'max_age': 1.0}, (0.97, 0.6), 20, 'max_age', r'the staleness bound binds \(--max_age=1.0\)'),
        (
            {'age_price': 0.02},
            (0.97, 0.6),
            20,
            'age_price',
            r'the staleness bound binds \(--age_price=0.02: a',
        ),
        ({}, (0.97, 0.6), 20, 'eta', r'the staleness bound binds \(a larger eta is no faster\)'),
    ],
)
def test_what_binds(changed, busy, live, binding, said):
    setting = dataclasses.replace(make(), **changed)
    plan, found = Plan(12, 4, 8, setting.most_slots), outcome(engines_busy=busy[0], learner_busy=busy[1])
    assert find_binding(setting, plan, found, live) == binding
    assert re.match(said, describe_binding(setting, plan, found, live, binding))


def test_what_a_price_of_age_would_take():
    """From 100 tokens a second at age 6 to 81 at 4: (1 - p)^2 = .81; to 40.5 at 3: p = .5. 60 at 5 is never best."""
    found = {8: (100.0, 6.0), 6: (60.0, 5.0), 4: (81.0, 4.0), 2: (40.5, 3.0), 1: (40.5, 3.5)}
    tried = {Plan(2, 2, eta, 8): outcome(tokens_s=speed, age_mean=age) for eta, (speed, age) in found.items()}
    trades = list_trades(tried, Plan(2, 2, 8, 8))
    assert [(trade.plan.eta, round(trade.price, 9)) for trade in trades] == [(4, 0.1), (2, 0.5)]
    for trade in trades:
        for price in (trade.price - 1e-6, trade.price + 1e-6):
            setting = make(age_price=price)
            best = max(tried, key=lambda plan: worth(setting, tried[plan]))
            assert (tried[best].age_mean <= trade.outcome.age_mean) == (price > trade.price)


@pytest.mark.parametrize(
    ('synchronous', 'said', 'in_turns'),
    [
        (0.5e5, 'asynchrony pays 2.00 times', False),
        (0.995e5, 'asynchrony does not pay here: train synchronously', True),
        (1.2e5, 'asynchrony does not pay here: train synchronously', True),
    ],
)
def test_when_asynchrony_does_not_pay(synchronous, said, in_turns):
    advice = advise(make(), PLAN, OUTCOME, LOAD, 60, outcome(tokens_s=synchronous, age_mean=0.0), '')
    assert advice.asynchrony.startswith(said)
    assert advice.trains_in_turns == in_turns


def test_a_bound_that_no_plan_keeps_means_synchronous_training():
    advice = advise(make(max_age=1.0), PLAN, OUTCOME, LOAD, 60, outcome(tokens_s=1e4), '')
    assert advice.trains_in_turns
    assert 'no asynchronous plan keeps the mean age to 1' in advice.asynchrony


def test_what_breaks_next():
    """The controller of 8 accelerators has half a core to do, with 64 one and a half."""
    assert describe_next(LOAD).startswith('50% of one core of the controller is used')
    assert 'this pace is not reached' in describe_next(Peak(LAYOUTS[1]).load(MEASURED))


def test_a_group_holds_its_place_until_its_longest_answer_ends():
    """12 engines with 20 live answers, M_tail 2.67, groups of 16: 40.01, so 41 groups, and not 15."""
    setting = make()
    plan = Plan(12, 4, 8, 20)
    assert count_running_groups(setting, plan) == 41


def test_device_hours_do_not_count_what_is_left_over():
    """1e6 tokens at 1e5 a second on 14 devices: 140 s, .0389 hours."""
    plan = Plan(12, 2, 8, 256)
    assert count_devices(make(), plan) == 14
    assert device_hours(make(), plan, 1e5) == pytest.approx(140 / 3600)


def test_joules_lie_between_idle_and_the_limit_of_the_board():
    """16 boards at 1e5 tokens a second: all at 700 W are .112 J a token, all idle at 70 W .0112."""
    setting, plan = dataclasses.replace(make(), chip=H100), Plan(12, 4, 8, 256)
    found = joules_a_token(setting, plan, OUTCOME, 64)
    assert 0.0112 < found.low < found.mid < found.high < 0.112
    idle = joules_a_token(setting, plan, outcome(engines_busy=0.0, learner_busy=0.0), 64)
    assert idle.low == pytest.approx(0.0112)
    assert joules_a_token(make(), plan, OUTCOME, 64) is None  # an H800, of which none are published
