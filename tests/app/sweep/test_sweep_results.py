"""Which groups of a sweep are compared with which, and what the interval of a difference is said to show."""

import itertools

import pytest

from areal_jax.app.sweep.endpoints import Bounds, PairedDifference
from areal_jax.app.sweep.sweep_results import Comparison, build_results, split_series
from tests.app.sweep.toy_sweep import ToySweep

ETA, RATE, PROXIMAL = 'staleness.eta', 'optimizer.learning_rate', 'loss.proximal'
PLAIN, DECOUPLED = {PROXIMAL: 'behavior'}, {PROXIMAL: 'recompute'}


def groups_of(directory, groups, seeds=(0,)):
    """The groups of a sweep of which no arm has run."""
    arms = {f'{name}_seed{seed}': {**own, 'run.seed': seed} for name, own in groups.items() for seed in seeds}
    return build_results('toy.py', ToySweep(directory, arms).arms()).groups


def pairs_of(directory, monkeypatch, groups):
    """The pairs whose last rewards are compared after a run."""
    sweep = ToySweep(directory, groups)
    assert sweep.run(monkeypatch, '--jobs=4') == 0
    found = build_results('toy.py', sweep.arms()).comparisons
    return [(one.baseline, one.group) for one in found if one.endpoint == 'reward_last']


def test_a_numeric_field_orders_the_groups_and_infinity_comes_last(tmp_path):
    groups = groups_of(tmp_path, {f'eta{eta}': {ETA: float(eta)} for eta in ('0', 'inf', '4')}, seeds=(0, 1))
    [series] = split_series(groups)
    assert series.label == ''
    assert list(series.groups.items()) == [('eta0', 0.0), ('eta4', 4.0), ('etainf', float('inf'))]


def test_fields_that_differ_at_one_value_divide_the_groups_and_fields_that_change_with_it_do_not(tmp_path):
    etas = {'0': 0, '1': 1, '4': 4}
    two = {f'{eta}{name}': {ETA: n, **own} for eta, n in etas.items() for name, own in (('p', PLAIN), ('d', DECOUPLED))}
    assert [(series.label, list(series.groups)) for series in split_series(groups_of(tmp_path, two))] == [
        ('loss.proximal=behavior', ['0p', '1p', '4p']),
        ('loss.proximal=recompute', ['0d', '1d', '4d']),
    ]
    sizes = {f'g{n}': {'rollout.group_size': n, 'learner.groups_per_update': 64 // n} for n in (4, 8, 16)}
    [series] = split_series(groups_of(tmp_path, sizes))
    assert list(series.groups) == ['g4', 'g8', 'g16']
    assert split_series(groups_of(tmp_path, {'p': PLAIN, 'd': DECOUPLED})) == []


def test_all_values_are_compared_with_each_other_and_methods_at_equal_values(tmp_path, monkeypatch):
    groups = {f'{eta}{name}': {ETA: eta, **own} for eta in (0, 1, 4) for name, own in (('p', PLAIN), ('d', DECOUPLED))}
    found = pairs_of(tmp_path, monkeypatch, groups)
    assert found == [
        pair for pair in itertools.combinations(groups, 2) if pair[0][0] == pair[1][0] or pair[0][1] == pair[1][1]
    ]
    assert len(found) == 3 + 3 + 3


def test_groups_without_an_order_are_compared_with_the_first(tmp_path, monkeypatch):
    groups = {'d': DECOUPLED, 'p': PLAIN, 'slow': {PROXIMAL: 'loglinear'}}
    assert pairs_of(tmp_path, monkeypatch, groups) == [('d', 'p'), ('d', 'slow')]


@pytest.mark.parametrize(
    ('low', 'high', 'p', 'verdict'),
    [
        (-0.1, 0.2, 0.04, 'no difference shown'),
        (0.0, 0.2, 0.04, 'no difference shown'),
        (0.1, 0.2, 0.04, 'higher'),
        (-0.2, -0.1, 0.04, 'lower'),
        (-0.2, -0.1, 0.05, 'lower, by this interval alone'),
        (None, None, None, 'not known'),  # of one seed
    ],
)
def test_the_verdict_is_that_of_the_interval_and_of_all_pairs_together(low, high, p, verdict):
    bounds = None if low is None else Bounds(low, high)
    difference = PairedDifference(3, 0.0, bounds, None, p, None)
    assert Comparison('reward_last', 'eta0', 'eta4', difference, p).verdict == verdict
