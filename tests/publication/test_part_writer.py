"""A version that several processes write: the files are those of one process, each process fetches its leaves alone,
and a failure of any of them is told. Processes are played one after the other; see tests/distributed for real ones."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.formats.hf_export import HfCompanions
from areal_jax.publication.export import PartWriter
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from areal_jax.publication.manifest import weights_sha256
from areal_jax.publication.versions import PublicationError
from areal_jax.sharding.rules import SharedLeaf, Shares, make_mesh
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params

_COMPANIONS = HfCompanions(texts={'generation_config.json': '{}\n'})


def _shared(params, processes=2):
    mesh = make_mesh(fsdp=8)
    tree = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    shares = Shares(tree, mesh, lambda device: device.id * processes // 8)
    return shares.collect(jax.jit(shares.spread, out_shardings=shares.shardings)(tree))


class _Process:
    """`publication.files.VersionWriter`: another process, played by this one."""

    def __init__(self, index, copy, monkeypatch, separate_head=False):
        self._index, self._copy, self._patch, self._separate_head = index, copy, monkeypatch, separate_head
        self.seen: list[pathlib.Path] = []

    def write(self, directory, version):
        with self._patch.context() as patch:
            patch.setattr(jax, 'process_index', lambda: self._index)
            try:
                writer = PartWriter(CONFIG, separate_head=self._separate_head)
                self._outcome = writer.write(directory, version, self._copy)
            except PublicationError as error:
                self._outcome = str(error)

    def written(self):
        return self._outcome


def _transfer(directory, params, monkeypatch, version=3, processes=2, **options):
    copy = _shared(params, processes)
    others = [_Process(index, copy, monkeypatch, **options) for index in range(1, processes)]
    channel = FilesChannel(directory, CONFIG, verify=True, companions=_COMPANIONS, writers=others, **options)
    return channel, channel.transfer(version, copy)


def test_a_separate_head_is_written_by_the_owner_of_the_embedding(tmp_path, monkeypatch):
    params = host_params()
    channel, published = _transfer(tmp_path, params, monkeypatch, separate_head=True)
    written = [load_file(file) for file in sorted((tmp_path / 'v000003').glob('*.safetensors'))]
    assert len(written) == 2
    [owner] = [tensors for tensors in written if 'lm_head.weight' in tensors]
    np.testing.assert_array_equal(owner['lm_head.weight'], params['embedding'])
    np.testing.assert_array_equal(owner['model.embed_tokens.weight'], params['embedding'])
    assert_bit_equal(channel.receive(published), params)


@pytest.mark.parametrize('put', [jax.device_put, lambda params: params], ids=['devices', 'host'])
def test_one_process_in_a_role_of_its_own_writes_all(tmp_path, put):
    """A controller elsewhere tells it when; its weights are no SharedLeaf."""
    params = host_params()
    channel = FilesChannel(tmp_path / 'here', CONFIG, verify=True, companions=_COMPANIONS)
    expected = channel.transfer(3, jax.device_put(params))
    parts, copy, directory = PartWriter(CONFIG, _COMPANIONS), put(params), str(tmp_path / 'there')
    parts.begin(directory, 3, copy)
    digest, path = parts.finish(directory, 3, copy, parts.write(directory, 3, copy))
    assert digest == expected.manifest_hash
    files = [
        {file.name: file.read_bytes() for file in pathlib.Path(each).iterdir()} for each in (path, expected.handle)
    ]
    assert files[0] == files[1]


@pytest.mark.parametrize('processes', [2, 4, 8])
def test_the_tensors_and_the_hash_are_those_of_one_process(tmp_path, monkeypatch, processes):
    params = host_params()
    alone = FilesChannel(tmp_path / 'one', CONFIG, verify=True, companions=_COMPANIONS)
    expected = alone.transfer(3, jax.device_put(params))
    channel, published = _transfer(tmp_path / 'all', params, monkeypatch, processes=processes)
    assert (published.version, published.manifest_hash) == (3, expected.manifest_hash)
    assert published.handle == str(tmp_path / 'all' / 'v000003')
    files = sorted(pathlib.Path(published.handle).glob('*.safetensors'))
    assert 1 < len(files) <= processes
    tensors = [load_file(file) for file in files]
    one = load_file(pathlib.Path(expected.handle) / 'model.safetensors')
    assert sum(map(len, tensors)) == len(one)  # no tensor twice
    for name, values in (item for file in tensors for item in file.items()):
        assert values.tobytes() == one[name].tobytes(), name
    records = [json.loads((pathlib.Path(p.handle) / 'manifest.json').read_text()) for p in (published, expected)]
    assert records[0] == records[1]
    for name in ('config.json', 'generation_config.json'):
        both = [(pathlib.Path(each.handle) / name).read_text() for each in (published, expected)]
        assert both[0] == both[1]
    # what servers do
    assert_bit_equal(load_version(find_version(published.handle, 3), CONFIG, verify=True), params)
    assert_bit_equal(channel.receive(published), params)
    assert_bit_equal(load_hf_weights(published.handle, CONFIG), params)


def test_each_process_fetches_its_own_leaves_once_and_no_others(tmp_path, monkeypatch):
    params, fetched = host_params(), []
    join = SharedLeaf.join
    monkeypatch.setattr(SharedLeaf, 'join', lambda leaf: fetched.append((jax.process_index(), leaf)) or join(leaf))
    _transfer(tmp_path, params, monkeypatch)
    assert [leaf.owner for _, leaf in fetched] == [process for process, _ in fetched]
    assert len({id(leaf) for _, leaf in fetched}) == len(fetched) == len(jax.tree.leaves(params))
    size = lambda leaf: int(np.prod(leaf.shape)) * leaf.dtype.itemsize
    by_process = [sum(size(leaf) for process, leaf in fetched if process == index) for index in range(2)]
    assert sum(by_process) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert abs(by_process[0] - by_process[1]) <= max(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_weights_on_the_disk_are_read_one_at_a_time_for_the_report(tmp_path, monkeypatch):
    params = host_params()
    channel, _ = _transfer(tmp_path, params, monkeypatch)
    mapped = channel.map_version(3)
    assert_bit_equal(mapped, params)
    assert weights_sha256(mapped) == weights_sha256(params)
    assert all(isinstance(leaf, np.memmap) and not leaf.flags.writeable for leaf in jax.tree.leaves(mapped))


@pytest.mark.parametrize('path', [('embedding',), ('final_norm',)])
def test_weights_that_are_no_numbers_are_refused_by_their_process_and_named(tmp_path, monkeypatch, path):
    params = host_params()
    params[path[0]].reshape(-1)[0] = np.nan
    with pytest.raises(PublicationError, match=rf"^weights of version 3: 1 of the \d+ values of '{path[0]}' are NaN"):
        _transfer(tmp_path, params, monkeypatch)
    assert list(tmp_path.glob('v*')) == []
    _, published = _transfer(tmp_path, host_params(), monkeypatch)  # what was left is no obstacle
    assert list(tmp_path.iterdir()) == [pathlib.Path(published.handle)]


def test_a_leaf_that_nobody_wrote_leaves_no_version(tmp_path, monkeypatch):
    monkeypatch.setattr(_Process, 'written', lambda self: {})
    with pytest.raises(PublicationError, match=r'writing .*v000003 failed: no process wrote the leaf'):
        _transfer(tmp_path, host_params(), monkeypatch)
    assert list(tmp_path.glob('v*')) == []


def test_a_process_that_sees_another_disk_says_so(tmp_path):
    copy = _shared(host_params())
    with pytest.raises(PublicationError, match=r'process 0 does not see .*v000003\.partial, which another'):
        PartWriter(CONFIG).write(str(tmp_path), 3, copy)


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr('areal_jax.files.free_bytes', lambda path: 10)
    with pytest.raises(PublicationError, match=r'has 10 bytes free, one version of the weights needs \d+'):
        _transfer(tmp_path / 'new', host_params(), monkeypatch)
    assert list(tmp_path.glob('**/*.safetensors')) == []
