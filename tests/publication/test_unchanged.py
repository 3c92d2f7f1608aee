"""A version that shares leaves with the one before: only the others are measured, moved and written."""

from __future__ import annotations

import errno
import os

import jax
import numpy as np
import pytest

from areal_jax.publication.files_channel import DeviceChannel, FilesChannel, find_version
from areal_jax.publication.manifest import Mover, UnchangedLeaves, host_manifest, manifest_hash
from areal_jax.publication.versions import PublicationError
from areal_jax.types import PublishedWeights
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    return {'layers': {'0': {'up': draw(8, 4)}, '1': {'up': draw(8, 4)}}, 'norm': draw(3)}


def change_layer(params, layer):
    up = params['layers'][layer]['up'] + 1
    return params | {'layers': params['layers'] | {layer: {'up': up}}}


def test_what_was_made_of_the_same_arrays_is_found():
    leaves, seen = {'a': np.zeros(2), 'b': np.ones(2)}, UnchangedLeaves()
    assert seen.find(leaves) == {}
    seen.note(leaves, {'a': 1, 'b': 2})
    assert seen.find(leaves) == {'a': 1, 'b': 2}
    assert seen.find({'a': leaves['a'], 'b': np.ones(2), 'c': leaves['a']}) == {'a': 1}  # an equal array is another
    seen.note({'b': leaves['b']}, {'b': 3})
    assert seen.find(leaves) == {'b': 3}


def test_the_comparison_keeps_no_version_alive():
    leaves, seen = {'a': np.zeros(2)}, UnchangedLeaves()
    seen.note(leaves, {'a': 1})
    leaves['a'] = np.zeros(2)  # the first one is gone, and the second may have its address
    assert seen.find(leaves) == {}


def test_the_device_channel_carries_the_changed_leaves():
    first = make_params()
    second = change_layer(first, '1')
    channel = DeviceChannel(jax.devices()[1], verify=True)
    held = channel.receive(channel.transfer(1, first))
    assert channel.carried_bytes == 4 * (32 + 32 + 3)
    published = channel.transfer(2, second)
    assert channel.carried_bytes == 4 * 32
    assert published.manifest_hash == manifest_hash(host_manifest(second))
    received = channel.receive(published)
    jax.tree.map(np.testing.assert_array_equal, received, second)
    assert received['norm'] is held['norm']  # on the channel's device it is the leaf of the version before
    assert received['layers']['1']['up'] is not held['layers']['1']['up']
    third = change_layer(second, '0')
    channel.release(2)
    assert channel.transfer(3, third).manifest_hash == manifest_hash(host_manifest(third))
    assert channel.carried_bytes == 4 * 32


def test_an_engine_on_devices_of_its_own_gets_the_changed_leaves():
    mesh = jax.make_mesh((2,), ('tensor',), devices=jax.devices()[2:4])
    over = jax.NamedSharding(mesh, jax.P())
    place = jax.tree.map(lambda _: over, make_params())
    channel, first = DeviceChannel(verify=True), make_params()
    second = change_layer(first, '0')
    held = channel.receive(channel.transfer(1, first), place)
    received = channel.receive(channel.transfer(2, second), place)
    jax.tree.map(np.testing.assert_array_equal, received, second)
    assert received['norm'] is held['norm']
    assert received['layers']['0']['up'] is not held['layers']['0']['up']


def test_a_moved_leaf_that_is_gone_is_moved_again():
    mover, params = Mover(jax.devices()[1]), make_params()
    first = mover.move(params)
    kept = first['norm']
    del first
    again = mover.move(params)
    assert again['norm'] is kept
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_changed_leaf_that_is_not_finite_is_refused():
    channel, params = DeviceChannel(verify=True), make_params()
    channel.transfer(1, params)
    with pytest.raises(PublicationError, match=r"version 2: 1 of the 3 values of 'norm' are NaN"):
        channel.transfer(2, params | {'norm': params['norm'].at[0].set(np.nan)})
    assert isinstance(channel.transfer(2, params), PublishedWeights)


def test_the_files_channel_writes_the_files_of_changed_leaves(tmp_path):
    """A file for each layer, and one for the rest; the others are links to the version before."""
    file_of = lambda path: int(path.split('/')[1]) + 1 if path.startswith('layers/') else 0
    channel = FilesChannel(tmp_path, CONFIG, verify=True, file_of=file_of)
    first = host_params()
    # one leaf of the layer changes: its file is written again, with the others of the layer
    layer = first['layers']['1'] | {'mlp_norm': host_params(seed=1)['layers']['1']['mlp_norm']}
    second = first | {'layers': first['layers'] | {'1': layer}}
    assert_bit_equal(channel.receive(channel.transfer(1, first)), first)
    whole = channel.carried_bytes
    assert whole == sum(leaf.nbytes for leaf in jax.tree.leaves(first))
    published = channel.transfer(2, second)
    assert channel.carried_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(second['layers']['1']))
    assert_bit_equal(channel.receive(published), second)
    assert published.manifest_hash == manifest_hash(host_manifest(second))
    files = [sorted(path.glob('*.safetensors')) for path in sorted(tmp_path.glob('v*'))]
    assert [a.samefile(b) for a, b in zip(*files, strict=True)] == [True, True, False]
    # the version before may go: a link keeps its content
    channel.release(3)
    channel.transfer(3, second)
    channel.transfer(4, second)
    channel.release(5)
    assert not (tmp_path / 'v000002').exists()
    assert_bit_equal(channel.receive(find_version(tmp_path / 'v000004', 4)), second)


def test_where_there_are_no_hard_links_all_files_are_written(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EPERM, 'no links here')

    monkeypatch.setattr(os, 'link', refuse)
    channel = FilesChannel(tmp_path, CONFIG, verify=True, file_of=lambda path: path.startswith('layers/'))
    params = host_params()
    for version in (1, 2):
        assert_bit_equal(channel.receive(channel.transfer(version, params)), params)
    assert (tmp_path / 'v000002' / 'model-00001-of-00002.safetensors').stat().st_nlink == 1


def test_a_version_that_was_removed_is_no_source_of_links(tmp_path):
    """A resumed run publishes its version again, and removes it first."""
    channel = FilesChannel(tmp_path, CONFIG, verify=True, file_of=lambda path: path.startswith('layers/'))
    params = host_params()
    for _ in range(2):
        assert_bit_equal(channel.receive(channel.transfer(5, params)), params)
