from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.sharding.mesh import make_mesh
from areal_jax.sharding.placement import gather, place


def test_what_is_placed_comes_back():
    sharding = NamedSharding(make_mesh(fsdp=8), PartitionSpec('fsdp'))
    tree = {'a': np.arange(16.0).reshape(8, 2), 'b': np.arange(8)}
    placed = place(tree, sharding)
    assert placed['a'].addressable_shards[3].data.tolist() == [[6, 7]]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(gather(x), y), placed, tree)


def test_what_is_gathered_is_a_copy_of_its_own():
    leaf = jax.numpy.zeros(3)
    host = gather(leaf)
    host[0] = 1
    assert leaf[0] == 0
