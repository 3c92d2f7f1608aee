"""Brakes: their factors by hand, and steps of a learner that are shorter by exactly them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.config.training import OptimizerSection
from areal_jax.learning.settings import (
    COSINE_HIGH,
    COSINE_LOW,
    Brake,
    compare_gradients,
    sequence_effective_sample_size,
    take_along,
)
from areal_jax.sharding.rules import make_mesh
from tests.learning import examples
from tests.learning.examples import group, make_optimizer, random_groups, tiny_decoder

_DECODER = tiny_decoder(n_layers=1)
_PARAMS = _DECODER.init(seed=2, scale=2.0)
_GROUPS = random_groups(5, 5)  # policy versions 0..2
_SGD = make_optimizer('sgd', clip_norm=0)
_PROJECTS = make_optimizer('sgd', clip_norm=0, brake='projection')


def brake(kind: str, *, shown: bool = False, **changes: float) -> Brake:
    return Brake(OptimizerSection(brake=kind, **{f'brake_{name}': value for name, value in changes.items()}), shown)


def size_of(log_weights, mask=None, starts=None, kind=np.asarray):
    """Of answers of one token, or as `starts` says, under log-ratios [R, N]."""
    ratios = np.asarray(log_weights, np.float32)
    behavior = np.full(ratios.shape, -1.0, np.float32)
    mask = np.ones(ratios.shape, bool) if mask is None else np.asarray(mask)
    starts = np.broadcast_to(np.arange(ratios.shape[-1]), ratios.shape) if starts is None else np.asarray(starts)
    return float(sequence_effective_sample_size(kind(behavior + ratios), kind(behavior), kind(mask), kind(starts)))


@pytest.mark.parametrize('kind', [np.asarray, jnp.asarray])
def test_the_effective_sample_size_of_three_equal_weights_and_one_of_five(kind):
    # (1 + 1 + 1 + 5)² / (4 (1 + 1 + 1 + 25)) = 64 / 112
    size = size_of(np.log([[1.0, 1.0], [1.0, 5.0]]), kind=kind)
    np.testing.assert_allclose(size, 0.571429, atol=1e-6)
    np.testing.assert_allclose(brake('ess').ess_factor(np.asarray(size)), 0.755929, atol=1e-6)
    assert float(brake('ess', base=0.5).ess_factor(np.asarray(size))) == 1.0


@pytest.mark.parametrize('kind', [np.asarray, jnp.asarray])
def test_a_weight_is_the_product_over_an_answer_and_masked_tokens_are_not_read(kind):
    whole = size_of(np.log([[1.0, 4.0]]), kind=kind)
    # 4 = 2 · 0.5 · 4; the first token of the first answer is masked, and padding is one more answer
    cut = np.log([[np.nan, 1.0, 2.0, 0.5, 4.0, np.inf, np.nan]])
    mask = np.array([[False, True, True, True, True, False, False]])
    assert size_of(cut, mask, [[0, 0, 2, 2, 2, 5, 5]], kind) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize('kind', [np.asarray, jnp.asarray])
def test_weights_of_any_size_are_compared_and_no_answer_brakes_nothing(kind):
    assert size_of([[500.0, 500.0], [500.0, -500.0]], kind=kind) == pytest.approx(0.75)  # 3² / (4 · 3)
    assert size_of([[-300.0, -300.0]], kind=kind) == pytest.approx(1.0)
    assert size_of([[np.inf, 0.0]], kind=kind) == pytest.approx(0.5)
    assert size_of([[3.0, 0.0]], [[False, False]], kind=kind) == 1.0
    assert float(brake('ess').ess_factor(kind(np.float32(np.nan)))) == 0.0


def test_the_rate_times_the_lag_is_held():
    # 1e-6 at a lag of 8 steps is 2.5e-7 at 32
    assert brake('lag').lag_factor(32.0) * 1e-6 == pytest.approx(2.5e-7)
    assert [brake('lag').lag_factor(lag) for lag in (0.0, 3.0, 8.0)] == [1.0, 1.0, 1.0]
    assert brake('none').lag_factor(32.0) == 1.0


def test_a_gradient_is_turned_until_its_cosine_is_the_lower_bound():
    before, gradient = jnp.array([1.0, 0.0]), jnp.array([3.0, 4.0])
    compared = compare_gradients(gradient, before, jnp.float32(5.0))
    np.testing.assert_allclose(compared.cosine, 0.6, rtol=1e-6)
    np.testing.assert_allclose(take_along(gradient, before, compared.along), [0.200250, 4.0], atol=1e-6)
    assert float(compared.factor) == 0.0  # above the upper bound


@pytest.mark.parametrize('cosine', [0.06, 0.1, 0.29])
def test_the_turned_gradient_has_the_lower_bound_as_its_cosine_and_the_reported_length(cosine):
    rng = np.random.default_rng(0)
    along, across = np.linalg.qr(rng.normal(size=(50, 2)))[0].T
    before, gradient = (
        {'w': jnp.array(3.0 * along)},
        {'w': jnp.array(7.0 * (cosine * along + np.sqrt(1 - cosine**2) * across))},
    )
    compared = compare_gradients(gradient, before, jnp.float32(7.0))
    turned = np.asarray(take_along(gradient, before, compared.along)['w'])
    np.testing.assert_allclose(turned @ along / np.linalg.norm(turned), COSINE_LOW, rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(turned) / 7.0, compared.factor, rtol=1e-5)
    np.testing.assert_allclose(turned @ across, 7.0 * np.sqrt(1 - cosine**2), rtol=1e-5)  # what lies across stays


@pytest.mark.parametrize('cosine', [-0.9, 0.0, 0.05])
def test_a_gradient_that_points_elsewhere_changes_no_bit(cosine):
    gradient = {'w': jnp.array([cosine - 1e-6, np.sqrt(1 - cosine**2)], jnp.float32)}
    compared = compare_gradients(gradient, {'w': jnp.array([1.0, 0.0])}, jnp.float32(1.0))
    turned = take_along(gradient, {'w': jnp.array([1.0, 0.0])}, compared.along)
    np.testing.assert_array_equal(turned['w'], gradient['w'])
    assert float(compared.factor) == 1.0


def test_a_step_along_the_one_before_is_left_out_and_the_next_one_is_not():
    params = {'w': jnp.zeros(2)}
    state = _PROJECTS.init(params)
    steps, cosines, factors = [], [], []
    for gradient in ([1.0, 0.0], [1.0, 0.1], [1.0, 0.0], [0.1, 1.0]):
        params, state, metrics = _PROJECTS.apply(params, state, {'w': jnp.array(gradient)}, jnp.float32(1.0))
        steps.append(int(state['step']))
        cosines.append(round(float(metrics['gradient_cosine']), 3))
        factors.append(float(metrics['brake']))
    assert steps == [1, 1, 2, 3]  # the count stands where a step is left out
    assert cosines == [0.0, 0.995, 0.0, 0.1]
    assert factors[:3] == [1.0, 0.0, 1.0]
    assert COSINE_LOW < cosines[3] < COSINE_HIGH
    np.testing.assert_allclose(params['w'], [-2 - COSINE_LOW / np.sqrt(1 - COSINE_LOW**2), -1.0], rtol=1e-5)


def test_a_gradient_that_is_not_finite_keeps_the_one_before():
    params, state = {'w': jnp.zeros(2)}, _PROJECTS.init({'w': jnp.zeros(2)})
    params, state, _ = _PROJECTS.apply(params, state, {'w': jnp.array([1.0, 0.0])}, jnp.float32(1.0))
    same, after, metrics = _PROJECTS.apply(params, state, {'w': jnp.array([np.nan, 0.0])}, jnp.float32(1.0))
    jax.tree.map(np.testing.assert_array_equal, (same, after), (params, state))
    assert float(metrics['skip_count']) == float(metrics['brake']) == 1.0


def make_learner(kind='none', optimizer=_SGD, mesh=(1, 1), **settings):
    settings = {'brake': brake(kind, lag=2.0)} | settings
    return examples.make_learner(make_mesh(*mesh), params=_PARAMS, optimizer=optimizer, **settings)


def moves(learner, groups=_GROUPS, version=2):
    """(metrics, by how much an update changes each weight)."""
    before = learner.save()['params']
    metrics = learner.update(groups, version)
    return metrics, jax.tree.map(lambda a, b: a - b, learner.save()['params'], before)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        pytest.param({'accumulate': 'scan', 'max_microbatches': 4}, marks=pytest.mark.slow),
        {'mesh': (2, 4), 'rows_per_microbatch': 8, 'accumulate': 'scan'},
    ],
    ids=['dispatch', 'scan', 'scan over a mesh'],
)
def test_a_step_of_the_learner_is_shorter_by_the_root_of_its_sample_size(settings):
    metrics, whole = moves(make_learner())
    braked, change = moves(make_learner('ess', **settings))
    factor = metrics['loss/sequence_effective_sample_size'] ** 0.5
    assert 0 < factor < 0.9
    np.testing.assert_allclose(braked['update/brake'], factor, rtol=1e-5)
    np.testing.assert_allclose(braked['update/learning_rate'], 0.1 * factor, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, factor * b, rtol=2e-3, atol=1e-6), change, whole)


@pytest.mark.parametrize('accumulate', ['dispatch', 'scan'])
def test_a_lag_counts_optimizer_steps(accumulate):
    # all tokens are of version 1: at version 3 and with two steps an update, they are 4 and 5 steps old; S₀ = 2
    old = [group([1, 2], [[3, 4], [5, 6]], draw=draw, version=1) for draw in range(2)]
    metrics = make_learner('lag', accumulate=accumulate, n_minibatches=2).update(old, 3)
    assert metrics['update/lag_steps'] == 4.5
    assert metrics['update/brake'] == pytest.approx((2 / 4 + 2 / 5) / 2)
    assert metrics['update/learning_rate'] == pytest.approx(0.1 * 2 / 5)  # of the last step


def test_without_a_brake_a_run_is_the_same_to_the_last_bit_while_all_are_shown():
    plain, shown = make_learner(), make_learner(optimizer=make_optimizer('sgd', clip_norm=0, compares=True))
    for version in (2, 3):
        plain.update(_GROUPS, version)
        metrics = shown.update(_GROUPS, version)
    jax.tree.map(np.testing.assert_array_equal, plain.save()['params'], shown.save()['params'])
    assert metrics['update/gradient_cosine'] > 0.5  # the same groups again
    assert 'update/brake' not in metrics


def test_the_gradient_before_is_part_of_a_checkpoint():
    whole, first = make_learner(optimizer=_PROJECTS), make_learner(optimizer=_PROJECTS)
    groups = [_GROUPS, random_groups(6, 5)]
    for version, update in enumerate(groups, start=2):
        expected = whole.update(update, version)
    first.update(groups[0], 2)
    second = make_learner(optimizer=_PROJECTS)
    second.restore(first.save())
    assert second.update(groups[1], 3) == expected
    assert expected['update/gradient_cosine'] != 0
    jax.tree.map(np.testing.assert_array_equal, second.save(), whole.save())


def test_a_brake_names_its_field():
    with pytest.raises(
        ConfigError, match=r"optimizer\.brake='abs' is not known; use one of none, ess, lag, projection"
    ):
        brake('abs')
    with pytest.raises(ConfigError, match=r'optimizer\.brake_base=1\.5 must lie in \(0, 1\]'):
        brake('ess', base=1.5)
