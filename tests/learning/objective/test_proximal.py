from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.objective.proximal import loglinear_logprobs, proximal_logprobs, recomputed_logprobs

_POLICY = jnp.array([-2.0, -2.0, -2.0, -2.0])
_BEHAVIOR = jnp.array([-1.0, -1.0, -1.0, -1.0])
_VERSIONS = jnp.array([7, 6, 5, 3])
_RECOMPUTED = jnp.array([-5.0, -5.0, -5.0, -5.0])


def _proximal(kind: str, first: bool) -> jax.Array:
    return _centre(kind, _POLICY, first)


def _centre(kind, policy, first):
    known = recomputed_logprobs(policy, _RECOMPUTED, jnp.bool_(first))
    return proximal_logprobs(kind, policy, _BEHAVIOR, _VERSIONS, jnp.int32(7), known)


def test_loglinear_from_behavior_towards_policy():
    # weights before the update are version 7: e = 0 1 2 4, alpha = 0 1/2 2/3 4/5, log prox = -1 - alpha
    np.testing.assert_allclose(_proximal('loglinear', True), [-1.0, -1.5, -5 / 3, -1.8], rtol=1e-6)


def test_loglinear_of_a_current_token_is_the_behavior_policy_exactly():
    behavior = jnp.array([-0.1234567])
    np.testing.assert_array_equal(
        loglinear_logprobs(jnp.array([-9.0]), behavior, jnp.array([4]), jnp.int32(4)), behavior
    )


def test_loglinear_of_a_very_old_token_is_the_policy():
    value = loglinear_logprobs(_POLICY[:1], _BEHAVIOR[:1], jnp.array([0]), jnp.int32(10**6))
    np.testing.assert_allclose(value, _POLICY[:1], rtol=1e-5)


def test_recompute_takes_the_pass_that_sees_the_weights_before_the_update():
    np.testing.assert_array_equal(_proximal('recompute', True), _POLICY)
    np.testing.assert_array_equal(_proximal('recompute', False), _RECOMPUTED)


def test_behavior_is_plain_ppo():
    np.testing.assert_array_equal(_proximal('behavior', True), _BEHAVIOR)


@pytest.mark.parametrize('kind', ['recompute', 'loglinear', 'behavior'])
def test_no_gradient_flows_through_the_centre(kind):
    gradient = jax.grad(lambda p: _centre(kind, p, True).sum())(_POLICY)
    np.testing.assert_array_equal(gradient, 0)


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"loss.proximal='ema' is unknown; use one of recompute, loglinear, behavior"):
        _proximal('ema', True)
