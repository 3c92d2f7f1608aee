"""config/drawn_lengths.py: lengths by key, their correlation in a group, and their drift over a run."""

import math
import statistics

import numpy as np
import pytest

from areal_jax.config.drawn_lengths import AnswerLimits, parse_lengths
from areal_jax.config.fields import ConfigError

CAP = 27_648


def test_a_length_is_the_same_in_whatever_order_it_is_drawn():
    lengths = parse_lengths('lognormal(9000, 0.75)', CAP, group_share=0.3)
    keys = [(3, draw, sample) for draw in range(20) for sample in range(4)]
    there = {key: lengths.draw(*key) for key in keys}
    assert {key: lengths.draw(*key) for key in reversed(keys)} == there
    assert len(set(there.values())) > 70


def test_lengths_are_whole_tokens_from_one_to_the_cap():
    found = [parse_lengths('lognormal(50, 3)', 100).draw(0, draw, 0) for draw in range(500)]
    assert (min(found), max(found)) == (1, 100)
    assert parse_lengths('constant(7.6)', 100).draw(0, 0, 0) == 8


def test_the_mean_is_that_before_lengths_are_cut_off():
    """Lognormal of mean 9,000 and sigma 0.75: 8,669 where it is cut off at 27,648."""
    for cap, mean in ((10**9, 9000), (CAP, 8669)):
        lengths = parse_lengths('lognormal(9000, 0.75)', cap)
        found = [lengths.draw(1, draw, 0) for draw in range(20_000)]
        assert statistics.fmean(found) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize('share', [0.0, 0.4, 1.0])
def test_answers_to_one_prompt_have_the_asked_share_of_the_variance_in_common(share):
    lengths = parse_lengths('lognormal(9000, 0.75)', 10**9, group_share=share)
    logs = np.log([[lengths.draw(1, draw, sample) for sample in (0, 1)] for draw in range(4000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.05)
    assert logs.std() == pytest.approx(0.75, rel=0.03)


def test_means_drift_in_equal_ratios_from_the_first_prompt_to_the_last_and_stay():
    lengths = parse_lengths('lognormal(2000, 0) -> lognormal(16000, 0)', 10**6, draws_of_run=300)
    assert [lengths.draw(0, draw, 0) for draw in (0, 100, 200, 300, 900)] == [2000, 4000, 8000, 16000, 16000]


def test_phases_are_equal_parts_of_the_run_and_the_last_one_stays():
    lengths = parse_lengths('constant(20); exponential(9); constant(40)', 10**6, draws_of_run=300)
    assert {lengths.draw(0, draw, 0) for draw in range(100)} == {20}
    assert len({lengths.draw(0, draw, 0) for draw in range(100, 200)}) > 10
    assert {lengths.draw(0, draw, 0) for draw in (200, 299, 300, 900)} == {40}


def test_a_drift_of_the_mean_keeps_the_numbers_of_each_answer():
    still = parse_lengths('lognormal(2000, 0.75)', 10**9)
    drifting = parse_lengths('lognormal(2000, 0.75) -> lognormal(8000, 0.75)', 10**9, draws_of_run=100)
    ratios = [drifting.draw(5, draw, 3) / still.draw(5, draw, 3) for draw in (0, 50, 100)]
    assert ratios == pytest.approx([1, 2, 4], rel=2e-3)


def test_answers_of_a_mixture_know_their_part():
    lengths = parse_lengths('mixture(0.7 constant(100), 0.3 constant(300))', CAP)
    parts = [lengths.part(0, draw, 1) for draw in range(3000)]
    assert statistics.fmean(parts) == pytest.approx(0.3, abs=0.03)
    assert [lengths.draw(0, draw, 1) for draw in range(3000)] == [(100, 300)[part] for part in parts]
    assert parse_lengths('constant(3)', CAP).part(0, 0, 0) == 0


def test_several_lengths_of_one_answer_differ():
    lengths = parse_lengths('lognormal(100, 1)', CAP)
    assert len({lengths.draw(0, 0, 0, index=index) for index in range(10)}) > 8
    assert lengths.draw(0, 0, 0, 'tool') != lengths.draw(0, 0, 0)


@pytest.mark.parametrize(
    ('text', 'settings', 'complaint'),
    [
        ('constant(1) -> exponential(1)', {'draws_of_run': 5}, 'from one form to another'),
        ('constant(1) -> constant(2)', {}, 'drifts over the prompts of the run, and the run has no last one'),
        ('constant(1); constant(2)', {}, 'has phases over the prompts of the run, and the run has no last one'),
        ('constant(1); ', {'draws_of_run': 5}, 'is not'),
        ('constant(1) ->', {'draws_of_run': 5}, 'is not known'),
        ('constant(1)', {'group_share': 1.5}, r'rollout\.x: group_share=1\.5 must lie in \[0, 1\]'),
        ('constant(1)', {'cap': 0}, r'rollout\.x: cap=0 must be at least 1'),
    ],
)
def test_what_cannot_be_drawn_is_refused(text, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_lengths(text, **{'cap': CAP, 'field': 'rollout.x', **settings})


def test_the_group_share_is_of_the_variance_of_the_logarithm():
    """With all of it in common, a group has one length, and so does every draw by itself."""
    lengths = parse_lengths('lognormal(9000, 0.75)', 10**9, group_share=1)
    assert len({lengths.draw(0, 4, sample) for sample in range(8)}) == 1
    logs = [math.log(lengths.draw(0, draw, 0)) for draw in range(4000)]
    assert statistics.stdev(logs) == pytest.approx(0.75, rel=0.04)


def test_limits_of_answers_have_the_mean_of_the_distribution_cut_off_at_the_most():
    """E[min(L, 4,096)] of lognormal(1024, 0.75): 1,024 F(d - 0.75) + 4,096 (1 - F(d)), d = 2.223 the cut in sigmas."""
    limits = AnswerLimits.parse('lognormal(1024, 0.75)', 4096, seed=5)
    found = np.array([[limits.of(draw, sample) for sample in range(8)] for draw in range(1000)])
    normal, cut = statistics.NormalDist(), math.log(4096 / 1024) / 0.75 + 0.75 / 2
    mean = 1024 * normal.cdf(cut - 0.75) + 4096 * (1 - normal.cdf(cut))
    assert mean == pytest.approx(1005.6, abs=0.05)
    assert abs(found.mean() - mean) < 3 * found.std() / math.sqrt(found.size)
    assert (found.min() >= 1, found.max()) == (True, 4096)
    assert limits.field == 'rollout.answer_lengths'


def test_without_lengths_every_answer_has_the_most():
    limits = AnswerLimits.parse('', 16, seed=5)
    assert (limits.of(0, 0), limits.of(7, 3), limits.field) == (16, 16, 'rollout.max_new_tokens')


def test_answers_with_other_seeds_draws_or_samples_have_other_limits():
    one, other = (AnswerLimits.parse('uniform(1, 4000000)', 4_000_000, seed) for seed in (1, 2))
    assert len({one.of(0, 0), one.of(0, 1), one.of(1, 0), other.of(0, 0)}) == 4
    assert one.of(1, 0) == AnswerLimits.parse('uniform(1, 4000000)', 4_000_000, 1).of(1, 0)
