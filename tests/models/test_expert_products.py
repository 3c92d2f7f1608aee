"""Three products of experts against their formula in float64, and that a token's numbers are its own, bit for bit."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.expert_products import mix_blocks, mix_grouped, mix_native, mixers_for
from areal_jax.models.grouped.products import Hardware
from areal_jax.models.layer_parts import ClampedSwiglu
from areal_jax.native import compiled_library as library
from tests.native import needs_kernels

HAS_KERNELS = library.is_available()
mix_ragged = functools.partial(mix_grouped, jax.lax.ragged_dot)  # in the place of a kernel
MIXERS = [
    pytest.param(mix_native, id='native', marks=needs_kernels),
    pytest.param(mix_blocks, id='blocks'),
    pytest.param(mix_ragged, id='grouped'),
]
OWN = MIXERS[:2]  # which promise more than kernels of others do


class Case(NamedTuple):
    experts: int
    choices: int
    d: int
    width: int
    tokens: int
    chosen: str = 'random'  # 'one' = all tokens choose expert 1; 'few' = experts of odd number have no token
    none: float = 0.0  # share of choices that are none


CASES = [
    Case(4, 2, 24, 20, 7),  # neither d nor F is a multiple of a vector
    Case(8, 4, 32, 48, 1),
    Case(3, 1, 16, 8, 600, 'one'),  # more rows than are summed at once
    Case(6, 2, 130, 36, 40, 'few', 0.3),
    Case(5, 3, 40, 260, 600, none=0.1),  # several panels deep, and several times as many rows as a tile has
    Case(2, 2, 8, 4, 5, none=1.0),
]
NAMES = ('y', 'dx', 'd_weights', 'd_gate', 'd_up', 'd_down')


def make_inputs(case, seed=0):
    """(x, experts, weights, gate, up, down, dy), as numpy arrays."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    numbers = {'random': np.arange(case.experts), 'one': np.array([1]), 'few': np.arange(0, case.experts, 2)}
    experts = np.stack([rng.permutation(numbers[case.chosen])[: case.choices] for _ in range(case.tokens)])
    experts = np.where(rng.random(experts.shape) < case.none, case.experts, experts).astype(np.int32)
    weights = rng.uniform(0.1, 1.0, experts.shape).astype(np.float32)
    into, out_of = (case.experts, case.d, case.width), (case.experts, case.width, case.d)
    x, dy = normal(case.tokens, case.d), normal(case.tokens, case.d)
    return x, experts, weights, normal(*into), normal(*into), normal(*out_of), dy


def compute(x, experts, weights, gate, up, down, dy):
    """y and its gradients from the formula, one choice after the other, in float64."""
    x, weights, gate, up, down, dy = (np.asarray(leaf, np.float64) for leaf in (x, weights, gate, up, down, dy))
    y, dx, d_weights, d_gate, d_up, d_down = map(np.zeros_like, (x, x, weights, gate, up, down))
    for t, j in np.argwhere(experts < len(gate)):
        e, w = experts[t, j], weights[t, j]
        h, u = x[t] @ gate[e], x[t] @ up[e]
        sigmoid = 1 / (1 + np.exp(-h))
        inner = h * sigmoid * u
        y[t] += w * (inner @ down[e])
        back = down[e] @ dy[t]
        d_weights[t, j] = back @ inner
        d_h, d_u = w * back * u * sigmoid * (1 + h * (1 - sigmoid)), w * back * h * sigmoid
        dx[t] += gate[e] @ d_h + up[e] @ d_u
        d_gate[e] += np.outer(x[t], d_h)
        d_up[e] += np.outer(x[t], d_u)
        d_down[e] += np.outer(w * inner, dy[t])
    return y, dx, d_weights, d_gate, d_up, d_down


def differentiate(mix):
    def run(x, experts, weights, gate, up, down, dy):
        y, pull = jax.vjp(lambda x, *rest: mix(x, experts, *rest), x, weights, gate, up, down)
        return y, *pull(dy)

    return jax.jit(run)


def assert_near(found, expected, of_range):
    for name, value, reference in zip(NAMES, found, expected, strict=True):
        value = np.asarray(value, np.float64)
        assert value.shape == reference.shape, name
        np.testing.assert_allclose(value, reference, atol=of_range * np.abs(reference).max(), rtol=0, err_msg=name)


def assert_same_bits(found, expected):
    for value, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(value).view(np.int32), np.asarray(reference).view(np.int32))


@pytest.mark.parametrize('case', CASES, ids=str)
@pytest.mark.parametrize('mix', MIXERS)
def test_value_and_gradients_are_those_of_the_formula(mix, case):
    inputs = make_inputs(case)
    assert_near(differentiate(mix)(*inputs), compute(*inputs), of_range=3e-6)


@pytest.mark.parametrize('mix', MIXERS[1:])
def test_numbers_of_16_bits(mix):
    inputs = make_inputs(Case(4, 2, 24, 20, 50, none=0.1))
    rounded = [jnp.asarray(leaf, jnp.bfloat16) if leaf.dtype == np.float32 else leaf for leaf in inputs]
    rounded[2] = inputs[2]
    found = differentiate(mix)(*rounded)
    assert [leaf.dtype for leaf in found] == [jnp.float32 if name == 'd_weights' else jnp.bfloat16 for name in NAMES]
    assert_near(found, compute(*rounded), of_range=2e-2)  # 8 bits of 2 to 3 products


@pytest.mark.parametrize('mix', MIXERS)
def test_what_nobody_chose_has_a_gradient_of_exactly_zero(mix):
    case = Case(6, 2, 24, 20, 40, 'few', 0.4)
    x, experts, weights, *rest = make_inputs(case)
    experts[3] = case.experts  # token 3 has no expert at all
    y, dx, d_weights, *d_matrices = differentiate(mix)(x, experts, weights, *rest)
    for gradient in d_matrices:
        assert not np.asarray(gradient)[1::2].any()
        assert np.asarray(gradient)[::2].any(axis=(1, 2)).all()
    assert not np.asarray(y)[3].any()
    assert not np.asarray(dx)[3].any()
    np.testing.assert_array_equal(np.asarray(d_weights) == 0, experts == case.experts)


@pytest.mark.parametrize('mix', OWN)
def test_a_token_has_the_same_bits_in_any_company(mix):
    """By itself, among few and among many: its expert then has 1 row, some, and more than are summed at once."""
    x, experts, weights, *matrices, _ = make_inputs(Case(4, 3, 72, 136, 600))
    run = jax.jit(mix)
    everyone = run(x, experts, weights, *matrices)
    for part in (slice(5, 6), slice(2, 9), slice(100, 141), slice(77, 400)):
        assert_same_bits([run(x[part], experts[part], weights[part], *matrices)], [everyone[part]])


@pytest.mark.parametrize('mix', OWN)
def test_the_number_of_an_expert_does_not_matter(mix):
    x, experts, weights, *matrices, _ = make_inputs(Case(6, 4, 40, 24, 90, none=0.1))
    order = np.random.default_rng(1).permutation(6)  # new expert i is old expert order[i]
    new = np.append(np.argsort(order), 6).astype(np.int32)
    moved = [matrix[order] for matrix in matrices]
    assert_same_bits([jax.jit(mix)(x, new[experts], weights, *moved)], [jax.jit(mix)(x, experts, weights, *matrices)])


@pytest.mark.parametrize('mix', OWN)
def test_layers_in_a_scan_that_are_computed_again(mix):
    """Three layers with remat in lax.scan have the gradients of three calls; remat alone those of none, bit for bit."""
    x, experts, weights, *_ = make_inputs(Case(4, 2, 24, 20, 30))
    layers = [make_inputs(Case(4, 2, 24, 20, 30), seed)[3:6] for seed in range(3)]
    stacked = [jnp.stack(leaves) for leaves in zip(*layers, strict=True)]
    block = lambda x, layer: x + mix(x, experts, weights, *layer)

    def scanned(x, stacked):
        return (jax.lax.scan(lambda x, layer: (jax.checkpoint(block)(x, layer), None), x, stacked)[0] ** 2).sum()

    def unrolled(x, stacked, block=block):
        for i in range(3):
            x = block(x, [leaf[i] for leaf in stacked])
        return (x**2).sum()

    leaves = lambda loss: jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(x, stacked))
    plain = leaves(unrolled)
    assert_same_bits(leaves(lambda x, stacked: unrolled(x, stacked, jax.checkpoint(block))), plain)
    for found, expected in zip(leaves(scanned), plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@needs_kernels
def test_a_layer_that_is_computed_again_multiplies_no_second_time_with_down():
    inputs = make_inputs(CASES[0])
    loss = lambda x: (jax.checkpoint(lambda x: mix_native(x, *inputs[1:6]))(x) * inputs[6]).sum()
    text = jax.jit(jax.grad(loss)).lower(inputs[0]).compile().as_text()
    assert text.count(f'"{library.EXPERT_PRODUCTS}"') == text.count(f'"{library.EXPERT_GRADIENT}"') == 1
    assert text.count(f'"{library.EXPERT_MIX}"') == 0


@needs_kernels
def test_threads_do_not_change_bits():
    """Processes whose pool of threads has 1 and 2 threads."""
    digests = {threads: _digest_in_process(threads) for threads in (1, 2)}
    assert digests[1] == digests[2] == digest()


def digest():
    found = differentiate(mix_native)(*make_inputs(CASES[4]))
    return hashlib.sha256(b''.join(np.asarray(leaf).tobytes() for leaf in found)).hexdigest()


def _digest_in_process(threads):
    program = 'from tests.models.test_expert_products import digest; print(digest())'
    environment = os.environ | {'NPROC': str(threads), 'XLA_FLAGS': ''}
    return subprocess.run(
        [sys.executable, '-c', program], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_mixers_that_can_be_used(monkeypatch):
    cpu, gpu, tpu = Hardware('cpu'), Hardware('gpu', (9, 0), 132), Hardware('tpu')
    assert mixers_for(cpu, 'float32', (24, 20)) == ({'native': mix_native} if HAS_KERNELS else {'blocks': mix_blocks})
    assert mixers_for(cpu, 'bfloat16', (24, 20)) == {'blocks': mix_blocks}
    assert list(mixers_for(gpu, 'bfloat16', (128, 64))) == ['mosaic', 'triton', 'blocks']
    assert list(mixers_for(tpu, 'float32', (24, 20))) == ['megablox', 'blocks']
    monkeypatch.setattr(library, 'is_available', lambda: False)
    assert mixers_for(cpu, 'float32', (24, 20)) == {'blocks': mix_blocks}


# Clamped experts with biases, as gpt-oss has them.

CLAMPED = ClampedSwiglu(limit=0.8, alpha=1.702)  # a third of the gates and ups are beyond it
CLAMPED_NAMES = ('y', 'dx', 'd_weights', 'd_gate_up', 'd_gate_up_bias', 'd_down', 'd_down_bias')


def make_clamped(case):
    """(x, experts, weights, gate_up, gate_up_bias, down, down_bias, dy)."""
    x, experts, weights, gate, up, down, dy = make_inputs(case)
    rng = np.random.default_rng(1)
    gate_up = np.stack([gate, up], axis=-1).reshape(case.experts, case.d, -1) * 3
    of = lambda size: rng.normal(0, 0.5, (case.experts, size)).astype(np.float32)
    return x * 3, experts, weights, gate_up, of(2 * case.width), down, of(case.d), dy


def compute_clamped(x, experts, weights, gate_up, gate_up_bias, down, down_bias, dy):
    """y and its gradients from the formula, one choice after the other, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in (x, weights, gate_up, gate_up_bias, down, down_bias, dy)]
    x, weights, gate_up, gate_up_bias, down, down_bias, dy = leaves
    y, dx, d_weights, d_gate_up, d_bias, d_down, d_down_bias = map(np.zeros_like, (x, *leaves[:-1]))
    for t, j in np.argwhere(experts < len(gate_up)):
        e, w = experts[t, j], weights[t, j]
        z = x[t] @ gate_up[e] + gate_up_bias[e]
        gate, up = np.minimum(z[::2], 0.8), np.clip(z[1::2], -0.8, 0.8)
        sigmoid = 1 / (1 + np.exp(-1.702 * gate))
        inner = (up + 1) * gate * sigmoid
        out = inner @ down[e] + down_bias[e]
        y[t] += w * out
        d_weights[t, j] = out @ dy[t]
        back = w * (down[e] @ dy[t])
        d_z = np.zeros_like(z)
        d_z[::2] = back * (up + 1) * sigmoid * (1 + 1.702 * gate * (1 - sigmoid)) * (z[::2] < 0.8)
        d_z[1::2] = back * gate * sigmoid * (np.abs(z[1::2]) < 0.8)
        dx[t] += gate_up[e] @ d_z
        d_gate_up[e] += np.outer(x[t], d_z)
        d_bias[e] += d_z
        d_down[e] += np.outer(w * inner, dy[t])
        d_down_bias[e] += w * dy[t]
    return y, dx, d_weights, d_gate_up, d_bias, d_down, d_down_bias


@pytest.mark.parametrize('case', [CASES[0], CASES[2], CASES[3], CASES[5]], ids=str)
@pytest.mark.parametrize('mix', MIXERS)
def test_clamped_experts_are_those_of_the_formula(mix, case):
    x, experts, weights, *leaves, dy = inputs = make_clamped(case)

    @jax.jit
    def run(x, weights, *leaves):
        y, pull = jax.vjp(lambda x, w, *rest: mix(x, experts, w, *rest, swiglu=CLAMPED), x, weights, *leaves)
        return y, *pull(dy)

    found = run(x, weights, *leaves)
    for name, value, reference in zip(CLAMPED_NAMES, found, compute_clamped(*inputs), strict=True):
        limit = 3e-6 * np.abs(reference).max()
        np.testing.assert_allclose(np.asarray(value, np.float64), reference, atol=limit, rtol=0, err_msg=name)


def test_a_clamped_expert_by_hand():
    # gate 8 -> 7, up -9 -> -7: (-7 + 1) * 7 * sigmoid(1.702 * 7) = -42 / (1 + e^-11.914) = -41.99972
    one = jnp.ones((1, 1, 1))
    leaves = jnp.array([[[8.0, -9.0]]]), jnp.zeros((1, 2)), one, jnp.full((1, 1), 0.5)
    y = mix_blocks(
        jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), *leaves, swiglu=ClampedSwiglu(7.0, 1.702)
    )
    np.testing.assert_allclose(y, [[-41.99972 + 0.5]], rtol=1e-6)
