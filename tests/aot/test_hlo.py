"""A program's text is read by its meaning: repeats of loops, groups of devices, arithmetic, copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from areal_jax.aot import hlo

LAYERS, TOKENS, WIDTH = 5, 64, 32
TPU = """HloModule jit_step, is_scheduled=true

FileNames
1 "/usr/lib/python3/site-packages/jax/_src/pjit.py"
2 "/home/me/areal_jax/learning/forward.py"

FunctionNames
1 "pjit"
2 "Stream.constrain"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=120 end_line=120 column=4 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=1}

%all-reduce-scatter.1 (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[8,4]{1,0:T(8,128)} all-reduce(%p), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %slice.1 = f32[2,4]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %p), dynamic_slice_sizes={2,4}
}

%body (arg: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %arg = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %kernel = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"block": "{128}"
}}, metadata={op_name="step/splash"}
  %mark = f32[8,4]{1,0} custom-call(%x), custom_call_target="PrepareAsyncCallStart"
  %gather = (f32[8,4], f32[16,4]) all-gather-start(%kernel), replica_groups=[2,2]<=[4], metadata={stack_frame_id=2}
  %scatter = f32[2,4]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %count = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%count, %two)
  ROOT %out = (s32[]{:T(128)}, /*index=1*/f32[8,4]{1,0}) tuple(%next, /*index=1*/%x)
}

%condition (arg: (s32[], f32[8,4])) -> pred[] {
  %arg = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %limit = s32[] constant(14)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%moved (p: bf16[4096,8192]) -> bf16[8192,4096] {
  %p = bf16[4096,8192]{1,0} parameter(0)
  ROOT %t = bf16[8192,4096]{1,0} transpose(%p), dimensions={1,0}
}

ENTRY %main (a: (s32[], f32[8,4]), b: bf16[4096,8192]) -> bf16[8192,4096] {
  %a = (s32[], f32[8,4]{1,0}) parameter(0)
  %b = bf16[4096,8192]{1,0} parameter(1)
  %loop = (s32[], f32[8,4]{1,0}) while(%a), condition=%condition, body=%body
  %conv = f32[16,64]{1,0} convolution(%b, %b), dim_labels=bf_io->bf
  ROOT %turned = bf16[8192,4096]{1,0} fusion(%b), kind=kLoop, calls=%moved, metadata={op_name="jit(step)/transpose"}
}
"""


def mesh_of(**sizes):
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_a_loop_that_is_unrolled_runs_as_often_as_its_counter_and_condition_allow():
    module = hlo.parse(TPU)
    assert module.times['body'] == 7  # 14 in steps of 2
    assert hlo.find_kernels(module) == {'tpu_custom_call splash': 7}


def test_exchanges_have_axes_repeats_and_the_line_of_the_package():
    found = {one.kind: one for one in hlo.find_collectives(hlo.parse(TPU), mesh_of(fsdp=2, tensor=2))}
    gather, scatter = found['all-gather'], found['reduce-scatter']
    assert (gather.axes, gather.array, gather.bytes, gather.times) == ('tensor', 'f32[16,4]', 256, 7)
    assert gather.source == 'learning/forward.py:120 (constrain)'
    assert (scatter.axes, scatter.array, scatter.times) == ('fsdp', 'f32[8,4]', 7)  # inside of a fusion
    assert len(found) == 2


def test_a_transpose_in_a_fusion_is_a_copy_and_small_ones_are_left_out():
    module = hlo.parse(TPU)
    assert [(one.array, one.bytes) for one in hlo.find_copies(module, 2**20)] == [('bf16[8192,4096]', 2**26)]
    assert hlo.find_copies(module, 2**26 + 1) == []
    assert hlo.find_buffers(module, 1)[0].array == 'bf16[8192,4096]'  # parameters are no buffers of their own


OVERLAPPED = """HloModule jit_step, is_scheduled=true

%product (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%nested (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %inner = bf16[8,8]{1,0} fusion(%p), kind=kCustom, calls=%product
}

%sum (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,8]{1,0} add(%p, %p)
}

%exchanged (p: bf16[8,8]) -> bf16[2,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %rs = bf16[2,8]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}

%body (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %a = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%nested
  %first = ((bf16[8,8]{1,0}, bf16[8,8]), (bf16[2,8]{1,0}, bf16[2,8])) reduce-scatter-start(%a, %x), dimensions={0}
  %b = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%nested
  %second = ((bf16[8,8]), bf16[2,8], u32[]) async-start(%b), calls=%exchanged
  %kernel = bf16[8,8]{1,0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton"
  %going = ((bf16[8,8]), bf16[2,8], u32[]) async-update(%second)
  %c = bf16[8,8]{1,0} fusion(%x), kind=kLoop, calls=%sum
  %marker = bf16[8,8]{1,0} custom-call(%c), custom_call_target="Sharding"
  %one = (bf16[2,8], bf16[2,8]) reduce-scatter-done(%first)
  %d = bf16[8,8]{1,0} dot(%kernel, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %two = bf16[2,8] async-done(%going)
  %e = bf16[8,8]{1,0} dot(%d, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %waited = bf16[8,8]{1,0} all-reduce(%e), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (a: bf16[8,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %gather = (bf16[8,8], bf16[32,8]) all-gather-start(%a), dimensions={0}
  %loop = bf16[8,8]{1,0} while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %gathered = bf16[32,8] all-gather-done(%gather)
}
"""


def test_an_exchange_covers_the_products_and_kernels_between_its_start_and_its_end():
    covers = {one.kind: one for one in hlo.find_covers(hlo.parse(OVERLAPPED))}
    scatter = covers['reduce-scatter']
    # the first one covers b and the kernel, the second one the kernel and d: three in all; no sum, no marker, no e
    assert (scatter.exchanges, scatter.kernels, scatter.times) == (2, 3, 6)
    assert scatter.bytes == 3 * 8 * 8 * 2  # what is scattered, of both arrays of the first
    assert (covers['all-reduce'].kernels, covers['all-reduce'].bytes) == (0, 128)  # it has no start
    assert (covers['all-gather'].kernels, covers['all-gather'].bytes, covers['all-gather'].times) == (0, 512, 1)


def test_arrays_that_are_exchanged_together_count_together():
    found = {one.kind: one for one in hlo.find_collectives(hlo.parse(OVERLAPPED), None)}
    sizes = [one.bytes for one in hlo.find_collectives(hlo.parse(OVERLAPPED), None) if one.kind == 'reduce-scatter']
    assert sorted(sizes) == [128, 256]
    assert found['all-gather'].bytes == 512


def test_a_tpus_reduce_scatter_in_a_fusion_covers_nothing():
    covers = {one.kind: one for one in hlo.find_covers(hlo.parse(TPU))}
    assert (covers['reduce-scatter'].kernels, covers['reduce-scatter'].times) == (0, 7)
    assert covers['reduce-scatter'].bytes == 128  # of its operand


@pytest.mark.parametrize(
    ('labels', 'left', 'right', 'out', 'window', 'flops'),
    [
        ('bf_io->bf', (16, 8), (8, 64), (16, 64), '', 2 * 16 * 8 * 64),
        # a product for each of 3 groups, as a TPU writes it: every place of the axis meets one place of the kernel
        ('0bf_0io->0bf', (3, 16, 8), (3, 8, 64), (3, 16, 64), 'size=3 stride=2 lhs_dilate=3', 2 * 3 * 16 * 8 * 64),
        # a filter of 3 over 5 places with one of padding on each side: 13 of 15 pairs meet an input
        ('b0f_0io->b0f', (1, 5, 8), (3, 8, 4), (1, 5, 4), 'size=3 pad=1_1', 2 * 13 * 8 * 4),
    ],
)  # fmt: skip
def test_products_written_as_convolutions_are_counted_by_the_pairs_that_meet(labels, left, right, out, window, flops):
    array = lambda sizes: f'f32[{",".join(map(str, sizes))}]'
    inside = f', window={{{window}}}' if window else ''
    text = (
        f'ENTRY %main (a: {array(left)}) -> {array(out)} {{\n  %a = {array(left)} parameter(0)\n'
        f'  %b = {array(right)} parameter(1)\n'
        f'  ROOT %c = {array(out)} convolution(%a, %b){inside}, dim_labels={labels}\n}}\n'
    )
    assert hlo.count_flops(hlo.parse(text)) == flops


@pytest.fixture(scope='module')
def compiled():
    """A scan over layers whose weights are cut over fsdp, compiled by XLA for four devices of a CPU."""
    mesh = mesh_of(fsdp=4)
    over = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))

    def run(weights, x):
        step = lambda x, weight: (jnp.tanh(x @ jax.lax.with_sharding_constraint(weight, over())), None)
        return jax.lax.scan(step, x, weights)[0]

    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=over(None, 'fsdp'))
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32, sharding=over('fsdp'))
    return mesh, hlo.parse(jax.jit(run).lower(weights, x).compile().as_text())


def test_a_layer_inside_a_scan_counts_once_for_each_layer(compiled):
    mesh, module = compiled
    assert hlo.count_flops(module) == 2 * LAYERS * TOKENS // 4 * WIDTH**2
    gathers = [one for one in hlo.find_collectives(module, mesh) if one.kind == 'all-gather']
    assert {one.axes for one in gathers} == {'fsdp'}
    moved = sum(one.bytes * one.times for one in gathers)
    assert moved == LAYERS * WIDTH**2 * 4  # whole weights, each layer once


@pytest.mark.parametrize(
    ('result', 'start'), [('bf16[256,8]{1,0}', ''), ('((bf16[64,8], bf16[256,8]), bf16[256,8])', '-start')]
)
def test_a_ragged_exchange_counts_its_room_once(result, start):
    arguments = '%a = bf16[64,8] parameter(0)\n  %o = bf16[256,8] parameter(1)\n  %n = s32[4] parameter(2)'
    line = f'ROOT %r = {result} ragged-all-to-all{start}(%a, %o, %n, %n, %n, %n), replica_groups={{{{0,1,2,3}}}}'
    text = f'ENTRY %main (a: bf16[64,8], o: bf16[256,8], n: s32[4]) -> bf16[256,8] {{\n  {arguments}\n  {line}\n}}\n'
    [found] = hlo.find_collectives(hlo.parse(text), None)
    assert (found.kind, found.bytes) == ('ragged-all-to-all', 256 * 8 * 2)


def test_groups_are_named_by_the_axes_of_the_mesh():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)

    def name(groups):
        kind = 'collective-permute' if 'pairs' in groups else 'all-gather'
        text = f'ENTRY %main (a: f32[2]) -> f32[4] {{\n  ROOT %g = f32[4]{{0}} {kind}(%a), {groups}\n}}\n'
        [found] = hlo.find_collectives(hlo.parse(text), mesh)
        return found.axes

    assert name('replica_groups=[4,2]<=[8]') == 'tensor'
    assert name('replica_groups=[4,2]<=[2,4]T(1,0)') == 'data'
    assert name('replica_groups={{0,1,2,3},{4,5,6,7}}') == 'fsdp x tensor'
    assert name('replica_groups=[1,8]<=[8]') == 'data x fsdp x tensor'
    assert name('source_target_pairs={{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}') == 'fsdp'
    assert name('replica_groups={{0,3},{1,2}}') == '?'
    # named by axes of XLA's own mesh, in which one axis may be two of ours
    assert name("replica_groups=mesh['x'=2,'y'=4] {'x'}") == 'data'
    assert name("replica_groups=mesh['x'=2,'y'=4] {'y'}") == 'fsdp x tensor'
    assert name("replica_groups=mesh['x'=2,'y'=4] {'y':(1)2}") == 'fsdp'
    assert name("replica_groups=mesh['x'=2,'y'=4] {'x','y':(2)2}") == 'data x tensor'
