"""config/drawn_lengths.py: what texts mean, and what is refused."""

import statistics

import pytest

from areal_jax.config.drawn_lengths import (
    Constant,
    Exponential,
    Lognormal,
    Mixture,
    Uniform,
    move,
    parse_distribution,
    same_form,
)
from areal_jax.config.fields import ConfigError


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('constant(512)', Constant(512)),
        ('uniform(10, 20)', Uniform(10, 20)),
        (' uniform(10,20) ', Uniform(10, 20)),
        ('exponential(300)', Exponential(300)),
        ('lognormal(9000, .75)', Lognormal(9000, 0.75)),
        ('lognormal(9e3, 0)', Lognormal(9000, 0)),
        (
            'mixture(0.7 lognormal(3000, 0.5), 0.3 lognormal(9000, 0.5))',
            Mixture((0.7, 0.3), (Lognormal(3000, 0.5), Lognormal(9000, 0.5))),
        ),
    ],
)
def test_a_text_is_a_distribution(text, found):
    assert parse_distribution(text, 'lengths') == found


@pytest.mark.parametrize(
    ('text', 'complaint'),
    [
        ('pareto(3)', r"lengths='pareto\(3\)' is not known; use constant\(VALUE\), .* or mixture\(WEIGHT FORM, ...\)"),
        ('lognormal', 'is not known'),
        ('lognormal(9000)', r'has 1 numbers: use lognormal\(MEAN, SIGMA\)'),
        ('lognormal(9000, -1)', 'is not known'),
        ('constant(0)', 'must be above 0'),
        ('constant(1e999)', 'all finite'),
        ('uniform(20, 10)', 'LOW at most HIGH'),
        ('mixture(0.7 constant(1), 0.7 constant(2))', 'sum to 1'),
        ('mixture(1 pareto(1))', 'is not known'),
        ('mixture(1 mixture(1 constant(2)))', 'is not known'),
    ],
)
def test_other_texts_are_refused_with_the_forms(text, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_distribution(text, 'lengths')


@pytest.mark.parametrize(
    ('found', 'median'),
    [
        (Constant(5), 5),
        (Uniform(10, 20), 15),
        (Exponential(100), 69.3147),
        (Lognormal(100, 0.5), 88.2497),  # 100 exp(-0.125)
    ],
)
def test_half_of_the_numbers_lie_below_the_median(found, median):
    assert found.quantile(0.0) == pytest.approx(median)


@pytest.mark.parametrize(
    ('found', 'mean'), [(Uniform(10, 20), 15), (Exponential(100), 100), (Lognormal(100, 0.5), 100)]
)
def test_the_mean_is_the_one_that_was_asked_for(found, mean):
    normal = statistics.NormalDist()
    points = [found.quantile(normal.inv_cdf((i + 0.5) / 20_000)) for i in range(20_000)]
    assert statistics.fmean(points) == pytest.approx(mean, rel=1e-3)


def test_parts_of_a_mixture_are_chosen_by_weight():
    mixture = Mixture((0.25, 0.75), (Constant(1), Constant(2)))
    assert [mixture.part(uniform) for uniform in (0.0, 0.2499, 0.25, 0.9999)] == [0, 0, 1, 1]


def test_halfway_means_are_the_geometric_mean_and_widths_the_middle():
    assert move(Lognormal(2000, 0.5), Lognormal(8000, 0.7), 0.5) == Lognormal(4000, 0.6)
    assert move(Constant(4), Constant(9), 0.5) == Constant(6)
    assert move(Uniform(1, 4), Uniform(4, 16), 0.5) == Uniform(2, 8)
    halves = Mixture((0.5, 0.5), (Constant(1), Exponential(4)))
    assert move(halves, Mixture((0.1, 0.9), (Constant(1), Exponential(16))), 0.5) == Mixture(
        (0.3, 0.7), (Constant(1), Exponential(8))
    )


def test_forms_are_the_same_part_by_part():
    assert same_form(Lognormal(1, 1), Lognormal(2, 0))
    assert not same_form(Lognormal(1, 1), Constant(2))
    assert not same_form(Mixture((1.0,), (Constant(1),)), Mixture((1.0,), (Exponential(1),)))
    with pytest.raises(TypeError, match='two forms'):
        move(Constant(1), Exponential(1), 0.5)
