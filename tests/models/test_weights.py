"""The table of weights, where a new weight is one row; the two forms of a tree of weights; adapters beside them."""

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
import optax
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_directory import hf_tensors, load_hf
from areal_jax.models import weight_rows
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import run_rows
from areal_jax.models.experts import Routing
from areal_jax.models.families import DELTA, FAMILIES, Family, LayerKind, ModelConfig
from areal_jax.models.layer_parts import DeltaNet, Experts
from areal_jax.models.weight_rows import COMMON, Init
from areal_jax.models.weights import (
    DELTA_TARGETS,
    TARGETS,
    Lora,
    attach_adapters,
    find_leaf,
    is_adapter,
    leaf_at,
    list_layers,
    logical_axes,
    merge_adapters,
    nest,
    stack_layers,
    unstack_layers,
    weight_table,
)
from areal_jax.publication.export import export_hf
from areal_jax.sharding.rules import make_mesh, param_shardings, path_name
from tests.models import family_examples

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


def initial_leaf(path, shape, n_layers, seed, scale):
    """The rule by names of leaves that the table replaced."""
    if path.endswith(('/bias', '/lora_b')):
        return np.zeros(shape, np.float32)
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    deviation = scale / math.sqrt(shape[1] if path in ('embedding', 'head') else shape[-2])
    if path.endswith(('attention/output/weight', 'mlp/down/weight', 'mlp/experts/down')):
        deviation /= math.sqrt(2 * n_layers)
    return normal(jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode())), shape, deviation)


@functools.partial(jax.jit, static_argnums=1)
def normal(key, shape, deviation):
    return jax.random.normal(key, shape, jnp.float32) * deviation


@pytest.mark.parametrize('lora', [None, Lora(2, 4.0, TARGETS)], ids=['plain', 'lora'])
@pytest.mark.parametrize('name', MODELS)
def test_initial_weights_are_bit_for_bit_those_of_the_rule_by_names(name, lora):
    config = MODELS[name]
    if config.experts and lora:
        lora = Lora(2, 4.0, TARGETS[:4])  # experts have no adapters
    for drawn in ((7, 1.5), (3, 1.0)):  # seed, scale
        for path, leaf in by_path(Decoder(config, lora=lora).init(*drawn)).items():
            np.testing.assert_array_equal(leaf, initial_leaf(path, leaf.shape, config.n_layers, *drawn), err_msg=path)


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
    assert DELTA_TARGETS == ('output_gate', 'beta', 'decay')


def test_adapters_of_a_hybrid_are_those_of_attention_and_of_delta_nets():
    config = ModelConfig(
        vocab_size=29, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0,
        family='qwen3_5_text', kinds=(DELTA, LayerKind()), delta=DeltaNet(2, 4, 3, 5),
        **FAMILIES['qwen3_5_text'].switches,
    )  # fmt: skip
    table = weight_table(config, Lora(2, 4.0, ('query', 'output_gate', 'beta')))
    adapted = {path.rpartition('/')[0] for path in table if is_adapter(path)}
    of_delta = {f'layers/*/delta/{name}' for name in ('query', 'output_gate', 'beta')}
    assert adapted == of_delta | {f'layers/*/attention/{name}' for name in ('query', 'output_gate')}
    assert table['layers/*/delta/beta/lora_b'].shape == (2, 4)
    assert [table[f'layers/*/delta/beta/lora_{name}'].layers for name in 'ab'] == [(0,)] * 2


def test_adapters_of_projections_that_a_model_lacks_are_refused():
    said = r"lora\.targets=\('query', 'beta'\) names 'beta', which no layer of this llama model has: remove it"
    with pytest.raises(ConfigError, match=said):
        weight_table(LLAMA, Lora(2, 4.0, ('query', 'beta')))


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
        weight_rows.norm('mlp_post_norm', 'd', 'post_feedforward_layernorm'),
        weight_rows.bias('mlp/down', 'd', 'mlp.down_proj'),
        weight_rows.Weight('positions', 'V d', 'vocab embed', Init.TABLE, 'model.embed_positions.weight'),
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


# The two forms of a tree of weights.

N_LAYERS = 3


def listed(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    leaf = lambda *shape: rng.normal(size=shape).astype(dtype)
    layers = {str(i): {'norm': leaf(4), 'mlp': {'weight': leaf(4, 5)}} for i in range(N_LAYERS)}
    return {'embedding': leaf(7, 4), 'layers': layers}


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('dtype', [np.float32, jnp.bfloat16, np.int8])
@pytest.mark.parametrize('kind', ['numpy', 'jax', 'jit'])
def test_both_conversions_move_bits_and_nothing_else(kind, dtype):
    tree = listed(dtype=dtype)
    stack, unstack = stack_layers, lambda x: unstack_layers(x, N_LAYERS)
    if kind != 'numpy':
        tree = jax.tree.map(jnp.asarray, tree)
    if kind == 'jit':
        stack, unstack = jax.jit(stack), jax.jit(unstack)
    stacked = stack(tree)
    assert {type(leaf) for leaf in jax.tree.leaves(stacked)} == {type(leaf) for leaf in jax.tree.leaves(tree)}
    assert sorted(stacked['layers']) == ['mlp', 'norm']
    weight = stacked['layers']['mlp']['weight']
    assert weight.shape == (3, 4, 5)
    for i in range(N_LAYERS):
        np.testing.assert_array_equal(weight[i], tree['layers'][str(i)]['mlp']['weight'])
    np.testing.assert_array_equal(stacked['embedding'], tree['embedding'])
    assert_same(unstack(stacked), tree)
    assert_same(stack(unstack(stacked)), stacked)


def test_layers_are_stacked_by_number_not_by_name():
    # as strings '10' < '2'
    tree = {'layers': {str(i): {'bias': np.full(2, i)} for i in reversed(range(11))}}
    np.testing.assert_array_equal(stack_layers(tree)['layers']['bias'][:, 0], np.arange(11))


def test_moments_of_an_optimizer_convert_with_their_weights():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    weights = jax.tree.map(jnp.asarray, listed())
    _, of_list = jax.jit(optimizer.update)(listed(1), optimizer.init(weights), weights)
    stacked = stack_layers(weights)
    _, of_stacked = jax.jit(optimizer.update)(stack_layers(listed(1)), optimizer.init(stacked), stacked)
    adam = of_list[1][0]
    assert isinstance(adam, optax.ScaleByAdamState)
    assert adam.mu['layers']['2']['norm'].any()
    assert_same(unstack_layers(stack_layers(of_list), N_LAYERS), of_list)
    converted = stack_layers(of_list)
    assert jax.tree.structure(converted) == jax.tree.structure(of_stacked)
    # the norm that clips is summed in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), converted, of_stacked)


def test_placeholders_of_masked_leaves_stay():
    # as adapters beside frozen weights: moments for the matrices only
    optimizer = optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda leaf: np.ndim(leaf) > 1, tree))
    state = optimizer.init(listed())
    assert state.inner_state[0].mu['layers']['0']['norm'] == optax.MaskedNode()
    stacked = stack_layers(state)
    assert stacked.inner_state[0].mu['layers']['norm'] == optax.MaskedNode()
    assert stacked.inner_state[0].mu['layers']['mlp']['weight'].shape == (3, 4, 5)
    assert_same(unstack_layers(stacked, N_LAYERS), state)


def test_a_leaf_without_the_axis_goes_to_every_layer():
    tree = {'layers': {'count': np.int32(7), 'row': np.zeros(1), 'weight': np.arange(6).reshape(3, 2)}}
    split = unstack_layers(tree, N_LAYERS)['layers']
    for i in range(N_LAYERS):
        assert split[str(i)]['count'] == 7
        assert split[str(i)]['row'].shape == (1,)
        np.testing.assert_array_equal(split[str(i)]['weight'], [2 * i, 2 * i + 1])


def test_layers_are_found_inside_other_containers():
    tree = [{'weights': listed()}, (listed(1), 'name'), None]
    [one, (two, name), nothing] = stack_layers(tree)
    assert_same(one, {'weights': stack_layers(listed())})
    assert_same(two, stack_layers(listed(1)))
    assert (name, nothing) == ('name', None)


# Adapters.

CONFIG = ModelConfig(
    vocab_size=29, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=40, rope_theta=100.0,
    qkv_bias=True,
)  # fmt: skip
EVERY_TARGET = Lora(rank=3, alpha=6.0, targets=TARGETS)
TOKENS = np.array([3, 1, 4, 15, 9, 2], np.int32)


def logits(decoder, params, compiled=True):
    def attend(q, k, v, entry, window):  # every token sees itself and the one before
        before = jnp.concatenate([v[:1], v[:-1]])
        weight = jax.nn.sigmoid(jnp.sum(q.reshape(len(q), 2, -1, 8) * k[:, :, None], axis=(2, 3)))[..., None]
        return jnp.repeat(weight * v + (1 - weight) * before, 2, axis=1), entry

    run = lambda p: decoder.logits(p, decoder.hidden(p, TOKENS, jnp.arange(len(TOKENS)), attend)[0])
    return (jax.jit(run) if compiled else run)(params)


def paths(tree):
    return [jax.tree_util.keystr(p, simple=True, separator='/') for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def trained(params, seed=0):
    """Adapters that are not 0."""
    rng = np.random.default_rng(seed)

    def leaf(path, value):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        return jnp.asarray(rng.normal(size=value.shape) * 0.2, value.dtype) if is_adapter(name) else value

    return jax.tree_util.tree_map_with_path(leaf, params)


def test_one_projection_by_hand():
    # x = (1, 2); x W = (1, 2); x A = 1 + 2 = 3, times B = (3, 0) alpha/r = 4/1: (12, 0).  Together (13, 2).
    projection = {'weight': jnp.eye(2), 'lora_a': jnp.ones((2, 1)), 'lora_b': jnp.array([[1.0, 0.0]])}
    merged = merge_adapters({'query': projection}, Lora(rank=1, alpha=4.0, targets=TARGETS))
    np.testing.assert_allclose(jnp.array([1.0, 2.0]) @ merged['query']['weight'], [13, 2])
    assert list(merged['query']) == ['weight']


def test_fresh_adapters_change_no_bit():
    base = Decoder(CONFIG).init(7)
    with_adapters = Decoder(CONFIG, lora=EVERY_TARGET)
    fresh = with_adapters.init(8)
    attached = attach_adapters(base, fresh)
    assert jax.tree.structure(attached) == jax.tree.structure(with_adapters.abstract())
    np.testing.assert_array_equal(
        attached['layers']['1']['mlp']['up']['lora_a'], fresh['layers']['1']['mlp']['up']['lora_a']
    )
    np.testing.assert_array_equal(attached['embedding'], base['embedding'])
    plain = logits(Decoder(CONFIG), base, compiled=False)
    np.testing.assert_array_equal(logits(with_adapters, attached, compiled=False), plain)
    # compiled, a product may start its sum from what is added to it, and rounds otherwise
    np.testing.assert_allclose(logits(with_adapters, attached), plain, atol=1e-6 * np.abs(plain).max())


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_merged_weights_compute_what_the_attached_ones_do(layers):
    plain, with_adapters = Decoder(CONFIG, layers=layers), Decoder(CONFIG, layers=layers, lora=EVERY_TARGET)
    attached = trained(with_adapters.init(7))
    merged = merge_adapters(attached, EVERY_TARGET)
    assert jax.tree.structure(merged) == jax.tree.structure(plain.abstract())
    expected = logits(with_adapters, attached)
    assert np.abs(expected - logits(plain, plain.init(7))).max() > 0.1  # the adapters do something
    np.testing.assert_allclose(logits(plain, merged), expected, atol=2e-6 * np.abs(expected).max())


def test_either_form_merges_to_the_same():
    attached = trained(Decoder(CONFIG, lora=EVERY_TARGET).init(7))
    of_list = stack_layers(merge_adapters(attached, EVERY_TARGET))
    of_stacked = merge_adapters(stack_layers(attached), EVERY_TARGET)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), of_stacked, of_list)


def test_merging_bfloat16_weights_rounds_once():
    # 1 + 2^-8 rounds to 1 (ties to even); 2^-8 + 2^-8 of two adapters' ranks, summed first, is 2^-7: seen
    small = jnp.full((1, 2), 2.0**-8, jnp.bfloat16)
    tree = {'weight': jnp.ones((1, 1), jnp.bfloat16), 'lora_a': small, 'lora_b': jnp.ones((2, 1), jnp.bfloat16)}
    merged = merge_adapters(tree, Lora(rank=2, alpha=2.0, targets=TARGETS))['weight']
    assert merged.dtype == jnp.bfloat16
    assert float(merged[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize('layers', ['list', 'stacked'])
def test_only_targets_get_adapters(layers):
    lora = Lora(rank=3, alpha=6.0, targets=('value', 'down'))
    found = {path for path in paths(Decoder(CONFIG, layers=layers, lora=lora).abstract()) if is_adapter(path)}
    prefixes = ['layers/0/', 'layers/1/'] if layers == 'list' else ['layers/']
    assert found == {
        f'{prefix}{projection}/{leaf}'
        for prefix in prefixes
        for projection in ('attention/value', 'mlp/down')
        for leaf in ('lora_a', 'lora_b')
    }
    every = Decoder(CONFIG, layers=layers, lora=EVERY_TARGET).abstract()
    assert {path.split('/')[-2] for path in paths(every) if is_adapter(path)} == set(TARGETS)


def test_adapters_are_told_by_their_last_name():
    assert is_adapter('layers/0/attention/query/lora_a')
    assert is_adapter('layers/mlp/up/lora_b')
    assert not is_adapter('layers/0/attention/query/weight')
    assert not is_adapter('lora_a/weight')


def test_gradients_reach_both_matrices():
    decoder = Decoder(CONFIG, lora=EVERY_TARGET)
    gradient = jax.grad(lambda p: jnp.sum(jnp.sin(logits(decoder, p))))
    fresh = decoder.init(7)
    at_start, later = gradient(fresh), gradient(trained(fresh))
    for path, leaf in jax.tree_util.tree_leaves_with_path(at_start):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        if name.endswith('lora_a'):
            np.testing.assert_array_equal(leaf, 0.0)  # behind B = 0
        if name.endswith('lora_b'):
            assert (np.abs(leaf) > 0).any(), name
    for name, leaf in zip(paths(later), jax.tree.leaves(later), strict=True):
        assert (np.abs(leaf) > 0).any(), name


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'rank': 0}, r'lora.rank=0 must be at least 1'),
        ({'alpha': float('nan')}, r'lora.alpha=nan must be above 0 and finite'),
        ({'targets': ()}, r'lora.targets=\(\) must name some of query, key'),
        ({'targets': ('query', 'head')}, r"lora.targets=\('query', 'head'\) must name some of query, key"),
    ],
)
def test_adapters_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Lora(**{'rank': 2, 'alpha': 4.0, 'targets': TARGETS} | change)


@pytest.mark.parametrize('name', family_examples.HYBRIDS)
def test_layers_that_differ_stack_and_come_back(name):
    decoder = Decoder(family_examples.CONFIGS[name], layers='stacked')
    config = decoder.config
    listed = family_examples.draw(config)
    stacked = stack_layers(listed)
    shapes = jax.tree.map(lambda leaf: leaf.shape, stacked)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, decoder.abstract())
    moments = {'of': ({'count': np.zeros(()), 'mu': stacked},)}
    back = unstack_layers(moments, config.n_layers, list_layers(config))['of'][0]['mu']
    assert jax.tree.structure(back) == jax.tree.structure(listed)
    jax.tree.map(np.testing.assert_array_equal, back, listed)


def test_a_scan_over_periods_is_the_layers_one_after_the_other():
    shape = family_examples.CONFIGS['qwen3_next']
    kinds = (*(DELTA, LayerKind()) * 3,)
    config = dataclasses.replace(
        shape, n_layers=6, kinds=kinds, experts=dataclasses.replace(shape.experts, dense_layers=(1, 3, 5))
    )
    params = family_examples.draw(config)
    tokens = np.arange(9, dtype=np.int32)
    ones = jnp.ones((1, 9), jnp.int32)
    recur = lambda inputs, entry: (run_rows(inputs.map_tokens(lambda x: x[None]), ones, ones)[0], entry)

    def attend(q, k, v, entry, window):
        return packed_attention(q, k, v, ones[0], ones[0], scale=1.0, positions=jnp.arange(9)), entry

    def run(layers, params):
        decoder = Decoder(config, layers=layers)
        forward = lambda params, recorded: decoder.hidden_and_routes(
            params, tokens, jnp.arange(9), attend, recur=recur, routing=Routing(recorded=recorded, follows=True)
        )
        states, _, routed = jax.jit(forward)(params, None)
        again, _, _ = jax.jit(forward)(params, (routed.live + 1) % 6)
        return states, routed.live, again

    listed, scanned = run('list', params), run('stacked', stack_layers(params))
    np.testing.assert_array_equal(scanned[1], listed[1])
    for found, expected in zip(scanned[::2], listed[::2], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    text = jax.jit(lambda p: Decoder(config, layers='stacked').hidden(p, tokens, jnp.arange(9), attend, recur=recur)[0])
    assert text.lower(stack_layers(params)).as_text().count('stablehlo.while') >= 2  # of periods, and of chunks
