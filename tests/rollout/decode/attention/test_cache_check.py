"""Which decode attention is chosen, and that the check finds what is wrong with one."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged

from areal_jax.models.attention.backends import AttentionError
from areal_jax.native import compiled_library as library
from areal_jax.rollout.decode.attention import choose as check
from areal_jax.rollout.decode.attention import pallas_kernels
from areal_jax.rollout.decode.attention.choose import (
    Demand,
    NativeAttention,
    choose_checked,
    choose_implementation,
    self_check,
)
from areal_jax.rollout.decode.attention.loops import GatherAttention, LoopAttention
from areal_jax.rollout.decode.attention.pallas_kernels import (
    HeadMajorTpuAttention,
    PallasGpuAttention,
    PallasTpuAttention,
    Tuning,
)
from tests.native import needs_kernels

CPU = jax.devices('cpu')[0]
SMALL = Demand(heads=4, kv_heads=2, head_dim=16, block_tokens=16, table_blocks=4, dtype='float32', windows=False)
WINDOWED = dataclasses.replace(SMALL, windows=True)
# 9 heads in 3 groups, and head and block sizes that are no powers of two
ODD = dataclasses.replace(SMALL, heads=9, kv_heads=3, head_dim=20, block_tokens=24)
SINKS = dataclasses.replace(WINDOWED, sinks=True)
BFLOAT16 = dataclasses.replace(ODD, dtype='bfloat16')


def device(platform, capability=None):
    return types.SimpleNamespace(platform=platform, compute_capability=capability)


@pytest.mark.parametrize('demand', [SMALL, ODD, BFLOAT16, SINKS], ids=['small', 'odd', 'bfloat16', 'sinks'])
@pytest.mark.parametrize('attention', [GatherAttention(check.TABLE_BLOCKS), LoopAttention()], ids=lambda a: a.name)
def test_plain_ones_agree_with_float64(attention, demand):
    assert self_check(attention, demand, CPU) < (1e-6 if demand.dtype == 'float32' else 2e-2)


@needs_kernels
@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'sinks': True, 'heads': 9, 'kv_heads': 3},
        {'head_dim': 64},
        {'head_dim': 128},
        {'block_tokens': 1},
        {'heads': 9, 'kv_heads': 3, 'head_dim': 20},
    ],
)
def test_native_agrees_with_float64(changes):
    assert self_check(NativeAttention(), dataclasses.replace(WINDOWED, **changes), CPU) < 1e-6


ODD_SINKS = dataclasses.replace(ODD, windows=True, sinks=True)
BFLOAT16_SINKS = dataclasses.replace(ODD_SINKS, dtype='bfloat16')
ONE_TOKEN = dataclasses.replace(SINKS, block_tokens=1)
more_sinks = [pytest.param(BFLOAT16_SINKS, marks=pytest.mark.slow), pytest.param(ONE_TOKEN, marks=pytest.mark.slow)]


@pytest.mark.parametrize('demand', [SMALL, ODD, BFLOAT16, ODD_SINKS, *more_sinks], ids=lambda d: f'{d.dtype} {d.sinks}')
def test_pallas_gpu_agrees_with_float64_in_the_interpreter(demand):
    attention = PallasGpuAttention(demand.head_dim, interpret=True)
    assert self_check(attention, demand, CPU) < (1e-6 if demand.dtype == 'float32' else 3e-2)


@pytest.mark.parametrize('demand', [ODD_SINKS, *more_sinks], ids=lambda d: f'{d.dtype}')
def test_pallas_tpu_with_sinks_agrees_with_float64_in_the_interpreter(demand):
    attention = HeadMajorTpuAttention(demand.head_dim, interpret=True)
    assert self_check(attention, demand, CPU) < (1e-6 if demand.dtype == 'float32' else 3e-2)


def test_parts_of_a_row_add_up(monkeypatch):
    # parts of 16 positions: rows of up to 64 have several, and in a window of 24 the last parts may hold none
    monkeypatch.setattr(pallas_kernels, 'tile_tokens', lambda dim, dtype: 16)
    attention = PallasGpuAttention(WINDOWED.head_dim, interpret=True, tuning=Tuning(16, 4, 2))
    assert self_check(attention, WINDOWED, CPU) < 1e-6


@pytest.mark.slow
def test_pallas_tpu_means_what_the_kernels_reference_computes(monkeypatch):
    demand = dataclasses.replace(ODD, windows=True)

    # jax's interpreter lacks what the kernel does with its copies; the reference beside it takes the same arguments
    def reference(*arrays, num_kv_pages_per_block, num_queries_per_block, **setting):
        assert 0 < num_kv_pages_per_block <= check.TABLE_BLOCKS
        assert 0 < num_queries_per_block <= check.ROWS
        out = ragged.ref_ragged_paged_attention(*arrays, **setting)
        left = len(arrays[0]) - len(out)  # rows that the kernel does not write
        return jnp.concatenate([out, jnp.full((left, *out.shape[1:]), jnp.nan)])

    monkeypatch.setattr('jax.experimental.pallas.ops.tpu.ragged_paged_attention.ragged_paged_attention', reference)
    with jax.disable_jit():  # the reference reads lengths
        assert self_check(PallasTpuAttention(demand.kv_heads, demand.head_dim), demand, CPU) < 1e-6


class OneHeadForAll(GatherAttention):
    def write(self, layer, k, v, blocks, offsets):
        return super().write(layer, jnp.broadcast_to(k[:, :1], k.shape), v, blocks, offsets)


class Unmasked(GatherAttention):
    def attend(self, q, layer, tables, lengths, window, sinks=None):
        return super().attend(q, layer, tables, jnp.where(lengths > 0, lengths + 1, 0), window)


class TablesIgnored(GatherAttention):
    def attend(self, q, layer, tables, lengths, window, sinks=None):
        return super().attend(q, layer, jnp.sort(tables, axis=1), lengths, window)


class NoWindow(GatherAttention):
    def attend(self, q, layer, tables, lengths, window, sinks=None):
        return super().attend(q, layer, tables, lengths, None)


class NoCopy(GatherAttention):
    def copy(self, layer, sources, targets):
        return layer


class Raises(GatherAttention):
    def attend(self, q, layer, tables, lengths, window, sinks=None):
        raise RuntimeError('no ptxas')


@pytest.mark.parametrize(
    ('wrong', 'complaint'),
    [
        (OneHeadForAll, 'a read block is off by'),
        (Unmasked, 'attention is not finite in 8 rows'),
        (TablesIgnored, 'attention is'),
        (NoWindow, 'attention in a window of 24 is off by'),
        (NoCopy, 'a read block is off by'),
        (Raises, 'does not run here: no ptxas'),
    ],
)
def test_the_check_finds(wrong, complaint):
    with pytest.raises(AttentionError, match=f"rollout.attention='gather' .*{complaint}.*; use 'gather'"):
        self_check(wrong(check.TABLE_BLOCKS), WINDOWED, CPU)


@pytest.mark.parametrize(
    ('demand', 'where', 'chosen'),
    [
        (WINDOWED, CPU, 'native'),
        (BFLOAT16, CPU, 'loops'),
        (SMALL, device('gpu', '9.0'), 'pallas_gpu'),
        (SMALL, device('gpu', '8.0'), 'pallas_gpu'),
        (SMALL, device('gpu', '7.5'), 'gather'),
        (WINDOWED, device('gpu', '9.0'), 'pallas_gpu'),
        (SINKS, CPU, 'native'),
        (SINKS, device('gpu', '9.0'), 'pallas_gpu'),
        (SINKS, device('tpu'), 'pallas_tpu'),
        (dataclasses.replace(SMALL, head_dim=512), device('gpu', '9.0'), 'gather'),
        (WINDOWED, device('tpu'), 'pallas_tpu'),
        (dataclasses.replace(SMALL, dtype='float16'), device('tpu'), 'gather'),
    ],
)
def test_auto_takes_the_best_that_can(demand, where, chosen):
    assert choose_implementation('auto', demand, where) == chosen


@pytest.mark.parametrize(
    ('impl', 'demand', 'where', 'message'),
    [
        ('paged', SMALL, CPU, "rollout.attention='paged' is unknown; use one of auto, "),
        (
            'pallas_gpu',
            SMALL,
            CPU,
            "rollout.attention='pallas_gpu' does not run on 'cpu' .only gpu.; use 'gather' or 'loops' or 'native'",
        ),
        ('pallas_tpu', SMALL, device('gpu', '9.0'), "'pallas_tpu' does not run on 'gpu' .only tpu.; use 'gather' or"),
        ('pallas_gpu', SMALL, device('gpu', '7.5'), 'needs CUDA compute capability .8, 0.'),
        ('pallas_tpu', dataclasses.replace(SMALL, dtype='float16'), device('tpu'), 'cannot compute in float16'),
        ('pallas_gpu', dataclasses.replace(SMALL, head_dim=512), device('gpu', '9.0'), 'cannot take head size 512'),
    ],
)
def test_a_named_one_that_cannot_is_refused(impl, demand, where, message):
    with pytest.raises(AttentionError, match=message):
        choose_implementation(impl, demand, where)


def test_without_a_compiler_auto_takes_the_loops_and_says_why(monkeypatch):
    def refuse():
        raise library.NativeError('there is no C++ compiler')

    monkeypatch.setattr(library, 'register', refuse)
    attention, reasons = choose_checked('auto', SMALL, CPU)
    assert (attention.name, reasons) == (
        'loops',
        ("rollout.attention='native' can not be had: there is no C++ compiler",),
    )
    with pytest.raises(AttentionError, match=r'there is no C\+\+ compiler'):
        choose_checked('native', SMALL, CPU)


def test_auto_passes_over_a_kernel_that_fails_its_check_and_says_why():
    # a GPU by its attributes, and the kernel is then run on the default CPU, where Triton has no lowering
    class Pretended:
        platform, compute_capability = 'gpu', '9.0'

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, 'is_attached', lambda device: True)
        patch.setattr(jax, 'default_device', lambda device: jax.ensure_compile_time_eval())
        attention, reasons = choose_checked('auto', SMALL, Pretended())
        assert attention.name == 'gather'
        assert len(reasons) == 1
        assert "rollout.attention='pallas_gpu' does not run here: " in reasons[0]
        with pytest.raises(AttentionError, match="'pallas_gpu' does not run here: "):
            choose_checked('pallas_gpu', SMALL, Pretended())


def test_a_process_checks_a_kernel_once_for_each_demand_and_again_one_that_failed(monkeypatch):
    checked, kernel = [], dataclasses.replace(check.IMPLEMENTATIONS['loops'], is_kernel=True)
    monkeypatch.setitem(check.IMPLEMENTATIONS, 'loops', kernel)

    def note(attention, demand, device):
        checked.append((attention.name, demand, device.id))
        if len(checked) == 1:
            raise AttentionError('fails at first')

    monkeypatch.setattr(check, 'self_check', note)
    first, second, *_ = jax.local_devices()
    with pytest.raises(AttentionError, match='fails at first'):
        choose_checked('loops', SMALL, first)
    for demand, where in ((SMALL, first), (SMALL, second), (WINDOWED, second), (SMALL, first)):
        assert choose_checked('loops', demand, where)[0].name == 'loops'
    assert checked == [('loops', SMALL, 0), ('loops', SMALL, 0), ('loops', WINDOWED, 1)]


def test_on_a_device_that_is_only_described_nothing_is_checked():
    attention, reasons = choose_checked('auto', SMALL, device('gpu', '9.0'))  # no process has this device
    assert (attention.name, reasons) == ('pallas_gpu', ())


@pytest.mark.parametrize('attention', [GatherAttention(check.TABLE_BLOCKS), LoopAttention()], ids=lambda a: a.name)
def test_the_check_finds_sinks_that_are_not_in_the_sum(attention):
    class Without:
        def __getattr__(self, name):
            return getattr(attention, name)

        def attend(self, q, layer, tables, lengths, window, sinks):
            return attention.attend(q, layer, tables, lengths, window)

    with pytest.raises(AttentionError, match=r'attention is off by 0\.\d+ of its largest value'):
        self_check(Without(), SINKS, CPU)
