"""Maps the logical axes of weights to the axes of the mesh, with one table per strategy.

models/weight_rows.py declares the logical axes of each weight; callers pass them as WeightAxes. `cluster.strategy`
chooses the table.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from areal_jax.config.cluster import AXES, ENGINES, LEARNER, STRATEGY, EnginesLayout, LearnerLayout, require_fit
from areal_jax.config.fields import ConfigError
from areal_jax.lanes import engine_lane
from areal_jax.types import Tree

# Neighbouring devices differ in the last axis of AXES, which has the heaviest traffic.
ROW_AXES = ('data', 'fsdp', 'expert')  # the rows of a batch are sharded over all three
TOKEN_AXES = (*ROW_AXES, 'context')  # and the flat stream of tokens over these


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    *,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """`mesh_of` these sizes."""
    return mesh_of(LearnerLayout(data, fsdp, expert, context, tensor), devices)


def mesh_of(layout: LearnerLayout, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the sizes of the layout, over the first of `devices` (default: all, of all processes).

    On CPU and GPU the devices are in row-major order; on TPU jax orders them by their links.

    Raises ConfigError if the mesh needs more devices than there are, or fewer than a run of several processes has.
    """
    available = jax.devices() if devices is None else list(devices)
    require_fit(layout, EnginesLayout(), len(available), available[0].platform)
    if devices is None and jax.process_count() > 1 and layout.devices < len(available):
        raise ConfigError(
            f'{LEARNER}={str(layout)!r} takes {layout.devices} of the {len(available)} devices of '
            f'{jax.process_count()} processes; every process must take part: raise a size to use all devices'
        )
    grid = mesh_utils.create_device_mesh(layout.sizes, available[: layout.devices], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def nearest_device(mesh: Mesh) -> jax.Device:
    """The first device of the mesh that this process has; the first of all if it has none."""
    own = set(jax.local_devices())
    return next((device for device in mesh.devices.flat if device in own), mesh.devices.flat[0])


# The devices of the learner and of each engine, from `cluster.learner` and `cluster.engines`.
#
# app/ gives the learner its mesh and each engine its devices; config/cluster.py has the sizes.


EngineDevices: TypeAlias = tuple[jax.Device, ...]  # of one engine and of this process, one or more


@dataclasses.dataclass(frozen=True)
class Allocation:
    """The devices of the learner and of each engine of a run."""

    learner: Mesh  # data x fsdp x expert x context x tensor, over all processes
    engines: tuple[EngineDevices, ...]  # by engine

    def engine_shares(self, index: int) -> bool:
        """Whether another engine, or the learner, computes on the devices of this engine."""
        devices = self.engines[index]
        return not {*devices}.isdisjoint(self.learner.devices.flat) or self.engines.count(devices) > 1

    @property
    def lanes_own_devices(self) -> bool:
        """Whether the learner and every engine have separate accelerators; virtual CPU devices share the cores."""
        shared = any(self.engine_shares(index) for index in range(len(self.engines)))
        used = (*self.learner.devices.flat, *itertools.chain(*self.engines))
        return not shared and all(device.platform != 'cpu' for device in used)

    def by_devices(self) -> dict[EngineDevices, list[int]]:
        """The engines on each set of devices; two sets have no device in common."""
        found: dict[EngineDevices, list[int]] = {}
        for index, devices in enumerate(self.engines):
            found.setdefault(devices, []).append(index)
        return found

    def describe(self) -> dict[str, list[int] | dict[str, list[int]]]:
        """{'learner': ids, 'engines': {'engine/0': ids}}, for the report."""
        engines = {engine_lane(index): [device.id for device in devices] for index, devices in enumerate(self.engines)}
        return {'learner': [device.id for device in self.learner.devices.flat], 'engines': engines}


def allocate(
    learner: LearnerLayout,
    engines: EnginesLayout,
    *,
    from_end: bool = False,
    devices: Sequence[jax.Device] | None = None,
) -> Allocation:
    """The learner's mesh over the first devices, and the devices of the engines.

    Engines that do not share devices get the ones after the learner's; engines that share decode on the first local
    device. With `from_end` the first engine has the last devices, so that engines keep theirs when others come and go.
    `devices` are those of another machine, which is only described; None = all of this run.

    Raises ConfigError if there are too few devices, or if engines do not share devices in a run of several processes,
    which is not built yet.
    """
    available = jax.devices() if devices is None else list(devices)
    if engines.devices and jax.process_count() > 1:
        raise ConfigError(
            f'{ENGINES}={str(engines)!r}: devices of their own for engines of a learner over {jax.process_count()} '
            f"processes (hosts) are not built yet; use '{engines.count} x shared'"
        )
    require_fit(learner, engines, len(available), available[0].platform)
    mesh = mesh_of(learner, devices)
    if engines.shared:
        return Allocation(mesh, ((nearest_device(mesh),),) * engines.count)
    if from_end:
        return Allocation(mesh, tuple(devices[::-1] for devices in _share_out(available[::-1], engines)))
    return Allocation(mesh, _share_out(available[learner.devices :], engines))


def allocate_engines(engines: EnginesLayout) -> Allocation:
    """The devices of engines without a learner, the first ones; the mesh is the first device.

    Raises ConfigError if there are too few devices.
    """
    devices = jax.local_devices()
    needed = 1 if engines.shared else engines.devices
    if needed > len(devices):
        platform = devices[0].platform
        more = f', or set XLA_FLAGS=--xla_force_host_platform_device_count={needed} before jax is imported'
        raise ConfigError(
            f'{ENGINES}={str(engines)!r} needs {needed} devices; the platform {platform!r} has {len(devices)}: lower a '
            f"number, or use '{engines.count} x shared'{more if platform == 'cpu' else ''}"
        )
    chosen = ((devices[0],),) * engines.count if engines.shared else _share_out(devices, engines)
    return Allocation(make_mesh(devices=devices[:1]), chosen)


def describe_hardware(devices: EngineDevices) -> str:
    """Number and kind, '2 x NVIDIA H100': engines of equal hardware are of one class."""
    return f'{len(devices)} x {devices[0].device_kind}'


def _share_out(devices: Sequence[jax.Device], engines: EnginesLayout) -> tuple[EngineDevices, ...]:
    return tuple(tuple(devices[number] for number in numbers) for numbers in engines.place())


@dataclasses.dataclass(frozen=True)
class WeightAxes:
    """The logical axes of a model's weights. Producer: models/weights.py."""

    by_path: Mapping[str, tuple[str, ...]]  # {'layers/*/attention/query/weight': ('embed', 'heads')}
    units: Mapping[
        str, int
    ]  # indivisible parts of a logical axis, {'heads': 32}; without an entry every index is one unit


_ANY = ('embed', 'mlp', 'vocab', 'heads', 'kv_heads', 'key_heads', 'value_heads')  # what fsdp may shard, best first
# what tensor may shard: parts are computed independently
_SPLIT = ('heads', 'kv_heads', 'key_heads', 'value_heads', 'mlp', 'vocab')

_EXPERTS = {'expert': ('experts',)}  # the axis of the mesh exists for them, whatever else a strategy shards

# axis of the mesh -> logical axes that it may shard, best first; at most one of a leaf
STRATEGIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    'replicated': _EXPERTS,
    'fsdp': {**_EXPERTS, 'fsdp': _ANY},
    'tensor': {**_EXPERTS, 'tensor': _SPLIT},
    'fsdp_tensor': {**_EXPERTS, 'tensor': _SPLIT, 'fsdp': _ANY},
}


def param_shardings(params: Tree, axes: WeightAxes, mesh: Mesh, strategy: str) -> Tree:
    """The sharding of every leaf: a tree like `params`, whose leaves need a shape only.

    An axis whose parts do not divide evenly over the devices is not sharded.

    Raises ValueError for an unknown strategy, for an axis of the mesh that the strategy does not use, and for a path
    that `axes` does not have.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f'{STRATEGY}={strategy!r} is unknown; use one of {", ".join(STRATEGIES)}')
    if mesh.shape['tensor'] > 1 and 'tensor' not in STRATEGIES[strategy]:
        raise ConfigError(
            f'{STRATEGY}={strategy!r} leaves tensor={mesh.shape["tensor"]} of {LEARNER} idle; use fsdp_tensor or '
            f'tensor, or {LEARNER} without tensor'
        )

    def sharding(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = axes_of(axes, path_name(path), len(leaf.shape))
        parts = {name: axes.units.get(name, size) for name, size in zip(names, leaf.shape, strict=True)}
        return NamedSharding(mesh, partition(names, parts, mesh, strategy))

    return jax.tree_util.tree_map_with_path(sharding, params)


def axes_of(axes: WeightAxes, path: str, n_axes: int) -> tuple[str, ...]:
    """('embed', 'heads') of 'layers/0/attention/query/weight'; 'layers' comes first if layers are stacked."""
    own = axes.by_path.get(re.sub(r'^layers/(\d+/)?', 'layers/*/', path))
    if own is None or n_axes - len(own) not in (0, 1):
        raise ValueError(f'the table of weights has no logical axes for the parameter {path!r} with {n_axes} axes')
    return ('layers',) * (n_axes - len(own)) + own


def partition(axes: tuple[str, ...], parts: Mapping[str, int], mesh: Mesh, strategy: str) -> PartitionSpec:
    """The axes of one leaf over the mesh: each axis of the mesh shards the best logical axis that it divides evenly.

    `parts` is the number of indivisible parts of each logical axis.
    """
    placed: dict[str, str] = {}
    for mesh_axis, candidates in STRATEGIES[strategy].items():
        shards = mesh.shape[mesh_axis]
        for name in candidates:
            if shards > 1 and name in axes and name not in placed and parts[name] % shards == 0:
                placed[name] = mesh_axis
                break
    spec = [placed.get(name) for name in axes]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def row_sharding(mesh: Mesh, leading_axes: int = 0) -> NamedSharding:
    """The sharding of arrays [..., R, T]: rows over ROW_AXES, tokens over context, leading axes whole."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading_axes, ROW_AXES, 'context'))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows_by_process(mesh: Mesh, rows: int) -> dict[int, np.ndarray]:
    """The rows of a micro-batch of `rows` of which each process holds tokens: int, ascending, by its index."""
    held: dict[int, set[int]] = collections.defaultdict(set)
    places = NamedSharding(mesh, PartitionSpec(ROW_AXES)).devices_indices_map((rows,))
    for device in mesh.devices.flat:
        (own,) = places[device] or (slice(0),)
        held[device.process_index].update(range(*own.indices(rows)))
    return {process: np.array(sorted(own)) for process, own in held.items()}


def data_shards(mesh: Mesh) -> int:
    """Shards of a batch's rows: the rows of a micro-batch must be a multiple of this number."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def path_name(path: KeyPath) -> str:
    """'layers/0/attention/query/weight' of a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


# Whole leaves for each process of a mesh that spans several, by exchanging shards: no process gets a whole tree.
#
# The learner's program of publication ends with `Shares.spread`, publication/export.py reads the result. Leaves
# of equal shape are stacked, one for each process; a program whose result is cut along that axis moves every shard to
# the process of its leaf, as an all-to-all. If fewer leaves than processes are left, the other processes get zeros,
# which are never read. Inside a process a leaf is cut over the devices again, so that no device holds more than its
# part.


_PROCESS, _DEVICE = 'process', 'device'


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Leaves that are exchanged together, one for each process."""

    paths: tuple[str | None, ...]  # by process
    shape: tuple[int, ...]
    dtype: np.dtype
    axis: int | None  # the axis cut over the devices of the process; None: each device has the whole leaf


@dataclasses.dataclass(frozen=True, eq=False)
class SharedLeaf:
    """A leaf that one process, the owner, holds whole: other processes know its shape, but not its values."""

    shape: tuple[int, ...]
    dtype: np.dtype
    owner: int  # process
    pieces: tuple[jax.Array, ...]  # [1, ...] by device of the owner, as it was cut; () in all other processes
    axis: int | None  # the axis along which the pieces are cut; None: each is the whole leaf

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def join(self) -> np.ndarray:
        """The whole leaf on the host of its owner.

        Runs no program on the devices, because it would wait for the update that is running there.
        """
        if self.axis is None:
            return np.asarray(self.pieces[0])[0]
        for piece in self.pieces:
            piece.copy_to_host_async()
        return np.concatenate([np.asarray(piece)[0] for piece in self.pieces], self.axis)


class Shares:
    """Assigns each leaf of a tree over a mesh to a process, about equally many bytes to each.

    Args:
      tree: arrays or descriptions of them, with their shardings over `mesh`.
      process_of: the process of a device, for tests.
      together: a name for each leaf, by its path, that is to have the process of all other leaves of this name: files
        of Hugging Face have one tensor for them.
    """

    def __init__(
        self,
        tree: Tree,
        mesh: Mesh,
        process_of: Callable[[jax.Device], int] = lambda device: device.process_index,
        together: Mapping[str, str] | None = None,
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
        self._stacks = self._plan(leaves, together or {})

    @property
    def shardings(self) -> list[NamedSharding]:
        """The shardings of the results of `spread`."""
        return [self._result for _ in self._stacks]

    def spread(self, tree: Tree) -> list[jax.Array]:
        """Makes the stacks, inside a program over the mesh, cut so that every device gets its part of its leaf."""
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

    def _plan(
        self, leaves: Mapping[str, jax.Array | jax.ShapeDtypeStruct], together: Mapping[str, str]
    ) -> list[_Stack]:
        kinds: dict[tuple[tuple[int, ...], np.dtype, int | None], list[str]] = collections.defaultdict(list)
        for path, leaf in leaves.items():
            kinds[leaf.shape, np.dtype(leaf.dtype), self._axis(leaf)].append(path)
        count = len(self.processes)
        stacks, given = [], [0] * count  # bytes
        slot_of: dict[str, int] = {}  # by the names in `together`
        for (shape, dtype, axis), paths in sorted(kinds.items(), key=lambda kind: -math.prod(kind[0][0])):
            slots: list[list[str]] = [[] for _ in range(count)]
            for path in paths:
                fewest = min(range(count), key=lambda slot: (len(slots[slot]), given[slot]))
                slot = slot_of.setdefault(together[path], fewest) if path in together else fewest
                slots[slot].append(path)
                given[slot] += math.prod(shape) * dtype.itemsize
            stacks += [_Stack(tuple(row), shape, dtype, axis) for row in itertools.zip_longest(*slots)]
        return stacks

    def _axis(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
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
    """Whether the leaves of the tree are SharedLeaf."""
    return any(isinstance(leaf, SharedLeaf) for leaf in jax.tree.leaves(tree))
