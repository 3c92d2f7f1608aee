"""Under the whole loop: how orbax writes a numpy array, in every process. Imports orbax, which takes a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import tensorstore_utils


class LocalNumpyHandler(type_handlers.NumpyHandler):
    """Writes what it is given in whichever process it is.

    Orbax's own takes numpy arrays for the same in all processes: only process 0 writes them, in the others nothing is
    written and nothing said (orbax-checkpoint 0.12.8, _src/serialization/type_handlers.py:151, in this method).
    """

    async def _background_serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> None:
        writes = []
        for value, info, arg in zip(values, infos, args or [type_handlers.SaveArgs()] * len(values), strict=True):
            await info.await_path_creation()
            spec = tensorstore_utils.build_array_write_spec(
                info=info,
                arg=arg,
                global_shape=value.shape,
                local_shape=value.shape,
                dtype=value.dtype,
                use_ocdbt=True,
                process_index=0,  # names a subdirectory; the tree is this process's alone
            )
            writes.append(self._open_and_write(value, spec.json, info.ts_context))
        await asyncio.gather(*writes)
