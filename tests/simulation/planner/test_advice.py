"""What is said of a plan: which side binds, when to train synchronously, joules from published watts."""

import dataclasses
import re

import pytest

from areal_jax.simulation.chips import H100
from areal_jax.simulation.planner.advice import (
    advise,
    count_devices,
    count_running_groups,
    describe_binding,
    describe_next,
    device_hours,
    joules_a_token,
)
from areal_jax.simulation.planner.host_costs import MEASURED
from areal_jax.simulation.planner.load_tables import LAYOUTS, Peak
from areal_jax.simulation.planner.plan_setting import Outcome, Plan
from tests.simulation.planner.rig import make

OUTCOME = Outcome(25.0, 1e5, 0.8, 0.99, 2.0, 4.0)
LOAD = Peak(LAYOUTS[0]).load(MEASURED)


def outcome(**changes: float) -> Outcome:
    return dataclasses.replace(OUTCOME, **changes)


@pytest.mark.parametrize(
    ('engines', 'learner', 'live', 'said'),
    [
        (0.8, 0.99, 60, 'the learner binds'),
        (0.97, 0.6, 60, 'the engines bind'),
        (0.97, 0.6, 20, 'the staleness bound binds: .* with 20 of 64 slots filled'),
        (0.6, 0.5, 60, 'the staleness bound binds: .* and both wait for it'),
    ],
)
def test_what_binds(engines, learner, live, said):
    assert re.match(said, describe_binding(outcome(engines_busy=engines, learner_busy=learner), live, 64))


@pytest.mark.parametrize(
    ('synchronous', 'said', 'in_turns'),
    [
        (0.5e5, 'asynchrony pays 2.00 times', False),
        (0.995e5, 'asynchrony does not pay here: train synchronously', True),
        (1.2e5, 'asynchrony does not pay here: train synchronously', True),
    ],
)
def test_when_asynchrony_does_not_pay(synchronous, said, in_turns):
    advice = advise(OUTCOME, LOAD, 60, outcome(tokens_s=synchronous), None, '')
    assert advice.asynchrony.startswith(said)
    assert advice.trains_in_turns == in_turns


def test_a_bound_that_no_plan_keeps_means_synchronous_training():
    advice = advise(OUTCOME, LOAD, 60, outcome(tokens_s=1e4), 1.0, '')
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
