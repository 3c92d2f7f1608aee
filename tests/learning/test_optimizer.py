from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_jax.learning.optimizer import make_optimizer

_PARAMS = {'a': jnp.array([3.0, 4.0]), 'b': jnp.array([[1.0]])}
_GRADIENTS = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[4.0]])}  # norm 5


def _step(optimizer, gradients=_GRADIENTS, rate=0.1, state=None):
    state = optimizer.init(_PARAMS) if state is None else state
    return jax.jit(optimizer.apply)(_PARAMS, state, gradients, jnp.float32(rate))


def test_sgd_by_hand():
    params, state, metrics = _step(make_optimizer('sgd', clip_norm=0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3, 4], rtol=1e-6)
    assert int(state['step']) == 1
    assert float(metrics['grad_norm']) == 5.0


def test_clip_scales_to_the_norm_and_reports_the_norm_before():
    # norm 5 clipped to 1: a fifth of every gradient
    params, _, metrics = _step(make_optimizer('sgd', clip_norm=1.0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3 / 5, 4], rtol=1e-6)
    assert float(metrics['grad_norm']) == 5.0
    params, _, _ = _step(make_optimizer('sgd', clip_norm=6.0))
    np.testing.assert_allclose(params['a'], [3 - 0.1 * 3, 4], rtol=1e-6)


def test_adamw_is_that_of_optax():
    optimizer = make_optimizer('adamw', b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, clip_norm=0)
    reference = optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1)
    params, state = _PARAMS, optimizer.init(_PARAMS)
    expected, expected_state = _PARAMS, reference.init(_PARAMS)
    for scale in (1.0, -0.5, 2.0):
        gradients = jax.tree.map(lambda g: g * scale, _GRADIENTS)
        params, state, _ = optimizer.apply(params, state, gradients, jnp.float32(0.1))
        updates, expected_state = reference.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, expected)


def test_warm_up_grows_linearly_and_counts_applied_steps():
    # 4 steps of warm-up at .8: .2 .4 .6 .8 .8; a skipped step does not advance it
    optimizer = make_optimizer('sgd', warmup_steps=4)
    state, rates = optimizer.init(_PARAMS), []
    infinite = jax.tree.map(lambda g: g * jnp.inf, _GRADIENTS)
    for gradients in (_GRADIENTS, infinite, _GRADIENTS, _GRADIENTS, _GRADIENTS, _GRADIENTS):
        _, state, metrics = _step(optimizer, gradients, 0.8, state)
        rates.append(float(metrics['learning_rate']))
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.4, 0.6, 0.8, 0.8], rtol=1e-6)


@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
def test_non_finite_gradient_changes_no_bit(bad):
    optimizer = make_optimizer('adamw', weight_decay=0.1)
    _, state, _ = _step(optimizer)
    params, after, metrics = _step(optimizer, {'a': jnp.array([1.0, bad]), 'b': jnp.array([[1.0]])}, state=state)
    jax.tree.map(np.testing.assert_array_equal, (params, after), (_PARAMS, state))
    assert float(metrics['skip_count']) == 1.0
    assert float(_step(optimizer)[2]['skip_count']) == 0.0


def test_values_of_the_learning_rate_share_a_program():
    optimizer = make_optimizer('sgd')
    step = jax.jit(optimizer.apply)
    for rate in (0.1, 0.2):
        step(_PARAMS, optimizer.init(_PARAMS), _GRADIENTS, jnp.float32(rate))
    assert step._cache_size() == 1


def test_settings_that_cannot_work_are_named():
    with pytest.raises(ValueError, match=r"optimizer.name='lion' is unknown; use one of adamw, sgd"):
        make_optimizer('lion')
    with pytest.raises(ValueError, match=r'optimizer.clip_norm=-1.0 must not be negative'):
        make_optimizer('sgd', clip_norm=-1.0)
