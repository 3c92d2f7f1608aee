"""Under arrow 7: arrays onto a mesh and back, also where the mesh spans several processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

Region = tuple[slice, ...]  # one per axis, start and stop given


@dataclasses.dataclass(frozen=True, eq=False)
class HostShards:
    """What this process saves of an array that lies over several: copies on the host, of which no other has the same.

    A number as index takes that entry of the first axis, in views, as it does of an array.
    """

    shape: tuple[int, ...]  # of the whole array
    dtype: np.dtype
    parts: tuple[tuple[tuple[int, ...], np.ndarray], ...]  # (where it begins in the whole, values)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, index: int) -> HostShards:
        holding = [(s, part) for s, part in self.parts if s[0] <= index < s[0] + len(part)]
        entries = tuple((start[1:], part[index - start[0], ...]) for start, part in holding)
        return HostShards(self.shape[1:], self.dtype, entries)


def place(tree: Any, shardings: Any) -> Any:
    """The leaves (numpy or jax arrays) laid out as `shardings` says: one sharding, or a tree of them.

    Where devices of other processes take part, every process must hold the same values and call this; nothing is
    compared between them. Buffers may be shared with the argument where nothing has to move.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    whole = isinstance(shardings, Sharding)
    over = jax.tree.map(lambda _: shardings, tree) if whole else shardings
    return jax.tree.map(_place_leaf, tree, over)


def place_regions(read: Callable[[Region], np.ndarray], shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """An array laid out as `sharding` says, of which every process reads what its own devices hold.

    `read` gives a region of the whole on the host; it is asked once, for the smallest that holds all shards of this
    process. No collective.
    """
    held = [_region(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()]
    starts = [min(region[axis].start for region in held) for axis in range(len(shape))]
    stops = [max(region[axis].stop for region in held) for axis in range(len(shape))]
    values = read(tuple(map(slice, starts, stops)))

    def shard(index: Any) -> np.ndarray:
        region = _region(index, shape)
        within = [slice(s.start - first, s.stop - first) for s, first in zip(region, starts, strict=True)]
        return np.asarray(values[tuple(within)])

    return jax.make_array_from_callback(shape, sharding, shard)


def gather(leaf: Any) -> np.ndarray:
    """The whole array on the host, in memory that no update writes to. A collective where other processes hold parts of
    it: all must call it."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return np.array(multihost_utils.process_allgather(leaf, tiled=True), copy=True)
    return _copy(leaf)


def copy_shards(leaf: Any) -> np.ndarray | HostShards:
    """The whole array where no other process holds any of it, else the shards of which this one holds the first copy.

    On the host, in memory that no update writes to. No collective.
    """
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return _copy(leaf)
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    for shard in own:
        shard.data.copy_to_host_async()
    starts = [tuple(s.start for s in _region(shard.index, leaf.shape)) for shard in own]
    parts = tuple(zip(starts, [_copy(shard.data) for shard in own], strict=True))
    return HostShards(leaf.shape, np.dtype(leaf.dtype), parts)


def _copy(leaf: Any) -> np.ndarray:
    """On CPU jax hands out views, and a buffer with a view cannot be reused by the next update; elsewhere copies, which
    it keeps itself as long as the array lives: a second one would double what a save needs."""
    if isinstance(leaf, jax.Array) and all(device.platform != 'cpu' for device in leaf.devices()):
        return jax.device_get(leaf)
    return np.array(jax.device_get(leaf), copy=True)


def _region(index: Any, shape: tuple[int, ...]) -> Region:
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))


def _place_leaf(leaf: Any, sharding: Any) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
