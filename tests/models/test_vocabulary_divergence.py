"""Divergences over the vocabulary against float64, tile by tile and over a mesh, with gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from areal_jax.models.logprobs import over_mesh
from areal_jax.models.vocabulary_divergence import token_divergences

N, D, OTHER, V = 8, 6, 10, 104  # tiles of 30 leave 14 columns over; a half and a quarter of V are slices
RATES = np.linspace(0.5, 2.0, N, dtype=np.float32)
COTANGENTS = np.random.default_rng(1).normal(size=(2, N)).astype(np.float32)


def example(scale=1.0):
    rng = np.random.default_rng(0)
    shapes = (N, D), (V, D), (N, OTHER), (V, OTHER)
    return tuple((rng.normal(size=shape) * scale).astype(np.float32) for shape in shapes)


def by_numpy(hidden, head, other_hidden, other_head):
    """(reverse, forward, gradients of their sum with COTANGENTS with respect to hidden and head) in float64."""
    hidden, head, other_hidden, other_head, rates = (
        np.asarray(x, np.float64) for x in (hidden, head, other_hidden, other_head, RATES[:, None])
    )
    log_softmax = lambda z: (
        z - z.max(1, keepdims=True) - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    )
    log_p, log_q = log_softmax(hidden @ head.T / rates), log_softmax(other_hidden @ other_head.T / rates)
    p, q = np.exp(log_p), np.exp(log_q)
    reverse, forward = (p * (log_p - log_q)).sum(1), (q * (log_q - log_p)).sum(1)
    a, b = COTANGENTS[..., None]
    d_z = (a * p * (log_p - log_q - reverse[:, None]) + b * (p - q)) / rates
    return reverse, forward, d_z @ head, d_z.T @ hidden


@functools.partial(jax.jit, static_argnames='chunk')
def values_and_gradients(*arguments, chunk=None):
    def loss(hidden, head):
        found = token_divergences(hidden, head, *arguments[2:], RATES, chunk=chunk)
        return jnp.sum(COTANGENTS * jnp.stack(found)), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*arguments[:2])
    return (*found, *gradients)


@pytest.mark.parametrize('chunk', [None, 30, 52])
@pytest.mark.parametrize('scale', [0.3, 1.5])
def test_values_and_gradients_equal_those_of_float64(scale, chunk):
    arguments = example(scale)
    for ours, exact in zip(values_and_gradients(*arguments, chunk=chunk), by_numpy(*arguments), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


def test_two_choices_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): reverse log 2 - log(3)/2 = 0.143841, forward log(3) 3/4 - log 2 = 0.130812
    head = jnp.eye(2)
    found = jax.jit(token_divergences)(jnp.zeros((1, 2)), head, jnp.array([[0.0, np.log(3)]]), head, 1.0)
    np.testing.assert_allclose(np.ravel(found), [0.143841, 0.130812], atol=1e-6)


@pytest.mark.parametrize('chunk', [None, 30])
def test_equal_models_are_at_zero_and_stay_there(chunk):
    hidden, head = example(3.0)[:2]
    for found in values_and_gradients(hidden, head, hidden, head, chunk=chunk):
        np.testing.assert_array_equal(found, 0)


def test_extreme_logits_stay_finite():
    # logits of about +-1e4: the teacher is as sure of another token
    for found in values_and_gradients(*example(1e2), chunk=30):
        assert np.isfinite(found).all()


def test_the_teacher_is_constant():
    loss = lambda *teacher: jnp.sum(token_divergences(*example()[:2], *teacher, 1.0)[0])
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1)))(*example()[2:]):
        np.testing.assert_array_equal(gradient, 0)


def test_nan_stays_with_its_token():
    arguments = list(example())
    clean = values_and_gradients(*arguments, chunk=30)[:2]
    arguments[2] = arguments[2].copy()
    arguments[2][3, 2] = np.nan
    for ours, expected in zip(values_and_gradients(*arguments, chunk=30)[:2], clean, strict=True):
        np.testing.assert_array_equal(ours, np.where(np.arange(N) == 3, np.nan, expected))


@pytest.mark.parametrize('shape', [(1, 2, 2, 2), (1, 1, 8, 1)], ids=['three axes', 'tensor 8'])
def test_over_a_mesh_equals_one_device(shape):
    names = ('data', 'fsdp', 'tensor', 'context')
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4)

    def compute(tokens, heads):
        hidden, other, rates = tokens
        return token_divergences(hidden, heads[0], other, heads[1], rates, chunk=5, axis_name='tensor')

    @jax.jit
    def over(hidden, head, other_hidden, other_head):
        def loss(hidden, head):
            tokens, heads = (jnp.tanh(hidden), other_hidden, RATES), (head, other_head)
            axes = {'token_axes': ('data', 'fsdp', 'context'), 'vocab_axis': 'tensor'}
            found = over_mesh(compute, tokens, heads, mesh=mesh, **axes)
            return jnp.sum(COTANGENTS * jnp.stack(found)), found

        (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return (*found, *gradients)

    hidden, *others = example()
    inner = np.tanh(hidden)
    reverse, forward, d_inner, d_head = by_numpy(inner, *others)
    expected = reverse, forward, d_inner * (1 - inner**2), d_head
    for ours, exact in zip(over(hidden, *others), expected, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


def test_no_array_has_all_logits():
    # 512 tokens, 8192 columns: all logits take 16 MB; a tile of 256 columns 0.5 MB
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    loss = lambda *x: sum(jnp.sum(v * v) for v in token_divergences(*x, 1.0, chunk=256))
    arguments = shape(512, 16), shape(8192, 16), shape(512, 24), shape(8192, 24)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    assert '512,256]' in compiled.as_text()
    assert '512,8192]' not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5e6
