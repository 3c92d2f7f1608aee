"""simulation/closed_forms.py: the published table."""

import pytest

from areal_jax.simulation.closed_forms import (
    in_queue_staleness,
    pre_queue_staleness,
    staleness,
    token_age,
)


@pytest.mark.parametrize(
    ('slots', 'batch', 'capacity', 'rho', 'tail', 'versions'),
    [
        (120, 240, 2, 0.63, 1.42, 1.34),
        (240, 120, 2, 0.92, 1.43, 3.78),
        (128, 128, 2, 1.07, 1.44, 3.25),
        (240, 120, 1, 0.86, 1.42, 3.70),
        (120, 120, 1, 0.67, 1.42, 2.09),
        (128, 128, 1, 1.14, 1.45, 2.21),
    ],
)
def test_the_formula_in_the_cells_of_the_published_table(slots, batch, capacity, rho, tail, versions):
    assert staleness(slots, batch, capacity, rho, tail) == pytest.approx(versions, abs=0.006)


def test_twice_the_slots_double_what_is_before_the_queue_alone():
    assert pre_queue_staleness(200, 50, 1.5, 0.8) == 2 * pre_queue_staleness(100, 50, 1.5, 0.8) == 6
    assert pre_queue_staleness(100, 50, 1.5, 2.0) == 1.5
    assert in_queue_staleness(2, 1.25) == pytest.approx(1.7)


def test_tokens_are_younger_than_groups_by_their_share_of_the_tail():
    """Equal lengths: half of the time of a group in the engine."""
    assert token_age(100, 50, 1, 0.5, 0.5) == pytest.approx(1 + 0.5)
    assert staleness(100, 50, 1, 0.5, 1.0) == pytest.approx(2 + 0.5)
