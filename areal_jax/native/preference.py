"""Decoding gives way to training where both run on the processors of one process.

An update that shares the processors with decoding ends late, and decoding has ended before it: new weights then find
no answer under way. Kernels that give way run on threads of their own, when no other thread wants the processor
(threads.h).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from areal_jax.native import compiled_library as library


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """While it is open, kernels that decode in this process give way to all other work; no result changes.

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
