"""benchmarks/agent_learning.py: gains, their interval and the checks, by hand."""

import pytest

from benchmarks.agent_learning import gains_of, summarize

COST = {'wall_s': 240.0, 'cpu_s': 400.0}


def seed(before, after, problems=64):
    return {'before': [[before, before]] * problems, 'after': [after] * problems, 'cost': COST}


def failed_checks(*seeds, minutes=8.0, **warm_up):
    return [name for name, held in summarize(seeds, COST | warm_up, minutes)['checks'].items() if not held]


def test_the_gain_of_a_problem_is_that_of_its_means():
    assert gains_of({'before': [[0, 1], [0, 0]], 'after': [[1, 1], [0, 0.5]]}) == [0.5, 0.25]


def test_all_checks_hold_where_every_seed_gains_enough():
    found = summarize([seed(0, [1, 0]), seed(0, [1, 1])], COST, minutes=8)
    assert (found['gains'], found['pooled']['mean'], found['pooled']['n']) == ([0.5, 1], 0.75, 128)
    # of 128 gains, half 0.5 and half 1: SE² = 0.0625 / 127
    assert found['pooled']['low'] == pytest.approx(0.75 - 1.9788 * (0.0625 / 127) ** 0.5, abs=1e-4)
    assert (found['minutes'], all(found['checks'].values())) == ([8, 8], True)


def test_a_check_that_fails_is_named():
    good = seed(0, [1, 1])
    assert failed_checks(good, seed(0.5, [0.55, 0.55])) == ['every seed gains more than 0.1']
    assert failed_checks(good, seed(0, [1, 1], problems=63)) == ['64 held-out problems']
    assert failed_checks(good, minutes=7.9) == ['a seed takes at most 7.9 minutes']
    assert failed_checks(good, minutes=10, wall_s=301.0) == ['the warm-up takes at most 5 minutes']


def test_an_interval_that_reaches_below_the_bar_fails():
    spread = {'before': [[0.0]] * 64, 'after': [[1.0]] * 10 + [[0.0]] * 54, 'cost': COST}
    assert failed_checks(spread) == ['the pooled interval is above 0.1']
