"""Writes the arrays of a step to the disk, each process the parts that it holds, and reads them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from areal_jax.errors import UserError
from areal_jax.files import sync_tree
from areal_jax.sharding.host_shards import HostShards

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    import tensorstore as ts


_TABLE_BYTES = 100_000_000
_T = TypeVar('_T')


def write_trees(directory: pathlib.Path, trees: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Writes each {key: array} to `directory/0000`, `directory/0001`, ...; needs no memory in addition to the arrays.

    At most two of `trees` are held at a time, so an iterator can release the others.
    """
    _away_from_loops(lambda: _write_trees(directory, trees))


class TreeReader:
    """Reads arrays of trees; caches the trees' tables of contents, at most 100 MB of each, and no array.

    A reader is pickled without its tables, so it can be sent to another process.
    """

    def __init__(self) -> None:
        self.tables: dict[pathlib.Path, ts.KvStore] = {}

    def read(self, tree: pathlib.Path, key: str) -> np.ndarray:
        """Reads one array of a tree; raises whatever tensorstore raises for a damaged file."""
        import tensorstore as ts

        table = self.tables.get(tree)
        if table is None:
            context = ts.Context({'cache_pool#tables': {'total_bytes_limit': _TABLE_BYTES}})
            files = {'driver': 'file', 'path': f'{tree}/'}
            store = {'driver': 'ocdbt', 'base': files, 'cache_pool': 'cache_pool#tables'}
            table = self.tables[tree] = ts.KvStore.open(store, context=context).result()
        opened = ts.open({'driver': 'zarr'}, kvstore=table / f'{key}/', open=True, read=True)
        return opened.result().read().result()

    def __reduce__(self) -> tuple[type[TreeReader], tuple[()]]:
        return TreeReader, ()


def _write_trees(directory: pathlib.Path, trees: Iterable[Mapping[str, np.ndarray]]) -> None:
    import jax
    import orbax.checkpoint as ocp

    from areal_jax.checkpoint.handler import LocalNumpyHandler

    handlers = [
        (np.ndarray, LocalNumpyHandler()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # never used, but without it orbax warns at every save
    ]
    alone = _this_process_alone()
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        multiprocessing_options=alone,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(*handlers),
    )
    directory.mkdir()
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        for number, tree in enumerate(trees):
            checkpointer.save(directory / f'{number:04d}', args=ocp.args.PyTreeSave(tree))


def _this_process_alone() -> ocp.options.MultiprocessingOptions:
    """Options for trees of a single process: orbax must not wait for the other processes of a distributed run."""
    import jax
    import orbax.checkpoint as ocp

    this = jax.process_index()
    prefix = None if jax.process_count() == 1 else f'process{this}'
    active = None if jax.process_count() == 1 else {this}
    return ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes=active, barrier_sync_key_prefix=prefix
    )


def _away_from_loops(fn: Callable[[], _T]) -> _T:
    """Runs `fn` on a separate thread and waits for it.

    Orbax runs asyncio inside. If a loop already runs in the calling thread (the virtual clock calls inline), orbax's
    behavior depends on version and platform: it uses uvloop on a thread, or patches asyncio to nest, which would let
    other coroutines run in between.
    """
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='orbax') as own:
        return own.submit(fn).result()


# Trees of arrays by the names of their leaves: the pieces on the disk, and reads of regions.
#
# This part does not import jax. distributed/ tells other processes which regions to read.


Region = tuple[slice, ...]  # one per axis, start and stop given
_OTHER_NODE = '{} does not lie in dicts with text keys, as JSON needs'


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
class ArrayShape:
    """A leaf that only other processes hold and write."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, 'shape', tuple(self.shape))


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """A leaf of a checkpoint. Regions are read on access; the object is small and can be pickled.

    Raises CheckpointError if a piece is missing or differs from the saved one.
    """

    directory: str  # holds the trees of all writers
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[Piece, ...]  # together the whole array, each entry once
    if_damaged: str  # advice for the error message
    reader: TreeReader = dataclasses.field(default_factory=TreeReader, repr=False, compare=False)

    def __getitem__(self, region: Region) -> np.ndarray:
        """Reads the region. Every piece that overlaps it is read in full and verified by its checksum."""
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
        """Reads the piece; raises ValueError if it differs from the saved one, or tensorstore's error if damaged."""
        found = self.reader.read(pathlib.Path(self.directory) / piece.tree, piece_key(self.name, piece.start))
        if (found.shape, checksum(found)) != (tuple(piece.shape), piece.crc32):
            raise ValueError(f'leaf {self.name!r} is not what was saved')
        return found


def verify_arrays(leaves: Iterable[StoredArray]) -> None:
    """Reads every piece of the leaves and compares it with its checksum; holds one piece at a time.

    Raises ValueError that names a leaf, or whatever the readers raise for a damaged file.
    """
    for leaf in leaves:
        for piece in leaf.pieces:
            leaf.read(piece)


def require_whole(shapes: Mapping[str, Sequence[int]], index: Index) -> None:
    """Raises ValueError that names a leaf if its parts do not cover it or exceed it."""
    for name, shape in shapes.items():
        for piece in index[name]:
            places = zip(piece.start, piece.shape, shape, strict=True)
            if any(type(one) is not int for one in (*piece.start, *piece.shape, *shape)) or any(
                start < 0 or size < 0 or start + size > length for start, size, length in places
            ):
                raise ValueError(f'a part of leaf {name!r} is not within it')
        written = sum({tuple(piece.start): math.prod(piece.shape) for piece in index[name]}.values())
        if written != math.prod(shape):
            raise ValueError(f'{written} of the {math.prod(shape)} values of leaf {name!r} were written')


def brief(error: BaseException) -> str:
    """The error's type and first line: orbax's messages are pages long."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:300]}'


def named_leaves(tree: Any) -> dict[str, np.ndarray | HostShards | ArrayShape]:
    """Leaves of nested dicts by name, 'params/layers/0/query', keys sorted; None is not a leaf.

    Raises ValueError for a tree that is not made of dicts with text keys, or for two leaves with the same name.
    """
    named: dict[str, np.ndarray | HostShards | ArrayShape] = {}

    def add(path: tuple[str, ...], node: Any) -> None:
        if isinstance(node, Mapping):
            for key in sorted(node, key=str):
                if not isinstance(key, str):
                    raise ValueError(_OTHER_NODE.format(_spell(*path, key)))
                add((*path, key), node[key])
        elif isinstance(node, (list, tuple)):
            raise ValueError(_OTHER_NODE.format(_spell(*path, 0)))
        elif node is not None:
            name = '/'.join(path)
            if name in named:
                raise ValueError('two leaves of the tree have the same path: no key may look like two joined by "/"')
            named[name] = node if isinstance(node, (HostShards, ArrayShape)) else np.asarray(node)

    add((), tree)
    return named


def _spell(*path: object) -> str:
    return ''.join(f'[{key!r}]' for key in path)


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, path: str = '') -> Any:
    """The nested dicts with `fn(name, leaf)` in place of each leaf; None stays None."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, tree[key], f'{path}/{key}' if path else key) for key in sorted(tree)}
    return None if tree is None else fn(path, tree)


def piece_key(name: str, start: Sequence[int]) -> str:
    """The key of a piece of a leaf in its tree."""
    return f'{name}@{"_".join(map(str, start))}'


def checksum(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


TREE_BYTES = 1 << 28  # of arrays in one orbax tree


def write_shards(
    directory: pathlib.Path, leaves: MutableMapping[str, np.ndarray | HostShards]
) -> dict[str, list[Piece]]:
    """Writes this process's parts as orbax trees in the new directory `directory`, and syncs them to the disk.

    `leaves` is empty afterwards: an array is released as soon as it is written. Returns the pieces of each leaf. Waits
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
    """Returns (arrays of each orbax tree, pieces of each leaf); `leaves` is empty afterwards."""
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
