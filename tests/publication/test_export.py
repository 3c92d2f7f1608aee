"""The final weights as others load them, and a version that several processes write. Processes are played one after
the other; see tests/distributed for real ones."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.numpy import load_file

from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import WeightsError, from_hf_names, load_hf, load_hf_weights
from areal_jax.formats.hf_export import HfCompanions
from areal_jax.models.families import LayerKind
from areal_jax.models.ropes import Llama3Scaling
from areal_jax.publication.export import PartWriter, export_hf
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from areal_jax.publication.manifest import weights_sha256
from areal_jax.publication.versions import PublicationError
from areal_jax.sharding.rules import SharedLeaf, Shares, make_mesh
from tests.models import family_examples
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params

SHAPES = {
    **family_examples.CONFIGS,
    'llama': CONFIG,
    'llama3': dataclasses.replace(CONFIG, tie_embeddings=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 512)),
    'qwen2': dataclasses.replace(CONFIG, family='qwen2', qkv_bias=True, kinds=(LayerKind(), LayerKind(5))),
    'qwen3': dataclasses.replace(CONFIG, family='qwen3', qk_norm=True, qkv_bias=True, output_bias=True),
    'mistral': dataclasses.replace(CONFIG, family='mistral', kinds=(LayerKind(5),), tie_embeddings=False),
}


@pytest.mark.parametrize('name', SHAPES)
@pytest.mark.parametrize('file_bytes', [400, 10**9], ids=['many files', 'one file'])
def test_an_export_loads_back_bit_for_bit(tmp_path, name, file_bytes):
    params = host_params(config=SHAPES[name])
    export_hf(tmp_path / 'export', jax.device_put(params), SHAPES[name], file_bytes=file_bytes, dtype='float32')
    config, loaded = load_hf(tmp_path / 'export')
    assert config == SHAPES[name]
    assert_bit_equal(loaded, params)


def test_one_file_as_the_library_of_the_format_reads_it(tmp_path):
    params = host_params()
    export_hf(tmp_path / 'export', params, CONFIG, dtype='float32')
    path = tmp_path / 'export' / 'model.safetensors'
    assert_bit_equal(from_hf_names(load_file(path), CONFIG), params)
    assert {p.name for p in path.parent.iterdir()} == {'model.safetensors', 'config.json'}
    with safe_open(path, 'numpy') as file:
        assert file.metadata() == {'format': 'pt'}  # transformers refuses files without


def test_files_have_at_most_so_many_bytes(tmp_path):
    # a tensor has 4 bytes a value; the largest is the embedding, 11 * 6 * 4 = 264
    export_hf(tmp_path / 'export', host_params(), CONFIG, file_bytes=500, dtype='float32')
    index = json.loads((tmp_path / 'export' / 'model.safetensors.index.json').read_text())
    files = {path.name: load_file(path) for path in (tmp_path / 'export').glob('*.safetensors')}
    count = len(files)
    assert count > 3
    assert sorted(files) == [f'model-{number:05d}-of-{count:05d}.safetensors' for number in range(1, count + 1)]
    sizes = [sum(tensor.nbytes for tensor in file.values()) for file in files.values()]
    assert max(sizes) <= 500
    assert index['metadata']['total_size'] == sum(sizes)
    assert index['weight_map'] == {name: file for file, tensors in files.items() for name in tensors}
    export_hf(
        tmp_path / 'export', host_params(), CONFIG, file_bytes=1, dtype='float32'
    )  # every tensor alone, the earlier files gone
    assert len([*(tmp_path / 'export').glob('*.safetensors')]) == len(index['weight_map'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_weights_are_cast_and_the_config_says_so(tmp_path, dtype):
    params = host_params()
    export_hf(tmp_path / 'export', params, CONFIG, dtype=dtype)
    assert json.loads((tmp_path / 'export' / 'config.json').read_text())['dtype'] == dtype
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params)
    assert_bit_equal(load_hf(tmp_path / 'export', dtype=dtype)[1], cast)


def test_what_belongs_to_the_model_goes_along(tmp_path):
    source = tmp_path / 'source'
    export_hf(source, host_params(), CONFIG, dtype='float32')
    config = json.loads((source / 'config.json').read_text())
    (source / 'config.json').write_text(json.dumps(config | {'bos_token_id': 1, 'eos_token_id': [2, 3]}))
    for name in ('tokenizer.json', 'chat_template.jinja', 'thesis.tex'):
        (source / name).write_text(name)
    export_hf(tmp_path / 'export', host_params(1), CONFIG, dtype='float32', companions=HfCompanions(source))
    files = {path.name for path in (tmp_path / 'export').iterdir()}
    assert files == {'model.safetensors', 'config.json', 'tokenizer.json', 'chat_template.jinja'}
    assert (tmp_path / 'export' / 'tokenizer.json').read_text() == 'tokenizer.json'
    said = json.loads((tmp_path / 'export' / 'config.json').read_text())
    assert (said['bos_token_id'], said['eos_token_id'], said['num_hidden_layers']) == (1, [2, 3], 2)
    with pytest.raises(PublicationError, match='source is where the weights came from'):
        export_hf(source, host_params(), CONFIG, dtype='float32', companions=HfCompanions(source))


def test_what_cannot_be_exported_is_named(tmp_path):
    large = host_params()
    large['final_norm'][0] = 7e4
    with pytest.raises(PublicationError, match=r'model\.norm\.weight has values that float16 cannot hold'):
        export_hf(tmp_path / 'export', large, CONFIG, dtype='float16')
    large['final_norm'][0] = 3.4e38
    with pytest.raises(PublicationError, match=r'model\.norm\.weight has values that bfloat16 cannot hold'):
        export_hf(tmp_path / 'export', large, CONFIG, dtype='bfloat16')
    with pytest.raises(PublicationError, match="dtype='int8' is unknown"):
        export_hf(tmp_path / 'export', large, CONFIG, dtype='int8')
    config = dataclasses.replace(CONFIG, qk_norm=True)
    with pytest.raises(HfError, match="qk_norm=True cannot be written for family='llama'"):
        export_hf(tmp_path / 'export', host_params(config=config), config, dtype='float32')
    adapted = host_params()
    adapted['layers']['0']['mlp']['up']['lora_a'] = np.ones((6, 1), np.float32)
    with pytest.raises(WeightsError, match='layers/0/mlp/up/lora_a belongs to an adapter'):
        export_hf(tmp_path / 'export', adapted, CONFIG, dtype='float32')
    assert list(tmp_path.iterdir()) == []


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path):
    export_hf(tmp_path / 'export', host_params(0), CONFIG, dtype='float32')
    export_hf(tmp_path / 'export', jax.device_put(host_params(1)), CONFIG, dtype='float32')
    assert_bit_equal(load_hf(tmp_path / 'export')[1], host_params(1))
    assert [p.name for p in tmp_path.iterdir()] == ['export']

    (tmp_path / 'export' / 'model.safetensors').unlink()
    with pytest.raises(PublicationError, match='not ours to replace'):
        export_hf(tmp_path / 'export', host_params(), CONFIG, dtype='float32')


# A version that several processes write.


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
