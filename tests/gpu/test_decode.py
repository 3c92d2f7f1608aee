"""The engine's log-probs are the learner's, on the device and in the dtypes of runs; the paged kernels are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode.attention.choose import Demand, choose_checked
from areal_jax.rollout.decode.attention.loops import GatherAttention
from areal_jax.rollout.decode.attention.pallas_kernels import PallasGpuAttention
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.decode.prefill import BLOCKED_ROWS, choose_row_attention
from benchmarks.gpu_parts.decode import decode_errors
from benchmarks.gpu_parts.shapes import TINY
from tests.app.small import SmallRun

pytestmark = pytest.mark.gpu
# nats, mean and largest: float32 products have 10 bits on tensor cores unless the precision is 'highest'
ALLOWED = {'float32': (5e-3, 5e-2), 'bfloat16': (5e-2, 0.6)}


@pytest.mark.parametrize('attention', ['dense', 'auto'])
@pytest.mark.parametrize('dtype', ALLOWED)
def test_decoding_and_training_agree(dtype, attention, device):
    errors = decode_errors(TINY, dtype, attention)
    mean, largest = ALLOWED[dtype]
    assert errors['mean_difference'] <= mean
    assert errors['largest_difference'] <= largest


def test_they_agree_to_rounding_with_whole_float32_products(device):
    with jax.default_matmul_precision('highest'):
        assert decode_errors(TINY, 'float32')['largest_difference'] <= 2e-4


# query heads, key heads and head size of SmolLM2-135M, Qwen2.5-1.5B and Qwen2.5-7B
SHAPES = [(9, 3, 64), (12, 2, 128), (28, 4, 128)]


def demand(shape, dtype, on_gpu):
    """Of 256 blocks a row; small on a CPU, whose interpreter is slow."""
    heads, kv_heads, dim = shape if on_gpu else (4, 2, 16)
    return Demand(heads, kv_heads, dim, 64 if on_gpu else 16, 256 if on_gpu else 6, dtype, windows=False)


def rows_of(demand, rows):
    """(q, k, v of every position, tables, descending lengths); every second row begins with its neighbour's block."""
    rng = np.random.default_rng(0)
    blocks = rows * demand.table_blocks
    shapes = (rows, demand.heads), (blocks * demand.block_tokens, demand.kv_heads)
    q, kv = ((*shape, demand.head_dim) for shape in shapes)
    q, k, v = (jnp.asarray(rng.standard_normal(shape, np.float32), demand.dtype) for shape in (q, kv, kv))
    tables = rng.permutation(blocks).reshape(rows, -1).astype(np.int32)
    tables[1::2, 0] = tables[::2, 0]
    lengths = np.sort(rng.integers(1, demand.table_blocks * demand.block_tokens, rows))[::-1].astype(np.int32)
    return q, k, v, tables, lengths


@pytest.mark.parametrize(('window', 'sinks'), [(None, False), (None, True), (1000, False), (128, True)])
@pytest.mark.parametrize('dtype', ALLOWED)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_the_paged_kernel_is_plain_attention_over_long_tables(shape, dtype, window, sinks, device, on_gpu):
    if not on_gpu and (shape, dtype, sinks, window) != (SHAPES[0], 'float32', False, None):
        pytest.skip('a kernel that is interpreted takes long')
    sizes = demand(shape, dtype, on_gpu)
    q, k, v, tables, lengths = rows_of(sizes, rows=8)
    block, offset = (x.astype(np.int32).ravel() for x in np.indices((tables.size, sizes.block_tokens)))

    def attend(attention, *arrays):
        q, k, v = arrays
        layer = attention.empty(tables.size, sizes.kv_heads, sizes.block_tokens, sizes.head_dim, jnp.dtype(q.dtype))
        layer = attention.write(layer, k, v, jnp.asarray(block), jnp.asarray(offset))
        logits = jnp.linspace(-2.0, 5.0, sizes.heads) if sinks else None
        return attention.attend(q, layer, jnp.asarray(tables), jnp.asarray(lengths), window, logits)

    kernel = PallasGpuAttention(sizes.head_dim, interpret=not on_gpu)
    found = jax.jit(functools.partial(attend, kernel))(q, k, v)
    with jax.default_matmul_precision('highest'):
        exact = (x.astype(jnp.float32) for x in (q, k, v))
        expected = jax.jit(functools.partial(attend, GatherAttention(sizes.table_blocks)))(*exact)
    error = np.abs(np.asarray(found, np.float32) - np.asarray(expected)).max() / np.abs(expected).max()
    assert error <= {'float32': 2e-2, 'bfloat16': 4e-2}[dtype]  # float32 is multiplied with 10 bits on tensor cores


@pytest.mark.parametrize('dtype', ALLOWED)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_the_kernel_of_the_device_passes_its_check_and_is_chosen(shape, dtype, device, on_gpu):
    attention, rejected = choose_checked('auto', demand(shape, dtype, on_gpu), device)
    assert rejected == ()
    assert attention.name in (('pallas_gpu',) if on_gpu else ('native', 'loops'))  # native needs float32 and a compiler


def test_a_run_decodes_with_the_kernel(tmp_path, on_gpu, capsys):
    run = SmallRun(tmp_path, run__steps=2, rollout__attention='pallas_gpu' if on_gpu else 'auto').train()
    assert len(run.batches) == 2
    assert 'passes over' not in capsys.readouterr().err


@pytest.mark.parametrize('dtype', ALLOWED)
def test_packed_prefills_take_a_kernel_where_the_device_has_one(dtype, device, on_gpu):
    # chosen inside of a program, the check of a kernel failed, and loops of XLA took its place: a hundred times slower
    chosen, rejected = choose_row_attention(TINY, dtype, device)
    assert rejected == ()
    kernel = 'cudnn' if dtype == 'bfloat16' else 'pallas'
    assert chosen == ({(False, False): kernel, (False, True): 'pallas'} if on_gpu else BLOCKED_ROWS)
    backend = JaxDecodeBackend(
        Decoder(TINY), slots=2, context_tokens=192, block_tokens=64, prefill_buckets=(64,), decode_steps=1,
        filtered=False, dtype=dtype,
    )  # fmt: skip
    assert backend.placement.row_attention == chosen
