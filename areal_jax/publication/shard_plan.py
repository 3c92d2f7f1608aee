"""Plans which process of a learner sends which part of which leaf, and which part of it goes to which host of an engine.

    layouts  = layouts_of(copy)                  # from the learner's shardings
    shards   = divide_leaves(layouts)            # every element is in one shard of one process
    transfers = route(shards, needed)            # the parts that each host needs, each once

Pure: every process computes the same plan from the same shardings, so no process has to tell it to the others. A shard
has a name, 'layers/0/attention/query[0:128,0:64|512,64]', under which records and manifests have it; a shard that is the
whole leaf has the name of the leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

Box: TypeAlias = tuple[tuple[int, int], ...]  # (start, stop) of each axis

_LEAST_CUT = 1 << 16  # bytes: a smaller box that several processes hold is sent whole by one of them
_MOST_BYTES = 2 << 30  # of a shard


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where the elements of a leaf are."""

    shape: tuple[int, ...]
    itemsize: int  # bytes of an element
    holders: Mapping[Box, tuple[int, ...]]  # disjoint boxes that cover the leaf -> the processes that hold them, sorted


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a leaf."""

    path: str
    box: Box
    shape: tuple[int, ...]  # of the whole leaf

    @property
    def name(self) -> str:
        """The path, followed by the box and the shape unless the shard is the whole leaf."""
        if self.is_whole:
            return self.path
        box = ','.join(f'{start}:{stop}' for start, stop in self.box)
        return f'{self.path}[{box}|{",".join(map(str, self.shape))}]'

    @property
    def is_whole(self) -> bool:
        return self.box == tuple((0, size) for size in self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return count_elements(self.box)

    @property
    def bounds(self) -> tuple[Box, tuple[int, ...]]:
        """The arguments of `find_runs`."""
        return self.box, self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of the whole leaf that are the shard."""
        return tuple(slice(start, stop) for start, stop in self.box)


@functools.lru_cache(maxsize=1 << 16)
def parse_shard(name: str, shape: tuple[int, ...]) -> Shard:
    """Returns the shard of a name, whose values have `shape`; raises ValueError if no shard has that name and shape."""
    path, mark, rest = name.partition('[')
    if not mark:
        return Shard(path, tuple((0, size) for size in shape), shape)
    axes, bar, sizes = rest.removesuffix(']').partition('|')
    box = tuple((int(start), int(stop)) for start, _, stop in (axis.partition(':') for axis in axes.split(',')))
    shard = Shard(path, box, tuple(map(int, sizes.split(','))))
    fits = all(0 <= start <= stop <= size for (start, stop), size in zip(box, shard.shape, strict=True))
    if not bar or not fits or tuple(stop - start for start, stop in box) != shape or shard.name != name:
        raise ValueError(f'{name[:120]!r} is no shard with values of the shape {shape}')
    return shard


def is_shard(name: str) -> bool:
    """Whether this is the name of a part of a leaf."""
    return name.endswith(']')


def leaf_path(name: str) -> str:
    """The path of the leaf that a shard is a part of."""
    return name.partition('[')[0]


def count_elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def find_overlap(one: Box, other: Box) -> Box | None:
    """The box of the elements that both have; None if there are none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


# Where the elements of a shard lie in its leaf.


@dataclasses.dataclass(frozen=True)
class Runs:
    """Row-major positions of a shard's elements: for each of `starts`, `rows` runs of `width`, `stride` apart."""

    starts: tuple[int, ...]
    rows: int
    width: int
    stride: int

    def positions(self, local: np.ndarray) -> np.ndarray:
        """The positions in the leaf, int64 [n], of the elements at the row-major positions `local` in the shard."""
        row, column = np.divmod(local, self.width)
        if len(self.starts) == 1:
            return self.starts[0] + row * self.stride + column
        outer, row = np.divmod(row, self.rows)
        return np.asarray(self.starts, np.int64)[outer] + row * self.stride + column


@functools.lru_cache(maxsize=4096)
def find_runs(box: Box, shape: tuple[int, ...]) -> Runs:
    """Returns the runs of a box in a leaf of `shape`; a whole leaf is one run."""
    cut = [axis for axis, (bounds, size) in enumerate(zip(box, shape, strict=True)) if bounds != (0, size)]
    last = cut[-1] if cut else 0  # the runs lie along this axis and those after it
    first = (
        cut[-2] if len(cut) > 1 else 0
    )  # rows are along the axes from here to `last`, of which only the first is cut
    behind = math.prod(shape[last + 1 :])
    stride = behind * (shape[last] if shape else 1)
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    offset = sum(start * step for (start, _), step in zip(box, steps, strict=True))
    outer = [
        range(0, (stop - start) * step, step) for (start, stop), step in zip(box[:first], steps[:first], strict=True)
    ]
    starts = tuple(offset + sum(each) for each in itertools.product(*outer))
    rows = count_elements(box[first:last])
    width = (box[last][1] - box[last][0]) * behind if shape else 1
    return Runs(starts, rows, width, stride)


# Who sends what.


def layouts_of(
    tree: Tree, process_of: Callable[[jax.Device], int] = lambda device: device.process_index
) -> dict[str, LeafLayout]:
    """Returns the layout of every leaf, by path, of a tree of arrays or of descriptions of them with shardings.

    `process_of`: the process of a device, for tests.
    """
    layouts, known = {}, dict[tuple[object, tuple[int, ...]], Mapping[Box, tuple[int, ...]]]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        sharding = getattr(leaf, 'sharding', None)
        key = sharding, leaf.shape
        if sharding is None:  # of the host of a learner of one process
            known[key] = {tuple((0, size) for size in leaf.shape): (0,)}
        if key not in known:
            found = collections.defaultdict[Box, set[int]](set)
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                found[to_box(index, leaf.shape)].add(process_of(device))
            known[key] = {box: tuple(sorted(holders)) for box, holders in sorted(found.items())}
        layouts[path_name(path)] = LeafLayout(leaf.shape, np.dtype(leaf.dtype).itemsize, known[key])
    return layouts


def to_box(index: Iterable[slice], shape: tuple[int, ...]) -> Box:
    """Returns the box of an index as jax describes a shard."""
    return tuple(
        (bounds.start or 0, size if bounds.stop is None else bounds.stop)
        for bounds, size in zip(index, shape, strict=True)
    )


def divide_leaves(layouts: Mapping[str, LeafLayout]) -> dict[int, list[Shard]]:
    """Assigns every element of every leaf to one process that holds it, about equally many bytes to each.

    A box that several processes hold is cut into as many parts; a small one goes to the holder with the fewest bytes.
    Returns shards by process, in the order of their names; no shard has more than 2 GiB.
    """
    processes = sorted({each for layout in layouts.values() for holders in layout.holders.values() for each in holders})
    shards: dict[int, list[Shard]] = {process: [] for process in processes}
    given = dict.fromkeys(processes, 0)
    boxes = [(path, box, holders) for path, layout in layouts.items() for box, holders in layout.holders.items()]
    size = lambda each: count_elements(each[1]) * layouts[each[0]].itemsize
    for path, box, holders in sorted(boxes, key=lambda each: (-size(each), each)):
        layout = layouts[path]
        nbytes = count_elements(box) * layout.itemsize
        parts = _cut(box, len(holders)) if nbytes >= _LEAST_CUT * len(holders) else [box]
        for part in parts:
            nbytes = count_elements(part) * layout.itemsize
            sender = min(holders, key=lambda process: given[process])
            given[sender] += nbytes
            pieces = _cut(part, -(-nbytes // _MOST_BYTES)) if nbytes > _MOST_BYTES else [part]
            shards[sender] += [Shard(path, piece, layout.shape) for piece in pieces]
    return {process: sorted(own, key=lambda shard: shard.name) for process, own in shards.items()}


def _cut(box: Box, count: int) -> list[Box]:
    """Cuts a box along its first axis with `count` entries, whose parts are contiguous, else along its longest axis."""
    sizes = [stop - start for start, stop in box]
    axis = next((axis for axis, size in enumerate(sizes) if size >= count), None)
    if axis is None:
        axis = max(range(len(sizes)), key=sizes.__getitem__, default=None)
        if axis is None:
            return [box]
        count = max(1, min(count, sizes[axis]))
    start, size = box[axis][0], sizes[axis]
    ends = [start + size * part // count for part in range(count + 1)]
    return [(*box[:axis], bounds, *box[axis + 1 :]) for bounds in itertools.pairwise(ends) if bounds[0] < bounds[1]]


# Who receives what.


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A part of a leaf on its way from a process of the learner to a host of an engine."""

    path: str
    box: Box
    nbytes: int
    sender: int
    receiver: Hashable


def route(
    shards: Mapping[int, Sequence[Shard]],
    needed: Mapping[Hashable, Mapping[str, Sequence[Box]]],
    itemsizes: Mapping[str, int],
) -> list[Transfer]:
    """Returns the transfers that bring each host the boxes that its devices need, every element once.

    Args:
      needed: by host and path, the boxes of its devices, which are equal or disjoint; leaves that a host does not need,
        such as experts of other hosts, are left out.
      itemsizes: bytes of an element, by path.
    """
    by_path = collections.defaultdict[str, list[tuple[int, Shard]]](list)
    for sender, own in shards.items():
        for shard in own:
            by_path[shard.path].append((sender, shard))
    transfers = []
    for receiver, leaves in needed.items():
        for path, boxes in leaves.items():
            for box, (sender, shard) in itertools.product(dict.fromkeys(boxes), by_path[path]):
                if (part := find_overlap(box, shard.box)) is not None:
                    nbytes = count_elements(part) * itemsizes[path]
                    transfers.append(Transfer(path, part, nbytes, sender, receiver))
    return transfers


def needed_boxes(
    tree: Tree, host_of: Callable[[jax.Device], Hashable] = lambda device: device.process_index
) -> dict[Hashable, dict[str, list[Box]]]:
    """Returns the boxes that each host of an engine needs, by path, from the shardings of the engine's weights."""
    needed = collections.defaultdict[Hashable, dict[str, list[Box]]](dict)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            boxes = needed[host_of(device)].setdefault(path_name(path), [])
            box = to_box(index, leaf.shape)
            if box not in boxes:
                boxes.append(box)
    return dict(needed)
