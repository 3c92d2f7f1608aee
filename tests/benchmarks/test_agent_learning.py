"""benchmarks/agent_learning.py: gains, their interval and the checks, by hand."""

import pytest

from benchmarks.agent_learning import gains_of, summarize

COST = {'wall_s': 240.0, 'cpu_s': 400.0}


def seed(before, after, problems=64, **changes):
    return {
        'before': [[before, before]] * problems,
        'after': [after] * problems,
        'warm_up': COST,
        'training': COST,
    } | changes


def test_the_gain_of_a_problem_is_that_of_its_means():
    assert gains_of({'before': [[0, 1], [0, 0]], 'after': [[1, 1], [0, 0.5]]}) == [0.5, 0.25]


def test_all_checks_hold_where_every_seed_gains_enough():
    found = summarize([seed(0, [1, 0]), seed(0, [1, 1])], minutes=8)
    assert (found['gains'], found['pooled']['mean'], found['pooled']['n']) == ([0.5, 1], 0.75, 128)
    # of 128 gains, half 0.5 and half 1: SE² = 0.0625 / 127
    assert found['pooled']['low'] == pytest.approx(0.75 - 1.9788 * (0.0625 / 127) ** 0.5, abs=1e-4)
    assert all(found['checks'].values())


@pytest.mark.parametrize(('seeds', 'minutes', 'failed'), [
    ([seed(0, [1, 1]), seed(0.5, [0.55, 0.55])], 8, 'every seed gains'),
    ([seed(0, [0.2, 0.2], problems=63), seed(0, [0.2, 0.2])], 8, '64 held-out problems'),
    ([seed(0, [1, 1])], 7.9, 'a seed takes'),
    ([seed(0, [1, 1], warm_up=COST | {'wall_s': 301.0})], 10, 'a warm-up takes'),
])  # fmt: skip
def test_a_check_that_fails_is_named(seeds, minutes, failed):
    checks = summarize(seeds, minutes)['checks']
    assert [name[: len(failed)] for name, held in checks.items() if not held] == [failed]


def test_an_interval_that_reaches_below_the_bar_fails():
    spread = {'before': [[0.0]] * 64, 'after': [[1.0]] * 10 + [[0.0]] * 54, 'warm_up': COST, 'training': COST}
    checks = summarize([spread], 10)['checks']
    assert not checks['the pooled interval is above 0.1']
    assert checks['every seed gains more than 0.1']
