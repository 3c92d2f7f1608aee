"""The table of weights: what hangs on it is what it was, and a new weight is one row."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from areal_jax.formats.hf_directory import hf_tensors, load_hf
from areal_jax.models import families
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import COMMON, FAMILIES, Experts, Family, Init, ModelConfig
from areal_jax.models.weights import TARGETS, Lora, find_leaf, leaf_at, logical_axes, nest, stack_layers, weight_table
from areal_jax.publication.export import export_hf
from areal_jax.sharding.rules import make_mesh, param_shardings, path_name

LLAMA = ModelConfig(
    vocab_size=29, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0,
    tie_embeddings=False,
)  # fmt: skip
MODELS = {
    'llama': LLAMA,
    'tied': dataclasses.replace(LLAMA, tie_embeddings=True),
    'qwen2': dataclasses.replace(LLAMA, family='qwen2', qkv_bias=True),
    'qwen3': dataclasses.replace(LLAMA, family='qwen3', qk_norm=True),
    'qwen3_moe': dataclasses.replace(
        LLAMA, family='qwen3_moe', qk_norm=True, experts=Experts(4, 2, 16, dense_layers=(1,))
    ),
    'mixtral': dataclasses.replace(LLAMA, family='mixtral', experts=Experts(4, 2, 40)),
}
# the first three numbers of the last row of initial weights for seed 7 and scale 1.5, recorded before there was a table
INITIAL = {
    'embedding': (0.15029363, 0.04310828, 0.09369223),
    'head': (-0.11712776, -0.20017257, -0.40312102),
    'layers/0/attention/query/weight': (0.11871047, -0.16526197, -0.14278322),
    'layers/1/attention/output/weight': (0.06209218, 0.05593060, -0.15512308),
    'layers/2/mlp/down/weight': (0.02086427, -0.12765807, 0.00502511),
}
# sha256 of the JSON list of (name, path, shape in the file, transposed), recorded likewise
HF_TENSORS = {
    'llama': '2846da8c04422a59c86aaa999a5634bf6d12a07f8918e1c9dd9b02de542e52da',
    'tied': '9ec22018330d1a80d7ffba057a264903cb0b5ac73ccb43779852441dd926832c',
    'qwen2': '67873d5bff07b8531d060d551cd543a225922eb4e6df3f85afabc40a4e6fc298',
    'qwen3': '616f140bdb8a8d758801ddf605ec97ca0dc132413d4e7ee79b61fefa4e32a9a3',
    'qwen3_moe': '01fab612b68cbc5530027fadc47f7608ead0f660f21d25dd243a0df5272f03a7',
    'mixtral': '0972938b0aff60dd8f1bf24b9e675a0f48e1f01759579216c3b7f35e62812b22',
}


def by_path(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def initial_leaf(path, shape, n_layers):
    """The rule by names of leaves that the table replaced, for seed 7 and scale 1.5."""
    if path.endswith(('/bias', '/lora_b')):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    deviation = 1.5 / math.sqrt(shape[1] if path in ('embedding', 'head') else shape[-2])
    if path.endswith(('attention/output/weight', 'mlp/down/weight', 'mlp/experts/down')):
        deviation /= math.sqrt(2 * n_layers)
    return normal(jax.random.fold_in(jax.random.key(7), zlib.crc32(path.encode())), shape, deviation)


@functools.partial(jax.jit, static_argnums=1)
def normal(key, shape, deviation):
    return jax.random.normal(key, shape, jnp.float32) * deviation


@pytest.mark.parametrize('lora', [None, Lora(2, 4.0, TARGETS)], ids=['plain', 'lora'])
@pytest.mark.parametrize('name', MODELS)
def test_initial_weights_are_bit_for_bit_those_of_the_rule_by_names(name, lora):
    config = MODELS[name]
    if config.experts and lora:
        lora = Lora(2, 4.0, TARGETS[:4])  # experts have no adapters
    leaves = by_path(Decoder(config, lora=lora).init(7, 1.5))
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, initial_leaf(path, leaf.shape, config.n_layers), err_msg=path)


def test_a_scale_of_the_embedding_multiplies_what_tokens_look_up():
    config = dataclasses.replace(LLAMA, plain=True, tie_embeddings=False)
    drawn, scaled = (by_path(Decoder(config).init(7, 1.5, scale)) for scale in (1.0, 3.0))
    for path, leaf in drawn.items():
        factor = 3.0 if path in ('embedding', 'positions') else 1.0
        np.testing.assert_allclose(scaled[path], factor * leaf, rtol=1e-6, err_msg=path)


def test_the_initial_weights_of_a_seed_never_change():
    leaves = by_path(Decoder(LLAMA).init(7, 1.5))
    for path, expected in INITIAL.items():
        np.testing.assert_allclose(leaves[path][-1, :3], expected, rtol=1e-5)


@pytest.mark.parametrize('name', MODELS)
def test_the_tensors_of_files_never_change(name):
    listed = [[t.name, t.path, list(t.shape), t.transposed] for t in hf_tensors(MODELS[name])]
    assert hashlib.sha256(json.dumps(listed).encode()).hexdigest() == HF_TENSORS[name]


def test_families_differ_by_rows():
    paths = {name: set(weight_table(config)) for name, config in MODELS.items()}
    assert paths['llama'] - paths['tied'] == {'head'}
    assert paths['qwen2'] - paths['llama'] == {f'layers/*/attention/{name}/bias' for name in ('query', 'key', 'value')}
    assert paths['qwen3'] - paths['llama'] == {f'layers/*/attention/{name}_norm' for name in ('query', 'key')}


def test_a_row_in_the_sizes_of_a_model():
    query = weight_table(LLAMA)['layers/*/attention/query/weight']
    assert query.shape == (24, 4 * 8)
    assert query.axes == ('embed', 'heads')
    assert (query.hf_name, query.transposed) == ('model.layers.*.self_attn.q_proj.weight', True)
    assert query.gguf_name == 'blk.*.attn_q.weight'
    assert (query.in_layers, query.path_in_layer) == (True, 'attention/query/weight')


def test_every_row_is_listed_once_with_an_axis_for_every_size():
    for kind in ('when', 'unless'):  # of a plain decoder, of any other
        for norm in ('qk_norm', 'whole_qk_norm'):
            paths = [row.path for row in COMMON if getattr(row, kind) != 'plain' and row.when != norm]
            assert len(set(paths)) == len(paths)
    assert [row.path for row in COMMON if len(row.shape.split()) != len(row.axes.split())] == []


def test_adapters_follow_their_projections():
    table = weight_table(LLAMA, Lora(2, 4.0, ('down',)))
    assert set(table) - set(weight_table(LLAMA)) == {f'layers/*/mlp/down/lora_{name}' for name in 'ab'}
    a, b = (table[f'layers/*/mlp/down/lora_{name}'] for name in 'ab')
    assert (a.shape, b.shape) == ((40, 2), (2, 24))
    assert (a.axes, b.axes) == (('embed', 'rank'), ('rank', 'embed'))
    assert (a.init, b.init, a.hf_name, b.hf_name) == (Init.MATRIX, Init.ZEROS, None, None)
    assert TARGETS == ('query', 'key', 'value', 'output', 'gate', 'up', 'down')


def test_leaves_by_path():
    tree = nest([('a/b', 1), ('a/c/d', 2), ('e', 3)])
    assert tree == {'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}
    assert leaf_at(tree, 'a/c/d') == 2
    assert [find_leaf(tree, path) for path in ('e', 'a/c', 'a/x/y', 'x')] == [3, {'d': 2}, None, None]


# A family of the tests: a llama with a norm after its MLP, a bias of its MLP's last projection and a table of its own.

TOY = Family(
    'ToyForCausalLM', 64, None, None,
    weights=(
        *COMMON,
        families.norm('mlp_post_norm', 'd', 'post_feedforward_layernorm'),
        families.bias('mlp/down', 'd', 'mlp.down_proj'),
        families.Weight('positions', 'V d', 'vocab embed', Init.TABLE, 'model.embed_positions.weight'),
    ),
)  # fmt: skip
TOY_CONFIG = dataclasses.replace(LLAMA, family='llama', vocab_size=32, context_tokens=64)
EXTRA = {
    'mlp_post_norm': ('model.layers.{}.post_feedforward_layernorm.weight', 1.0),
    'mlp/down/bias': ('model.layers.{}.mlp.down_proj.bias', 0.0),
}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(FAMILIES, 'toy', TOY)
    return dataclasses.replace(TOY_CONFIG, family='toy')


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_new_rows_have_initial_weights(toy, layers):
    params = Decoder(toy, layers=layers).init(3)
    assert jax.tree.structure(params) == jax.tree.structure(Decoder(toy, layers=layers).abstract())
    for path, (_, value) in EXTRA.items():
        leaves = [f'layers/{path}'] if layers == 'stacked' else [f'layers/{layer}/{path}' for layer in range(3)]
        for leaf in leaves:
            np.testing.assert_array_equal(leaf_at(params, leaf), np.full((3, 24) if layers == 'stacked' else 24, value))
    # a table's fan in is its width: 32 * 24 = 768 values of deviation 1 / sqrt(24) = .204
    assert abs(np.std(params['positions']) - 24**-0.5) < 0.02
    # the weights that the toy shares with llama are those of llama
    shared = by_path(Decoder(TOY_CONFIG, layers=layers).init(3))
    for path, leaf in by_path(params).items():
        if path in shared:
            np.testing.assert_array_equal(leaf, shared[path])
    assert Decoder(toy).parameter_count() == Decoder(TOY_CONFIG).parameter_count() + 3 * 2 * 24 + 32 * 24


def test_new_rows_are_sharded(toy):
    mesh = make_mesh(fsdp=4, tensor=2)
    for layers, prefix in (('list', 'layers/1'), ('stacked', 'layers')):
        abstract = Decoder(toy, layers=layers).abstract()
        specs = by_path(param_shardings(abstract, logical_axes(toy), mesh, 'fsdp_tensor'))
        assert specs['positions'].spec == P('tensor', 'fsdp')
        assert specs[f'{prefix}/mlp_post_norm'].spec == specs[f'{prefix}/mlp/down/bias'].spec == P()


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_new_rows_are_exported_and_loaded(toy, layers, tmp_path):
    changed = lambda leaf: leaf + np.arange(leaf.size, dtype=np.float32).reshape(leaf.shape)
    params = jax.tree.map(changed, Decoder(toy).init(3))
    export_hf(tmp_path / 'export', params, toy, dtype='float32')
    stored = load_file(tmp_path / 'export' / 'model.safetensors')
    for path, (name, _) in EXTRA.items():
        np.testing.assert_array_equal(stored[name.format(2)], leaf_at(params, f'layers/2/{path}'))
    np.testing.assert_array_equal(stored['model.embed_positions.weight'], params['positions'])
    assert json.loads((tmp_path / 'export' / 'config.json').read_text())['architectures'] == ['ToyForCausalLM']

    config, loaded = load_hf(tmp_path / 'export', layers=layers)
    assert config == toy
    expected = stack_layers(params) if layers == 'stacked' else params
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_forward_pass_without_the_new_rows_still_runs(toy):
    attend = lambda q, k, v, entry, window: (v.repeat(2, axis=1), entry)
    tokens = np.arange(5, dtype=np.int32)
    run = lambda decoder: decoder.hidden(decoder.init(3), tokens, tokens, attend)[0]
    # the toy's bias is 0 and its norm is unused
    np.testing.assert_array_equal(run(Decoder(toy)), run(Decoder(TOY_CONFIG)))
