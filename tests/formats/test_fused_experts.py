"""Experts in files of Hugging Face: round trips, fused tensors, and faults of both layouts in one sentence each."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_jax.formats.hf_config import HfError, read_hf_config
from areal_jax.formats.hf_directory import from_hf_names, load_hf, map_hf_weights, to_hf_names
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weights import logical_axes, stack_layers
from areal_jax.publication.export import export_hf
from areal_jax.sharding.rules import make_mesh, param_shardings

QWEN = ModelConfig(
    vocab_size=29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=100.0,
    rms_eps=1e-6, family='qwen3_moe', qk_norm=True, tie_embeddings=False, experts=Experts(4, 2, 12),
)  # fmt: skip
CONFIGS = {
    'qwen3_moe': QWEN,
    'mixed': dataclasses.replace(QWEN, experts=Experts(4, 2, 12, normalised=False, dense_layers=(0,))),
    'mixtral': dataclasses.replace(QWEN, family='mixtral', qk_norm=False, d_ff=12),
    'olmoe': dataclasses.replace(QWEN, family='olmoe', qk_norm=False, whole_qk_norm=True, d_ff=12),
}
PARAMS = Decoder(QWEN).init(1)
_LAYER = 'model.layers.1.mlp.experts'


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp('experts') / 'model'
    export_hf(directory, PARAMS, QWEN, dtype='float32')
    return directory


@pytest.fixture
def directory(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'model')


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def change(directory, change_tensors):
    tensors = load_file(directory / 'model.safetensors')
    change_tensors(tensors)
    save_file(tensors, directory / 'model.safetensors')


def set_fields(directory, **fields):
    path = directory / 'config.json'
    kept = {name: value for name, value in {**json.loads(path.read_text()), **fields}.items() if value is not None}
    path.write_text(json.dumps(kept))


def fuse(tensors, layers=('0', '1')):
    """The experts of these layers as two tensors each."""
    for layer in layers:
        place = f'model.layers.{layer}.mlp.experts'
        part = lambda name, e, place=place: tensors.pop(f'{place}.{e}.{name}.weight')
        both = [np.concatenate([part('gate_proj', e), part('up_proj', e)]) for e in range(4)]
        tensors[f'{place}.gate_up_proj'] = np.stack(both)
        tensors[f'{place}.down_proj'] = np.stack([part('down_proj', e) for e in range(4)])


@pytest.mark.parametrize('name', CONFIGS)
def test_a_round_trip_changes_no_bit(tmp_path, name):
    config = CONFIGS[name]
    params = Decoder(config).init(2)
    export_hf(tmp_path / 'model', params, config, dtype='float32', file_bytes=9000)
    assert read_hf_config(tmp_path / 'model') == config
    assert_equal(load_hf(tmp_path / 'model')[1], params)
    assert_equal(map_hf_weights(tmp_path / 'model', config), params)
    assert_equal(from_hf_names(to_hf_names(params, config), config), params)
    if not config.experts.dense_layers:
        assert_equal(load_hf(tmp_path / 'model', layers='stacked')[1], stack_layers(params))


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_shards_of_a_mesh_read_their_own_experts(whole, layers):
    mesh = make_mesh(fsdp=2, tensor=4)
    described = Decoder(QWEN, layers=layers).abstract()
    shardings = param_shardings(described, logical_axes(QWEN), mesh, 'fsdp_tensor')
    _, found = load_hf(whole, shardings=shardings, layers=layers)
    expected = PARAMS if layers == 'list' else stack_layers(PARAMS)
    assert_equal(found, expected)
    experts = (found['layers']['0'] if layers == 'list' else found['layers'])['mlp']['experts']
    assert {shard.data.shape[-2:] for shard in experts['gate'].addressable_shards} == {(8, 3)}


def test_fused_experts_are_read(directory):
    change(directory, fuse)
    assert_equal(load_hf(directory)[1], PARAMS)
    assert_equal(map_hf_weights(directory, QWEN), PARAMS)


def doubled(tensors):
    copy = dict(tensors)
    fuse(copy)
    tensors[f'{_LAYER}.down_proj'] = copy[f'{_LAYER}.down_proj']


def half_fused(tensors):
    fuse(tensors)
    tensors[f'{_LAYER}.gate_up_proj'] = tensors[f'{_LAYER}.gate_up_proj'][:3]


def misnumbered(tensors):
    tensors[f'{_LAYER}.4.up_proj.weight'] = tensors.pop(f'{_LAYER}.3.up_proj.weight')


def without_one(tensors):
    del tensors[f'{_LAYER}.2.down_proj.weight']


def with_nan(tensors):
    tensors['model.layers.0.mlp.gate.weight'][1, 1] = np.nan


@pytest.mark.parametrize(
    ('fault', 'message'),
    [
        (doubled, r'model\.layers\.1\.mlp\.experts\.\d\.down_proj\.weight is there twice'),
        (half_fused, r'gate_up_proj has shape \[3, 24, 16\] instead of \[4, 24, 16\]'),
        (misnumbered, r'missing model\.layers\.1\.mlp\.experts\.3\.up_proj.*surplus .*experts\.4\.up_proj'),
        (without_one, r'missing model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight'),
        (with_nan, r'1 values of model\.layers\.0\.mlp\.gate\.weight are NaN'),
    ],
)
def test_faults_of_tensors_are_named(directory, fault, message):
    change(directory, fault)
    with pytest.raises(HfError, match=message):
        load_hf(directory)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'num_local_experts': 8}, 'num_experts=4 and num_local_experts=8 are two numbers of experts'),
        ({'num_experts_per_tok': 5}, 'num_experts_per_tok=5 is more than the 4 experts'),
        ({'mlp_only_layers': [2]}, r'mlp_only_layers=\[2\] must be a list of layers, whose numbers are 0 to 1'),
        ({'mlp_only_layers': 'all'}, r"mlp_only_layers='all' must be a list of layers"),
        ({'decoder_sparse_step': 3}, 'decoder_sparse_step=3 leave no layer with experts'),
        ({'shared_expert_intermediate_size': 8}, 'shared_expert_intermediate_size=8 is not supported'),
    ],
)
def test_faults_of_the_config_are_named(directory, fields, message):
    set_fields(directory, **fields)
    with pytest.raises(HfError, match=message):
        read_hf_config(directory)


def test_both_spellings_of_the_number_of_experts_are_read(directory):
    set_fields(directory, num_experts=None, num_local_experts=4)
    assert read_hf_config(directory) == QWEN
    set_fields(directory, num_experts=4, mlp_only_layers=[], decoder_sparse_step=2)
    assert read_hf_config(directory).experts.dense_layers == (0,)
