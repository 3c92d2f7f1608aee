"""Divergences over the vocabulary and the entropy among the likeliest tokens: against float64, tile by tile and over a
mesh, with gradients."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from areal_jax.models.logprobs import over_mesh, token_logprobs
from areal_jax.models.vocabulary_divergence import clamped_entropy, count_kept, token_divergences

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


def differentiate_over(shape, compute, cotangents):
    """A program (hidden, head, further tokens, further heads) over a mesh: results of `compute`, then the gradients."""
    names = ('data', 'fsdp', 'tensor', 'context')
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4)
    axes = {'token_axes': ('data', 'fsdp', 'context'), 'vocab_axis': 'tensor'}

    @jax.jit
    def over(hidden, head, tokens, heads):
        def loss(hidden, head):
            found = over_mesh(compute, (jnp.tanh(hidden), *tokens), (head, *heads), mesh=mesh, **axes)
            return jnp.sum(cotangents * jnp.stack(found)), found

        (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return (*found, *gradients)

    return over


def assert_over_a_mesh(found, inner, expected):
    """`expected`: results and gradients with respect to `inner`, the tanh of the hidden states, and the head."""
    *values, d_inner, d_head = expected
    for ours, exact in zip(found, (*values, d_inner * (1 - inner**2), d_head), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


meshes = pytest.mark.parametrize('shape', [(1, 2, 2, 2), (1, 1, 8, 1)], ids=['three axes', 'tensor 8'])


@meshes
def test_divergences_over_a_mesh_equal_those_of_one_device(shape):
    def compute(tokens, heads):
        hidden, other, rates = tokens
        return token_divergences(hidden, heads[0], other, heads[1], rates, chunk=5, axis_name='tensor')

    hidden, head, other_hidden, other_head = example()
    found = differentiate_over(shape, compute, COTANGENTS)(hidden, head, (other_hidden, RATES), (other_head,))
    inner = np.tanh(hidden)
    assert_over_a_mesh(found, inner, by_numpy(inner, head, other_hidden, other_head))


def test_no_array_has_all_logits():
    # 512 tokens, 8192 columns: all logits take 16 MB; a tile of 256 columns 0.5 MB
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    loss = lambda *x: sum(jnp.sum(v * v) for v in token_divergences(*x, 1.0, chunk=256))
    arguments = shape(512, 16), shape(8192, 16), shape(512, 24), shape(8192, 24)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
    assert '512,256]' in compiled.as_text()
    assert '512,8192]' not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5e6


# The entropy among the likeliest tokens.

KEPT = 73


def entropy_by_numpy(hidden, head, kept=KEPT):
    """(entropy, gradients of its sum with COTANGENTS[0] with respect to hidden and head) in float64."""
    hidden, head, rates = (np.asarray(x, np.float64) for x in (hidden, head, RATES[:, None]))
    z = hidden @ head.T / rates
    ranks = np.argsort(np.argsort(-z, axis=1), axis=1)
    q = np.where(ranks < kept, np.exp(z - z.max(axis=1, keepdims=True)), 0)
    q /= q.sum(axis=1, keepdims=True)
    log_q = np.log(np.where(q > 0, q, 1))
    entropy = -(q * log_q).sum(axis=1)
    d_z = -COTANGENTS[0][:, None] * q * (log_q + entropy[:, None]) / rates
    return entropy, d_z @ head, d_z.T @ hidden


@functools.partial(jax.jit, static_argnames=('kept', 'chunk', 'block'))
def entropy_and_gradients(hidden, head, kept=KEPT, chunk=None, block=None):
    def loss(hidden, head):
        found = clamped_entropy(hidden, head, RATES, kept, chunk=chunk, block=block)
        return jnp.sum(COTANGENTS[0] * found), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
    return found, *gradients


@pytest.mark.parametrize(('chunk', 'block'), [(None, None), (30, 3), (52, 1)])
@pytest.mark.parametrize('scale', [0.3, 2.0])
def test_the_entropy_and_its_gradients_equal_those_of_float64(scale, chunk, block):
    arguments = example(scale)[:2]
    found = entropy_and_gradients(*arguments, chunk=chunk, block=block)
    for ours, exact in zip(found, entropy_by_numpy(*arguments), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize('kept', [1, 2, 103, 104])
def test_one_token_and_all_but_one(kept):
    arguments = example()[:2]
    for ours, exact in zip(
        entropy_and_gradients(*arguments, kept=kept), entropy_by_numpy(*arguments, kept), strict=True
    ):
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
    hidden, head = example()[:2]
    expected = jax.jit(token_logprobs, static_argnames='chunk')(hidden, head, np.zeros(N, int), RATES, chunk=30)[1]
    found = entropy_and_gradients(hidden, head, kept=count_kept(V, 0.0), chunk=30)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_nan_stays_with_its_token_in_the_entropy():
    hidden, head = example()[:2]
    poisoned = hidden.copy()
    poisoned[3, 2] = np.nan
    clean, found = (entropy_and_gradients(x, head, chunk=30, block=3)[0] for x in (hidden, poisoned))
    np.testing.assert_array_equal(found, np.where(np.arange(N) == 3, np.nan, clean))


@meshes
def test_the_entropy_over_a_mesh_equals_that_of_one_device(shape):
    def compute(tokens, heads):
        return (clamped_entropy(tokens[0], heads[0], tokens[1], KEPT, chunk=5, block=1, axis_name='tensor'),)

    hidden, head = example()[:2]
    found = differentiate_over(shape, compute, COTANGENTS[:1])(hidden, head, (RATES,), ())
    inner = np.tanh(hidden)
    assert_over_a_mesh(found, inner, entropy_by_numpy(inner, head))


def test_no_array_of_the_entropy_has_all_logits():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    loss = lambda *x: jnp.sum(clamped_entropy(*x, 1.0, 5000, chunk=256, block=4) ** 2)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(shape(512, 16), shape(8192, 16)).compile()
    assert '4,8192]' in compiled.as_text()
    assert '512,8192]' not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5e6


# Capped logits: of the policy by 3, of the teacher by 2.


def capped(hidden, head, cap):
    return cap * jnp.tanh(hidden @ head.T / cap) / RATES[:, None]


@pytest.mark.parametrize('chunk', [None, 30])
def test_divergences_of_capped_logits_equal_those_of_the_whole(chunk):
    hidden, head, *other = example(1.5)

    def plain(hidden, head):
        log_p, log_q = jax.nn.log_softmax(capped(hidden, head, 3.0)), jax.nn.log_softmax(capped(*other, 2.0))
        return jnp.stack([jnp.sum(jnp.exp(p) * (p - q), axis=1) for p, q in ((log_p, log_q), (log_q, log_p))])

    tiled = lambda hidden, head: jnp.stack(token_divergences(hidden, head, *other, RATES, chunk=chunk, caps=(3.0, 2.0)))
    for ours, exact in zip(*(both(compute, COTANGENTS, hidden, head) for compute in (tiled, plain)), strict=True):
        np.testing.assert_allclose(ours, exact, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize('chunk', [None, 30])
def test_the_clamped_entropy_of_capped_logits_equals_that_of_the_whole(chunk):
    hidden, head = example(1.5)[:2]

    def plain(hidden, head):
        z = capped(hidden, head, 3.0)
        least = jnp.sort(z, axis=1)[:, V - KEPT]
        log_q = jax.nn.log_softmax(jnp.where(z >= least[:, None], z, -1e30))
        return -jnp.sum(jnp.exp(log_q) * jnp.where(log_q > -1e20, log_q, 0), axis=1)

    tiled = lambda hidden, head: clamped_entropy(hidden, head, RATES, KEPT, chunk=chunk, cap=3.0)
    for ours, exact in zip(*(both(compute, COTANGENTS[0], hidden, head) for compute in (tiled, plain)), strict=True):
        np.testing.assert_allclose(ours, exact, atol=2e-5 * np.abs(exact).max())


def both(compute, cotangents, *arguments):
    """The values, and the gradients of their sum with the cotangents."""
    loss = lambda *x: jnp.sum(cotangents * compute(*x))
    return jax.jit(compute)(*arguments), *jax.jit(jax.grad(loss, argnums=(0, 1)))(*arguments)
