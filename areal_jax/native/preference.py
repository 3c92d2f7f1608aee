"""Decoding takes less of the processors while training runs on them, where both are in one process.

Half of the threads are enough to read the weights at most of the memory's rate, so that a step costs fewer CPU seconds
beside an update than alone. With as many threads as the update has, decoding would have ended before it, and new
weights would find no answer under way (threads.h).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from areal_jax.native import compiled_library as library


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """While it is open, kernels that decode have half of the threads, and none of XLA's; no result changes.

    Nothing happens where no kernel has been used.
    """
    kernels = library.registered()
    if kernels is None:
        yield
        return
    prefer = kernels.areal_jax_prefer
    prefer.argtypes = (ctypes.c_int64,)
    prefer(1)
    try:
        yield
    finally:
        prefer(-1)
