"""pass@k and maj@k against brute force over subsets and orders; the bootstrap against what is known of means."""

import itertools
import math

import numpy as np
import pytest

from areal_jax.evaluation.results import bootstrap_intervals, majority_score, pass_at_k, sizes_of_k


@pytest.mark.parametrize('rewards', [[0, 0, 1, 0, 1], [0.2, 0.8, 0.8, -1.0, 0.5, 1.0], [0.0], [1, 1, 1]])
def test_pass_at_k_is_the_mean_best_over_all_subsets(rewards):
    for k in range(1, len(rewards) + 1):
        best = [max(subset) for subset in itertools.combinations(rewards, k)]
        assert pass_at_k(rewards, k) == pytest.approx(sum(best) / len(best), abs=1e-12)


def test_pass_at_k_is_that_of_chen_et_al_for_right_and_wrong():
    # n = 200 answers, c right: 1 - C(n-c, k) / C(n, k)
    for c, k in itertools.product((0, 1, 7, 199, 200), (1, 2, 64, 100, 200)):
        expected = 1 - math.comb(200 - c, k) / math.comb(200, k)
        assert pass_at_k([1.0] * c + [0.0] * (200 - c), k) == pytest.approx(expected, abs=1e-12)


def test_more_answers_than_there_are_have_no_pass_at_k():
    with pytest.raises(ValueError, match='pass@3 needs at least 3 answers, there are 2'):
        pass_at_k([0, 1], 3)


def first_of_the_most_frequent(answers, rewards):
    """The vote where ties go to the answer that came first; a random one of the equal answers is taken."""
    most = max(answers.count(answer) for answer in answers)
    winner = next(answer for answer in answers if answers.count(answer) == most)
    found = [reward for answer, reward in zip(answers, rewards, strict=True) if answer == winner]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ('answers', 'rewards'),
    [
        ('a', [1]),
        ('aab', [1, 1, 0]),
        ('abb', [1, 0, 0]),
        ('aabb', [1, 1, 0, 0]),  # a tie of two: 1/2
        ('abc', [0, 1, 0]),  # a tie of three: 1/3
        ('aaabbb', [1, 0, 1, 0, 0, 0]),  # one of the right answers was cut off: (2/3 + 0) / 2
    ],
)
def test_a_vote_is_the_mean_over_the_orders_of_the_answers(answers, rewards):
    orders = itertools.permutations(range(len(answers)))
    found = [first_of_the_most_frequent([answers[i] for i in o], [rewards[i] for i in o]) for o in orders]
    assert majority_score(list(answers), rewards) == pytest.approx(sum(found) / len(found), abs=1e-12)


def test_a_tie_counts_one_over_n():
    assert majority_score(['4', '5'], [1.0, 0.0]) == 0.5
    with pytest.raises(ValueError, match='a vote needs'):
        majority_score([], [])


def test_k_doubles_up_to_the_number_of_samples():
    assert sizes_of_k(0) == []
    assert sizes_of_k(1) == [1]
    assert sizes_of_k(4) == [1, 2, 4]
    assert sizes_of_k(6) == [1, 2, 4, 6]


def test_the_interval_of_a_mean_is_near_that_of_the_normal_distribution():
    # standard error of a share p of n: sqrt(p (1 - p) / n) = sqrt(.25 / 400) = .025; 1.96 * .025 = .049
    scores = np.array([[0.0], [1.0]] * 200)
    (interval,) = bootstrap_intervals(scores, seed=0)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.451, abs=0.004)
    assert interval.high == pytest.approx(0.549, abs=0.004)


def test_columns_are_resampled_together_and_the_seed_decides():
    scores = np.random.default_rng(0).random((30, 2))
    scores[:, 1] = 1 - scores[:, 0]
    one, other = bootstrap_intervals(scores, seed=3)
    assert one.low + other.high == pytest.approx(1.0, abs=1e-9)
    assert bootstrap_intervals(scores, seed=3) == [one, other]
    assert bootstrap_intervals(scores, seed=4)[0].low != one.low


def test_the_bootstrap_draws_every_problem_equally_often():
    # the mean of the resampled means of a unit vector is 1/n
    scores = np.eye(5)
    means = [interval.mean for interval in bootstrap_intervals(scores, seed=1)]
    assert means == pytest.approx([0.2] * 5)
    for interval in bootstrap_intervals(scores, seed=1):
        assert (interval.low, interval.high) == (0.0, pytest.approx(0.6, abs=0.01))  # 97.5% of B(5, 1/5) / 5 is 3/5


def test_one_problem_has_no_interval_and_none_no_mean():
    (interval,) = bootstrap_intervals(np.array([[0.5]]), seed=0)
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.5, None, None, 1)
    with pytest.raises(ValueError, match='no problem was scored'):
        bootstrap_intervals(np.zeros((0, 1)), seed=0)
