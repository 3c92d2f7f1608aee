"""Endpoints of an arm, and statistics of arms that share seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy  # imports scipy.stats, which takes a second, where that is used

from areal_jax.app.sweep.endpoints import (
    BOOTSTRAP_SEEDS,
    Pairing,
    bootstrap_bounds,
    common_horizon,
    describe_pairing,
    endpoint_values,
    holm,
    mean_of_line,
    mean_of_steps,
    paired_difference,
    pairing_gain,
    read_record,
    student_bounds,
    t_probability,
)
from tests.app.small import SmallRun, equal


def lines(rewards, tokens=10, seconds=2.0):
    return [
        {'step': step, 'time': step * seconds, 'reward/mean': reward, 'tokens/trained': tokens}
        for step, reward in enumerate(rewards, start=1)
    ]


def interval(mean):
    return {'mean': mean, 'low': None, 'high': None, 'n': 1}


def test_the_mean_of_steps_by_hand():
    assert mean_of_steps([10, 20, 40], [1.0, 2.0, 3.0], 40) == (10 * 1 + 10 * 2 + 20 * 3) / 40
    assert mean_of_steps([10, 20, 40], [1.0, 2.0, 3.0], 25) == (10 * 1 + 10 * 2 + 5 * 3) / 25
    assert mean_of_steps([10, 20], [1.0, 2.0], 5) == 1.0
    assert mean_of_steps([10, 20], [1.0, 2.0], 30) == (10 * 1 + 20 * 2) / 30  # the last one holds on
    assert mean_of_steps([], [], 5) is None


def test_the_mean_of_lines_by_hand():
    assert mean_of_line([0, 10, 20], [0.0, 1.0, 1.0], 20) == (5 + 10) / 20
    assert mean_of_line([0, 10, 20], [0.0, 1.0, 1.0], 5) == 0.25
    assert mean_of_line([0, 10, 10, 20], [0.0, 1.0, 2.0, 2.0], 20) == (5 + 20) / 20  # an update that trained nothing
    assert mean_of_line([0], [1.0], 5) is None


def test_areas_end_where_the_shortest_arm_ends():
    long, short = read_record(lines([0.0, 1.0, 1.0, 1.0]), {}), read_record(lines([0.0, 1.0], seconds=1.0), {})
    horizon = common_horizon([long, short])
    assert (horizon.tokens, horizon.seconds) == (20, 2.0)
    assert endpoint_values(long, horizon)['reward_per_token'] == 0.5
    assert endpoint_values(long, horizon)['reward_per_second'] == 0.0  # 2 seconds: its first update
    assert endpoint_values(short, horizon)['reward_per_second'] == 0.5


def test_the_last_reward_is_that_of_the_last_tenth():
    record = read_record(lines([0.0] * 18 + [1.0, 3.0]), {})
    assert endpoint_values(record, common_horizon([record]))['reward_last'] == 2.0
    record = read_record(lines([1.0, 3.0]), {})
    assert endpoint_values(record, common_horizon([record]))['reward_last'] == 3.0


def test_updates_without_a_reward_keep_the_tokens_in_place():
    found = [*lines([1.0]), {'step': 2, 'time': 4.0, 'reward/mean': None, 'tokens/trained': 0}]
    found.append({'step': 3, 'time': 6.0, 'reward/mean': 4.0, 'tokens/trained': 10})
    record = read_record(found, {})
    assert (record.reward.updates, record.reward.tokens, record.reward.seconds) == ((1, 3), (10, 20), (2.0, 6.0))


def test_the_curve_of_evaluations_has_both_ends():
    scores = lambda value: {'greedy': interval(value), 'sampled': None}
    report = {
        'steps': 4,
        'evaluation_curve': [{'version': 2, **scores(0.5)}],
        'evaluation_curve_ends': {'greedy': {'before': interval(0.0), 'after': interval(1.0)}, 'sampled': {}},
    }
    record = read_record(lines([0.0] * 4), report)
    assert record.evaluation.tokens == (0, 20, 40)
    assert record.evaluation.values == (0.0, 0.5, 1.0)
    values = endpoint_values(record, common_horizon([record]))
    assert values['evaluation_per_token'] == pytest.approx(0.5)
    assert 'accuracy_greedy' not in values


def test_supervised_training_has_its_own_endpoint():
    report = {'steps': 2, 'held_out_nll': {'0': 3.0, '10': 1.0, '2': 2.0}}
    record = read_record([{'step': 1, 'time': 1.0, 'tokens/trained': 5}], report)
    values = endpoint_values(record, common_horizon([record]))
    assert values['held_out_nll'] == 1.0
    assert 'reward_last' not in values


# Statistics of arms that share seeds, against hand arithmetic, numpy and scipy.


def test_a_paired_difference_by_hand():
    """d = 1, 2, 3: mean 2, std 1, error 1/sqrt(3), t quantile of 2 degrees 4.3027."""
    found = paired_difference([0.0, 0.0, 1.0], [1.0, 2.0, 4.0])
    assert (found.n, found.mean) == (3, 2.0)
    assert found.t.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.t.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert found.bootstrap is None  # too few seeds


def test_the_probability_is_that_of_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 9))
    assert t_probability(list(b - a)) == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue, rel=1e-12)
    assert t_probability([0.3]) is None


@pytest.mark.parametrize(('n', 'confidence'), [(2, 0.95), (3, 0.9), (9, 0.95), (40, 0.9)])
def test_the_interval_of_student_is_that_of_scipy(n, confidence):
    values = np.random.default_rng(n).normal(0.01, 0.2, n)
    found, expected = (
        student_bounds(values, confidence),
        scipy.stats.ttest_1samp(values, 0).confidence_interval(confidence),
    )
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12, rel=1e-12)
    assert paired_difference(np.zeros(n), values).t == student_bounds(values)
    assert student_bounds(values[:1]) is None


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


# Common random numbers: arms with one seed have prompts by draw, and noise by (draw, sample, position), in common.


STILL = {'optimizer__learning_rate': 0.0}  # weights never change: equal noise is seen as equal answers


def trained(run):
    return [(group.draw, trajectory) for batch in run.batches for group in batch for trajectory in group.trajectories]


def answers(run):
    return {(draw, trajectory.sample): trajectory.tokens.tolist() for draw, trajectory in trained(run)}


def answers_of_version_0(run):
    """Generated before any update, so the weights are those of every arm."""
    return {
        (draw, trajectory.sample): trajectory.tokens.tolist()
        for draw, trajectory in trained(run)
        if trajectory.policy_versions.max() == 0
    }


def prompts(run):
    return {draw: trajectory.prompt.tokens.tolist() for draw, trajectory in trained(run)}


@pytest.mark.slow
def test_arms_with_another_eta_have_the_same_prompts_and_the_same_noise(tmp_path):
    in_turn = SmallRun(tmp_path / '0', staleness__eta=0.0).train()
    ahead = SmallRun(tmp_path / '4', staleness__eta=4.0).train()
    assert not equal(in_turn.final, ahead.final)
    assert prompts(in_turn) == prompts(ahead)
    assert len(prompts(ahead)) == 5 * 2
    first, more = answers_of_version_0(in_turn), answers_of_version_0(ahead)
    assert len(first) == 2 * 4  # the first batch
    assert len(more) > len(first)  # decoded in other company
    assert first.items() <= more.items()


@pytest.mark.slow
def test_arms_with_other_learning_rates_have_the_same_noise_however_they_were_interrupted(tmp_path):
    still = SmallRun(tmp_path / 'still', staleness__eta=0.0, **STILL).train()
    ahead = SmallRun(tmp_path / 'ahead', staleness__eta=4.0, **STILL).train()
    moving = SmallRun(tmp_path / 'moving', staleness__eta=4.0).train()
    assert still.report['interruptions'] == 0
    assert ahead.report['interruptions'] > 0
    assert ahead.report['token_age']['max'] > 0
    assert answers(still) == answers(ahead)
    assert len(answers(still)) == 5 * 2 * 4
    assert answers_of_version_0(moving).items() <= answers(still).items()
    assert prompts(moving) == prompts(still)
