from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from areal_jax.config.cluster import parse_engines, parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.models.weights import Lora, logical_axes
from areal_jax.sharding import rules
from areal_jax.sharding.rules import (
    SharedLeaf,
    Shares,
    allocate,
    allocate_engines,
    axes_of,
    data_shards,
    is_shared,
    make_mesh,
    param_shardings,
    path_name,
    row_sharding,
)

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


def test_mesh_takes_the_first_devices():
    mesh = make_mesh(data=2, fsdp=3)
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 3, 'expert': 1, 'context': 1, 'tensor': 1}
    assert list(mesh.devices.ravel()) == jax.devices()[:6]


def test_neighbours_lie_along_tensor():
    mesh = make_mesh(fsdp=2, context=2, tensor=2)
    assert [d.id for d in mesh.devices[0, 0, 0, 0]] == [0, 1]
    assert [d.id for d in mesh.devices[0, :, 0, 0, 0]] == [0, 4]


def test_too_many_devices_names_both_numbers():
    with pytest.raises(ValueError, match=r"cluster.learner='data=4,fsdp=4' needs 16 devices; the platform 'cpu' has 8"):
        make_mesh(data=4, fsdp=4)


def test_no_devices_is_refused():
    with pytest.raises(
        ValueError, match=r"cluster.learner='context=0': the size of context must be a whole number, at least 1"
    ):
        make_mesh(context=0)


def _allocate(learner: str, engines: str) -> rules.Allocation:
    return allocate(parse_learner(learner), parse_engines(engines))


def test_the_default_is_one_device_for_all():
    found = _allocate('data=1', '1 x shared')
    assert found.describe() == {'learner': [0], 'engines': {'engine/0': [0]}}
    assert found.engine_shares(0)
    assert not found.lanes_own_devices


def test_engines_have_the_devices_after_the_learners():
    found = _allocate('data=2,fsdp=2', '2 x tensor=1')
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4], 'engine/1': [5]}}
    assert found.learner.shape == {'data': 2, 'fsdp': 2, 'expert': 1, 'context': 1, 'tensor': 1}
    assert [found.engine_shares(index) for index in (0, 1)] == [False, False]
    assert found.by_devices() == {(jax.devices()[4],): [0], (jax.devices()[5],): [1]}


@pytest.mark.parametrize('axis', ['tensor', 'expert'])
def test_each_engine_has_as_many_devices_as_its_axes(axis):
    found = _allocate('fsdp=4', f'2 x {axis}=2')
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4, 5], 'engine/1': [6, 7]}}
    assert [found.engine_shares(index) for index in (0, 1)] == [False, False]
    assert found.by_devices() == {tuple(jax.devices()[4:6]): [0], tuple(jax.devices()[6:]): [1]}


def test_engines_of_unequal_size_have_theirs_one_after_the_other():
    found = _allocate('fsdp=2', '1 x tensor=2 + 2 x tensor=1 + 1 x tensor=2')
    engines = {'engine/0': [2, 3], 'engine/1': [4], 'engine/2': [5], 'engine/3': [6, 7]}
    assert found.describe() == {'learner': [0, 1], 'engines': engines}
    assert not any(found.engine_shares(index) for index in range(4))


def test_the_learner_of_a_mesh_with_experts():
    found = _allocate('fsdp=2,expert=2', '1 x expert=2,tensor=2')
    assert found.learner.shape == {'data': 1, 'fsdp': 2, 'expert': 2, 'context': 1, 'tensor': 1}
    assert found.describe() == {'learner': [0, 1, 2, 3], 'engines': {'engine/0': [4, 5, 6, 7]}}


def test_engines_without_a_learner_have_the_first_devices():
    found = allocate_engines(parse_engines('2 x tensor=3'))
    assert found.describe()['engines'] == {'engine/0': [0, 1, 2], 'engine/1': [3, 4, 5]}
    # 3 engines of 3 devices are 9
    with pytest.raises(ConfigError, match=r"cluster.engines='3 x tensor=3' needs 9 devices; the platform 'cpu' has 8"):
        allocate_engines(parse_engines('3 x tensor=3'))


def test_shared_engines_are_on_the_learners_first_device():
    found = _allocate('fsdp=4', '2 x shared')
    assert found.describe()['engines'] == {'engine/0': [0], 'engine/1': [0]}
    assert found.by_devices() == {(jax.devices()[0],): [0, 1]}


def test_virtual_devices_share_the_cores():
    # disjoint devices are the lanes' own on an accelerator; on CPU they are all the same cores
    found = _allocate('data=2', '1 x tensor=1')
    assert not found.lanes_own_devices

    @dataclasses.dataclass(frozen=True)
    class Accelerator:
        id: int
        platform: str = 'gpu'

    class Mesh:
        def __init__(self, *devices):
            self.devices = self
            self.flat = devices

    one, two, three = (Accelerator(index) for index in range(3))
    assert rules.Allocation(Mesh(one), ((two,), (three,))).lanes_own_devices
    assert not rules.Allocation(Mesh(one), ((two,), (two,))).lanes_own_devices
    assert not rules.Allocation(Mesh(one, two), ((two, three),)).lanes_own_devices


def test_too_few_devices_are_refused_with_both_fields():
    with pytest.raises(
        ConfigError, match=r"'fsdp=3' needs 3 devices and cluster.engines='2 x tensor=3' needs 6, 9 tog.* has 8"
    ):
        _allocate('fsdp=3', '2 x tensor=3')


def test_own_devices_in_several_processes_are_not_built(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(ConfigError, match=r"cluster.engines='2 x tensor=1': .*not built yet; use '2 x shared'"):
        _allocate('fsdp=4', '2 x tensor=1')


_CUTS = {
    'rows': ({'fsdp': 8}, ('fsdp',)),
    'columns': ({'fsdp': 8}, (None, 'fsdp')),
    'rows in a process, columns over processes': ({'fsdp': 4, 'tensor': 2}, ('tensor', 'fsdp')),
    'whole in every process': ({'data': 2, 'fsdp': 4}, ('fsdp',)),
}


def _tree(mesh, cut, count):
    rng = np.random.default_rng(0)
    over = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    place = lambda shape, dtype, *spec: jax.device_put(rng.normal(size=shape).astype(dtype), over(*spec))
    layers = {
        str(n): {'w': place((32, 16), np.float32, *cut), 'norm': place((16,), np.float32)} for n in range(count)
    }  # fmt: skip
    return {
        'embedding': place((48, 16), jnp.bfloat16, *cut), 'layers': layers, 'odd': place((3, 5), np.float32),
    }  # fmt: skip


def _of(processes):
    return lambda device: device.id * processes // 8


def _spread(shares, tree):
    program = jax.jit(shares.spread, out_shardings=shares.shardings).lower(tree).compile()
    return program, shares.collect(program(tree))


@pytest.mark.parametrize('processes', [2, 4])
@pytest.mark.parametrize('name', _CUTS)
def test_every_leaf_arrives_whole_at_its_process_and_nowhere_else(name, processes):
    axes, cut = _CUTS[name]
    mesh = make_mesh(**axes)
    tree = _tree(mesh, cut, 5)
    program, found = _spread(Shares(tree, mesh, _of(processes)), tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    held = dict.fromkeys(range(processes), 0)
    for leaf, whole in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert (leaf.shape, leaf.dtype) == (whole.shape, whole.dtype)
        assert {_of(processes)(device) for piece in leaf.pieces for device in piece.devices()} == {leaf.owner}
        assert np.asarray(leaf.join()).tobytes() == np.asarray(whole).tobytes()
        held[leaf.owner] += whole.nbytes
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert max(held.values()) - min(held.values()) <= largest
    _require_no_gather(program, tree, processes)


def _require_no_gather(program, tree, processes):
    """No device ever gets a stack of leaves that it does not own: all-gathers are at most of one leaf's size."""
    largest = max(leaf.size for leaf in jax.tree.leaves(tree))
    for shape in re.findall(r'= \w+\[([\d,]*)\]\S* all-gather', program.as_text()):
        assert np.prod([int(size) for size in shape.split(',') if size]) < processes * largest


def test_devices_in_another_order_get_the_same():
    """As on a TPU, where the mesh follows the links and not the processes."""
    mesh = make_mesh(fsdp=8)
    tree = _tree(mesh, ('fsdp',), 3)
    odd = lambda device: device.id % 2
    _, found = _spread(Shares(tree, mesh, odd), tree)
    for leaf, whole in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert {odd(device) for piece in leaf.pieces for device in piece.devices()} == {leaf.owner}
        np.testing.assert_array_equal(np.asarray(leaf.join()), np.asarray(whole))


def test_a_device_holds_its_part_of_the_leaves_of_its_process():
    mesh = make_mesh(fsdp=8)
    tree = _tree(mesh, ('fsdp',), 4)
    _, found = _spread(Shares(tree, mesh, _of(2)), tree)
    (weight,) = {piece.shape for piece in found['layers']['0']['w'].pieces}
    assert weight == (1, 8, 16)  # a quarter of [32, 16]
    assert [piece.shape for piece in found['odd'].pieces] == [(1, 3, 5)] * 4  # four devices do not divide it


def test_one_process_with_fewer_leaves_than_processes_owns_none():
    mesh = make_mesh(fsdp=8)
    tree = {'w': jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, PartitionSpec('fsdp')))}
    _, found = _spread(Shares(tree, mesh, _of(4)), tree)
    assert isinstance(found['w'], SharedLeaf)
    np.testing.assert_array_equal(np.asarray(found['w'].join()), 1.0)
    assert is_shared(found)
    assert not is_shared(tree)
