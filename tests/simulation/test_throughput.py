"""simulation/closed_forms.py: the slowest station and the cost of new weights by hand."""

import pytest

from areal_jax.simulation.closed_forms import (
    age_of_sawtooth,
    idle_shares,
    stale_share,
    useful_share_of_interrupted,
    useful_share_of_waiting,
)


def test_others_are_idle_for_what_the_slowest_takes_longer():
    """2.75 samples a second can be trained and 1.95 generated: the trainer is idle for 29%."""
    seconds = {'trainer': 1 / 2.75, 'generator': 1 / 1.95}
    assert idle_shares(seconds) == {'trainer': pytest.approx(0.291, abs=5e-4), 'generator': 0}


def test_interruption_costs_the_load_and_the_rebuild():
    """256 answers of 6,640 tokens at 7.35 us a token are 12.5 s, 6% of 213 s."""
    assert useful_share_of_interrupted(0, 256 * 6640, 7.35e-6, 213) == pytest.approx(1 - 12.5 / 213, abs=1e-4)
    assert useful_share_of_interrupted(2.13, 0, 7.35e-6, 213) == pytest.approx(0.99)


def test_waiting_costs_what_the_longest_answer_takes_longer_than_the_others():
    assert useful_share_of_waiting(100, 3.07, 0.76, 500) == pytest.approx(1 - 231 / 500)


def test_versions_that_are_published_rarely():
    assert [age_of_sawtooth(updates) for updates in (1, 2, 8)] == [0, 0.5, 3.5]
    assert stale_share(2, 1) == pytest.approx(32 / 96)
