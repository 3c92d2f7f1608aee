"""The final weights as others load them."""

import dataclasses
import json

import jax
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from areal_jax.models.hf import from_hf_names
from areal_jax.publication.errors import PublicationError
from areal_jax.publication.export import export_hf
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params


@pytest.mark.parametrize('tie_embeddings', [True, False])
def test_an_export_loads_back_bit_for_bit(tmp_path, tie_embeddings):
    config = dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings)
    params = host_params(config=config)
    export_hf(tmp_path / 'export', params, config)
    path = tmp_path / 'export' / 'model.safetensors'
    assert_bit_equal(from_hf_names(load_file(path), config), params)
    assert {p.name for p in path.parent.iterdir()} == {'model.safetensors', 'config.json'}
    assert json.loads((path.parent / 'config.json').read_text())['tie_word_embeddings'] == tie_embeddings
    with safe_open(path, 'numpy') as file:
        assert file.metadata() == {'format': 'pt'}  # transformers refuses files without


def test_an_export_replaces_the_one_before_and_nothing_else(tmp_path):
    export_hf(tmp_path / 'export', host_params(0), CONFIG)
    export_hf(tmp_path / 'export', jax.device_put(host_params(1)), CONFIG)
    tensors = load_file(tmp_path / 'export' / 'model.safetensors')
    assert_bit_equal(from_hf_names(tensors, CONFIG), host_params(1))
    assert [p.name for p in tmp_path.iterdir()] == ['export']

    (tmp_path / 'export' / 'model.safetensors').unlink()
    with pytest.raises(PublicationError, match='not ours to replace'):
        export_hf(tmp_path / 'export', host_params(), CONFIG)
