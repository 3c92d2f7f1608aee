"""Grouped products and both gradients against their formula, by the interpreters of the kernels; what they cost."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from areal_jax.models.expert_products import mixers_for
from areal_jax.models.grouped.megablox import Megablox, tile_rows
from areal_jax.models.grouped.mosaic import Mosaic, block_rows
from areal_jax.models.grouped.products import Hardware, kernels_for, multiply
from areal_jax.models.grouped.triton import Triton
from tests.models.grouped.mosaic_interpreter import interpreted

SIZES = [30, 0, 17]  # groups that begin and end inside of tiles, one without rows, 17 rows without a group
ROWS = 64
NAMES = ('y', 'd_rows', 'd_matrices')
SHAPES = {'megablox': (Megablox(interpret=True), 40, 24), 'triton': (Triton(interpret=True), 40, 24),
          'mosaic': (Mosaic(cores=2), 64, 128)}  # fmt: skip


def make_inputs(depth, width, dtype):
    """(rows, matrices, sizes, dy); rows without a group are zeros."""
    rng = np.random.default_rng(0)
    used = (np.arange(ROWS) < sum(SIZES))[:, None]
    normal = lambda *shape: rng.normal(size=shape) / np.sqrt(shape[-2])
    left, right = (np.where(used, normal(ROWS, size), 0) for size in (depth, width))
    rows, matrices, dy = (jnp.asarray(value, dtype) for value in (left, normal(len(SIZES), depth, width), right))
    return rows, matrices, jnp.array(SIZES, jnp.int32), dy


def compute(rows, matrices, sizes, dy):
    """y and its gradients from the formula, group after group, in float64."""
    rows, matrices, dy = (np.asarray(leaf, np.float64) for leaf in (rows, matrices, dy))
    y, d_rows, d_matrices = np.zeros(dy.shape), np.zeros(rows.shape), np.zeros(matrices.shape)
    ends = np.cumsum(sizes)
    for group, (first, end) in enumerate(zip(ends - np.asarray(sizes), ends, strict=True)):
        own = slice(first, end)
        y[own], d_rows[own] = rows[own] @ matrices[group], dy[own] @ matrices[group].T
        d_matrices[group] = rows[own].T @ dy[own]
    return y, d_rows, d_matrices


def differentiate(kernels, rows, matrices, sizes, dy):
    y, pull = jax.vjp(lambda *operands: multiply(kernels, *operands, sizes), rows, matrices)
    return y, *pull(dy)


@pytest.mark.parametrize('dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', SHAPES)
def test_value_and_gradients_are_those_of_the_formula(name, dtype, monkeypatch):
    kernels, *shape = SHAPES[name]
    inputs = make_inputs(*shape, dtype)
    with interpreted(monkeypatch) if name == 'mosaic' else contextlib.nullcontext():
        run = jax.jit(differentiate, static_argnums=0, compiler_options={'xla_backend_optimization_level': 0})
        found = jax.device_get(run(kernels, *inputs))
    for what, value, expected in zip(NAMES, found, compute(*inputs), strict=True):
        assert value.dtype == dtype
        value = np.asarray(value, np.float64)
        if what != 'd_matrices':
            value[sum(SIZES) :] = 0  # anything
        limit = {'float32': 1e-6, 'bfloat16': 4e-3}[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, atol=limit, rtol=0, err_msg=what)
    assert not found[2][1].any()


GPU = AbstractMesh((1,), ('x',), abstract_device=AbstractDevice('NVIDIA H100', None, 'gpu'))
HOPPER = Hardware('gpu', (9, 0), 132)


@pytest.mark.parametrize(
    ('hardware', 'way', 'target', 'calls'),
    [
        (Hardware('tpu'), 'megablox', '@tpu_custom_call', 6),  # gate and up share their kernels' programs
        (HOPPER, 'mosaic', '@mosaic_gpu_v2', 9),
        (Hardware('gpu', (8, 0), 108), 'triton', '@__gpu$xla.gpu.triton', 9),
    ],
    ids=['tpu', 'hopper', 'ampere'],
)
def test_a_layer_is_nine_kernels_and_no_dense_product(hardware, way, target, calls):
    # gate, up and down, each forward, for the rows and for the matrices; that they run is what the self-check is for
    experts, d, width, tokens = 4, 128, 64, 64
    mix = mixers_for(hardware, 'bfloat16', (d, width))[way]
    described = [
        jax.ShapeDtypeStruct(shape, 'bfloat16')
        for shape in ((tokens, d), (experts, d, width), (experts, d, width), (experts, width, d))
    ]

    def loss(x, *leaves):
        chosen = jnp.tile(jnp.arange(2, dtype=jnp.int32), (tokens, 1))
        return mix(x, chosen, jnp.full((tokens, 2), 0.5), *leaves).astype(jnp.float32).sum()

    platform = 'tpu' if hardware.platform == 'tpu' else 'cuda'
    with use_abstract_mesh(GPU) if platform == 'cuda' else contextlib.nullcontext():
        traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3))).trace(*described)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f'custom_call {target}') == calls
    assert 'chlo.ragged_dot' not in text
    assert 'stablehlo.dot_general' not in text


@pytest.mark.parametrize(
    ('hardware', 'dtype', 'sizes', 'names'),
    [
        (Hardware('tpu'), 'bfloat16', (2048, 768), ['megablox']),
        (Hardware('tpu'), 'float16', (2048, 768), []),
        (HOPPER, 'bfloat16', (2048, 768), ['mosaic', 'triton']),
        (HOPPER, 'float32', (2048, 768), ['triton']),
        (HOPPER, 'bfloat16', (2048, 96), ['triton']),  # 64 does not divide it
        (Hardware('gpu', (10, 0), 148), 'bfloat16', (2048, 768), ['triton']),  # has no wgmma
        (Hardware('gpu'), 'bfloat16', (2048, 768), ['triton']),
        (Hardware('cpu'), 'bfloat16', (2048, 768), []),
    ],
)
def test_kernels_that_can_be_used(hardware, dtype, sizes, names):
    assert list(kernels_for(hardware, dtype, sizes)) == names


def test_the_count_of_cores_is_that_of_the_device():
    class Described:
        platform, compute_capability, core_count = 'gpu', '9.0', 114

    assert Hardware.of(Described()) == ('gpu', (9, 0), 114)
    assert kernels_for(Hardware.of(Described()), 'bfloat16', (64, 64))['mosaic'] == Mosaic(114)
    assert Hardware.of(jax.devices()[0]) == ('cpu', None, 0)


@pytest.mark.parametrize('tile', [tile_rows, block_rows])
@pytest.mark.parametrize(('rows', 'groups'), [(131072, 128), (65536, 64), (16384, 8), (131072, 32)])
def test_tiles_in_two_groups_cost_at_most_an_eighth(tile, rows, groups):
    computed = (rows // tile(rows, groups) + groups - 1) * tile(rows, groups)  # one more where each group begins
    assert computed <= 1.125 * rows
