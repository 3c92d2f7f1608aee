"""config/drawn_lengths.py: numbers are functions of their key, and have the moments of their distributions."""

import numpy as np

from areal_jax.config import drawn_lengths

NUMBER = 20_000


def test_a_number_depends_on_every_part_of_its_key_and_on_nothing_else():
    keys = [
        (1, 2, 3, 'a', 0),
        (0, 2, 3, 'a', 0),
        (1, 0, 3, 'a', 0),
        (1, 2, 0, 'a', 0),
        (1, 2, 3, 'b', 0),
        (1, 2, 3, 'a', 4),
    ]
    there = [drawn_lengths.uniform(*key) for key in keys]
    back = [drawn_lengths.uniform(*key) for key in reversed(keys)]
    assert there == back[::-1]
    assert len(set(there)) == len(keys)


def test_numbers_are_the_same_on_every_machine():
    assert drawn_lengths.uniform(0, 0, 0, 'answer') == 0.9929177904799017


def test_uniform_numbers_fill_the_interval():
    found = np.array([drawn_lengths.uniform(7, draw, 0, 'x') for draw in range(NUMBER)])
    assert 0 < found.min() < 1e-3
    assert 1 - 1e-3 < found.max() < 1
    counts = np.histogram(found, 20, (0, 1))[0]
    assert ((counts - NUMBER / 20) ** 2 / (NUMBER / 20)).sum() < 40  # chi squared of 19 degrees: 40 in 3 of 1,000


def test_normal_numbers_have_mean_0_and_variance_1():
    found = np.array([drawn_lengths.normal(7, 0, sample, 'x') for sample in range(NUMBER)])
    assert abs(found.mean()) < 4 / NUMBER**0.5
    assert abs(found.var() - 1) < 4 * (2 / NUMBER) ** 0.5


def test_neighbouring_keys_are_not_correlated():
    found = np.array([[drawn_lengths.normal(seed, 5, sample, 'x') for sample in range(5000)] for seed in (0, 1)])
    assert abs(np.corrcoef(found)[0, 1]) < 4 / 5000**0.5
    assert abs(np.corrcoef(found[0, 1:], found[0, :-1])[0, 1]) < 4 / 5000**0.5
