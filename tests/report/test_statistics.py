from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.report.statistics import cluster_interval, mean_interval, paired_interval, wilson_interval


def test_wilson_of_8_in_10():
    # z = 1.959964, z^2/n = .384146, shrink 1.384146; center (.8 + .192073) / 1.384146 = .716740
    # half = z sqrt(.8 * .2 / 10 + 3.841459 / 400) / 1.384146 = z sqrt(.02560365) / 1.384146 = .226576
    interval = wilson_interval(8, 10)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.490163, abs=2e-6)
    assert interval.high == pytest.approx(0.943318, abs=2e-6)


def test_wilson_of_nothing_is_not_a_point():
    # center = half = (z^2 / 2n) / (1 + z^2 / n): from 0 to .384146 / 1.384146 = .277533
    interval = wilson_interval(0, 10)
    assert interval.low == 0.0
    assert interval.high == pytest.approx(0.277533, abs=1e-6)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_symmetric_and_stays_within_0_and_1(counts: tuple[int, int]):
    successes, n = counts
    interval, mirrored = wilson_interval(successes, n), wilson_interval(n - successes, n)
    assert 0 <= interval.low <= interval.mean + 1e-12
    assert interval.mean <= interval.high + 1e-12 <= 1 + 1e-12
    assert interval.low == pytest.approx(1 - mirrored.high, abs=1e-12)


@pytest.mark.parametrize(('successes', 'n'), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes: int, n: int):
    with pytest.raises(ValueError, match=f'{successes} successes of n={n}'):
        wilson_interval(successes, n)


def test_single_scores_give_the_interval_of_student():
    # 1, 2, 3: mean 2, s = 1, SE = 1 / sqrt 3, t_2(.975) = 4.302653: half = 2.484138
    interval = cluster_interval([[1.0], [2.0], [3.0]])
    assert (interval.mean, interval.n) == (2.0, 3)
    assert interval.high - 2.0 == pytest.approx(2.484138, abs=1e-6)
    assert 2.0 - interval.low == pytest.approx(2.484138, abs=1e-6)


def test_clusters_of_unequal_size():
    # scores 1, 1, 1 | 0: N = 4, m = .75; sums minus size * m: 3 - 2.25 = .75, 0 - .75 = -.75
    # SE^2 = 2/1 * (2 * .5625) / 16 = .140625, SE = .375, t_1(.975) = 12.706205: half = 4.764827
    interval = cluster_interval([[1.0, 1.0, 1.0], [0.0]])
    assert (interval.mean, interval.n) == (0.75, 2)
    assert interval.high - 0.75 == pytest.approx(4.764827, abs=1e-5)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20), st.integers(2, 5))
def test_copies_of_an_answer_carry_no_information(scores: list[float], copies: int):
    single, copied = cluster_interval([[s] for s in scores]), cluster_interval([[s] * copies for s in scores])
    assert copied.low == pytest.approx(single.low, abs=1e-9)
    assert copied.high == pytest.approx(single.high, abs=1e-9)


def test_one_cluster_has_a_mean_and_no_interval():
    interval = cluster_interval([[0.0, 1.0]])
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.5, None, None, 1)


def test_no_score_is_an_error():
    with pytest.raises(ValueError, match='2 clusters hold no score'):
        cluster_interval([[], []])


def test_binary_scores_get_wilson_and_graded_ones_student():
    assert mean_interval([1, 0, 0, 1]) == wilson_interval(2, 4)
    assert mean_interval([1.0, 0.5, 0.0]) == cluster_interval([[1.0], [0.5], [0.0]])


def test_paired_gain_by_hand():
    # means before .5, 0, 0 and after 1, 0, 1: d = .5, 0, 1, mean .5, s = .5, SE = .288675
    # half = 4.302653 SE = 1.242069
    interval = paired_interval([[0, 1], [0, 0], [0, 0]], [[1, 1], [0], [1, 1, 1]])
    assert interval.mean == pytest.approx(0.5)
    assert interval.high == pytest.approx(0.5 + 1.242069, abs=1e-6)
    assert interval.low == pytest.approx(0.5 - 1.242069, abs=1e-6)


def test_pairing_removes_the_difficulty_of_the_problems():
    # the same gain of .1 on problems of any difficulty: no spread of the differences
    before = [[0.0], [0.3], [0.9]]
    interval = paired_interval(before, [[s + 0.1 for s in scores] for scores in before])
    assert math.isclose(interval.low, 0.1, abs_tol=1e-9)
    assert math.isclose(interval.high, 0.1, abs_tol=1e-9)


def test_pairing_needs_the_same_problems():
    with pytest.raises(ValueError, match='2 problems before and 1 after'):
        paired_interval([[1.0], [0.0]], [[1.0]])
    with pytest.raises(ValueError, match='a problem without a score'):
        paired_interval([[1.0], []], [[1.0], [0.0]])
