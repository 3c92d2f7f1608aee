"""Statistics of arms that share seeds, against hand arithmetic, numpy and scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from areal_jax.app.sweep.paired import (
    BOOTSTRAP_SEEDS,
    Pairing,
    bootstrap_bounds,
    describe_pairing,
    holm,
    paired_difference,
    pairing_gain,
    t_probability,
)


def test_a_paired_difference_by_hand():
    """d = 1, 2, 3: mean 2, std 1, error 1/sqrt(3), t quantile of 2 degrees 4.3027."""
    found = paired_difference([0.0, 0.0, 1.0], [1.0, 2.0, 4.0])
    assert (found.n, found.mean) == (3, 2.0)
    assert found.t.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.t.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.bootstrap is None  # too few seeds


def test_the_probability_is_that_of_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 9))
    assert t_probability(list(b - a)) == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue)
    assert t_probability([0.3]) is None


@pytest.mark.parametrize(('value', 'p'), [(0.0, 1.0), (0.1, 0.0)])
def test_equal_differences_have_no_spread_to_test(value, p):
    found = paired_difference([1.0] * 6, [1.0 + value] * 6)
    assert found.p == p
    assert (found.t.low, found.t.high) == pytest.approx((found.mean, found.mean))
    assert found.bootstrap.low == found.bootstrap.high == pytest.approx(value)
    assert found.pairing is None  # no value differs between seeds


def test_one_seed_has_a_difference_and_nothing_else():
    found = paired_difference([1.0], [3.0])
    assert (found.n, found.mean, found.t, found.bootstrap, found.p, found.pairing) == (1, 2.0, None, None, None, None)


@pytest.mark.parametrize('pair', [([], []), ([1.0], [1.0, 2.0])])
def test_what_is_no_pair_is_refused(pair):
    with pytest.raises(ValueError, match='cannot be paired'):
        paired_difference(*pair)


def test_the_bootstrap_is_the_same_at_every_call_and_follows_the_skew():
    skewed = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 2.0]
    bounds = bootstrap_bounds(skewed)
    assert bounds == bootstrap_bounds(skewed)
    mean = np.mean(skewed)
    assert bounds.high - mean > mean - bounds.low > 0
    assert bootstrap_bounds(skewed[: BOOTSTRAP_SEEDS - 1]) is None


def test_what_pairing_buys_by_hand():
    """a = 0, 1, 2 and b = 0, 1, 4: variances 1 and 13/3, differences 0, 0, 2 with variance 4/3."""
    found = pairing_gain([0.0, 1.0, 2.0], [0.0, 1.0, 4.0])
    assert found.r == pytest.approx(1 - (4 / 3) / (16 / 3))
    assert found.seeds_factor == pytest.approx(4.0)
    assert found.error_factor == pytest.approx(2.0)
    assert found.paired_error == pytest.approx(math.sqrt(4 / 9))
    assert found.unpaired_error == pytest.approx(math.sqrt(16 / 9))


def test_the_factor_is_that_of_standard_errors_and_r_that_of_numpy_at_equal_spread():
    rng = np.random.default_rng(1)
    a = rng.normal(size=12)
    b = a + 0.5 * rng.normal(size=12)
    b *= np.std(a) / np.std(b)
    found = pairing_gain(a, b)
    assert found.r == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert found.error_factor == pytest.approx(found.unpaired_error / found.paired_error)
    assert found.paired_error == pytest.approx(scipy.stats.sem(b - a))


def test_the_correlation_is_recovered_from_many_seeds():
    shared, own = np.random.default_rng(2).normal(size=(2, 20000)), np.random.default_rng(3).normal(size=(2, 20000))
    found = pairing_gain(shared[0] + 0.5 * own[0], shared[0] + 0.5 * own[1])
    assert found.r == pytest.approx(0.8, abs=0.01)  # 1 / (1 + 0.25)
    assert found.seeds_factor == pytest.approx(5.0, abs=0.2)


def test_too_few_seeds_say_nothing_about_pairing():
    assert pairing_gain([0.0, 1.0], [0.0, 2.0]) is None


def test_holm_by_hand():
    """Sorted .01, .02, .04 of three tests: 3 * .01, max(.03, 2 * .02), max(.04, .04)."""
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def pairing(r, n=8):
    return Pairing(n, r, 1.0, 1.0 / math.sqrt(1 - r) if r < 1 else math.inf)


def test_pairing_is_described_in_a_sentence():
    assert describe_pairing([]) == ''
    assert describe_pairing([pairing(0.75)]).startswith(
        'Pairing: r 0.75; the standard error of a difference is 2 times'
    )
    assert '1/(1 - r) = 4 times as many seeds' in describe_pairing([pairing(0.75)])
    assert 'rough' not in describe_pairing([pairing(0.75)])
    assert 'from 3 seeds r is rough' in describe_pairing([pairing(0.75, n=3)])
    assert describe_pairing([pairing(0.1), pairing(0.29)]).startswith('Pairing buys nothing here: r 0.10 to 0.29')
    assert describe_pairing([pairing(-0.2), pairing(0.1), pairing(0.5)]).startswith(
        'Pairing buys nothing here: r -0.20'
    )
    assert 'so its standard error is 0' in describe_pairing([pairing(1.0)])
