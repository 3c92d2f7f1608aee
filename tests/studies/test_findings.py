"""The knee, verdicts on differences, controls and statements, on records with known numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from areal_jax.app.sweep.arms import ArmState
from areal_jax.studies import page
from areal_jax.studies.page import check_controls, decide_statements
from areal_jax.studies.stages import (
    CONTROLS,
    KNEE,
    KNOWN,
    LOCK_STEP,
    NATURAL,
    PILOT,
    SAME_A,
    SAME_B,
    ZERO_RATE,
    Factors,
    Record,
)
from tests.studies.toy_study import change, read_study

DONE = ArmState(300, True, True, True, '')
PLAN = read_study()[0]
SEEDS = PLAN.lock_step.seeds


def record(stage, method, seed, score, **fields):
    factors = {name: fields.pop(name) for name in ('lag', 'eta', 'rate', 'variant') if name in fields}
    return Record(Factors(stage, method, seed, **factors), DONE, score=score, **fields)


def lags(cost, spread=0.001, method='plain'):
    """Arms of every lag that lose cost(lag), with a spread over the seeds."""
    return [
        record(LOCK_STEP, method, seed, 0.9 - cost(lag) + spread * ((seed * 3 + lag) % 5), lag=lag)
        for lag in PLAN.lock_step.lags
        for seed in SEEDS
    ]


def verdicts(records, method='plain'):
    return {one.label: one.verdict(PLAN.margins) for one in page.compare_lags(PLAN, records, method)}


def test_the_knee_is_the_largest_rate_within_the_slack_of_the_best():
    scores = {3e-4: 0.7, 1e-3: 0.95, 3e-3: 0.94, 1e-2: 0.92, 3e-2: 0.5}
    records = [record(KNEE, 'decoupled', 200, score, rate=rate, lag=0) for rate, score in scores.items()]
    records += [record(KNEE, 'weighted_pg', 200, 0.5, rate=1e-3, lag=0)]
    assert page.find_rates(PLAN, records) == {'plain': 3e-3, 'decoupled': 3e-3, 'weighted_pg': 1e-3}


def test_rates_are_not_known_before_the_sweep_of_the_rate():
    assert page.find_rates(PLAN, []) == {}


def test_a_large_loss_is_worse_and_a_small_one_equal_and_a_noisy_one_not_decided():
    found = verdicts(lags(lambda lag: 0.3 if lag >= 16 else 0.0))
    assert found == {1: 'equal', 2: 'equal', 4: 'equal', 8: 'equal', 16: 'worse', 32: 'worse', 64: 'worse'}
    noisy = verdicts(lags(lambda lag: 0.06 if lag >= 16 else 0.0, spread=0.1))
    assert noisy[16] == 'not decided'


def test_a_gain_is_better():
    assert verdicts(lags(lambda lag: -0.3 if lag else 0.0))[1] == 'better'


def test_a_difference_is_decided_by_its_p_after_holm():
    [first, *_] = found = page.compare_lags(PLAN, lags(lambda lag: 0.08 if lag == 1 else 0.0, spread=0.02), 'plain')
    assert first.holm_p == pytest.approx(min(1, first.difference.p * len(found)))
    assert first.holm_p > first.difference.p


def test_the_smallest_difference_is_that_of_a_paired_t_test():
    n, spread = 5, 0.03
    expected = (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * spread / math.sqrt(n)
    assert page.smallest_difference(spread, n, PLAN.margins) == pytest.approx(expected)


def test_the_pilot_has_the_spread_of_paired_differences_and_what_pairing_bought():
    lag = PLAN.lock_step.pilot_lag
    first, losses = [0.9, 0.8, 0.7], [0.1, 0.2, 0.15]
    records = [record(PILOT, 'plain', seed, score, lag=0) for seed, score in enumerate(first)]
    second = [score - loss for score, loss in zip(first, losses, strict=True)]
    records += [record(PILOT, 'plain', seed, score, lag=lag) for seed, score in enumerate(second)]
    [(name, spread)] = page.pilot_spreads(PLAN, records).items()
    assert name == f'plain: lag {lag} against 0'
    assert spread.deviation == pytest.approx(np.std(losses, ddof=1))
    # (0.01 + 0.0175) / 0.0025: the variances of both arms over that of the differences
    assert spread.pairing.error_factor == pytest.approx(math.sqrt(11))


def test_the_slope_is_that_over_the_logarithm_of_the_lag():
    mean, bounds = page.dose_slope(PLAN, lags(lambda lag: 0.05 * math.log2(1 + lag), spread=0.0), 'plain')
    assert mean == pytest.approx(-0.05)
    assert bounds.low == pytest.approx(bounds.high)


def outcomes(records):
    return [one.outcome for one in decide_statements(PLAN, records)]


def test_statements_of_the_paper_hold_where_plain_loses_and_decoupled_does_not():
    plain = lags(lambda lag: 0.1 * math.log2(1 + lag))
    decoupled = lags(lambda lag: 0.2 if lag >= 32 else 0.0, method='decoupled')
    rates = {0.0: 100, 1.0: 200, 4.0: 250, 16.0: 250, math.inf: 260}
    natural = [record(NATURAL, 'plain', 0, 0.9, eta=eta, tokens_per_second=rate) for eta, rate in rates.items()]
    assert outcomes([*plain, *decoupled, *natural]) == ['reproduced'] * 5


def test_statements_fail_where_a_lag_costs_nothing():
    flat = [*lags(lambda lag: 0.0), *lags(lambda lag: 0.0, method='decoupled')]
    assert outcomes(flat) == ['not reproduced', 'reproduced', 'not reproduced', 'not reproduced', 'not decided']


def test_nothing_is_decided_without_arms():
    assert outcomes([]) == ['not decided'] * 5


def known(lag, *values):
    """Arms of the known curve; one value stands for all seeds."""
    seeds = PLAN.controls.known_seeds
    return [
        record(CONTROLS, 'weighted_pg', seed, 0.5, lag=lag, variant=KNOWN, curve=[0.1] * 250 + [value] * 50)
        for seed, value in zip(seeds, values if len(values) > 1 else values * len(seeds), strict=False)
    ]


def same(weights_a, weights_b, **where):
    return [
        record(CONTROLS, 'decoupled', 0, 0.5, variant=name, weights=weights, **where)
        for name, weights in ((SAME_A, weights_a), (SAME_B, weights_b))
    ]


def test_failed_controls_come_first():
    zero = record(CONTROLS, 'decoupled', 0, 0.3, lag=4, variant=ZERO_RATE, weights='w', initial_weights='w', oldest=4.0)
    records = [*known(0, 0.98), *known(30, 0.6), zero, *same('x', 'x', lag=4), *same('x', 'y', eta=4.0)]
    found = [(control.outcome, control.text.split(':')[0][:30]) for control in check_controls(PLAN, records)]
    assert [outcome for outcome, _ in found] == ['failed', 'failed', 'not finished', 'held', 'held', 'held']
    assert found[0][1].startswith('weighted_pg at lag 30')
    assert found[1][1].startswith('the same arm twice, as two run')


def test_weights_that_move_at_rate_0_fail_and_so_does_another_age():
    zero = {'lag': 4, 'variant': ZERO_RATE, 'initial_weights': 'w'}
    moved = record(CONTROLS, 'decoupled', 0, 0.3, weights='v', oldest=4.0, **zero)
    young = record(CONTROLS, 'decoupled', 0, 0.3, weights='w', oldest=0.0, **zero)
    for arm in (moved, young):
        [control] = [one for one in check_controls(PLAN, [arm]) if one.text.startswith('learning rate 0')]
        assert control.outcome == 'failed'


def test_a_control_with_too_few_seeds_has_not_finished():
    [control] = [one for one in check_controls(PLAN, known(0, 0.98)[1:]) if 'at lag 0' in one.text]
    assert control.outcome == 'not finished'


@pytest.mark.parametrize(('right', 'outcome'), [(9, 'held'), (7, 'failed')])
def test_the_known_curve_is_judged_by_the_median_of_its_seeds(right, outcome):
    values = [0.99] * right + [0.6] * (16 - right)
    [control] = [one for one in check_controls(PLAN, known(0, *values)) if 'at lag 0' in one.text]
    assert control.outcome == outcome
    assert control.because.startswith('0.990; seed 500: 0.990' if outcome == 'held' else '0.600; ')


def test_equal_plans_have_one_digest_and_others_another():
    assert read_study()[0].digest() == PLAN.digest()
    assert change(PLAN, 'margins', score=0.06).digest() != PLAN.digest()
