"""Whole leaves for each process of a mesh that spans several, by exchanging shards: no process gets a whole tree.

The learner's program of publication ends with `Shares.spread`, publication/export.py reads the result. Leaves of
equal shape are stacked, one for each process; a program whose result is cut along that axis moves every shard to the
process of its leaf, as an all-to-all. Where fewer leaves than processes are left, the others get zeros, which are never
read. Inside a process a leaf is cut over the devices again, so that no device holds more than its part of it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

_PROCESS, _DEVICE = 'process', 'device'


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Leaves that travel together, one for each process."""

    paths: tuple[str | None, ...]  # by process
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None  # is cut over the devices of the process; None: each device has all of the leaf


@dataclasses.dataclass(frozen=True, eq=False)
class SharedLeaf:
    """A leaf of which one process holds all: shapes are known everywhere, values to the owner alone."""

    shape: tuple[int, ...]
    dtype: np.dtype
    owner: int  # process
    pieces: tuple[jax.Array, ...]  # [1, ...] by device of the owner, as it was cut; () in all other processes
    axis: int | None  # that they are cut along; None: each is all of the leaf

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def join(self) -> np.ndarray:
        """The whole leaf on the host of its owner.

        No program of the devices: it would wait there for the update that is under way.
        """
        if self.axis is None:
            return np.asarray(self.pieces[0])[0]
        for piece in self.pieces:
            piece.copy_to_host_async()
        return np.concatenate([np.asarray(piece)[0] for piece in self.pieces], self.axis)


class Shares:
    """Which process gets which leaves of a tree over a mesh, about equally many bytes each.

    Args:
      tree: arrays or descriptions of them, with their shardings over `mesh`.
      process_of: the process of a device, for tests.
    """

    def __init__(
        self, tree: Tree, mesh: Mesh, process_of: Callable[[jax.Device], int] = lambda device: device.process_index
    ):
        devices = list(mesh.devices.flat)
        owners = [process_of(device) for device in devices]
        self.processes = sorted(set(owners))
        self._local = len(devices) // len(self.processes)
        # the slot of each device in a result: by process, then by its order in the mesh
        slots = sorted(range(len(devices)), key=lambda index: (owners[index], index))
        place = {index: slot for slot, index in enumerate(slots)}
        self._order = [place[index] for index in range(len(devices))]
        self._devices, self._process_of = [devices[index] for index in slots], process_of
        self._result = NamedSharding(Mesh(np.array(devices), (_DEVICE,)), PartitionSpec(_DEVICE))
        self._between: Mesh | None = None
        if self._order == list(range(len(devices))):
            grid = np.array(devices).reshape(len(self.processes), self._local)
            self._between = Mesh(grid, (_PROCESS, _DEVICE))
        leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        self._structure, self._paths = jax.tree.structure(tree), list(leaves)
        self._stacks = self._plan(leaves)

    @property
    def shardings(self) -> list[NamedSharding]:
        """Of the results of `spread`."""
        return [self._result for _ in self._stacks]

    def spread(self, tree: Tree) -> list[jax.Array]:
        """Inside a program over the mesh: the stacks, each cut so that every device gets its part of its leaf."""
        leaves = dict(zip(self._paths, jax.tree.leaves(tree), strict=True))
        return [self._spread(leaves, stack) for stack in self._stacks]

    def collect(self, results: Sequence[jax.Array]) -> Tree:
        """The tree of SharedLeaf; this process's leaves have their pieces. Copies nothing."""
        found: dict[str, SharedLeaf] = {}
        for stack, result in zip(self._stacks, results, strict=True):
            held = {shard.device: shard.data for shard in result.addressable_shards}
            for number, path in enumerate(stack.paths):
                if path is not None:
                    own = self._devices[number * self._local : (number + 1) * self._local]
                    pieces = tuple(held[device] for device in own) if own[0] in held else ()
                    found[path] = SharedLeaf(stack.shape, stack.dtype, self.processes[number], pieces, stack.axis)
        return jax.tree.unflatten(self._structure, [found[path] for path in self._paths])

    def _plan(self, leaves: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[_Stack]:
        kinds: dict[tuple[tuple[int, ...], np.dtype, int | None], list[str]] = collections.defaultdict(list)
        for path, leaf in leaves.items():
            kinds[leaf.shape, np.dtype(leaf.dtype), self._axis(leaf)].append(path)
        count = len(self.processes)
        stacks, given = [], [0] * count  # bytes
        for (shape, dtype, axis), paths in sorted(kinds.items(), key=lambda kind: -math.prod(kind[0][0])):
            for first in range(0, len(paths), count):
                chosen = paths[first : first + count]
                slots: list[str | None] = [None] * count
                for path, slot in zip(chosen, sorted(range(count), key=lambda slot: given[slot]), strict=False):
                    slots[slot] = path
                    given[slot] += math.prod(shape) * dtype.itemsize
                stacks.append(_Stack(tuple(slots), shape, dtype, axis))
        return stacks

    def _axis(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
        """The axis with the most shards on the mesh, of those that the devices of a process divide."""
        shards = [
            size // max(part, 1) for size, part in zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True)
        ]
        axes = [axis for axis, size in enumerate(leaf.shape) if size and size % self._local == 0]
        return max(axes, key=lambda axis: (shards[axis], -axis), default=None)

    def _spread(self, leaves: Mapping[str, jax.Array], stack: _Stack) -> jax.Array:
        nothing = jnp.zeros(stack.shape, stack.dtype)
        stacked = jnp.stack([nothing if path is None else leaves[path] for path in stack.paths])
        axis = stack.axis
        if axis is None:
            by_device = jnp.repeat(stacked[:, None], self._local, axis=1)
        else:
            shape = stack.shape
            cut = stacked.reshape(-1, *shape[:axis], self._local, shape[axis] // self._local, *shape[axis + 1 :])
            if self._between is not None:  # without it the partitioner gathers every leaf on every device
                spec = [_PROCESS, *[None] * axis, _DEVICE]
                cut = jax.lax.with_sharding_constraint(cut, NamedSharding(self._between, PartitionSpec(*spec)))
            by_device = jnp.moveaxis(cut, axis + 1, 1)
        by_device = by_device.reshape(-1, *by_device.shape[2:])
        return by_device if self._between is not None else by_device[np.array(self._order)]


def is_shared(tree: Tree) -> bool:
    """Whether the tree is one of SharedLeaf."""
    return any(isinstance(leaf, SharedLeaf) for leaf in jax.tree.leaves(tree))
