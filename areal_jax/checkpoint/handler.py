"""The orbax handler that writes numpy arrays in every process. Imports orbax, which takes 1 s."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

_DATA_FILE_BYTES = 1 << 31  # more than a tree holds, so each tree has one data file


class LocalNumpyHandler(type_handlers.NumpyHandler):
    """Writes the arrays in every process that calls it.

    Orbax's own handler assumes that numpy arrays are equal in all processes: only process 0 writes them, and the others
    report nothing (orbax-checkpoint 0.12.8). The arrays are not copied, because nothing changes them meanwhile, and not
    compressed: float32 weights hardly shrink, and decoding needs the CPU time.
    """

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Returns [] when all arrays are written: there is no future to wait for."""
        await asyncio.gather(*(_write(value, info) for value, info in zip(values, infos, strict=True)))
        return []


async def _write(value: np.ndarray, info: type_handlers.ParamInfo) -> None:
    await info.await_path_creation()
    # orbax merges every `ocdbt.process_*` when it closes the tree; the tree belongs to this process alone
    directory = {'driver': 'file', 'path': f'{info.parent_dir}/ocdbt.process_0/'}
    spec = {
        'driver': 'zarr',
        'kvstore': {
            'driver': 'ocdbt',
            'base': directory | {'file_io_locking': {'mode': 'non_atomic'}},
            'target_data_file_size': _DATA_FILE_BYTES,
            'path': info.name,
        },
        'dtype': value.dtype.name,
        'metadata': {'shape': value.shape, 'chunks': np.maximum(value.shape, 1).tolist(), 'compressor': None},
        'store_data_equal_to_fill_value': True,
    }
    array = await ts.open(spec, create=True, open=True, context=info.ts_context)
    await array.write(value, can_reference_source_data_indefinitely=True)
