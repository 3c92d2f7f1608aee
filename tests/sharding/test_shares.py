"""Leaves go whole to one process each, bit for bit and about equally many; no program gathers them on every device."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.sharding.rules import SharedLeaf, Shares, is_shared, make_mesh

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
