from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from areal_jax.report.statistics import (
    cluster_interval,
    clustered_share_interval,
    mean_interval,
    paired_interval,
    score_interval,
    t_quantile,
    wilson_interval,
)


def test_wilson_of_8_in_10():
    # z = 1.959964, z^2/n = .384146, shrink 1.384146; center (.8 + .192073) / 1.384146 = .716740
    # half = z sqrt(.8 * .2 / 10 + 3.841459 / 400) / 1.384146 = z sqrt(.02560365) / 1.384146 = .226576
    interval = wilson_interval(8, 10)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.490163, abs=2e-6)
    assert interval.high == pytest.approx(0.943318, abs=2e-6)


@pytest.mark.parametrize(('successes', 'n'), [(0, 7), (1, 7), (3, 7), (7, 7), (61, 1000), (500, 1000)])
def test_wilson_is_that_of_scipy(successes: int, n: int):
    found, expected = wilson_interval(successes, n), stats.binomtest(successes, n).proportion_ci(0.95, 'wilson')
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize('n', [2, 3, 17, 400])
def test_the_interval_of_a_mean_is_that_of_scipy(n: int):
    scores = np.random.default_rng(n).normal(0.3, 2.0, n)
    found, expected = cluster_interval(scores[:, None].tolist()), stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12, rel=1e-12)


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


def test_binary_scores_get_wilson_graded_ones_its_clustered_form_and_penalties_student():
    assert mean_interval([1, 0, 0, 1]) == wilson_interval(2, 4)
    assert mean_interval([1.0, 0.5, 0.0]) == clustered_share_interval([[1.0], [0.5], [0.0]])
    assert mean_interval([1.0, 0.5, -1.0]) == cluster_interval([[1.0], [0.5], [-1.0]])


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


def test_a_share_of_clusters_is_wilson_with_the_effective_number_of_scores():
    # m = 3/8; residuals 2 - 1.5, 1 - 1.5, 0 - 1.5, 3 - 1.5 of clusters of 4 with sum 6 of 16:
    # SE^2 = 4/3 (.25 + .25 + 2.25 + 2.25) / 256 = .0260417; n' = .234375 / .0260417 = 9
    clusters = [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]
    interval, t = clustered_share_interval(clusters), t_quantile(3)
    center, half = (0.375 + t**2 / 18) / (1 + t**2 / 9), t * math.sqrt(0.375 * 0.625 / 9 + t**2 / 324) / (1 + t**2 / 9)
    assert (interval.mean, interval.n) == (0.375, 4)
    assert (interval.low, interval.high) == (pytest.approx(center - half), pytest.approx(center + half))


def test_a_share_of_independent_scores_is_wilson_but_for_student_and_the_cluster_bessel():
    clusters = [[float(index < 60)] for index in range(1000)]
    one, other = clustered_share_interval(clusters), wilson_interval(60, 1000)
    assert (one.low, one.high) == (pytest.approx(other.low, rel=0.01), pytest.approx(other.high, rel=0.01))


@pytest.mark.parametrize('value', [0.0, 1.0])
def test_equal_clusters_at_an_end_leave_an_interval_on_its_other_side_as_wide_as_the_clusters_allow(value):
    interval = clustered_share_interval([[value] * 4] * 16)
    t = t_quantile(15)
    width = t**2 / 16 / (1 + t**2 / 16)
    expected = (0.0, width) if value == 0 else (1 - width, 1.0)
    assert (interval.low, interval.high) == (pytest.approx(expected[0]), pytest.approx(expected[1]))


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=4), min_size=2, max_size=12))
def test_an_interval_of_scores_in_0_and_1_stays_there_and_holds_the_mean(clusters):
    interval = score_interval(clusters)
    assert 0 <= interval.low <= interval.mean + 1e-12
    assert interval.mean - 1e-12 <= interval.high <= 1


def test_scores_below_0_have_students_interval():
    clusters = [[-1.0, 1.0], [0.5, -0.5], [1.0, 1.0]]
    assert score_interval(clusters) == cluster_interval(clusters)
    with pytest.raises(ValueError, match=r'a score is -1\.0'):
        clustered_share_interval(clusters)


@pytest.mark.parametrize('share', [0.02, 0.1, 0.5, 0.95])
def test_the_interval_of_a_clustered_share_holds_it_95_times_in_100_and_students_less_often_near_the_ends(share):
    """64 problems, 4 answers each; chances of a problem are beta distributed, intraclass correlation 1/3."""
    rng, runs = np.random.default_rng(0), 400
    chances = rng.beta(2 * share, 2 * (1 - share), (runs, 64, 1))
    scores = (rng.random((runs, 64, 4)) < chances).astype(float)
    held = {
        interval: np.mean([one.low <= share <= one.high for one in map(interval, scores.tolist())])
        for interval in (clustered_share_interval, cluster_interval)
    }
    assert held[clustered_share_interval] >= 0.93
    if share < 0.05:
        assert held[cluster_interval] < 0.93
