"""The paged kernels lower for their devices in the shapes of models, and contain NaN; test_check.py has the values."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice, use_abstract_mesh
from jax.sharding import AbstractMesh

from areal_jax.rollout.decode.attention import pallas_kernels
from areal_jax.rollout.decode.attention.pallas_kernels import (
    HeadMajorTpuAttention,
    PallasGpuAttention,
    PallasTpuAttention,
    Tuning,
    default_tuning,
)
from tests.diagonal import diagonal

# query heads, key heads, head size of SmolLM2-135M, Qwen2.5-7B and gpt-oss-20b
SHAPES = {'smollm2': (9, 3, 64), 'qwen2.5-7b': (28, 4, 128), 'gpt-oss-20b': (64, 8, 64)}
ROWS, BLOCK_TOKENS, TABLE_BLOCKS = 32, 64, 32
# both kernels ask for the device that they are compiled for
DEVICES = {'cuda': AbstractDevice('NVIDIA H100', None, 'gpu'), 'tpu': AbstractDevice('TPU v5 lite', 1, 'tpu')}


def lower(attention, shape, dtype, platform, window=None, sinks=False):
    """Text of a write and an `attend`."""
    heads, kv_heads, dim = shape
    blocks = ROWS * TABLE_BLOCKS + 1

    def step(q, k, v, layer, tables, lengths, *logits):
        layer = attention.write(layer, k, v, tables[:, 0], lengths % BLOCK_TOKENS)
        return attention.attend(q, layer, tables, lengths, window, *logits), layer

    q, kv = (jax.ShapeDtypeStruct((ROWS, n, dim), dtype) for n in (heads, kv_heads))
    layer = jax.eval_shape(lambda: attention.empty(blocks, kv_heads, BLOCK_TOKENS, dim, jnp.dtype(dtype)))
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((ROWS, TABLE_BLOCKS), (ROWS,)))
    with use_abstract_mesh(AbstractMesh((1,), ('x',), abstract_device=DEVICES[platform])):
        logits = [jax.ShapeDtypeStruct((heads,), dtype)] * sinks
        traced = jax.jit(step, donate_argnums=3).trace(q, kv, kv, layer, *integers, *logits)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ('dtype', 'window', 'sinks', 'name'),
    diagonal(itertools.product(('bfloat16', 'float32'), (None, 512, 128), (False, True)), SHAPES),
)
def test_pallas_gpu_lowers_for_cuda(name, dtype, window, sinks):
    text = lower(PallasGpuAttention(SHAPES[name][2]), SHAPES[name], dtype, 'cuda', window, sinks)
    assert text.count('@__gpu$xla.gpu.triton') == 1


@pytest.mark.parametrize(
    ('dtype', 'window', 'sinks', 'name'),
    diagonal(itertools.product(('bfloat16', 'float32'), (None, 512), (False, True)), SHAPES),
)
def test_pallas_tpu_lowers_for_tpu(name, dtype, window, sinks):
    heads, dim = SHAPES[name][1:]
    attention = HeadMajorTpuAttention(dim) if sinks else PallasTpuAttention(heads, dim)
    assert lower(attention, SHAPES[name], dtype, 'tpu', window, sinks).count('@tpu_custom_call') == 1


def test_the_kernel_of_jax_has_no_sinks():
    attention = PallasTpuAttention(2, 16)
    layer = attention.empty(2, 2, 16, 16, jnp.dtype('float32'))
    arrays = jnp.zeros((1, 4, 16)), layer, jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match='cannot express sinks; use HeadMajorTpuAttention'):
        attention.attend(*arrays, window=8, sinks=jnp.zeros(4))


def test_pallas_gpu_gives_nan_to_those_alone_who_see_it():
    # rows of 3, 2 and 1 positions of one shared block; the value at position 1 is infinite
    attention = PallasGpuAttention(16, interpret=True)
    k, v = (jnp.asarray(x, jnp.float32) for x in np.random.default_rng(0).normal(size=(2, 3, 2, 16)))
    layer = attention.empty(1, 2, 16, 16, jnp.dtype('float32'))
    layer = attention.write(layer, k, v.at[1, 0, 5].set(jnp.inf), jnp.zeros(3, jnp.int32), jnp.arange(3))
    arrays = jnp.ones((3, 4, 16)), layer, jnp.zeros((3, 1), jnp.int32), jnp.array([3, 2, 1])
    out = jax.jit(attention.attend, static_argnums=4)(*arrays, None)
    heads = np.isnan(out).all(axis=2)  # the heads of the other key head do not see it
    np.testing.assert_array_equal(heads, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert np.isfinite(out[~heads]).all()


@pytest.mark.parametrize(
    ('attention', 'block_tokens', 'read'),
    [
        # tiles of 64 tokens: 65 -> 128, 64 -> 64, 1 -> 64, 0 -> 0
        (PallasGpuAttention(64), 64, 256),
        # 256 * 2 bytes * 32 tokens = 16 KB: 65 -> 96, 64, 32, 0
        (PallasGpuAttention(256), 64, 192),
        # tiles of two blocks of 64: 65 -> 128, 64 -> 128, 1 -> 128
        (PallasTpuAttention(2, 64), 64, 384),
        # one block is more than a tile: 200 each
        (PallasTpuAttention(2, 64), 200, 600),
        # whole blocks: 65 -> 128, 64, 1 -> 64, 0
        (HeadMajorTpuAttention(64), 64, 256),
    ],
)
def test_positions_read_are_whole_tiles(attention, block_tokens, read):
    assert attention.positions_read(jnp.array([65, 64, 1, 0]), block_tokens) == read


def test_layouts():
    # Triton takes powers of two of at least 16; a TPU whole tiles of 128 lanes and of 1, 2, 4 or 8 n pairs of heads
    assert [pallas_kernels.padded_dim(d) for d in (4, 16, 64, 80, 128)] == [16, 16, 64, 128, 128]
    assert [pallas_kernels.tile_tokens(d, t) for d, t in ((64, 'bfloat16'), (128, 'float32'), (256, 'float32'))] == [
        64,
        32,
        16,
    ]
    assert [pallas_kernels.padded_lanes(d) for d in (64, 128, 192)] == [128, 128, 256]
    assert [pallas_kernels.padded_heads(n) for n in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 16]


def test_how_pallas_gpu_cuts_its_work_changes_the_result_by_rounding_alone():
    rng = np.random.default_rng(0)
    blocks, lengths = 20, jnp.array([640, 300])
    q = jnp.asarray(rng.normal(size=(2, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(64 * blocks, 2, 16)), jnp.float32) for _ in range(2))
    block, offset = (x.astype(np.int32).ravel() for x in np.indices((blocks, 64)))
    tables = jnp.arange(blocks, dtype=jnp.int32).reshape(2, -1)

    def attend(tuning):
        attention = PallasGpuAttention(16, interpret=True, tuning=tuning)
        layer = attention.write(attention.empty(blocks, 2, 64, 16, q.dtype), k, v, jnp.asarray(block), offset)
        return attention.attend(q, layer, tables, lengths, None)

    one, two = attend(Tuning(512, 4, 2)), attend(Tuning(128, 2, 3))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(attend(None), attend(Tuning(256, 4, 2)))


def test_long_contexts_are_cut_into_larger_parts():
    assert default_tuning(2048, 64) == (256, 4, 2)
    assert default_tuning(16384, 256) == (512, 8, 2)
