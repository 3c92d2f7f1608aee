"""simulation/closed_forms.py: waits and order statistics by hand."""

import math

import pytest

from areal_jax.simulation.closed_forms import (
    erlang_c,
    longest_exponential,
    longest_lognormal,
    longest_uniform,
    wait_for_one_s,
    wait_s,
)


def test_four_servers_that_are_busy_for_four_fifths():
    assert erlang_c(4, 0.8) == pytest.approx(0.5964, abs=5e-5)
    assert wait_s(4, 0.8, 1.0) == pytest.approx(0.7455, abs=5e-5)


def test_one_server():
    """rho = 0.8: 2 services where all take equally long, 4 where they are exponential."""
    assert wait_for_one_s(0.8, 3.0, variation=0) == pytest.approx(6.0)
    assert wait_for_one_s(0.8, 3.0, variation=1) == pytest.approx(12.0) == wait_s(1, 0.8, 3.0)
    assert wait_for_one_s(0.8, 3.0, variation=2) == pytest.approx(5 * 6.0)  # E[s^2] is 5 times as large


def test_nobody_waits_without_load_and_the_wait_has_no_bound_near_saturation():
    assert wait_s(4, 0.0, 1.0) == 0
    assert wait_s(4, 1 - 1e-9, 1.0) > 1e8


@pytest.mark.parametrize(('n', 'harmonic'), [(1, 1), (4, 2.083), (8, 2.718), (16, 3.381)])
def test_the_longest_of_exponential_lengths(n, harmonic):
    assert longest_exponential(n) == pytest.approx(harmonic, abs=5e-4)


def test_the_longest_of_others():
    assert longest_uniform(3) == 0.75
    assert longest_lognormal(1, 0.5) == pytest.approx(math.exp(-0.125))
    assert longest_lognormal(16, 0.75) == pytest.approx(math.exp(0.75 * 2.3548 - 0.28125), rel=1e-4)
