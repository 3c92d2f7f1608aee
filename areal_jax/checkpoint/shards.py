"""Under the whole loop: arrays of a step on the disk, each process's own parts, and any region of them back."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from areal_jax.errors import UserError
from areal_jax.files import sync_tree
from areal_jax.sharding.placement import HostShards, Region

_TREE_BYTES = 1 << 28  # of arrays in one orbax tree: of each piece that it reads, orbax reads the metadata of the tree
_T = TypeVar('_T')


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that can not be written or read; the message names the directory, the step and the fix."""


class Piece(NamedTuple):
    """A part of an array as it was written; in JSON a list."""

    start: Sequence[int]  # in the whole array
    shape: Sequence[int]
    crc32: int
    tree: str  # the orbax tree that holds it, 'writer_0000/0003'


Index = Mapping[str, Sequence[Piece]]  # by the leaf's name


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A leaf of a checkpoint, read when it is asked for a region; small, and can be sent to another process.

    Raises CheckpointError where a piece is missing or not what was written.
    """

    directory: str  # holds the trees of all writers
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]  # together the whole array, each entry once
    if_damaged: str  # what to do then, for the message

    def __getitem__(self, region: Region) -> np.ndarray:
        """The region, of which every piece that has a part of it is read whole and compared with its checksum."""
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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(0, size) for size in self.shape)], dtype)

    def _read(self, piece: Piece) -> np.ndarray:
        key = _key(self.name, piece.start)
        try:
            found = _read_pieces(pathlib.Path(self.directory) / piece.tree, {key: self.dtype})[key]
            _require_unchanged(found, self.name, piece)
        except Exception as error:  # whatever a damaged file makes the readers raise
            step = pathlib.Path(self.directory).parent
            raise CheckpointError(f'{step} is damaged ({brief(error)}): {self.if_damaged}') from error
        return found


def verify_arrays(leaves: Iterable[StoredArray]) -> None:
    """Reads every piece of the leaves of one step and compares it with its checksum; holds one orbax tree at a time.

    Raises ValueError that names a leaf, or whatever the readers raise for a damaged file.
    """
    trees: dict[pathlib.Path, list[tuple[StoredArray, Piece]]] = {}
    for leaf in leaves:
        for piece in leaf.pieces:
            trees.setdefault(pathlib.Path(leaf.directory) / piece.tree, []).append((leaf, piece))
    for tree, members in trees.items():
        found = _read_pieces(tree, {_key(leaf.name, piece.start): leaf.dtype for leaf, piece in members})
        for leaf, piece in members:
            _require_unchanged(found[_key(leaf.name, piece.start)], leaf.name, piece)


def named_leaves(tree: Any) -> dict[str, np.ndarray | HostShards]:
    """Leaves of nested dicts by 'params/layers/0/query'; raises ValueError for another tree, or two of one name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for path, _ in leaves:
        if not all(isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str) for key in path):
            raise ValueError(f'{jax.tree_util.keystr(path)} does not lie in dicts with text keys, which JSON can carry')
    named = {jax.tree_util.keystr(path, simple=True, separator='/'): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        raise ValueError('two leaves of the tree have the same path: no key may look like two joined by "/"')
    return {name: leaf if isinstance(leaf, HostShards) else np.asarray(leaf) for name, leaf in named.items()}


def write_shards(directory: pathlib.Path, leaves: Mapping[str, np.ndarray | HostShards]) -> dict[str, list[Piece]]:
    """Writes what this process holds, fsynced, as orbax trees in a directory of its own; returns what lies where.

    Needs nothing of other processes. Raises FileNotFoundError where the parent directory is not there.
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
    _away_from_loops(lambda: _write_trees(directory, trees))
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
    """Raises OSError for less than `size` on the disk: a writer that leaves arrays out says nothing (handler.py)."""
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


def _write_trees(directory: pathlib.Path, trees: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Beside the arrays this takes no memory worth mention."""
    import orbax.checkpoint as ocp

    from areal_jax.checkpoint.handler import LocalNumpyHandler

    # nobody changes the arrays meanwhile, and float32 weights hardly compress: without it a save costs its bytes and no
    # CPU that decoding needs
    handlers = [
        (np.ndarray, LocalNumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # there are none, but without it orbax warns at every save
    ]
    alone = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_compression=False,
        multiprocessing_options=alone,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
    )
    directory.mkdir()
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        for number, tree in enumerate(trees):
            checkpointer.save(directory / f'{number:04d}', args=ocp.args.PyTreeSave(tree))


def _read_pieces(tree: pathlib.Path, dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
    """The arrays of an orbax tree that have these keys."""
    return _away_from_loops(lambda: _restore_tree(tree, dtypes))


def _restore_tree(tree: pathlib.Path, dtypes: Mapping[str, np.dtype]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    alone = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, multiprocessing_options=alone)
    wanted = {key: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype) for key, dtype in dtypes.items()}
    arguments = ocp.args.PyTreeRestore(item=dict.fromkeys(dtypes, 0), restore_args=wanted, partial_restore=True)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        return checkpointer.restore(tree, args=arguments)


def _require_unchanged(found: np.ndarray, name: str, piece: Piece) -> None:
    if (found.shape, _checksum(found)) != (tuple(piece.shape), piece.crc32):
        raise ValueError(f'leaf {name!r} is not what was saved')


def _this_process_alone() -> Any:
    """Each process has trees of its own: orbax must not wait for the others of a distributed run."""
    import orbax.checkpoint as ocp

    this = jax.process_index()
    prefix = None if jax.process_count() == 1 else f'process{this}'
    active = None if jax.process_count() == 1 else {this}
    return ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes=active, barrier_sync_key_prefix=prefix
    )


def _away_from_loops(fn: Callable[[], _T]) -> _T:
    """Runs `fn` on a thread of its own and waits for it.

    orbax runs asyncio inside. Where a loop runs already (the virtual clock calls inline) it depends on version and
    platform what it does: uvloop on a thread, or asyncio patched to nest, which lets other coroutines run in between.
    """
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='orbax') as own:
        return own.submit(fn).result()


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
