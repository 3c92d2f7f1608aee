"""simulation/closed_forms.py: periods and ages by hand, and the law against its recursion."""

import math

import numpy as np
import pytest

from areal_jax.simulation.closed_forms import (
    group_age,
    mean_token_age,
    period_s,
    update_ends_s,
)


def test_the_period_falls_with_eta_to_that_of_the_learner():
    """G = 3, T = 1: 4, 2, 1.33, then 1."""
    assert [period_s(3, 1, 0, eta) for eta in (0, 1, 2, 3, 4, math.inf)] == pytest.approx([4, 2, 4 / 3, 1, 1, 1])


def test_the_plan_of_16_devices():
    """G = 60 s, T = 25 s: 85, 42.5, 28.3, 25 s for eta 0 to 3, where it is saturated."""
    assert [period_s(60, 25, 0, eta) for eta in range(4)] == pytest.approx([85, 42.5, 28.33, 25], abs=0.01)


def test_full_slots_bound_the_period():
    assert period_s(3, 1, 0, 8, work_s=1.5) == 1.5


@pytest.mark.parametrize('eta', range(5))
@pytest.mark.parametrize(('generation', 'publish'), [(3.0, 0.0), (2.5, 0.3), (0.5, 0.1)])
def test_the_law_is_the_recursion_in_the_long_run(eta, generation, publish):
    ends = update_ends_s([generation] * 1200, 1.0, publish, eta)
    assert (ends[-1] - ends[-601]) / 600 == pytest.approx(period_s(generation, 1, publish, eta), rel=1e-9)


def test_random_batches_take_longer_than_their_mean():
    """Lognormal G of mean 3 and sigma 0.6, T = 1: the law is a lower bound."""
    batches = np.random.default_rng(0).lognormal(math.log(3) - 0.18, 0.6, 30_000)
    found = [update_ends_s(batches.tolist(), 1.0, 0.0, eta)[-1] / len(batches) for eta in range(6)]
    assert found == pytest.approx([3.99, 2.29, 1.74, 1.47, 1.28, 1.18], rel=0.02)


def test_groups_are_eta_old_after_the_first_batches():
    assert [group_age(3, batch) for batch in range(6)] == [0, 1, 2, 3, 3, 3]


@pytest.mark.parametrize(('eta', 'ratio', 'age'), [(4, 1, 4), (4, 3, 3), (8, 2, 7.5), (4, 2.5, 3.2), (4, 0.5, 4)])
def test_tokens_are_younger_than_their_group(eta, ratio, age):
    assert mean_token_age(eta, ratio * 7, 7) == pytest.approx(age)
