"""Weights through the file system: bit for bit, whole or absent, and an error that names what is wrong."""

import dataclasses
import errno
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_jax.formats import safetensors_file
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.formats.hf_export import HfCompanions
from areal_jax.formats.safetensors_file import StoredTensor
from areal_jax.publication import manifest
from areal_jax.publication.export import export_hf
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from areal_jax.publication.manifest import host_manifest, manifest_hash
from areal_jax.publication.versions import PublicationError
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params

KILLED_WRITER = pathlib.Path(__file__).with_name('killed_writer.py')


def test_weights_arrive_as_they_were_sent(tmp_path):
    params = host_params()
    params['final_norm'][:4] = np.array([0x7F7FFFFF, 0x80000000, 1, 0xFF7FFFFF], np.uint32).view(np.float32)
    channel = FilesChannel(tmp_path / 'new', CONFIG, verify=True)
    published = channel.transfer(7, jax.device_put(params))
    assert (published.version, published.handle) == (7, str(tmp_path / 'new' / 'v000007'))
    received = channel.receive(published)
    assert_bit_equal(received, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(received))


def test_a_head_that_is_the_embedding_is_written_a_second_time_where_asked(tmp_path):
    params = host_params()
    channel = FilesChannel(tmp_path, CONFIG, verify=True, separate_head=True)
    published = channel.transfer(7, jax.device_put(params))
    written = load_file(tmp_path / 'v000007' / 'model.safetensors')
    np.testing.assert_array_equal(written['lm_head.weight'], params['embedding'])
    np.testing.assert_array_equal(written['model.embed_tokens.weight'], params['embedding'])
    assert json.loads((tmp_path / 'v000007' / 'config.json').read_text())['tie_word_embeddings'] is False
    assert_bit_equal(channel.receive(published), params)  # a reader by the model's own config has no head
    assert (
        published.manifest_hash
        == FilesChannel(tmp_path / 'one', CONFIG, verify=False).transfer(7, params).manifest_hash
    )
    assert 'lm_head.weight' not in load_file(tmp_path / 'one' / 'v000007' / 'model.safetensors')
    own = dataclasses.replace(CONFIG, tie_embeddings=False)  # changes nothing for a head of its own
    for name, separate_head in (('with', True), ('without', False)):
        own_channel = FilesChannel(tmp_path / name, own, verify=True, separate_head=separate_head)
        own_channel.transfer(1, host_params(config=own))
    contents = [(tmp_path / name / 'v000001' / 'model.safetensors').read_bytes() for name in ('with', 'without')]
    assert contents[0] == contents[1]


def test_weights_that_are_no_numbers_leave_no_directory(tmp_path):
    params = host_params()
    params['layers']['1']['mlp']['up']['weight'][0, 0] = np.nan
    with pytest.raises(PublicationError, match=r"version 7: 1 of the 60 values of 'layers/1/mlp/up/weight' are NaN"):
        FilesChannel(tmp_path / 'new', CONFIG, verify=False).transfer(7, jax.device_put(params))
    assert not (tmp_path / 'new').exists()


def test_the_directory_is_what_servers_load(tmp_path):
    params = host_params()
    FilesChannel(tmp_path, CONFIG, verify=False).transfer(1, jax.device_put(params))
    files = {path.name for path in (tmp_path / 'v000001').iterdir()}
    assert files == {'model.safetensors', 'config.json', 'manifest.json'}
    tensors = load_file(tmp_path / 'v000001' / 'model.safetensors')
    # [out, in] there, [in, out] here; a view dumped as it lies would have the right shape and wrong rows
    up = params['layers']['1']['mlp']['up']['weight']
    np.testing.assert_array_equal(tensors['model.layers.1.mlp.up_proj.weight'], up.T)
    assert json.loads((tmp_path / 'v000001' / 'config.json').read_text())['hidden_size'] == CONFIG.d_model
    manifest = json.loads((tmp_path / 'v000001' / 'manifest.json').read_text())
    assert (manifest['version'], manifest['manifest_hash']) == (1, manifest_hash(host_manifest(params)))


def test_weights_go_to_the_device_asked_for(tmp_path):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    received = channel.receive(channel.transfer(1, jax.device_put(host_params())), jax.devices()[3])
    assert {device for leaf in jax.tree.leaves(received) for device in leaf.devices()} == {jax.devices()[3]}


def test_a_version_is_written_without_a_program_of_the_device(tmp_path, monkeypatch):
    """A program would wait there for the update that is under way, and the version with it."""
    params = jax.device_put(host_params())
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    monkeypatch.setattr(manifest, 'shard_sums', None)
    assert_bit_equal(channel.receive(channel.transfer(1, params)), params)


def test_an_engine_over_two_devices_reads_its_halves(tmp_path):
    whole = jax.NamedSharding(jax.make_mesh((2,), ('tensor',), devices=jax.devices()[4:6]), jax.P())
    half = jax.NamedSharding(whole.mesh, jax.P(None, 'tensor'))
    params = host_params()
    place = jax.tree.map(lambda leaf: half if leaf.ndim == 2 else whole, params)
    channel = FilesChannel(tmp_path, CONFIG, verify=True)
    received = channel.receive(channel.transfer(1, jax.device_put(params)), place)
    assert_bit_equal(received, params)
    assert received['embedding'].addressable_shards[1].data.shape[1] * 2 == params['embedding'].shape[1]


def test_a_flipped_bit_is_caught_and_its_leaf_named(tmp_path):
    channel = FilesChannel(tmp_path, CONFIG, verify=True)
    published = channel.transfer(5, jax.device_put(host_params()))
    path = tmp_path / 'v000005' / 'model.safetensors'
    content = bytearray(path.read_bytes())
    norm = np.asarray(host_params()['final_norm']).tobytes()
    content[bytes(content).index(norm) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(PublicationError, match="version 5: leaf 'final_norm' is not what was published"):
        channel.receive(published)
    FilesChannel(tmp_path, CONFIG, verify=False).receive(published)  # only who verifies can know


@pytest.mark.parametrize('name', ['model.safetensors', 'manifest.json'])
@pytest.mark.parametrize('damage', ['missing', 'cut short', 'text'])
def test_a_torn_directory_is_named(tmp_path, name, damage):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    published = channel.transfer(2, jax.device_put(host_params()))
    path = tmp_path / 'v000002' / name
    content = path.read_bytes()
    path.unlink()
    if damage != 'missing':
        path.write_bytes(content[: len(content) // 2] if damage == 'cut short' else b'"weights"')
    with pytest.raises(PublicationError, match=f'{tmp_path}/v000002 does not hold version 2 as it was published'):
        channel.receive(published)


def test_the_same_version_of_another_run_is_refused(tmp_path):
    published = FilesChannel(tmp_path, CONFIG, verify=False).transfer(1, jax.device_put(host_params(seed=0)))
    FilesChannel(tmp_path, CONFIG, verify=False).transfer(1, jax.device_put(host_params(seed=1)))
    with pytest.raises(PublicationError, match=r'give every run a publication\.directory of its own'):
        FilesChannel(tmp_path, CONFIG, verify=False).receive(published)


def test_release_removes_old_versions_but_never_the_newest(tmp_path):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    published = [channel.transfer(version, jax.device_put(host_params(version))) for version in range(5)]
    channel.release(1)
    assert _names(tmp_path) == ['v000001', 'v000002', 'v000003', 'v000004']
    channel.release(4)  # 3 could go, but two stay
    assert _names(tmp_path) == ['v000003', 'v000004']
    assert_bit_equal(channel.receive(published[4]), host_params(4))
    with pytest.raises(PublicationError, match='does not hold version 2'):
        channel.receive(published[2])


def test_a_pinned_version_stays_on_the_disk(tmp_path):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    published = [channel.transfer(version, jax.device_put(host_params(version))) for version in range(5)]
    channel.release(4, pinned=(1,))
    assert _names(tmp_path) == ['v000001', 'v000003', 'v000004']
    assert_bit_equal(channel.receive(published[1]), host_params(1))


def test_a_resumed_run_replaces_versions_of_the_future_it_came_from(tmp_path):
    before = FilesChannel(tmp_path, CONFIG, verify=False)
    for version in (4, 5, 6):
        before.transfer(version, jax.device_put(host_params(version)))
    after = FilesChannel(tmp_path, CONFIG, verify=True)
    published = after.transfer(5, jax.device_put(host_params(50)))
    assert _names(tmp_path) == ['v000004', 'v000005']
    assert_bit_equal(after.receive(published), host_params(50))


def test_a_foreign_directory_is_neither_replaced_nor_removed(tmp_path):
    foreign = tmp_path / 'v000003'
    foreign.mkdir()
    (foreign / 'thesis.tex').write_text('years of work')
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    with pytest.raises(PublicationError, match=f'{foreign} exists and holds no model.safetensors'):
        channel.transfer(3, jax.device_put(host_params()))
    for version in (4, 5, 6):
        channel.transfer(version, jax.device_put(host_params()))
    channel.release(6)
    assert (foreign / 'thesis.tex').exists()


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=12345)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(PublicationError, match=rf'{tmp_path} has 12345 bytes free, one version .* needs 1\d{{6}}:'):
        FilesChannel(tmp_path, CONFIG, verify=False).transfer(1, jax.device_put(host_params()))
    assert _names(tmp_path) == []


def test_kill_at_any_moment_leaves_whole_versions(tmp_path):
    delays = [random.Random(0).uniform(0, 0.02) for _ in range(8)]
    repository = KILLED_WRITER.parents[2]
    environment = {'PYTHONPATH': str(repository), 'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, str(KILLED_WRITER), str(tmp_path), *map(str, delays)]
    subprocess.run(command, cwd=repository, env=environment, check=True, timeout=100)
    interrupted = 0
    for number in range(len(delays)):
        directory = tmp_path / str(number)
        versions = [name for name in _names(directory) if not name.startswith('.')]
        interrupted += len(_names(directory)) - len(versions)
        assert versions == [f'v{version:06d}' for version in range(len(versions))]
        for version, name in enumerate(versions):
            params = load_hf_weights(directory / name, CONFIG)
            weights = {value for leaf in jax.tree.leaves(params) for value in np.asarray(leaf).flat}
            assert weights == {version}
            assert json.loads((directory / name / 'manifest.json').read_text()) == {'version': version}
        FilesChannel(directory, CONFIG, verify=False).transfer(0, jax.device_put(host_params()))  # goes on, cleaning up
        assert _names(directory) == ['v000000']
    assert interrupted > 0  # else no kill hit a write


def test_bfloat16_weights_keep_their_dtype(tmp_path):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), host_params())
    channel = FilesChannel(tmp_path, CONFIG, verify=True)
    received = channel.receive(channel.transfer(1, params))
    assert_bit_equal(received, params)
    assert json.loads((tmp_path / 'v000001' / 'config.json').read_text())['dtype'] == 'bfloat16'


def test_a_server_can_start_from_a_version(tmp_path):
    source = tmp_path / 'source'
    export_hf(source, host_params(), CONFIG, dtype='float32')
    (source / 'tokenizer.json').write_text('of its makers')
    companions = HfCompanions(source, texts={'generation_config.json': '{"temperature": 1}'})
    FilesChannel(tmp_path / 'new', CONFIG, verify=False, companions=companions).transfer(1, host_params())
    assert (tmp_path / 'new' / 'v000001' / 'tokenizer.json').read_text() == 'of its makers'
    assert (tmp_path / 'new' / 'v000001' / 'generation_config.json').read_text() == '{"temperature": 1}'


# A server is told a path and a version, and loads with `find_version` and `load_version`.


def test_a_server_loads_what_was_published(tmp_path):
    published = FilesChannel(tmp_path, CONFIG, verify=False).transfer(7, jax.device_put(host_params()))
    found = find_version(published.handle, 7)
    assert found == published
    assert_bit_equal(load_version(found, CONFIG, verify=True), host_params())


def test_a_relative_directory_is_published_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published = FilesChannel('new', CONFIG, verify=False).transfer(1, jax.device_put(host_params()))
    assert published.handle == str(tmp_path / 'new' / 'v000001')  # servers run in other directories


def test_a_stale_version_is_refused(tmp_path):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    same = jax.device_put(host_params())  # an update without a step: equal weights, equal digests
    old, new = channel.transfer(1, same), channel.transfer(2, same)
    with pytest.raises(PublicationError, match=f'{tmp_path}/v000001 holds version 1, and version 2 was asked for'):
        find_version(old.handle, 2)
    with pytest.raises(PublicationError, match='holds weights of version 1 with manifest'):
        channel.receive(dataclasses.replace(new, handle=old.handle))


@pytest.mark.parametrize('content', [None, b'', b'[]', b'{"version": 3}', 'cut', 'hash'])
def test_a_server_refuses_a_version_with_a_damaged_manifest(tmp_path, content):
    published = FilesChannel(tmp_path, CONFIG, verify=False).transfer(3, jax.device_put(host_params()))
    path = tmp_path / 'v000003' / 'manifest.json'
    whole = path.read_bytes()
    path.unlink()
    if content == 'hash':
        path.write_bytes(whole.replace(published.manifest_hash.encode(), b'0' * 64))
    elif content is not None:
        path.write_bytes(whole[:-20] if content == 'cut' else content)
    with pytest.raises(PublicationError, match=f'{tmp_path}/v000003 does not hold version 3 as it was published'):
        find_version(published.handle, 3)


def test_a_server_waits_for_no_pipe_in_the_place_of_a_manifest(tmp_path, at_once):
    published = FilesChannel(tmp_path, CONFIG, verify=False).transfer(3, jax.device_put(host_params()))
    path = tmp_path / 'v000003' / 'manifest.json'
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PublicationError, match='it is no regular file'):
        find_version(published.handle, 3)


@pytest.mark.parametrize('damage', ['zeros', 'cut', 'longer', 'swapped'])
def test_a_server_refuses_torn_weights(tmp_path, damage):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    channel.transfer(1, jax.device_put(host_params(1)))
    published = channel.transfer(2, jax.device_put(host_params(2)))
    path = tmp_path / 'v000002' / 'model.safetensors'
    content = path.read_bytes()
    half = len(content) // 2
    torn = {
        'zeros': content[:half] + bytes(len(content) - half),  # blocks that were never written before power was lost
        'cut': content[:half],
        'longer': content + b'x',
        'swapped': (tmp_path / 'v000001' / 'model.safetensors').read_bytes(),
    }
    path.write_bytes(torn[damage])
    with pytest.raises(PublicationError, match='version 2'):
        load_version(find_version(published.handle, 2), CONFIG, verify=True)


def test_a_server_loads_a_directory_of_another_program(tmp_path):
    export_hf(tmp_path / 'checkpoint-4', host_params(), CONFIG, dtype='float32')
    found = find_version(tmp_path / 'checkpoint-4', 4)
    assert (found.version, found.manifest_hash) == (4, '')
    assert_bit_equal(load_version(found, CONFIG, verify=True), host_params())
    (tmp_path / 'checkpoint-4' / 'model.safetensors').write_bytes(b'torn')
    with pytest.raises(PublicationError, match='checkpoint-4 does not hold version 4'):
        load_version(found, CONFIG, verify=True)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(PublicationError, match=f'{tmp_path}/nowhere does not hold version 4'):
        find_version(tmp_path / 'nowhere', 4)


def test_a_version_that_is_read_is_collected_after_it(tmp_path, monkeypatch):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    published = [channel.transfer(version, jax.device_put(host_params(version))) for version in range(4)]
    reading, collected = hold_readers(monkeypatch)
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(load_version(published[0], CONFIG, verify=True)))
    thread.start()
    assert reading.wait(10)
    channel.release(3)
    assert _names(tmp_path) == ['v000000', 'v000002', 'v000003']  # 0 is being read
    collected.set()
    thread.join()
    assert_bit_equal(loaded[0], host_params(0))
    channel.release(3)
    assert _names(tmp_path) == ['v000002', 'v000003']


@pytest.mark.parametrize('verify', [True, False])
def test_a_version_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch, verify):
    channel = FilesChannel(tmp_path, CONFIG, verify=False)
    published = channel.transfer(5, jax.device_put(host_params(5)))
    reading, replaced = hold_readers(monkeypatch)
    errors = []

    def load():
        try:
            load_version(published, CONFIG, verify=verify)
        except PublicationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=load)
    thread.start()
    assert reading.wait(10)
    FilesChannel(tmp_path, CONFIG, verify=False).transfer(5, jax.device_put(host_params(50)))  # of a resumed run
    replaced.set()
    thread.join()
    assert 'v000005 was replaced while it was read' in errors[0]


def hold_readers(monkeypatch):
    """(set when a reader has read its first rows, set to let it go on)."""
    reading, go_on = threading.Event(), threading.Event()
    read_rows = StoredTensor.read_rows

    def held(self, first, end):
        rows = read_rows(self, first, end)
        reading.set()
        assert go_on.wait(10)
        return rows

    monkeypatch.setattr(StoredTensor, 'read_rows', held)
    return reading, go_on


@pytest.mark.parametrize('step', ['write', 'fsync', 'rename'])
def test_a_full_disk_at_any_step_leaves_the_version_before(tmp_path, monkeypatch, step):
    channel = FilesChannel(tmp_path, CONFIG, verify=True)
    published = channel.transfer(1, jax.device_put(host_params()))

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, 'No space left on device')

    with monkeypatch.context() as patch:
        place = {
            'write': (safetensors_file, 'np', types.SimpleNamespace(**{**vars(np), 'ascontiguousarray': fail})),
            'fsync': (os, 'fsync', fail),
            'rename': (pathlib.Path, 'rename', fail),
        }
        patch.setattr(*place[step])
        with pytest.raises(PublicationError, match=r'writing .*/v000002 failed .*No space left .* Make room or name'):
            channel.transfer(2, jax.device_put(host_params(2)))
    assert _names(tmp_path) == ['v000001']
    assert_bit_equal(channel.receive(published), host_params())
    channel.transfer(2, jax.device_put(host_params(2)))  # once there is room
    assert _names(tmp_path) == ['v000001', 'v000002']


def _names(directory):
    return sorted(path.name for path in directory.iterdir())
