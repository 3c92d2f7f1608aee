from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.app.parts.compilations import CompilationCounter
from areal_jax.sharding.placement import (
    compile_move,
    copy_shards,
    first_tokens,
    from_slices,
    gather,
    move_to,
    place,
    slice_places,
    to_slices,
    view_shards,
)
from areal_jax.sharding.rules import make_mesh
from tests.host_reads import record_reads


@pytest.fixture
def reads():
    with record_reads() as shapes:
        yield shapes


def test_what_is_placed_comes_back():
    sharding = NamedSharding(make_mesh(fsdp=8), PartitionSpec('fsdp'))
    tree = {'a': np.arange(16.0).reshape(8, 2), 'b': np.arange(8)}
    placed = place(tree, sharding)
    assert placed['a'].addressable_shards[3].data.tolist() == [[6, 7]]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(gather(x), y), placed, tree)


@pytest.mark.parametrize('axes', [None, (), ('fsdp',)], ids=['one device', 'on all', 'cut'])
def test_a_view_keeps_its_values_when_its_array_is_donated(axes):
    sharding = jax.devices()[0] if axes is None else NamedSharding(make_mesh(fsdp=8), PartitionSpec(*axes))
    leaf = jax.jit(lambda x: x + 1, out_shardings=None if axes is None else sharding)(
        jax.device_put(np.arange(4096.0, dtype=np.float32), sharding)
    )
    copied, viewed = copy_shards(leaf), view_shards(leaf)
    assert copied.flags.owndata
    assert viewed.flags.owndata == (axes == ('fsdp',))  # the parts of an array that is cut are put together
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    jax.block_until_ready(double(double(leaf)))
    np.testing.assert_array_equal(viewed, np.arange(1.0, 4097.0))
    np.testing.assert_array_equal(copied, viewed)


def test_an_array_that_jax_does_not_hold_is_copied():
    given = np.zeros(3)
    assert not np.may_share_memory(view_shards(given), given)


def test_what_is_gathered_is_a_copy_of_its_own():
    leaf = jax.numpy.zeros(3)
    host = gather(leaf)
    host[0] = 1
    assert leaf[0] == 0


@pytest.mark.parametrize(
    ('mesh', 'spec'),
    [
        ({'fsdp': 4}, PartitionSpec('fsdp')),
        ({'fsdp': 4}, PartitionSpec(None, 'fsdp')),
        ({'fsdp': 2, 'tensor': 2}, PartitionSpec('tensor', 'fsdp')),
        ({'data': 2, 'fsdp': 2}, PartitionSpec('fsdp')),  # every shard twice
        ({'data': 4}, PartitionSpec()),
    ],
)
@pytest.mark.parametrize('target', [0, 2, 7])
def test_shards_are_joined_on_one_device_without_the_host(mesh, spec, target, reads):
    bits = np.arange(96, dtype=np.uint32).reshape(8, 12) * np.uint32(0x02B92DA7)  # NaN and subnormals among them
    value = bits.view(np.float32)
    sharded = jax.device_put(value, NamedSharding(make_mesh(**mesh), spec))
    moved = move_to({'w': sharded}, jax.devices()[target])['w']
    assert reads == []
    assert moved.devices() == {jax.devices()[target]}
    assert np.asarray(moved).tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ('mesh', 'spec'),
    [({'fsdp': 4}, PartitionSpec('fsdp')), ({'data': 2, 'fsdp': 2, 'tensor': 2}, PartitionSpec(('tensor', 'fsdp')))],
)
def test_a_move_that_was_compiled_ahead_compiles_nothing(mesh, spec):
    value, sharding = np.arange(104, dtype=np.float32).reshape(8, 13), NamedSharding(make_mesh(**mesh), spec)
    compile_move({'w': jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}, jax.devices()[5])
    sharded = jax.block_until_ready(jax.device_put(value, sharding))
    with CompilationCounter() as compilations:
        moved = move_to({'w': sharded}, jax.devices()[5])['w']
    assert compilations.count == 0
    assert np.asarray(moved).tobytes() == value.tobytes()


@pytest.mark.parametrize('source', [None, PartitionSpec('fsdp'), PartitionSpec()])
@pytest.mark.parametrize('spec', [PartitionSpec('tensor'), PartitionSpec(None, 'tensor'), PartitionSpec()])
def test_shards_are_cut_anew_over_other_devices_without_the_host(source, spec, reads):
    # of the learner's four devices, or of one, for an engine on two others
    value = np.arange(96, dtype=np.uint32).reshape(8, 12).view(np.float32)
    held = jax.devices()[1] if source is None else NamedSharding(make_mesh(fsdp=4), source)
    wanted = NamedSharding(make_mesh(tensor=2, devices=jax.devices()[4:6]), spec)
    moved = move_to({'w': jax.device_put(value, held)}, {'w': wanted})['w']
    assert reads == []
    assert moved.sharding.is_equivalent_to(wanted, 2)
    assert np.asarray(moved).tobytes() == value.tobytes()
    assert move_to({'w': moved}, {'w': wanted})['w'] is moved


def test_device_put_of_shards_goes_through_the_host(reads):
    # why `move_to` exists: if this fails, jax has learned to do it
    sharded = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(make_mesh(fsdp=4), PartitionSpec('fsdp')))
    jax.device_put(sharded, jax.devices()[5])
    assert reads == [(8, 4)]


def test_what_is_there_already_is_not_copied():
    there = jax.device_put(np.ones(3, np.float32), jax.devices()[3])
    assert move_to({'w': there}, jax.devices()[3])['w'] is there
    assert move_to({'w': np.ones(3)}, jax.devices()[3])['w'].devices() == {jax.devices()[3]}


def test_each_device_holds_a_cheap_and_a_dear_half():
    row = jnp.arange(12)[None]
    assert to_slices(row, 2).reshape(2, 2, 3).tolist() == [[[0, 1, 2], [9, 10, 11]], [[3, 4, 5], [6, 7, 8]]]


@pytest.mark.parametrize('context', [1, 2, 3, 4])
def test_slice_order_and_back(context):
    row = np.random.default_rng(0).normal(size=(3, 48, 2))
    sliced = to_slices(jnp.asarray(row), context)
    np.testing.assert_array_equal(from_slices(sliced, context), row.astype(np.float32))
    index = np.arange(48)[None].repeat(3, 0)
    found = np.take_along_axis(np.asarray(sliced), np.asarray(slice_places(index, 48, context))[..., None], axis=1)
    np.testing.assert_array_equal(found, row.astype(np.float32))


@pytest.mark.parametrize('context', [1, 2, 4])
def test_causal_pairs_are_shared_evenly(context):
    """Token t reads t + 1 tokens: T (T + 1) / 2 pairs in all, and the halves of a device begin where it is said."""
    tokens = 64
    devices = np.asarray(to_slices(jnp.arange(tokens)[None], context)).reshape(context, 2, -1)
    assert {int((device + 1).sum()) for device in devices} == {tokens * (tokens + 1) // 2 // context}
    for device, halves in enumerate(devices):
        assert first_tokens(device, tokens, context) == tuple(halves[:, 0])
