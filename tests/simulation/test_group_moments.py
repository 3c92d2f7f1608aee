"""simulation/drawn_answers.py: published moments, closed forms, and draws."""

import statistics

import numpy as np
import pytest

from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.simulation.drawn_answers import group_moments, rests

CAP = 27_648


@pytest.mark.parametrize(
    ('sigma', 'tail', 'token_tail'), [(0.4, 1.91, 1.35), (0.6, 2.39, 1.76), (0.75, 2.66, 1.96), (1.0, 3.04, 2.22)]
)
def test_groups_of_16_of_mean_9000(sigma, tail, token_tail):
    found = group_moments(parse_lengths(f'lognormal(9000, {sigma})', CAP), 16)
    assert found.tail == pytest.approx(tail, abs=0.01)
    assert found.token_tail == pytest.approx(token_tail, abs=0.01)


def test_a_running_answer_is_longer_than_half_an_answer():
    found = group_moments(parse_lengths('lognormal(9000, 0.75)', CAP), 16)
    assert found.mean == pytest.approx(8669, abs=3)
    assert found.live_position == pytest.approx(6642, abs=5)


@pytest.mark.parametrize(('size', 'harmonic'), [(4, 2.0833), (8, 2.7179), (16, 3.3807)])
def test_the_longest_of_exponential_lengths(size, harmonic):
    assert group_moments(parse_lengths('exponential(1e5)', 10**9), size).tail == pytest.approx(harmonic, rel=1e-3)


def test_equal_lengths_have_no_tail():
    found = group_moments(parse_lengths('constant(500)', CAP), 16)
    assert (found.tail, found.token_tail) == (pytest.approx(1), pytest.approx(0.5))


def test_a_group_of_one_waits_for_itself_alone():
    """kappa = (1 + cv^2) / 2: 1 for exponential lengths."""
    assert group_moments(parse_lengths('exponential(1e5)', 10**9), 1).token_tail == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    'text',
    ['lognormal(9000, 0.75)', 'mixture(0.6 lognormal(3000, 0.4), 0.4 lognormal(12000, 0.5))', 'uniform(10, 500)'],
)
@pytest.mark.parametrize('share', [0.0, 0.5])
def test_moments_are_those_of_drawn_groups(text, share):
    lengths = parse_lengths(text, CAP, group_share=share)
    groups = np.array([[lengths.draw(2, draw, sample) for sample in range(4)] for draw in range(5000)])
    longest = groups.max(1)
    found = group_moments(lengths, 4)
    assert found.mean == pytest.approx(groups.mean(), rel=0.03)
    assert found.tail == pytest.approx(longest.mean() / groups.mean(), rel=0.03)
    assert found.product == pytest.approx(statistics.fmean(groups.mean(1) * longest), rel=0.06)
    assert found.second == pytest.approx((groups**2.0).mean(), rel=0.06)


def test_moments_follow_the_drift():
    lengths = parse_lengths('constant(100) -> constant(400)', CAP, draws_of_run=10)
    assert [group_moments(lengths, 4, draw).mean for draw in (0, 5, 10)] == pytest.approx([100, 200, 400])


@pytest.mark.parametrize(('sigma', 'mean', 'longest'), [(0.6, 0.69, 2.91), (0.75, 0.766, 3.07)])
def test_what_is_left_of_256_running_answers(sigma, mean, longest):
    """In mean lengths."""
    lengths = parse_lengths(f'lognormal(9000, {sigma})', CAP)
    found = [rest / group_moments(lengths, 1).mean for rest in rests(lengths, 256)]
    assert found == pytest.approx([mean, longest], abs=0.01)


def test_what_is_left_of_equal_and_of_exponential_answers():
    """Uniform up to the length, n / (n + 1) of it at most; and exponential again, without memory."""
    assert rests(parse_lengths('constant(1000)', CAP), 9) == pytest.approx((500, 900), rel=1e-4)
    assert rests(parse_lengths('exponential(1e5)', 10**8), 16)[1] == pytest.approx(3.381e5, rel=1e-3)
