"""Arrays in orbax trees: one directory each, written by one process and opened by any.

Orbax writes the directory and its metadata, and any orbax reads it again; tensorstore, on which orbax is built, writes
and reads the arrays. Importing orbax and jax takes seconds, so the functions do it, and who only reads needs neither.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    import tensorstore as ts

_TABLE_BYTES = 100_000_000
_T = TypeVar('_T')


def write_trees(directory: pathlib.Path, trees: Iterable[Mapping[str, np.ndarray]]) -> None:
    """Writes each {key: array} to `directory/0000`, `directory/0001`, ...; takes no memory besides the arrays.

    Of `trees` no more than two are held at a time, so that an iterator may let them go.
    """
    _away_from_loops(lambda: _write_trees(directory, trees))


class TreeReader:
    """Reads arrays of trees; keeps the trees' tables of contents, at most 100 MB of each, and no array.

    A pickled reader begins without them, so that another process can be told what to read.
    """

    def __init__(self) -> None:
        self.tables: dict[pathlib.Path, ts.KvStore] = {}

    def read(self, tree: pathlib.Path, key: str) -> np.ndarray:
        """One array of a tree; raises whatever tensorstore raises for a file that is damaged."""
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
    """Each process has trees of its own: orbax must not wait for the others of a distributed run."""
    import jax
    import orbax.checkpoint as ocp

    this = jax.process_index()
    prefix = None if jax.process_count() == 1 else f'process{this}'
    active = None if jax.process_count() == 1 else {this}
    return ocp.options.MultiprocessingOptions(
        primary_host=this, active_processes=active, barrier_sync_key_prefix=prefix
    )


def _away_from_loops(fn: Callable[[], _T]) -> _T:
    """Runs `fn` on a thread of its own and waits for it.

    Orbax runs asyncio inside. If a loop runs in the calling thread already (the virtual clock calls inline), what
    orbax does depends on version and platform: uvloop on a thread, or asyncio patched to nest, which would let other
    coroutines run in between.
    """
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='orbax') as own:
        return own.submit(fn).result()
