"""Arrays of a step on the disk: each process writes the parts that it holds, and any process reads any region.

Used by checkpoint/store.py and by the other processes of a run; uses checkpoint/trees.py.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from areal_jax.checkpoint.trees import TreeReader, write_trees
from areal_jax.errors import UserError
from areal_jax.files import sync_tree
from areal_jax.sharding.placement import HostShards, Region

_TREE_BYTES = 1 << 28  # of arrays in one orbax tree


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or read; the message names the directory, the step and the fix."""


class Piece(NamedTuple):
    """A part of an array as it was written; in JSON a list."""

    start: Sequence[int]  # in the whole array
    shape: Sequence[int]
    crc32: int
    tree: str  # the orbax tree that holds it, 'writer_0000/0003'


Index = Mapping[str, Sequence[Piece]]  # by the leaf's name


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A leaf of a checkpoint. A region is read when it is asked for; the object is small and can be pickled.

    Raises CheckpointError where a piece is missing or not what was written.
    """

    directory: str  # holds the trees of all writers
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]  # together the whole array, each entry once
    if_damaged: str  # what to do then, for the message
    reader: TreeReader = dataclasses.field(default_factory=TreeReader, repr=False, compare=False)

    def __getitem__(self, region: Region) -> np.ndarray:
        """The region. Every piece that overlaps it is read as a whole and compared with its checksum."""
        values = np.empty([s.stop - s.start for s in region], self.dtype)
        for piece in self.pieces:
            common = [
                (max(s.start, first), min(s.stop, first + size))
                for s, first, size in zip(region, piece.start, piece.shape, strict=True)
            ]
            if all(start < stop for start, stop in common):
                to = [slice(a - s.start, b - s.start) for (a, b), s in zip(common, region, strict=True)]
                of = [slice(a - first, b - first) for (a, b), first in zip(common, piece.start, strict=True)]
                values[tuple(to)] = self._read(piece)[tuple(of)]
        return values

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(0, size) for size in self.shape)], dtype)

    def _read(self, piece: Piece) -> np.ndarray:
        try:
            return self.read(piece)
        except Exception as error:  # whatever a damaged file makes the readers raise
            step = pathlib.Path(self.directory).parent
            raise CheckpointError(f'{step} is damaged ({brief(error)}): {self.if_damaged}') from error

    def read(self, piece: Piece) -> np.ndarray:
        """The piece; raises ValueError if it is not what was saved, or what tensorstore raises for a damaged file."""
        found = self.reader.read(pathlib.Path(self.directory) / piece.tree, _key(self.name, piece.start))
        if (found.shape, _checksum(found)) != (tuple(piece.shape), piece.crc32):
            raise ValueError(f'leaf {self.name!r} is not what was saved')
        return found


def verify_arrays(leaves: Iterable[StoredArray]) -> None:
    """Reads every piece of the leaves and compares it with its checksum; holds one piece at a time.

    Raises ValueError that names a leaf, or whatever the readers raise for a damaged file.
    """
    for leaf in leaves:
        for piece in leaf.pieces:
            leaf.read(piece)


def named_leaves(tree: Any) -> dict[str, np.ndarray | HostShards]:
    """Leaves of nested dicts by name, 'params/layers/0/query'.

    Raises ValueError for a tree that is not made of dicts with text keys, or for two leaves of one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for path, _ in leaves:
        if not all(isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str) for key in path):
            raise ValueError(f'{jax.tree_util.keystr(path)} does not lie in dicts with text keys, as JSON needs')
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError('two leaves of the tree have the same path: no key may look like two joined by "/"')
    return {name: leaf if isinstance(leaf, HostShards) else np.asarray(leaf) for name, leaf in named.items()}


def write_shards(directory: pathlib.Path, leaves: Mapping[str, np.ndarray | HostShards]) -> dict[str, list[Piece]]:
    """Writes the parts that this process holds as orbax trees in a directory of its own, and syncs them to the disk.

    Returns the pieces of each leaf. Waits for no other process. Raises FileNotFoundError if the parent directory is
    missing.
    """
    if not directory.parent.is_dir():
        raise FileNotFoundError(
            f'{directory.parent} is not there, which process 0 made: --workdir must be one directory that all '
            'processes of the run share under the same path'
        )
    trees: list[dict[str, np.ndarray]] = []
    index: dict[str, list[Piece]] = {name: [] for name in leaves}
    room = 0
    for name, start, part in ((name, *part) for name, leaf in leaves.items() for part in _parts(leaf)):
        if not trees or part.nbytes > room:
            trees.append({})
            room = _TREE_BYTES
        trees[-1][_key(name, start)] = part
        room -= part.nbytes
        tree = f'{directory.name}/{len(trees) - 1:04d}'
        index[name].append(Piece([int(s) for s in start], list(part.shape), _checksum(part), tree))
    write_trees(directory, trees)
    _require_bytes(directory, sum(part.nbytes for tree in trees for part in tree.values()))
    sync_tree(directory)
    return index


def require_whole(shapes: Mapping[str, Sequence[int]], index: Index) -> None:
    """Raises ValueError that names a leaf of which parts are missing."""
    for name, shape in shapes.items():
        written = sum({tuple(piece.start): math.prod(piece.shape) for piece in index[name]}.values())
        if written != math.prod(shape):
            raise ValueError(f'{written} of the {math.prod(shape)} values of leaf {name!r} were written')


def _require_bytes(directory: pathlib.Path, size: int) -> None:
    """Raises OSError if less than `size` bytes are on the disk: orbax reports nothing when arrays are left out."""
    found = sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
    if found < size:
        raise OSError(f'orbax wrote {found} of {size} bytes to {directory}')


def brief(error: BaseException) -> str:
    """Type and first line: orbax's messages go on for pages."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:300]}'


def _parts(leaf: np.ndarray | HostShards) -> Iterable[tuple[Sequence[int], np.ndarray]]:
    return leaf.parts if isinstance(leaf, HostShards) else [((0,) * leaf.ndim, leaf)]


def _key(name: str, start: Sequence[int]) -> str:
    return f'{name}@{"_".join(map(str, start))}'


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
