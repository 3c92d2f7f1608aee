"""Plans which process of a learner sends which parts of the leaves, and which of them each host of an engine gets.

    layouts   = layouts_of(copy)                    # from the learner's shardings
    shards    = divide_leaves(layouts)              # every element is in one shard of one process
    transfers = route(shards, needed, itemsizes)    # the parts that each host needs, each once

Pure: every process computes the same plan from the same shardings, so no process has to tell it to the others. Records
and manifests have a shard under its name, 'layers/0/attention/query[0:128,0:64|512,64]'; a shard that is the whole leaf
has the name of the leaf.
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

# A box that several processes hold is cut for them if each gets this many bytes and if it is this large a share of what
# a process sends; else one of them sends it whole. Smaller shares would even out nothing and cost time for each shard.
_LEAST_BYTES, _LEAST_SHARE = 1 << 16, 1 / 128
_MOST_BYTES = 2 << 30  # of a shard


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """Where the elements of a leaf are."""

    shape: tuple[int, ...]
    itemsize: int  # bytes of an element
    holders: Mapping[Box, tuple[int, ...]]  # disjoint boxes that cover the leaf -> the processes that hold them, sorted


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a leaf, a box."""

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
        """Whether the shard is the whole leaf."""
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
    """Returns the path of the leaf that the shard of this name is a part of."""
    return name.partition('[')[0]


def count_elements(box: Box) -> int:
    """Returns the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def find_overlap(one: Box, other: Box) -> Box | None:
    """Returns the box of the elements that two boxes share; None if they share none."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


# Where the elements of a shard lie in its leaf.


@dataclasses.dataclass(frozen=True)
class Runs:
    """The row-major positions of a shard in its leaf: at each of `starts`, `rows` runs of `width`, `stride` apart."""

    starts: tuple[int, ...]
    rows: int
    width: int
    stride: int

    def positions(self, local: np.ndarray) -> np.ndarray:
        """Returns the positions in the leaf, int64 [n], of the elements at row-major positions `local` of the shard."""
        row, column = np.divmod(local, self.width)
        if len(self.starts) == 1:
            return self.starts[0] + row * self.stride + column
        outer, row = np.divmod(row, self.rows)
        return np.asarray(self.starts, np.int64)[outer] + row * self.stride + column


@functools.lru_cache(maxsize=4096)
def find_runs(box: Box, shape: tuple[int, ...]) -> Runs:
    """Returns the runs of a box in a leaf of `shape`; a whole leaf is one run."""
    cut = [axis for axis, (bounds, size) in enumerate(zip(box, shape, strict=True)) if bounds != (0, size)]
    # A run is the part of the last cut axis, with all axes after it. The rows are the axes from the cut axis before it
    # on; the others of them are whole, so that rows have equal distances. The axes before them give the starts.
    *_, first, last = (0, 0, *cut)
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

    Boxes that several processes hold are cut into as many parts; small ones go whole to the holder with fewest bytes.
    Returns shards by process, in the order of their names; no shard has more than 2 GiB.
    """
    boxes = [(path, box, holders) for path, layout in layouts.items() for box, holders in layout.holders.items()]
    nbytes = lambda path, box: count_elements(box) * layouts[path].itemsize
    processes = sorted({process for *_, holders in boxes for process in holders})
    shards: dict[int, list[Shard]] = {process: [] for process in processes}
    given = dict.fromkeys(processes, 0)  # bytes
    least = _LEAST_SHARE * sum(nbytes(path, box) for path, box, _ in boxes) / max(1, len(processes))
    for path, box, holders in sorted(boxes, key=lambda each: (-nbytes(*each[:2]), each)):
        layout = layouts[path]
        is_cut = nbytes(path, box) >= max(_LEAST_BYTES * len(holders), least)
        for part in _cut_evenly(box, len(holders)) if is_cut else [box]:
            sender = min(holders, key=given.__getitem__)
            given[sender] += nbytes(path, part)
            pieces = _cut_to(part, _MOST_BYTES // layout.itemsize)
            shards[sender] += [Shard(path, piece, layout.shape) for piece in pieces]
    return {process: sorted(own, key=lambda shard: shard.name) for process, own in shards.items()}


def _cut_evenly(box: Box, count: int) -> list[Box]:
    """Cuts a box into `count` boxes along its first axis that divides evenly, else along its longest axis."""
    sizes = [stop - start for start, stop in box]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    axis = next((axis for axis, size in enumerate(sizes) if size % count == 0), longest)
    return _cut_axis(box, axis, min(count, sizes[axis]))


def _cut_to(box: Box, most: int) -> list[Box]:
    """Cuts a box into boxes of at most `most` elements, whose elements are contiguous in it."""
    if count_elements(box) <= most:
        return [box]
    axis = next(axis for axis, (start, stop) in enumerate(box) if stop - start > 1)
    entry = count_elements(box[axis + 1 :])
    size = box[axis][1] - box[axis][0]
    parts = _cut_axis(box, axis, -(-size // max(1, most // entry)))
    return [piece for part in parts for piece in _cut_to(part, most)]


def _cut_axis(box: Box, axis: int, count: int) -> list[Box]:
    """Cuts an axis of a box into `count` parts, whose sizes differ by 1 at most."""
    start, stop = box[axis]
    ends = [start + (stop - start) * part // count for part in range(count + 1)]
    return [(*box[:axis], bounds, *box[axis + 1 :]) for bounds in itertools.pairwise(ends)]


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
