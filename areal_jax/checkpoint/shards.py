"""Writes the arrays of a step to the disk: each process the parts that it holds; shards.py reads them again."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, MutableMapping, Sequence

import numpy as np

from areal_jax.checkpoint.shards import Piece, checksum, piece_key, write_trees
from areal_jax.files import sync_tree
from areal_jax.sharding.host_shards import HostShards

TREE_BYTES = 1 << 28  # of arrays in one orbax tree


def write_shards(
    directory: pathlib.Path, leaves: MutableMapping[str, np.ndarray | HostShards]
) -> dict[str, list[Piece]]:
    """Writes the parts that this process holds as orbax trees in a directory of its own, and syncs them to the disk.

    `leaves` is empty afterwards: an array is let go as soon as it is written. Returns the pieces of each leaf. Waits
    for no other process. Raises FileNotFoundError if the parent directory is missing.
    """
    if not directory.parent.is_dir():
        raise FileNotFoundError(
            f'{directory.parent} is not there, which process 0 made: --workdir must be one directory that all '
            'processes of the run share under the same path'
        )
    trees, index = _cut_trees(directory.name, leaves)
    size = sum(part.nbytes for tree in trees for part in tree.values())
    write_trees(directory, (trees.pop(0) for _ in range(len(trees))))
    _require_bytes(directory, size)
    sync_tree(directory)
    return index


def _cut_trees(
    writer: str, leaves: MutableMapping[str, np.ndarray | HostShards]
) -> tuple[list[dict[str, np.ndarray]], dict[str, list[Piece]]]:
    """(the arrays of each orbax tree, the pieces of each leaf); `leaves` is empty afterwards."""
    trees: list[dict[str, np.ndarray]] = []
    index: dict[str, list[Piece]] = {name: [] for name in leaves}
    room = 0
    for name, start, part in _take_parts(leaves):
        if not trees or part.nbytes > room:
            trees.append({})
            room = TREE_BYTES
        trees[-1][piece_key(name, start)] = part
        room -= part.nbytes
        tree = f'{writer}/{len(trees) - 1:04d}'
        index[name].append(Piece([int(s) for s in start], list(part.shape), checksum(part), tree))
    return trees, index


def _require_bytes(directory: pathlib.Path, size: int) -> None:
    """Raises OSError if less than `size` bytes are on the disk: orbax reports nothing when arrays are left out."""
    found = sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())
    if found < size:
        raise OSError(f'orbax wrote {found} of {size} bytes to {directory}')


def _take_parts(
    leaves: MutableMapping[str, np.ndarray | HostShards],
) -> Iterator[tuple[str, Sequence[int], np.ndarray]]:
    for name in [*leaves]:
        leaf = leaves.pop(name)
        for start, part in leaf.parts if isinstance(leaf, HostShards) else [((0,) * leaf.ndim, leaf)]:
            yield name, start, part
