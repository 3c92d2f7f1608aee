"""The loss of a critic, by hand: where it is clipped, its gradient, and what is measured."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.learning.objective.objective import RETURNS, VALUES
from areal_jax.learning.objective.value_loss import finalize_critic_metrics, value_loss
from tests.learning.objective.tokens import make_tokens


def loss_of(values, before, returns, mask=None, clip=0.5):
    values = jnp.asarray(values, jnp.float32)
    mask = jnp.ones(values.shape, bool) if mask is None else jnp.asarray(mask, bool)
    known = {VALUES: jnp.asarray(before, jnp.float32), RETURNS: jnp.asarray(returns, jnp.float32)}
    zeros = jnp.zeros(values.shape)
    tokens = make_tokens(zeros, zeros, zeros, mask, mask.sum(), token_weights=jnp.ones(values.shape), known=known)

    def loss(values):
        return value_loss(dataclasses.replace(tokens, values=values), clip)

    return loss(values), jax.grad(lambda v: loss(v)[0])(values)


@pytest.mark.parametrize(
    ('value', 'before', 'returned', 'loss', 'gradient'),
    [
        (1.2, 0.5, 1.0, 0.02, 0.2),  # at the edge 1.0 the error is 0: the larger one counts
        (1.2, 0.5, 2.0, 0.5, 0.0),  # beyond the edge, towards the return
        (1.0, 0.5, 2.0, 0.5, -1.0),  # on the edge it is not clipped
        (0.4, 0.5, 2.0, 1.28, -1.6),
        (-0.2, 0.5, 2.0, 2.42, -2.2),  # away from the return
    ],
)
def test_a_value_beyond_the_edge_is_trained_where_its_error_is_the_larger_one(value, before, returned, loss, gradient):
    (found, _), slope = loss_of([value], [before], [returned])
    np.testing.assert_allclose([found, slope[0]], [loss, gradient], rtol=1e-5)
    if before != value:
        (plain, _), slope = loss_of([value], [before], [returned], clip=0)
        np.testing.assert_allclose([plain, slope[0]], [(value - returned) ** 2 / 2, value - returned], rtol=1e-5)


def test_masked_tokens_do_not_count_whatever_they_hold():
    (found, metrics), slope = loss_of([1.0, np.nan], [0.9, np.inf], [0.0, np.nan], mask=[True, False])
    np.testing.assert_allclose([found, *slope], [0.5, 1.0, 0.0], rtol=1e-6)
    assert all(np.isfinite(value) for value in metrics.values())


def test_explained_variance_is_1_for_exact_values_and_0_for_their_mean():
    def explained(before, returns):
        (_, metrics), _ = loss_of(before, before, returns)
        return finalize_critic_metrics({'token_count': len(returns), **{k: float(v) for k, v in metrics.items()}})

    assert explained([1.0, 2.0], [1.0, 2.0])['critic/explained_variance'] == 1.0
    assert abs(explained([1.5, 1.5], [1.0, 2.0])['critic/explained_variance']) < 1e-6
    assert explained([0.0, 3.0], [1.0, 2.0])['critic/explained_variance'] < 0
    assert 'critic/explained_variance' not in explained([0.3, 0.3], [1.0, 1.0])
    assert finalize_critic_metrics({'token_count': 3.0}) == {}
