"""Choice of an attention backend, what each refuses, and that kernels for other devices at least lower here."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from areal_jax.models.attention import pallas, splash
from areal_jax.models.attention.backends import (
    BACKENDS,
    DENSE_BELOW_TOKENS,
    AttentionError,
    choose_implementation,
    packed_attention,
    shares_prompts,
)
from areal_jax.models.attention.flash import RowIds, Setting
from tests.models.attention.rows import PACKED, SCALE, SHARED, D, K, N, T, attend, tensors


def choose(impl='auto', **changes):
    facts = {'platform': 'cpu', 'tokens': 4096, 'dtype': 'bfloat16', 'head_dim': 64} | changes
    return choose_implementation(impl, **facts)


HOPPER, AMPERE = {'platform': 'gpu', 'capability': (9, 0)}, {'platform': 'gpu', 'capability': (8, 0)}


@pytest.mark.parametrize(
    ('facts', 'expected'),
    [
        ({}, 'blocked'),
        ({'tokens': DENSE_BELOW_TOKENS}, 'blocked'),
        ({'tokens': DENSE_BELOW_TOKENS - 1}, 'dense'),
        ({'platform': 'metal'}, 'blocked'),
        ({'platform': 'tpu'}, 'splash'),
        ({'platform': 'tpu', 'tokens': 128}, 'splash'),
        ({'platform': 'tpu', 'shares_prompts': True}, 'blocked'),
        ({'platform': 'tpu', 'window': 512}, 'splash'),
        ({'platform': 'tpu', 'slices': True}, 'blocked'),
        ({'platform': 'tpu', 'dtype': 'float16'}, 'blocked'),
        (HOPPER, 'cudnn'),
        (HOPPER | {'excluded': ('cudnn',)}, 'pallas'),
        (HOPPER | {'excluded': ('cudnn', 'pallas')}, 'blocked'),
        (HOPPER | {'shares_prompts': True}, 'pallas'),
        (HOPPER | {'window': 512}, 'pallas'),
        (HOPPER | {'sinks': True}, 'pallas'),
        (HOPPER | {'sinks': True, 'excluded': ('pallas',)}, 'cudnn'),
        ({'platform': 'tpu', 'sinks': True, 'window': 128}, 'splash'),
        (HOPPER | {'slices': True}, 'pallas'),
        (HOPPER | {'dtype': 'float32'}, 'pallas'),
        (HOPPER | {'head_dim': 84}, 'pallas'),
        (HOPPER | {'head_dim': 512}, 'blocked'),
        (AMPERE, 'pallas'),
        ({'platform': 'gpu', 'capability': (7, 5)}, 'blocked'),
    ],
)
def test_auto_takes_the_best_that_can_do_what_is_asked(facts, expected):
    assert choose(**facts) == expected


@pytest.mark.parametrize(
    ('impl', 'facts', 'message'),
    [
        ('flash', {}, "impl='flash' is unknown; use one of auto, dense, blocked, pallas, splash, cudnn"),
        ('splash', {}, "'splash' does not run on 'cpu' .only tpu.; use 'dense' or 'blocked'"),
        ('cudnn', AMPERE, r"'cudnn' needs CUDA compute capability \(9, 0\), this device has \(8, 0\); use .*'pallas'"),
        ('cudnn', HOPPER | {'dtype': 'float32'}, "'cudnn' cannot compute in float32 .*'dense' or 'blocked' or"),
        ('cudnn', HOPPER | {'shares_prompts': True}, "'cudnn' cannot express shared prompts .*'pallas'"),
        ('splash', {'platform': 'tpu', 'slices': True}, "'splash' cannot express a slice of the queries .*'blocked'"),
        ('cudnn', HOPPER | {'head_dim': 84}, "'cudnn' cannot take head size 84 .at most 256, .* of 8.*'pallas'"),
    ],
)  # fmt: skip
def test_what_a_backend_cannot_do_is_named_with_one_that_can(impl, facts, message):
    with pytest.raises(AttentionError, match=message):
        choose(impl, **facts)


def test_prompts_are_shared_by_what_can_mask_them():
    assert {impl: shares_prompts(impl) for impl in BACKENDS} == {
        'dense': True, 'blocked': True, 'pallas': True, 'splash': False, 'cudnn': False,
    }  # fmt: skip
    with pytest.raises(AttentionError, match="impl='auto' is not a backend"):
        shares_prompts('auto')


def test_a_call_refuses_what_the_mask_cannot_express():
    q, k, v = tensors()
    refused = lambda q, parent, **more: packed_attention(q, k, v, PACKED[0], parent, scale=1.0, impl='splash', **more)
    with pytest.raises(AttentionError, match=r"'splash' cannot express shared prompts .*; use 'dense' or 'blocked' or"):
        refused(q, SHARED[1])
    with pytest.raises(AttentionError, match="'splash' cannot express a slice"):
        refused(q[:10], PACKED[1])


def test_shared_prompts_seen_too_late_to_refuse_are_nan_and_not_wrong():
    # under jit ids are unknown while the program is built; tokens 50 to 99 and 125 to 134 have another parent
    out = attend(*tensors(), *SHARED, 'splash')
    lost = SHARED[0] != SHARED[1]
    assert np.isnan(out[lost]).all()
    assert np.isfinite(out[~lost]).all()


def test_a_window_over_positions_that_are_no_places_is_nan_and_not_wrong():
    # splash counts places of the row: two segments at positions 5, 6, ... are right, one whose positions jump is not
    jumped = np.r_[5:155].astype(np.int32)
    jumped[80:] += 1
    row = np.r_[np.full(80, 1), np.full(70, 2)].astype(np.int32)
    within, across = (attend(*tensors(), one, one, 'splash', jumped, 13) for one in (row, np.ones_like(row)))
    assert np.isfinite(within).all()
    assert np.isnan(across).all()


def test_auto_in_a_call_takes_blocks_for_long_rows():
    def loops(tokens):
        one = np.ones(tokens, np.int32)
        return 'while' in str(jax.make_jaxpr(lambda q, k, v: attend(q, k, v, one, one, 'auto'))(*tensors(0, tokens)))

    assert not loops(DENSE_BELOW_TOKENS - 1)
    assert loops(DENSE_BELOW_TOKENS)


@pytest.mark.parametrize('extras', [(None, False), (64, True)], ids=['causal', 'window and sinks'])
@pytest.mark.parametrize(
    ('attend_rows', 'platform', 'dim', 'dtype', 'kernel'),
    [
        (pallas.attend_rows, 'cuda', 64, 'bfloat16', '__gpu$xla.gpu.triton'),
        (pallas.attend_rows, 'cuda', 80, 'float32', '__gpu$xla.gpu.triton'),
        (splash.attend_rows, 'tpu', 64, 'bfloat16', 'tpu_custom_call'),
    ],
)
def test_kernels_lower_for_their_devices(attend_rows, platform, dim, dtype, kernel, extras):
    # forward, gradient of q, gradients of k and v; that they run there is what the self-check is for
    window, has_sinks = extras

    def loss(q, k, v, *sinks):
        places = jnp.arange(T)[None] if window else None
        ids = RowIds(jnp.asarray(PACKED[0])[None], jnp.asarray(PACKED[1])[None], places, 0)
        return jnp.sum(attend_rows(q, k, v, ids, Setting(SCALE, window), *sinks).astype(jnp.float32))

    arrays = [jax.ShapeDtypeStruct((1, T, heads, dim), dtype) for heads in (N, K, K)]
    arrays += [jax.ShapeDtypeStruct((N,), 'float32')] * has_sinks
    # Triton asks for the device that it compiles for; the kernels for TPU ask for none
    gpu = AbstractMesh((1,), ('x',), abstract_device=AbstractDevice('NVIDIA H100', None, 'gpu'))
    with use_abstract_mesh(gpu) if platform == 'cuda' else contextlib.nullcontext():
        traced = jax.jit(jax.grad(loss, argnums=range(len(arrays)))).trace(*arrays)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f'@{kernel}') == 3
    assert [one.dtype for one in traced.out_info] == [one.dtype for one in arrays]


def test_pallas_pads_head_sizes_that_are_no_power_of_two():
    # 8 to 16 in all tests here; 80 to 128 for models: a block of 4 bytes * 128 is 32 tokens
    assert [pallas.padded_dim(d) for d in (D, 16, 80, 128)] == [16, 16, 128, 128]
    assert [pallas.block_tokens(d, t) for d, t in ((128, 'bfloat16'), (80, 'float32'), (256, 'float32'))] == [
        64,
        32,
        16,
    ]
