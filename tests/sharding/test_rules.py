from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import Experts, ModelConfig
from areal_jax.models.weights import Lora, logical_axes
from areal_jax.sharding.rules import axes_of, data_shards, make_mesh, param_shardings, path_name, row_sharding

_CONFIG = ModelConfig(
    vocab_size=50, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=40, rope_theta=1e4,
    tie_embeddings=False, qkv_bias=True, qk_norm=True,
)  # fmt: skip


def _specs(mesh, strategy, **decoder):
    shardings = param_shardings(Decoder(_CONFIG, **decoder).abstract(), logical_axes(_CONFIG), mesh, strategy)
    return {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(shardings)}


def test_fsdp_cuts_the_width_of_every_matrix_and_no_vector():
    specs = _specs(make_mesh(fsdp=8), 'fsdp')
    assert specs['embedding'] == specs['head'] == P(None, 'fsdp')
    assert specs['layers/1/attention/query/weight'] == P('fsdp')
    assert specs['layers/1/attention/output/weight'] == P(None, 'fsdp')
    assert specs['layers/0/mlp/down/weight'] == P(None, 'fsdp')
    vectors = ('final_norm', 'layers/0/attention/query_norm', 'layers/0/attention/key/bias')
    assert {specs[name] for name in vectors} == {P()}


def test_an_axis_that_does_not_divide_leaves_the_next_best():
    # 16 of the width does not divide over 5 devices, 40 of the MLP and 50 of the vocabulary do, heads do not
    specs = _specs(make_mesh(fsdp=5), 'fsdp')
    assert specs['layers/0/mlp/up/weight'] == P(None, 'fsdp')
    assert specs['embedding'] == P('fsdp')
    assert specs['layers/0/attention/query/weight'] == P()


def test_tensor_cuts_what_is_computed_in_parts():
    specs = _specs(make_mesh(fsdp=4, tensor=2), 'fsdp_tensor')
    assert specs['layers/0/attention/key/weight'] == P('fsdp', 'tensor')
    assert specs['layers/0/attention/output/weight'] == P('tensor', 'fsdp')
    assert specs['layers/0/mlp/down/weight'] == P('tensor', 'fsdp')
    assert specs['head'] == P('tensor', 'fsdp')


def test_heads_are_not_cut_in_pieces():
    # 2 key heads of 6 are 12 columns, which 4 divides, but half a head is of no use
    specs = _specs(make_mesh(tensor=4), 'tensor')
    assert specs['layers/0/attention/query/weight'] == P(None, 'tensor')
    assert specs['layers/0/attention/key/weight'] == P()


def test_stacked_layers_are_not_cut_along_the_layers():
    specs = _specs(make_mesh(fsdp=2, tensor=2), 'fsdp_tensor', layers='stacked')
    assert specs['layers/attention/query/weight'] == P(None, 'fsdp', 'tensor')
    assert specs['layers/mlp/down/weight'] == P(None, 'tensor', 'fsdp')


def test_adapters_are_cut_along_the_width_alone():
    specs = _specs(make_mesh(fsdp=8), 'fsdp', lora=Lora(4, 8.0, ('query',)))
    assert specs['layers/0/attention/query/lora_a'] == P('fsdp')
    assert axes_of(logical_axes(_CONFIG), 'layers/attention/query/lora_b', 3) == ('layers', 'rank', 'embed')


def test_replicated_cuts_nothing():
    assert set(_specs(make_mesh(data=8), 'replicated').values()) == {P()}


@pytest.mark.parametrize(
    ('strategy', 'gate', 'router'),
    [
        ('replicated', P('expert'), P()),
        ('fsdp', P('expert', 'fsdp'), P('fsdp')),
        ('fsdp_tensor', P('expert', 'fsdp', 'tensor'), P('fsdp')),
    ],
)
def test_experts_are_shared_out_under_every_strategy_and_the_router_sees_all(strategy, gate, router):
    config = dataclasses.replace(_CONFIG, family='qwen3_moe', qkv_bias=False, experts=Experts(8, 2, 24))
    mesh = make_mesh(fsdp=2, expert=2, tensor=2 if strategy == 'fsdp_tensor' else 1)
    shardings = param_shardings(Decoder(config).abstract(), logical_axes(config), mesh, strategy)
    specs = {path_name(path): s.spec for path, s in jax.tree_util.tree_leaves_with_path(shardings)}
    assert specs['layers/0/mlp/experts/gate'] == gate
    assert specs['layers/0/mlp/router/weight'] == router
    assert 'expert' not in specs['layers/0/attention/query/weight']


def test_replicas_hold_equal_shards():
    shardings = param_shardings(
        {'embedding': np.zeros((50, 16))}, logical_axes(_CONFIG), make_mesh(data=2, fsdp=4), 'fsdp'
    )
    placed = jax.device_put(np.arange(50 * 16).reshape(50, 16), shardings['embedding'])
    shards = {s.device.id: np.asarray(s.data) for s in placed.addressable_shards}
    np.testing.assert_array_equal(shards[1], shards[5])  # devices (0, 1) and (1, 1) of the 2 x 4 mesh
    assert not (shards[0] == shards[1]).any()


@pytest.mark.parametrize('axis', ['fsdp', 'expert'])
def test_rows_lie_over_data_fsdp_and_expert_and_their_tokens_over_context(axis):
    mesh = make_mesh(data=2, context=2, **{axis: 2})
    assert data_shards(mesh) == 4
    assert row_sharding(mesh).shard_shape((16, 6)) == (4, 3)
    assert row_sharding(mesh, leading_axes=1).shard_shape((3, 16, 6)) == (3, 4, 3)


@pytest.mark.parametrize(
    ('mesh', 'strategy', 'params', 'message'),
    [
        ({}, 'zero', {}, "cluster.strategy='zero' is unknown; use one of replicated, fsdp, tensor, fsdp_tensor"),
        ({'tensor': 2}, 'fsdp', {}, "cluster.strategy='fsdp' leaves tensor=2 of cluster.learner idle"),
        ({}, 'fsdp', {'router': np.zeros((2, 2))}, "no logical axes for the parameter 'router' with 2 axes"),
        ({}, 'fsdp', {'embedding': np.zeros(2)}, "no logical axes for the parameter 'embedding' with 1 axes"),
    ],
)
def test_what_the_tables_do_not_know_is_named(mesh, strategy, params, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(params, logical_axes(_CONFIG), make_mesh(**mesh), strategy)


def test_path_names_are_readable():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({'layers': {'0': {'up': 1}}})
    assert path_name(path) == 'layers/0/up'
