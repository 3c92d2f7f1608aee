"""The fused kernels against dense attention on the device, forward and gradients, on rows as long as real ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention.backends import (
    AttentionError,
    choose_implementation,
    local_device,
    packed_rows_attention,
)
from areal_jax.models.attention.cudnn import MAX_SEGMENTS

pytestmark = pytest.mark.gpu
HEADS, KEY_HEADS = 4, 2
# relative to the largest value; bfloat16 has 8 bits, and float32 is multiplied with 10 on tensor cores
ALLOWED = {'bfloat16': 4e-2, 'float32': 2e-2}


def rows(on_gpu, parents):
    """(segment ids, parent ids), int32 [2, T]: lengths that end inside of blocks, and a padded tail."""
    lengths = [(700, 1, 513, 331), (1024, 64, 65, 700)] if on_gpu else [(70, 1, 31), (50, 20, 31)]
    tokens = 2048 if on_gpu else 128
    segment, parent = np.zeros((2, 2, tokens), np.int32)
    for row, sizes in enumerate(lengths):
        ids = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        segment[row, : len(ids)] = ids
        parent[row, : len(ids)] = np.where(ids > 2, 1, ids) if parents else ids  # answers 3, 4 to the prompt 1
    return segment, parent


def runnable(impl, device, **features):
    """Skips what this hardware cannot do; returns whether the kernel must be interpreted."""
    platform, capability = local_device()
    if platform == 'cpu' and impl == 'pallas':
        return True
    try:
        choose_implementation(impl, platform=platform, capability=capability, tokens=2048, **features)
    except AttentionError as error:
        pytest.skip(str(error))
    return False


def assert_close(value, reference, dtype):
    value, reference = np.asarray(value, np.float32), np.asarray(reference, np.float32)
    assert np.abs(value - reference).max() <= ALLOWED[dtype] * np.abs(reference).max()


@functools.partial(jax.jit, static_argnames=('impl', 'interpret', 'remat', 'window'))
def out_and_gradients(arrays, d_out, segment, parent, impl, interpret=False, remat=False, window=None):
    """`arrays` are q, k, v and maybe sinks."""
    positions = None if window is None else jnp.broadcast_to(jnp.arange(segment.shape[1]), segment.shape)

    def attend(q, k, v, sinks=None):
        same = segment if parent is None else parent
        return packed_rows_attention(
            q, k, v, segment, same, scale=q.shape[-1] ** -0.5, impl=impl, interpret=interpret, positions=positions,
            window=window, sinks=sinks,
        )  # fmt: skip

    if remat:
        names = jax.checkpoint_policies.save_only_these_names('attention_output', 'attention_lse')
        attend = jax.checkpoint(attend, policy=names)
    out, pull = jax.vjp(attend, *arrays)
    return out, *pull(d_out)


@pytest.mark.parametrize('remat', [False, True], ids=['saved', 'remat'])
@pytest.mark.parametrize('parents', [False, True], ids=['packed', 'shared prompts'])
@pytest.mark.parametrize(('dtype', 'dim'), [('bfloat16', 64), ('bfloat16', 128), ('float32', 64)])
@pytest.mark.parametrize('impl', ['cudnn', 'pallas'])
def test_kernels_agree_with_dense_attention(impl, dtype, dim, parents, remat, device, on_gpu):
    if (remat or not on_gpu) and (dtype, dim) != ('bfloat16', 64):
        pytest.skip('one dtype and head size is enough')
    if not on_gpu and parents != remat:
        pytest.skip('a kernel that is interpreted takes long')
    interpret = runnable(impl, device, dtype=dtype, head_dim=dim, shares_prompts=parents)
    segment, parent = rows(on_gpu, parents)
    shapes = [(*segment.shape, heads, dim) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    keys = jax.random.split(jax.random.key(0), 4)
    *arrays, d_out = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    parent = parent if parents else None
    found = out_and_gradients(arrays, d_out, segment, parent, impl, interpret, remat)
    exact = [x.astype(jnp.float32) for x in (*arrays, d_out)]
    with jax.default_matmul_precision('highest'):
        expected = out_and_gradients(exact[:3], exact[3], segment, parent, 'dense')
    for value, reference in zip(found, expected, strict=True):
        assert_close(value, reference, dtype)


@pytest.mark.parametrize('window', [None, 128])
@pytest.mark.parametrize('impl', ['cudnn', 'pallas'])
def test_sinks_and_windows_of_the_kernels_agree_with_dense_attention(impl, window, device, on_gpu):
    if not on_gpu:
        pytest.skip('tests/models/attention interprets the kernels')
    runnable(impl, device, dtype='bfloat16', head_dim=64, window=window, sinks=True)
    segment, _ = rows(on_gpu, parents=False)
    shapes = [(*segment.shape, heads, 64) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *arrays, d_out = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    arrays.append(jnp.array([-3.0, 0.0, 2.0, 9.0], jnp.bfloat16))
    found = out_and_gradients(arrays, d_out, segment, None, impl, remat=True, window=window)
    exact = [x.astype(jnp.float32) for x in (*arrays, d_out)]
    with jax.default_matmul_precision('highest'):
        expected = out_and_gradients(exact[:4], exact[4], segment, None, 'dense', window=window)
    for value, reference in zip(found, expected, strict=True):
        assert_close(value, reference, 'bfloat16')


def test_cudnn_takes_rows_of_as_many_segments_as_it_says(device):
    runnable('cudnn', device, dtype='bfloat16', head_dim=64)
    segment = np.repeat(np.arange(1, MAX_SEGMENTS + 1, dtype=np.int32), 2048 // MAX_SEGMENTS)[None]
    shapes = [(*segment.shape, heads, 64) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *arrays, d_out = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    found = out_and_gradients(arrays, d_out, segment, None, 'cudnn')
    expected = out_and_gradients(arrays, d_out, segment, None, 'dense')
    for value, reference in zip(found, expected, strict=True):
        assert_close(value, reference, 'bfloat16')
