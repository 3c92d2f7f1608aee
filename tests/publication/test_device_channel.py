"""Weights inside one process: bit for bit, on the devices asked for, until released."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.publication.files_channel import DeviceChannel
from areal_jax.publication.manifest import host_manifest, manifest_hash
from areal_jax.publication.versions import PublicationError
from areal_jax.types import PublishedWeights
from tests.host_reads import record_reads

# awkward bits: the largest number, -0.0, a subnormal
_BITS = np.array([0x7F7FFFFF, 0x80000000, 0x00000001, 0x3F800000], np.uint32)


def _params(scale=1.0):
    matrix = np.arange(32, dtype=np.float32).reshape(8, 4) * np.float32(scale)
    return {'layers': {'0': {'up': matrix, 'down': matrix.T}}, 'norm': _BITS.view(np.float32)}


def _assert_bit_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_weights_arrive_as_they_were_sent():
    channel = DeviceChannel(verify=True)
    sent = jax.device_put(_params())
    published = channel.transfer(7, sent)
    assert (published.version, published.manifest_hash) == (7, manifest_hash(host_manifest(_params())))
    received = channel.receive(published)
    _assert_bit_equal(received, _params())
    # no second copy of the weights where none was asked for
    assert received['norm'].unsafe_buffer_pointer() == sent['norm'].unsafe_buffer_pointer()


def test_weights_move_from_the_learners_mesh_to_the_engines_device():
    # cut over 4 devices for training, whole on the fifth for decoding
    mesh = jax.make_mesh((4,), ('fsdp',), devices=jax.devices()[:4])
    cut, whole = jax.NamedSharding(mesh, jax.P('fsdp')), jax.NamedSharding(mesh, jax.P())
    place = {'layers': {'0': {'up': cut, 'down': cut}}, 'norm': whole}
    channel = DeviceChannel(jax.devices()[4], verify=True)
    received = channel.receive(channel.transfer(1, jax.device_put(_params(), place)))
    _assert_bit_equal(received, _params())
    assert {device for leaf in jax.tree.leaves(received) for device in leaf.devices()} == {jax.devices()[4]}


def test_an_engine_over_two_devices_gets_its_halves():
    # cut over 4 devices for training, over two others for decoding; verification sums over the halves
    mesh = jax.make_mesh((4,), ('fsdp',), devices=jax.devices()[:4])
    copy = jax.device_put(_params(), jax.NamedSharding(mesh, jax.P('fsdp')))
    engine = jax.make_mesh((2,), ('tensor',), devices=jax.devices()[4:6])
    half, whole = jax.NamedSharding(engine, jax.P(None, 'tensor')), jax.NamedSharding(engine, jax.P())
    place = {'layers': {'0': {'up': half, 'down': half}}, 'norm': whole}
    channel = DeviceChannel(verify=True)
    received = channel.receive(channel.transfer(1, copy), place)
    _assert_bit_equal(received, _params())
    assert received['layers']['0']['up'].addressable_shards[1].data.shape == (8, 2)
    assert received['norm'].devices() == {*jax.devices()[4:6]}


@pytest.mark.parametrize('verify', [False, True])
def test_engines_get_the_shards_of_the_learner_without_the_host(verify):
    # cut over 4 devices for training; two engines on devices of their own
    mesh = jax.make_mesh((2, 2), ('fsdp', 'tensor'), devices=jax.devices()[:4])
    up, down, norm = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (('fsdp', 'tensor'), ('tensor',), ()))
    copy = jax.device_put(_params(), {'layers': {'0': {'up': up, 'down': down}}, 'norm': norm})
    channel = DeviceChannel(verify=verify)
    with record_reads() as reads:
        published = channel.transfer(1, copy)
        received = [channel.receive(published, device) for device in jax.devices()[4:6]]
    assert reads == []
    for device, params in zip(jax.devices()[4:6], received, strict=True):
        _assert_bit_equal(params, _params())
        assert {at for leaf in jax.tree.leaves(params) for at in leaf.devices()} == {device}
    assert published.manifest_hash == manifest_hash(host_manifest(_params()))


def test_a_flipped_bit_is_caught_and_its_leaf_named():
    channel = DeviceChannel(verify=True)
    published = channel.transfer(3, jax.device_put(_params()))
    received = channel.receive(published)
    received['layers']['0']['down'] = received['layers']['0']['down'].at[1, 2].multiply(1 + 2.0**-23)  # the last bit
    with pytest.raises(PublicationError, match=r"version 3: leaf 'layers/0/down' is not what was published"):
        channel.receive(published)


def test_what_arrives_is_verified_and_not_what_was_sent():
    class FaultyMove(DeviceChannel):
        def transfer(self, version, copy):
            published = super().transfer(version, copy)
            held = self._versions[version]
            self._versions[version] = dataclasses.replace(held, params=jax.tree.map(jnp.flip, held.params))
            return published

    channel = FaultyMove(verify=True)
    with pytest.raises(PublicationError, match="leaf 'layers/0/down'"):
        channel.receive(channel.transfer(1, jax.device_put(_params())))


@pytest.mark.parametrize(('pinned', 'left'), [((), [3]), ((1,), [1, 3])])
def test_released_versions_are_gone_and_pinned_and_newer_ones_stay(pinned, left):
    channel = DeviceChannel(verify=False)
    published = {version: channel.transfer(version, jax.device_put(_params(version))) for version in (1, 2, 3)}
    channel.release(3, pinned=pinned)
    for version in left:
        _assert_bit_equal(channel.receive(published.pop(version)), _params(version))
    for version, gone in published.items():
        with pytest.raises(PublicationError, match=rf'version {version} .* holds \[{", ".join(map(str, left))}\]'):
            channel.receive(gone)


def test_a_version_that_all_engines_have_is_not_held_through_the_next_update():
    channel = DeviceChannel(verify=False, keeps_newest=False)
    published = channel.transfer(1, jax.device_put(_params()))
    copy = weakref.ref(channel.receive(published)['norm'])  # no engine decodes with it
    assert copy() is not None
    channel.release(1, pinned=(1,))
    assert copy() is not None
    channel.release(1)
    assert copy() is None


def test_the_same_version_of_another_run_is_refused():
    other = DeviceChannel(verify=False).transfer(1, jax.device_put(_params(2.0)))
    channel = DeviceChannel(verify=False)
    channel.transfer(1, jax.device_put(_params(1.0)))
    with pytest.raises(PublicationError, match='version 1'):
        channel.receive(other)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_reach_no_engine(value):
    params, channel = _params(), DeviceChannel(verify=False)
    params['layers']['0']['up'] = np.where(np.isin(np.arange(32), (7, 9)), value, 1.0).astype(np.float32).reshape(8, 4)
    expected = r"version 4: 2 of the 32 values of 'layers/0/up' are NaN or infinite: lower optimizer\.learning_rate$"
    with pytest.raises(PublicationError, match=expected):
        channel.transfer(4, jax.device_put(params))
    with pytest.raises(PublicationError, match='not in this channel'):
        channel.receive(PublishedWeights(4, '', 4))


@pytest.mark.parametrize(('dtype', 'value'), [('float16', 7e4), ('bfloat16', 3.4e38)])
def test_an_overflow_of_the_published_dtype_names_the_field(dtype, value):
    params = jax.device_put({'norm': np.array([1.0, value], np.float32)})
    cast = jax.tree.map(lambda x: x.astype(dtype), params)
    with pytest.raises(PublicationError, match=rf"use publication\.dtype='float32' if {dtype} cannot hold them"):
        DeviceChannel(verify=False).transfer(1, cast)
    assert DeviceChannel(verify=False).transfer(1, params).version == 1
