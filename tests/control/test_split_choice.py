"""When devices move: arithmetic of busy seconds, hysteresis, and noise that moves nothing."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.config.cluster import DeviceSplit
from areal_jax.control.split_choice import Automatic, LaneSeconds, Planned, Rung, mean_seconds, predict_gain

RUNGS = [
    Rung(DeviceSplit('data=1', '7 x tensor=1'), 1, 7),
    Rung(DeviceSplit('fsdp=2', '6 x tensor=1'), 2, 6),
    Rung(DeviceSplit('fsdp=4', '4 x tensor=1'), 4, 4),
]
SPLITS = [rung.split for rung in RUNGS]


def seconds(learner, engines):
    return LaneSeconds(max(learner, engines), learner, engines)


def automatic(gain=0.1, updates=3):
    return Automatic(RUNGS, gain=gain, updates=updates)


def test_the_gain_is_that_of_the_busier_side_with_its_new_devices():
    # 12 s of training on 2 devices are 6 on 4; 4 s on 6 engines are 6 on 4: 12 / 6
    assert predict_gain(seconds(12.0, 4.0), RUNGS[1], RUNGS[2]) == pytest.approx(1.0)
    # the engines become the bound: 4 of 6 engines take 10.5 s for 7, and 12 / 10.5 is a seventh more
    assert predict_gain(seconds(12.0, 7.0), RUNGS[1], RUNGS[2]) == pytest.approx(1 / 7)
    # 14 s of generation on 6 engines are 12 on 7, 3 s of training on 2 devices are 6 on one
    assert predict_gain(seconds(3.0, 14.0), RUNGS[1], RUNGS[0]) == pytest.approx(14 / 12 - 1)
    assert predict_gain(seconds(10.0, 10.0), RUNGS[1], RUNGS[2]) < 0
    assert predict_gain(seconds(0.0, 0.0), RUNGS[1], RUNGS[2]) == 0.0


def test_devices_go_to_the_busier_side_after_so_many_updates_in_a_row():
    training, generating, even = seconds(12.0, 4.0), seconds(3.0, 14.0), seconds(10.0, 9.0)
    for measured, expected in [
        ([training] * 2, 1),
        ([training] * 3, 2),
        ([generating] * 3, 0),
        ([training, even, training], 1),
        ([even] * 9 + [training] * 3, 2),
        ([even] * 9, 1),
        ([], 1),
    ]:
        assert automatic().choose(9, SPLITS[1], measured) == SPLITS[expected], measured


def test_the_gain_must_be_above_the_threshold():
    measured = [seconds(12.0, 7.0)] * 3  # predicts a seventh
    assert automatic(gain=0.14).choose(9, SPLITS[1], measured) == SPLITS[2]
    assert automatic(gain=0.15).choose(9, SPLITS[1], measured) == SPLITS[1]


def test_the_ends_of_the_ladder_hold():
    assert automatic().choose(9, SPLITS[2], [seconds(50.0, 1.0)] * 9) == SPLITS[2]
    assert automatic().choose(9, SPLITS[0], [seconds(1.0, 50.0)] * 9) == SPLITS[0]


def test_a_move_back_waits_twice_as_long_each_time():
    choice, at, training, generating = automatic(updates=2), 1, seconds(12.0, 4.0), seconds(3.0, 14.0)
    waited = []
    for step in range(4):  # what was predicted never comes true
        measured = []
        there = 2 if step % 2 == 0 else 1
        while choice.choose(9, SPLITS[at], measured) != SPLITS[there]:
            measured.append(training if there == 2 else generating)
        waited.append(len(measured))
        choice.note_move(SPLITS[at], SPLITS[there])
        at = there
    assert waited == [2, 4, 8, 16]
    other = automatic(updates=2)
    other.restore(choice.state())
    assert other.choose(9, SPLITS[1], [training] * 31) == SPLITS[1]
    assert other.choose(9, SPLITS[1], [training] * 32) == SPLITS[2]


def test_a_further_move_in_the_same_direction_waits_no_longer():
    choice, training = automatic(updates=2), seconds(30.0, 1.0)
    choice.note_move(SPLITS[0], SPLITS[1])
    assert choice.choose(9, SPLITS[1], [training] * 2) == SPLITS[2]


@pytest.mark.parametrize('seed', range(5))
def test_noise_around_an_even_split_moves_nothing(seed):
    random, measured = np.random.default_rng(seed), []
    choice = automatic(gain=0.1, updates=4)
    for update in range(500):
        learner, engines = 10.0 * random.lognormal(0.0, 0.3, 2)
        measured.append(seconds(learner, engines))
        assert choice.choose(update, SPLITS[1], measured) == SPLITS[1]


def test_a_plan_holds_each_split_from_its_update_on():
    planned = Planned({3: SPLITS[2], 7: SPLITS[0]})
    assert [planned.choose(update, SPLITS[1], ()) for update in (1, 2)] == [SPLITS[1]] * 2
    assert [planned.choose(update, SPLITS[1], ()) for update in (3, 6)] == [SPLITS[2]] * 2
    assert planned.choose(40, SPLITS[2], ()) == SPLITS[0]
    assert planned.ahead(1, SPLITS[1]) == SPLITS[2]
    assert planned.ahead(3, SPLITS[2]) == SPLITS[0]
    assert planned.ahead(7, SPLITS[0]) is None


def test_the_mean_of_what_was_measured():
    assert mean_seconds([LaneSeconds(2.0, 1.0, 2.0), LaneSeconds(4.0, 3.0, 1.0)]) == LaneSeconds(3.0, 2.0, 1.5)
    assert mean_seconds([]) == LaneSeconds(0.0, 0.0, 0.0)
