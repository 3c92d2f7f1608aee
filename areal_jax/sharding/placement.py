"""Moves arrays onto a mesh and back, also if the mesh spans several processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from areal_jax.sharding.host_shards import HostShards
from areal_jax.types import Tree


def to_slices(x: jax.Array, context: int) -> jax.Array:
    """Tokens [R, T, ...] from the order of the row to slice order. T is a multiple of 2 * context."""
    blocks = x.reshape(x.shape[0], 2 * context, x.shape[1] // (2 * context), *x.shape[2:])
    early, late = blocks[:, :context], blocks[:, context:][:, ::-1]
    return jnp.stack([early, late], axis=2).reshape(x.shape)


def from_slices(x: jax.Array, context: int) -> jax.Array:
    """Tokens [R, T, ...] from slice order to the order of the row: the inverse of `to_slices`."""
    pairs = x.reshape(x.shape[0], context, 2, x.shape[1] // (2 * context), *x.shape[2:])
    return jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1).reshape(x.shape)


def slice_places(index: jax.Array, tokens: int, context: int) -> jax.Array:
    """The position in slice order of each token `index` of a row of `tokens`: int, of the shape of `index`."""
    size = tokens // (2 * context)
    block = index // size
    place = jnp.where(block < context, 2 * block, 2 * (2 * context - 1 - block) + 1)
    return place * size + index % size


def first_tokens(device: jax.Array | int, tokens: int, context: int) -> tuple[jax.Array | int, jax.Array | int]:
    """The indices in the row of the first token of the two blocks that a device of `context` holds."""
    size = tokens // (2 * context)
    return device * size, (2 * context - 1 - device) * size


Leaf = np.ndarray | jax.Array
Index = tuple[slice, ...] | None  # one slice per axis, whose start and stop may be None; as jax describes a shard
Region = tuple[slice, ...]  # one per axis, start and stop given
Place: TypeAlias = Any  # jax.Device | Tree: one device of this process, or a tree of NamedSharding over some of them


def place(tree: Tree, shardings: Tree) -> Tree:
    """Places the leaves (numpy or jax arrays) with the given shardings: one for all leaves, or a tree of them.

    If the shardings include devices of other processes, every process must call this with the same values; the values
    are not compared. A leaf that need not move may share its buffer with the result.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    whole = isinstance(shardings, Sharding)
    over = jax.tree.map(lambda _: shardings, tree) if whole else shardings
    return jax.tree.map(_place_leaf, tree, over)


def place_rows(rows: np.ndarray, axis: int, own: np.ndarray, count: int, sharding: Sharding) -> jax.Array:
    """The array with `count` rows along `axis`, of which this process has those that its own devices hold.

    `own`: their indices, int, ascending. No collective.
    """
    shape = (*rows.shape[:axis], count, *rows.shape[axis + 1 :])

    def cut(index: Index) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[axis].indices(count)
        first = int(np.searchsorted(own, start))
        return rows[*index[:axis], first : first + stop - start, *index[axis + 1 :]]

    return jax.make_array_from_callback(shape, sharding, cut)


def describe(tree: Tree, shardings: Tree) -> Tree:
    """Describes the result of `place` (shapes, dtypes, shardings), also for devices that are not there."""
    whole = isinstance(shardings, Sharding)
    over = jax.tree.map(lambda _: shardings, tree) if whole else shardings
    one = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(one, tree, over)


def place_regions(read: Callable[[Region], np.ndarray], shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """An array with this sharding; every process reads the part that its own devices hold.

    `read` returns a region of the whole array on the host. It is called once, with the smallest region that contains
    all shards of this process. No collective.
    """
    held = [_region(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
    starts = [min(region[axis].start for region in held) for axis in range(len(shape))]
    stops = [max(region[axis].stop for region in held) for axis in range(len(shape))]
    values = read(tuple(map(slice, starts, stops)))

    def shard(index: Index) -> np.ndarray:
        region = _region(index, shape)
        within = [slice(s.start - first, s.stop - first) for s, first in zip(region, starts, strict=True)]
        return np.asarray(values[tuple(within)])

    return jax.make_array_from_callback(shape, sharding, shard)


def move_to(tree: Tree, place: Place) -> Tree:
    """Moves arrays to one device of this process, or shards them over several; a leaf already there is returned as is.

    The shards go from device to device and are joined on the last one; a leaf that is resharded is whole, for a moment,
    on the first of its devices. `jax.device_put` would gather a sharded array in the memory of the host. Runs no
    collective, so that another thread may use the source devices meanwhile.
    """
    if isinstance(place, jax.Device):
        on = SingleDeviceSharding(place)
        return jax.tree.map(lambda leaf: _move_leaf(leaf, on), tree)
    return jax.tree.map(_cut_leaf, tree, place)


def compile_move(described: Tree, place: Place) -> None:
    """Compiles the programs of `move_to` for arrays of these shapes and shardings before they exist; moves nothing."""
    first = place if isinstance(place, jax.Device) else jax.tree.leaves(place)[0].mesh.devices.flat[0]
    for leaf in jax.tree.leaves(described):
        if len(leaf.sharding.device_set) == 1 or leaf.sharding.is_fully_replicated:
            continue
        regions = dict.fromkeys(
            tuple((s.start, s.stop) for s in _region(index, leaf.shape))
            for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        )
        parts = [
            jax.ShapeDtypeStruct(
                [stop - start for start, stop in region], leaf.dtype, sharding=SingleDeviceSharding(first)
            )
            for region in regions
        ]
        starts = tuple(tuple(start for start, _ in region) for region in regions)
        _join.lower(parts, starts, leaf.shape).compile()


def _cut_leaf(leaf: Leaf, sharding: NamedSharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        return leaf
    first = sharding.mesh.devices.flat[0]
    return jax.device_put(_move_leaf(leaf, SingleDeviceSharding(first)), sharding)


def _move_leaf(leaf: Leaf, on: SingleDeviceSharding) -> jax.Array:
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return leaf if isinstance(leaf, jax.Array) and leaf.devices() == on.device_set else jax.device_put(leaf, on)
    if leaf.is_fully_replicated:
        return jax.device_put(leaf.addressable_data(0), on)
    shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    parts = jax.device_put([shard.data for shard in shards], on)
    starts = tuple(tuple(s.start for s in _region(shard.index, leaf.shape)) for shard in shards)
    return _join(parts, starts, leaf.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _join(parts: list[jax.Array], starts: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> jax.Array:
    whole = jnp.zeros(shape, parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        whole = lax.dynamic_update_slice(whole, part, start)
    return whole


def gather(leaf: Leaf) -> np.ndarray:
    """The whole array on the host, in memory that no update writes to.

    A collective if other processes hold parts of it: all must call it.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return np.array(multihost_utils.process_allgather(leaf, tiled=True), copy=True)
    return _copy(leaf)


def copy_shards(leaf: Leaf) -> np.ndarray | HostShards:
    """The whole array if this process holds all of it, else the shards whose first replica is in this process.

    On the host, in memory that no update writes to. No collective.
    """
    return _take_shards(leaf, _copy)


def view_shards(leaf: Leaf) -> np.ndarray | HostShards:
    """Like `copy_shards`, but a jax array that is already in the host's memory is not copied.

    While such a view lives, a program to which the array is donated computes in other memory.
    """
    return _take_shards(leaf, lambda leaf: jax.device_get(leaf) if isinstance(leaf, jax.Array) else _copy(leaf))


def _take_shards(leaf: Leaf, take: Callable[[Leaf], np.ndarray]) -> np.ndarray | HostShards:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return take(leaf)
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    for shard in own:
        shard.data.copy_to_host_async()
    starts = [tuple(s.start for s in _region(shard.index, leaf.shape)) for shard in own]
    parts = tuple(zip(starts, [take(shard.data) for shard in own], strict=True))
    return HostShards(leaf.shape, np.dtype(leaf.dtype), parts)


def _copy(leaf: Leaf) -> np.ndarray:
    """The array on the host, in memory that no update writes to.

    On CPU, device_get returns a view that blocks donation of the buffer, so we copy. On accelerators it already returns
    a host copy (cached by JAX); copying again would double a save's memory.
    """
    if isinstance(leaf, jax.Array) and all(device.platform != 'cpu' for device in leaf.devices()):
        return jax.device_get(leaf)
    return np.array(jax.device_get(leaf), copy=True)


def _region(index: Index, shape: tuple[int, ...]) -> Region:
    assert index is not None  # jax gives None to devices that hold nothing, which are of other processes
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))


def _place_leaf(leaf: Leaf, sharding: Sharding) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
