from __future__ import annotations

import numpy as np

from areal_jax.telemetry import names
from areal_jax.telemetry.devices import OptimizerAges
from areal_jax.telemetry.names import age_ranges, first_age, range_label


def row(histogram, steps, inside_mean=0.0, inside_max=0.0):
    return {
        names.TOKEN_AGE_HISTOGRAM: histogram, names.OPTIMIZER_STEPS: steps,
        names.STEPS_INSIDE_MEAN: inside_mean, names.STEPS_INSIDE_MAX: inside_max,
    }  # fmt: skip


def test_ages_in_optimizer_steps_by_hand():
    # updates of 4, 3 (one was skipped) and 4 steps; 1 token of age 0, 2 of age 1, 1 of age 2 in the third
    ages = OptimizerAges()
    assert ages.note_update(1, row([5], 4.0, 1.5, 3)) == {names.STEP_AGE_MEAN: 1.5, names.STEP_AGE_MAX: 3}
    assert ages.note_update(2, row([], 3.0)) == {}  # nothing was trained
    resumed = OptimizerAges(ages.state())
    for one in (ages, resumed):
        found = one.note_update(3, row([1, 2, 1], 4.0, 1.5, 3))
        assert found == {names.STEP_AGE_MEAN: (0 + 2 * 3 + 7) / 4 + 1.5, names.STEP_AGE_MAX: 7 + 3}
    assert OptimizerAges([]).note_update(3, row([1], 1.0)) == {}  # earlier updates are unknown


def test_one_step_an_update_is_one_publication():
    ages = OptimizerAges()
    for update in range(1, 4):
        found = ages.note_update(update, row([0] * (update - 1) + [3], 1.0))
        assert found == {names.STEP_AGE_MEAN: update - 1, names.STEP_AGE_MAX: update - 1}


def test_ranges_of_ages():
    labels = [range_label(n) for n in age_ranges(np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17]))]
    assert labels == ['0', '1', '2', '3-4', '3-4', '5-8', '5-8', '9-16', '9-16', '17-32']
    assert [first_age(label) for label in ('0', '3-4', '9-16', 'engine/0')] == [0, 3, 9, 0]
