"""When devices move: arithmetic of busy seconds, hysteresis, and noise that moves nothing."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.config.cluster import DeviceSplit
from areal_jax.control.split_choice import (
    Automatic,
    DecodeSums,
    LaneSeconds,
    Planned,
    Rung,
    StepCost,
    fit_step,
    full_rows,
    full_seconds,
    mean_seconds,
    needed_seconds,
    open_rows,
    predict_gain,
)

RUNGS = [
    Rung(DeviceSplit('data=1', '7 x tensor=1'), 1, 7),
    Rung(DeviceSplit('fsdp=2', '6 x tensor=1'), 2, 6),
    Rung(DeviceSplit('fsdp=4', '4 x tensor=1'), 4, 4),
]
SPLITS = [rung.split for rung in RUNGS]


def seconds(learner, engines):
    return LaneSeconds(max(learner, engines), learner, engines, engines)


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


@pytest.mark.parametrize(('held', 'learner', 'engines', 'best'), [(0, 30.0, 1.0, 2), (2, 1.0, 30.0, 0)])
def test_devices_go_to_the_best_split_at_once_and_stay_at_the_end_of_the_ladder(held, learner, engines, best):
    for now, count in ((held, 3), (best, 9)):
        assert automatic().choose(9, SPLITS[now], [seconds(learner, engines)] * count) == SPLITS[best]


def test_engines_with_idle_slots_count_by_the_seconds_that_full_ones_need():
    half_full = [LaneSeconds(period=12.0, learner=12.0, engines=12.0, needed=6.0)] * 3
    assert automatic().choose(9, SPLITS[1], half_full) == SPLITS[2]  # 6 s on 6 engines are 9 on 4, and 12 become 6
    assert automatic().choose(9, SPLITS[1], [seconds(12.0, 12.0)] * 3) == SPLITS[1]


def test_generation_needs_the_whole_update_where_the_learner_waits():
    assert needed_seconds(10.0, 9.5, 4.0, taken=100, ended=100) == 4.0
    assert needed_seconds(10.0, 8.9, 4.0, taken=100, ended=100) == 10.0
    assert needed_seconds(10.0, 8.9, 4.0, taken=100, ended=250) == 4.0  # the rest fills the pipeline
    assert needed_seconds(10.0, 9.5, 4.0, taken=0, ended=0) == 4.0


def sums_of(dispatches):
    """Of (steps, rows, seconds, positions)."""
    sums = DecodeSums()
    for dispatch in dispatches:
        sums = sums.add(*dispatch)
    return sums


def seconds_if_full(sums, slots, cache_tokens):
    return full_seconds(sums, fit_step(sums), full_rows(sums, slots, cache_tokens))


def test_seconds_with_full_slots_are_those_of_the_fitted_step():
    step_s = lambda rows: 0.02 + 0.001 * rows  # 8 rows: 28 ms
    sums = sums_of((100, rows, 100 * step_s(rows), 0) for rows in (1, 2, 3, 6))
    assert fit_step(sums) == pytest.approx(StepCost(0.02, 0.001))
    # 1,200 row-steps are 150 steps of 8 rows
    assert seconds_if_full(sums, 8, 1000) == pytest.approx(150 * step_s(8))
    # a cache of 1,200 tokens holds 4 rows of 300 positions each
    sums = sums_of((100, rows, 100 * step_s(rows), 100 * rows * 300) for rows in (1, 2, 3, 6))
    assert seconds_if_full(sums, 8, 1200) == pytest.approx(300 * step_s(4))
    # it holds 3, as many as there were on average: nothing is to be had
    assert seconds_if_full(sums, 8, 900) == sums.seconds


def test_a_step_whose_rows_are_free_costs_the_less_the_fuller_it_is_and_one_without_a_base_never():
    free = sums_of((10, rows, 1.0, 0) for rows in (2, 4))
    assert seconds_if_full(free, 6, 1000) == pytest.approx(1.0)  # 60 row-steps
    dear = sums_of((10, rows, float(rows), 0) for rows in (2, 4))
    assert seconds_if_full(dear, 6, 1000) == pytest.approx(dear.seconds)
    alike = sums_of([(10, 3, 1.0, 0)] * 2)  # one point has no slope
    assert seconds_if_full(alike, 6, 1000) == pytest.approx(1.0)
    assert seconds_if_full(DecodeSums(), 6, 1000) == 0.0


def test_engines_share_the_open_rows():
    """Steps of 20 ms and 1 ms a row; 48 rows decode at a time, and an engine holds 16."""
    here = LaneSeconds(9.0, 1.0, 9.0, 9.0, step_s=0.020, row_s=0.001, full_share=1 / 16, open_share=1 / 48)
    # 6 engines have 8 rows each: a row takes 20 / 8 + 1 = 3.5 ms; 4 have 12: 20 / 12 + 1 = 2.67 ms
    assert here.needed_of(6, 4) == pytest.approx(9.0 * 6 / 4 * (20 / 12 + 1) / 3.5)
    # 2 are full with 16, not 24: 20 / 16 + 1 = 2.25 ms
    assert here.needed_of(6, 2) == pytest.approx(9.0 * 6 / 2 * 2.25 / 3.5)
    # where it is not known how many decode, engines are as full as before
    assert here._replace(open_share=0.0).needed_of(6, 4) == pytest.approx(9.0 * 6 / 4)
    assert here.needed_of(6, 6) == 9.0
    # rows that cost nothing: more engines do not help
    assert here._replace(row_s=0.0).needed_of(4, 6) == pytest.approx(9.0)


def test_devices_do_not_go_to_engines_that_would_share_the_same_rows():
    measured = LaneSeconds(14.0, 3.0, 14.0, 14.0, step_s=0.02, row_s=0.0, full_share=1 / 16, open_share=1 / 48)
    assert predict_gain(measured, RUNGS[1], RUNGS[0]) == pytest.approx(0.0)
    assert automatic().choose(9, SPLITS[1], [measured] * 3) == SPLITS[1]
    assert automatic().choose(9, SPLITS[1], [seconds(3.0, 14.0)] * 3) == SPLITS[0]


def test_both_sides_count_for_answers_as_long_as_those_that_end_now():
    """Answers just became twice as long: engines feel it, the learner still trains the short ones."""
    measured = seconds(10.0, 12.0)._replace(growth=2.0)
    assert measured.training == 20.0
    # 20 s on 2 devices are 10 on 4, 12 s on 6 engines are 18 on 4
    assert predict_gain(measured, RUNGS[1], RUNGS[2]) == pytest.approx(20 / 18 - 1)
    assert automatic().choose(9, SPLITS[1], [measured] * 3) == SPLITS[2]
    assert automatic().choose(9, SPLITS[1], [measured._replace(growth=1.0)] * 3) == SPLITS[1]


def test_open_rows_are_those_of_engines_that_are_the_bound():
    assert open_rows(0.0, 10.0, 16.0, engines=4) == 40.0
    assert open_rows(60.0, 10.0, 16.0, engines=4) == 40.0  # the later measurement counts
    # full engines say that there are at least as many
    assert open_rows(40.0, 15.0, 16.0, engines=4) == 60.0
    assert open_rows(90.0, 15.0, 16.0, engines=4) == 90.0
    assert open_rows(0.0, 15.0, 16.0, engines=4) == 0.0


def test_a_row_costs_by_the_positions_that_it_sees():
    """Engines with few rows have the long ones: 20 ms, 0.1 ms a row and 1 us a position."""
    step_s = lambda rows, seen: 0.02 + 1e-4 * rows + 1e-6 * rows * seen
    shapes = [(60, 500), (40, 900), (20, 2000), (10, 5000)]
    sums = sums_of((64, rows, 64 * step_s(rows, seen), 64 * rows * seen) for rows, seen in shapes)
    mean = sum(rows * seen for rows, seen in shapes) / sum(rows for rows, _ in shapes)
    assert fit_step(sums) == pytest.approx(StepCost(0.02, 1e-4 + 1e-6 * mean))


def test_no_part_of_a_step_is_negative():
    random = np.random.default_rng(0)
    for _ in range(50):
        dispatches = [(8, int(random.integers(1, 9)), random.random(), int(random.integers(8, 999))) for _ in range(9)]
        assert min(fit_step(sums_of(dispatches))) >= 0


def test_joined_dispatches_say_the_same_of_a_step():
    """A jump is one dispatch of many steps, in which each row sees a position more at every step."""
    step_s = lambda rows, seen: 0.01 + 1e-6 * rows * seen
    single = [
        (4, rows, 4 * step_s(rows, seen), 4 * rows * seen)
        for rows, first in ((3, 100.0), (6, 40.0), (9, 70.0))
        for seen in first + 4.0 * np.arange(5)
    ]
    joined = [
        (
            20,
            rows,
            sum(seconds for _, n, seconds, _ in single if n == rows),
            sum(p for _, n, _, p in single if n == rows),
        )
        for rows in (3, 6, 9)
    ]
    assert fit_step(sums_of(single)) == pytest.approx(fit_step(sums_of(joined)))


def test_the_gain_must_be_above_the_threshold():
    measured = [seconds(12.0, 7.0)] * 3  # predicts a seventh
    assert automatic(gain=0.14).choose(9, SPLITS[1], measured) == SPLITS[2]
    assert automatic(gain=0.15).choose(9, SPLITS[1], measured) == SPLITS[1]


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
    assert choice.choose(9, SPLITS[1], [seconds(1.0, 30.0)] * 3) == SPLITS[1]  # back it waits for four


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
    found = mean_seconds([LaneSeconds(2.0, 1.0, 2.0, 2.0), LaneSeconds(4.0, 3.0, 1.0, 0.5)])
    assert found == LaneSeconds(3.0, 2.0, 1.5, 1.25)
    assert mean_seconds([]) == LaneSeconds(0.0, 0.0, 0.0, 0.0, row_s=0.0)
