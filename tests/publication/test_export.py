"""The final weights as others load them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import WeightsError, from_hf_names, load_hf
from areal_jax.formats.hf_export import HfCompanions
from areal_jax.models.families import Llama3Scaling
from areal_jax.publication.export import export_hf
from areal_jax.publication.versions import PublicationError
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params

SHAPES = {
    'llama': CONFIG,
    'llama3': dataclasses.replace(CONFIG, tie_embeddings=False, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 512)),
    'qwen2': dataclasses.replace(CONFIG, family='qwen2', qkv_bias=True, sliding_window=5, first_window_layer=1),
    'qwen3': dataclasses.replace(CONFIG, family='qwen3', qk_norm=True, qkv_bias=True, output_bias=True),
    'mistral': dataclasses.replace(CONFIG, family='mistral', sliding_window=5, tie_embeddings=False),
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
