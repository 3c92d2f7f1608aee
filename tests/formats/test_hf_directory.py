"""Checkpoint directories: every value where it belongs, in every form and place, and an error that names the fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from areal_jax.formats import hf_directory
from areal_jax.formats.hf_config import HfError, hf_config
from areal_jax.formats.hf_directory import INDEX, WEIGHTS, hf_tensors, load_hf, to_hf_names
from areal_jax.formats.safetensors_file import list_tensors, write_tensors
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import stack_layers
from areal_jax.publication.export import export_hf
from tests.publication.tiny import assert_bit_equal, host_params

CONFIG = ModelConfig(
    vocab_size=24, d_model=8, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=12, rope_theta=1e4,
    family='qwen2', qkv_bias=True, tie_embeddings=False,
)  # fmt: skip
TIED = ModelConfig(vocab_size=24, d_model=8, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=12, rope_theta=1e4)
UP = 'model.layers.1.mlp.up_proj.weight'


def save(directory, config, params, files=1, **more):
    """What transformers would have written, in so many files; `more` adds tensors or (None) leaves them out."""
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in to_hf_names(params, config).items()}
    tensors = {name: tensor for name, tensor in (tensors | more).items() if tensor is not None}
    (directory / 'config.json').write_text(json.dumps(hf_config(config)))
    names = [WEIGHTS] if files == 1 else [f'part-{number}.safetensors' for number in range(files)]
    places = {name: names[index % files] for index, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name, place in places.items() if place == file}, directory / file)
    if files > 1:
        (directory / INDEX).write_text(json.dumps({'metadata': {}, 'weight_map': places}))
    return tensors


def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('data', 'fsdp'))


@pytest.fixture(params=[16, 1 << 20], ids=['row by row', 'at once'])
def _block_bytes(request, monkeypatch):
    monkeypatch.setattr(hf_directory, 'BLOCK_BYTES', request.param)


@pytest.mark.usefixtures('_block_bytes')
@pytest.mark.parametrize('files', [1, 3])
@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_every_value_arrives(tmp_path, files, layers):
    params = host_params(config=CONFIG)
    save(tmp_path, CONFIG, params, files)
    config, loaded = load_hf(tmp_path, layers=layers)
    assert config == CONFIG
    assert_bit_equal(loaded, params if layers == 'list' else stack_layers(params))


# every way to cut a leaf: no axis, rows, columns, both, the layers; replicas over the axis that is not named
@pytest.mark.usefixtures('_block_bytes')
@pytest.mark.parametrize('layers', ['list', 'stacked'])
@pytest.mark.parametrize('cut', [(), ('fsdp',), (None, 'fsdp'), ('fsdp', 'data'), ('data', None, 'fsdp')])
def test_every_shard_holds_its_part(tmp_path, layers, cut):
    params = host_params(config=CONFIG)
    save(tmp_path, CONFIG, params, 2)
    expected = params if layers == 'list' else stack_layers(params)
    place = lambda leaf: NamedSharding(mesh(), PartitionSpec(*cut[: leaf.ndim]))
    shardings = jax.tree.map(place, expected)
    _, loaded = load_hf(tmp_path, shardings=shardings, layers=layers)
    assert_bit_equal(loaded, expected)
    triples = zip(*map(jax.tree.leaves, (loaded, expected, shardings)), strict=True)
    for leaf, whole, sharding in triples:
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        for part in leaf.addressable_shards:
            np.testing.assert_array_equal(part.data, whole[part.index])


def test_one_place_for_all(tmp_path):
    save(tmp_path, CONFIG, host_params(config=CONFIG))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    leaves = jax.tree.leaves(load_hf(tmp_path, shardings=place)[1])
    assert {device for leaf in leaves for device in leaf.devices()} == {jax.devices()[3]}


def test_rows_of_other_devices_are_not_read(tmp_path, monkeypatch):
    # The embedding [24, 8] lies in the file as it is; of four parts this device wants rows 6 to 12.
    save(tmp_path, TIED, host_params(config=TIED))
    stored = hf_directory.list_tensors(tmp_path / WEIGHTS)['model.embed_tokens.weight']
    read = []
    monkeypatch.setattr(
        type(stored), 'read_rows', lambda self, first, end: read.append((first, end)) or np.ones((end - first, 8))
    )
    hf_directory.fill([(((6, 12), (0, 8)), np.empty((6, 8)))], stored)
    assert read == [(6, 12)]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('kept_as', ['F32', 'BF16', 'F16'])
def test_dtypes_of_files_and_arrays(tmp_path, dtype, kept_as):
    params = host_params(config=TIED)
    save(tmp_path, TIED, params)
    stored = {'F32': np.float32, 'BF16': jnp.bfloat16, 'F16': np.float16}[kept_as]
    by_hand(tmp_path / WEIGHTS, load_file(tmp_path / WEIGHTS), kept_as, stored)
    _, loaded = load_hf(tmp_path, dtype=dtype)
    assert_bit_equal(loaded, jax.tree.map(lambda leaf: leaf.astype(stored).astype(dtype), params))


def by_hand(path, tensors, name, dtype):
    """The file as the description of the format says: length, header, tensors."""
    header, content = {}, b''
    for key, tensor in tensors.items():
        start = len(content)
        content += tensor.astype(dtype).tobytes()
        header[key] = {'dtype': name, 'shape': list(tensor.shape), 'data_offsets': [start, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + content)


def test_tensors_that_say_nothing_are_ignored(tmp_path):
    params = host_params(config=TIED)
    buffer = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(2, np.float32)}
    save(tmp_path, TIED, params, **buffer, **{'lm_head.weight': params['embedding']})
    assert_bit_equal(load_hf(tmp_path)[1], params)
    save(tmp_path, TIED, params, **{'lm_head.weight': params['embedding'] + 1})
    with pytest.raises(HfError, match=r'lm_head\.weight differs from model\.embed_tokens\.weight, but .*=true'):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({UP: None}, rf'missing {UP}$'),
        ({'model.layers.4.mlp.up_proj.weight': np.ones(3, np.float32)}, r'surplus model\.layers\.4\.mlp\.up_proj'),
        ({UP: np.ones((8, 12), np.float32)}, r'up_proj\.weight has shape \[8, 12\] instead of \[12, 8\]'),
        ({UP: np.ones((12, 8), np.int32)}, r'model\.safetensors: .*up_proj\.weight has dtype I32; only F32, BF16, F16'),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    save(tmp_path, CONFIG, host_params(config=CONFIG), **change)
    with pytest.raises(HfError, match=rf'{tmp_path}.*{message}'):
        load_hf(tmp_path)


def test_values_beyond_float16_are_named(tmp_path):
    save(tmp_path, TIED, host_params(config=TIED), **{'model.norm.weight': np.full(8, 7e4, np.float32)})
    with pytest.raises(HfError, match=r'model\.norm\.weight has values that float16 cannot hold'):
        load_hf(tmp_path, dtype='float16')
    assert load_hf(tmp_path, dtype='bfloat16')[1]['final_norm'][0] == 70144


def test_wrong_files_are_named(tmp_path):
    save(tmp_path, CONFIG, host_params(config=CONFIG), files=2)
    part, index = tmp_path / 'part-1.safetensors', tmp_path / INDEX
    content, places = part.read_bytes(), json.loads(index.read_text())['weight_map']

    def damaged(message):
        with pytest.raises(HfError, match=message):
            load_hf(tmp_path)

    part.write_bytes(content[:-100])
    damaged(rf'{part} is cut short: it has {len(content) - 100} bytes, its tensors end at {len(content)}')
    part.write_bytes(content[:100])
    damaged(rf'{part} is no safetensors file, or cut short')
    part.write_bytes(b'\x02' + bytes(7) + b'[]')
    damaged(rf'{part} is no safetensors file: its header')
    part.unlink()
    damaged(rf'{index} names part-1.safetensors, which is not there')
    part.write_bytes(content)
    moved = places | {UP: 'part-0.safetensors' if places[UP] == part.name else part.name}
    index.write_text(json.dumps({'weight_map': moved}))
    damaged(rf'has {UP}, which model\.safetensors\.index\.json places in')
    index.write_text(json.dumps({'weight_map': places | {'extra': part.name}}))
    damaged(rf'{part} lacks extra')
    index.write_text(json.dumps({'weight_map': {UP: '../elsewhere'}}))
    damaged('has no weight_map')
    index.unlink()
    damaged(rf'{tmp_path} has neither model.safetensors nor model.safetensors.index.json')


def test_unknown_options_are_named(tmp_path):
    with pytest.raises(HfError, match=r"dtype='int8' is unknown; use one of float32, bfloat16, float16"):
        load_hf(tmp_path, dtype='int8')
    with pytest.raises(HfError, match=r"layers='loose' is unknown; use one of list, stacked"):
        load_hf(tmp_path, layers='loose')


LOADER = """
import pathlib, sys
import jax
from areal_jax.formats.hf_directory import load_hf

def kilobytes(name):
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

load_hf(sys.argv[1])  # what the first use of everything needs
before = kilobytes('VmRSS')
pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak counts from here
_, params = load_hf(sys.argv[2], dtype='float32', layers=sys.argv[3])
print((kilobytes('VmHWM') - before) * 1024, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


# bfloat16 on the disk, float32 in memory. The largest tensor, 4096 x 1024 x 4 bytes, is 16 MiB; of eight layers 128.
@pytest.mark.slow
@pytest.mark.parametrize(('layers', 'largest_leaf'), [('list', 16 << 20), ('stacked', 128 << 20)])
def test_memory_beyond_the_weights_is_one_leaf(tmp_path, layers, largest_leaf):
    large = ModelConfig(
        vocab_size=4096, d_model=1024, n_layers=8, n_heads=8, n_kv_heads=4, head_dim=128, d_ff=4096, rope_theta=1e4
    )
    for name, config in (('small', TIED), ('large', large)):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'config.json').write_text(json.dumps(hf_config(config)))
        shapes = {tensor.name: jax.ShapeDtypeStruct(tensor.shape, jnp.bfloat16) for tensor in hf_tensors(config)}
        ones = lambda name, shapes=shapes: np.ones(shapes[name].shape, jnp.bfloat16)
        write_tensors(tmp_path / name / WEIGHTS, shapes, ones)
    command = [sys.executable, '-c', LOADER, str(tmp_path / 'small'), str(tmp_path / 'large'), layers]
    # else the allocator keeps some of what was freed
    environment = os.environ | {'MALLOC_MMAP_THRESHOLD_': '1000000', 'JAX_PLATFORMS': 'cpu'}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=environment)
    peak, weights = map(int, done.stdout.split())
    assert weights == Decoder(large).parameter_count() * 4 > 450 << 20
    assert weights + largest_leaf / 2 < peak < weights + largest_leaf + hf_directory.BLOCK_BYTES + (4 << 20)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_one_value_that_is_no_number_is_named(tmp_path, dtype, value, layers):
    export_hf(tmp_path / 'model', Decoder(CONFIG).init(0), CONFIG, dtype=dtype)
    gate = list_tensors(tmp_path / 'model' / WEIGHTS)['model.layers.1.mlp.gate_proj.weight']
    with gate.path.open('r+b') as file:
        file.seek(gate.offset + 5 * np.dtype(dtype).itemsize)
        file.write(np.array([value], dtype).tobytes())
    with pytest.raises(HfError, match=r'1 values of model\.layers\.1\.mlp\.gate_proj\.weight are NaN or infinite'):
        load_hf(tmp_path / 'model', layers=layers)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_the_largest_and_the_smallest_numbers_are_numbers(tmp_path, dtype):
    params = Decoder(CONFIG).init(0)
    finite = jnp.finfo(dtype)
    for place, value in enumerate((finite.max, finite.min, finite.tiny, finite.smallest_subnormal, -0.0)):
        params['final_norm'] = params['final_norm'].at[place].set(value)
    export_hf(tmp_path / 'model', params, CONFIG, dtype=dtype)
    _, loaded = load_hf(tmp_path / 'model', dtype=dtype)
    assert loaded['final_norm'][0] == finite.max
