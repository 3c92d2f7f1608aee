"""The entropy among the likeliest tokens against float64, with ties, tile by tile and over a mesh."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from areal_jax.models.logprobs import over_mesh, token_logprobs
from areal_jax.models.vocabulary_divergence import clamped_entropy, count_kept

N, D, V, KEPT = 8, 6, 104, 73
RATES = np.linspace(0.5, 2.0, N, dtype=np.float32)
COTANGENTS = np.random.default_rng(1).normal(size=N).astype(np.float32)


def example(scale=1.0):
    rng = np.random.default_rng(0)
    return tuple((rng.normal(size=shape) * scale).astype(np.float32) for shape in ((N, D), (V, D)))


def by_numpy(hidden, head, kept=KEPT):
    """(entropy, gradients of its sum with COTANGENTS with respect to hidden and head) in float64."""
    hidden, head, rates = (np.asarray(x, np.float64) for x in (hidden, head, RATES[:, None]))
    z = hidden @ head.T / rates
    ranks = np.argsort(np.argsort(-z, axis=1), axis=1)
    q = np.where(ranks < kept, np.exp(z - z.max(axis=1, keepdims=True)), 0)
    q /= q.sum(axis=1, keepdims=True)
    log_q = np.log(np.where(q > 0, q, 1))
    entropy = -(q * log_q).sum(axis=1)
    d_z = -COTANGENTS[:, None] * q * (log_q + entropy[:, None]) / rates
    return entropy, d_z @ head, d_z.T @ hidden


@functools.partial(jax.jit, static_argnames=('kept', 'chunk', 'block'))
def values_and_gradients(hidden, head, kept=KEPT, chunk=None, block=None):
    def loss(hidden, head):
        found = clamped_entropy(hidden, head, RATES, kept, chunk=chunk, block=block)
        return jnp.sum(COTANGENTS * found), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return found, *gradients


@pytest.mark.parametrize(('chunk', 'block'), [(None, None), (30, 3), (52, 1)])
@pytest.mark.parametrize('scale', [0.3, 2.0])
def test_values_and_gradients_equal_those_of_float64(scale, chunk, block):
    arguments = example(scale)
    found = values_and_gradients(*arguments, chunk=chunk, block=block)
    for ours, exact in zip(found, by_numpy(*arguments), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize('kept', [1, 2, 103, 104])
def test_one_token_and_all_but_one(kept):
    arguments = example()
    for ours, exact in zip(values_and_gradients(*arguments, kept=kept), by_numpy(*arguments, kept), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)


def test_seven_of_ten_equal_tokens():
    # the anchor of the method: V = 10, 0.3 left out, log 7 = 1.945910; ties share the last places, no logit is favoured
    assert count_kept(10, 0.3) == 7
    loss = lambda hidden: clamped_entropy(hidden, jnp.ones((10, 2)), 1.0, count_kept(10, 0.3)).sum()
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.ones((1, 2)))
    assert float(value) == pytest.approx(1.945910, abs=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


def test_a_tie_over_the_edge_counts_in_parts():
    # logits log 2, 0, 0, 0 of which 3 are kept: q = 1/2 and 1/4 twice, each of the three equal ones 2/3 of that
    hidden = jnp.array([[math.log(2), 0, 0, 0]])
    value = lambda hidden: clamped_entropy(hidden, jnp.eye(4), 1.0, 3)[0]
    entropy, gradient = jax.jit(jax.value_and_grad(value))(hidden)
    assert float(entropy) == pytest.approx(1.5 * math.log(2), rel=1e-6)
    # dH/dz = -q (log q + H): -(log 2) / 4 for the first, 2/3 of (log 2) / 8 for the others
    np.testing.assert_allclose(gradient, math.log(2) * np.array([[-1 / 4, 1 / 12, 1 / 12, 1 / 12]]), rtol=1e-5)


def test_of_the_whole_vocabulary_it_is_the_entropy():
    hidden, head = example()
    expected = jax.jit(token_logprobs, static_argnames='chunk')(hidden, head, np.zeros(N, int), RATES, chunk=30)[1]
    found = values_and_gradients(hidden, head, kept=count_kept(V, 0.0), chunk=30)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_nan_stays_with_its_token():
    hidden, head = example()
    poisoned = hidden.copy()
    poisoned[3, 2] = np.nan
    clean, found = (values_and_gradients(x, head, chunk=30, block=3)[0] for x in (hidden, poisoned))
    np.testing.assert_array_equal(found, np.where(np.arange(N) == 3, np.nan, clean))


@pytest.mark.parametrize('shape', [(1, 2, 2, 2), (1, 1, 8, 1)], ids=['three axes', 'tensor 8'])
def test_over_a_mesh_equals_one_device(shape):
    names = ('data', 'fsdp', 'tensor', 'context')
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4)

    def compute(tokens, heads):
        return (clamped_entropy(tokens[0], heads[0], tokens[1], KEPT, chunk=5, block=1, axis_name='tensor'),)

    @jax.jit
    def over(hidden, head):
        def loss(hidden, head):
            axes = {'token_axes': ('data', 'fsdp', 'context'), 'vocab_axis': 'tensor'}
            (found,) = over_mesh(compute, (jnp.tanh(hidden), RATES), (head,), mesh=mesh, **axes)
            return jnp.sum(COTANGENTS * found), found

        (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return found, *gradients

    hidden, head = example()
    inner = np.tanh(hidden)
    entropy, d_inner, d_head = by_numpy(inner, head)
    for ours, exact in zip(over(hidden, head), (entropy, d_inner * (1 - inner**2), d_head), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_no_array_has_all_logits():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    loss = lambda *x: jnp.sum(clamped_entropy(*x, 1.0, 5000, chunk=256, block=4) ** 2)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shape(512, 16), shape(8192, 16)).compile()
    assert '4,8192]' in compiled.as_text()
    assert '512,8192]' not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5e6
