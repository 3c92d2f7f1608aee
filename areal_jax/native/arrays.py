"""Kernels that Python calls with arrays on the host: checksums, and the form of matrices for decoding.

They run in the calling thread, without the interpreter's lock and on no thread of XLA. XLA's own programs wait for the
update of a learner that is under way in the same process.
"""

from __future__ import annotations

import ctypes
import math
import weakref

import jax
import ml_dtypes
import numpy as np

from areal_jax.native import library

PANEL_ROWS = 8  # of the kernels
_LINE = 64  # bytes, at which jax takes an array as it is
# the bits that are all set in NaN and infinity, of the floats that are counted here
_EXPONENTS = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


def host_view(leaf: np.ndarray | jax.Array) -> np.ndarray | None:
    """The values as they lie in the memory of the host, row by row; None where they lie elsewhere, or in parts."""
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
            return None
        if [device.platform for device in leaf.devices()] != ['cpu']:
            return None
        leaf = np.asarray(leaf)
    return leaf if leaf.flags.c_contiguous else None


def sum_words(leaf: np.ndarray) -> tuple[int, int, int] | None:
    """(the two sums of publication/manifest.py, how many values are NaN or infinite) of a host_view.

    None for dtypes that it does not know, and where there is no library.
    """
    counted = np.issubdtype(leaf.dtype, np.floating) or leaf.dtype.kind == 'V'
    if leaf.dtype not in _EXPONENTS and (counted or leaf.dtype.kind not in 'iub'):
        return None
    if leaf.dtype.itemsize > 4 or not library.is_available():
        return None
    sums = (ctypes.c_uint64 * 3)()
    library.register().areal_jax_digest(
        ctypes.c_void_p(leaf.ctypes.data), ctypes.c_int64(leaf.size), ctypes.c_int64(leaf.dtype.itemsize),
        ctypes.c_uint32(_EXPONENTS.get(leaf.dtype, 0)), sums,
    )  # fmt: skip
    return int(sums[0]), int(sums[1]), int(sums[2])


def pack_panels(matrix: np.ndarray, *, by_rows: bool) -> np.ndarray:
    """float32 [in, out], or [out, in] with `by_rows`, as [out / PANEL_ROWS, in, PANEL_ROWS]; memory that jax can take.

    The library must be registered, and PANEL_ROWS divide `out`.
    """
    features, rows = reversed(matrix.shape) if by_rows else matrix.shape
    packed = empty_aligned((rows // PANEL_ROWS, features, PANEL_ROWS))
    library.register().areal_jax_panels(
        ctypes.c_void_p(matrix.ctypes.data), ctypes.c_int64(features), ctypes.c_int64(rows), ctypes.c_bool(by_rows),
        ctypes.c_void_p(packed.ctypes.data),
    )  # fmt: skip
    return packed


def empty_aligned(shape: tuple[int, ...]) -> np.ndarray:
    """float32, from the beginning of a cache line on, in memory of blocks.py. The library must be registered."""
    kernels, count = library.register(), math.prod(shape)
    allocate = kernels.areal_jax_allocate
    allocate.restype = ctypes.c_void_p
    address = allocate(ctypes.c_uint64(_LINE), ctypes.c_uint64(4 * max(count, 1)))
    if address is None:
        raise MemoryError(f'{4 * count} bytes for weights in the form for decoding')
    memory = (ctypes.c_float * count).from_address(address)
    # blocks that are still in use when the process ends belong to programs that may be running
    weakref.finalize(memory, kernels.areal_jax_free, ctypes.c_void_p(address)).atexit = False
    return np.frombuffer(memoryview(memory), np.float32).reshape(shape)
