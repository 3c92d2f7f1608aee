from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from areal_jax.sharding.mesh import make_mesh
from areal_jax.sharding.rules import data_shards, param_shardings, partition, path_name, row_sharding

_PARAMS = {'layers': {'0': {'up': np.zeros((8, 24)), 'norm': np.zeros(16)}}, 'embedding': np.zeros((50, 8))}


@pytest.mark.parametrize(
    ('shape', 'spec'),
    [
        ((8, 24), P(None, 'fsdp')),  # the largest
        ((50, 8), P(None, 'fsdp')),  # 50 is larger but 8 devices do not divide it
        ((16, 16), P('fsdp')),  # the first of equals
        ((2, 16, 8), P(None, 'fsdp')),
        ((50, 7), P()),
        ((16,), P()),  # vectors are replicated
        ((), P()),
    ],
)
def test_largest_divisible_axis_is_cut(shape, spec):
    assert partition(shape, make_mesh(fsdp=8)) == spec


def test_fsdp_cuts_and_replicated_does_not():
    mesh = make_mesh(fsdp=8)
    cut = jax.device_put(_PARAMS, param_shardings(_PARAMS, mesh, 'fsdp'))
    assert cut['layers']['0']['up'].addressable_shards[0].data.shape == (8, 3)
    whole = jax.device_put(_PARAMS, param_shardings(_PARAMS, mesh, 'replicated'))
    assert {leaf.addressable_shards[3].data.shape for leaf in jax.tree.leaves(whole)} == {(8, 24), (16,), (50, 8)}


def test_replicas_hold_equal_shards():
    shardings = param_shardings(_PARAMS, make_mesh(data=2, fsdp=4), 'fsdp')
    placed = jax.device_put(np.arange(8 * 24).reshape(8, 24), shardings['layers']['0']['up'])
    shards = {s.device.id: np.asarray(s.data) for s in placed.addressable_shards}
    np.testing.assert_array_equal(shards[1], shards[5])  # devices (0, 1) and (1, 1) of the 2 x 4 mesh
    assert not (shards[0] == shards[1]).any()


def test_rows_lie_over_all_devices():
    mesh = make_mesh(data=2, fsdp=4)
    assert data_shards(mesh) == 8
    assert row_sharding(mesh).shard_shape((16, 5)) == (2, 5)
    assert row_sharding(mesh, leading_axes=1).shard_shape((3, 16, 5)) == (3, 2, 5)


def test_unknown_strategy_is_named():
    with pytest.raises(ValueError, match=r"mesh.strategy='tensor' is unknown; use one of fsdp, replicated"):
        param_shardings(_PARAMS, make_mesh(), 'tensor')


def test_path_names_are_readable():
    (path, _), *_ = jax.tree_util.tree_leaves_with_path({'layers': {'0': {'up': 1}}})
    assert path_name(path) == 'layers/0/up'
