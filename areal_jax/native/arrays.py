"""Kernels that Python calls with arrays on the host: checksums, and the form of matrices for decoding.

They run in the calling thread, without the interpreter's lock and not on XLA's threads: XLA's own programs would wait
for an update that a learner runs in the same process.
"""

from __future__ import annotations

import ctypes
import math
import weakref

import jax
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from areal_jax.native import compiled_library as library

PANEL_ROWS = 8  # of the kernels
BYTE_ROWS, BYTE_GROUP = 16, 4  # of panels of 8-bit matrices: rows, and adjacent entries of a row
_LINE = 64  # bytes: jax uses arrays of this alignment without a copy
# the bits that are all set in NaN and infinity, for the float dtypes that are counted here
_EXPONENTS = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}


def host_view(leaf: np.ndarray | jax.Array) -> np.ndarray | None:
    """A view of the values in the memory of the host, row by row; None if they are elsewhere or not contiguous."""
    if isinstance(leaf, jax.Array):
        if isinstance(leaf, jax.core.Tracer) or not leaf.is_fully_addressable:
            return None
        if [device.platform for device in leaf.devices()] != ['cpu']:
            return None
        leaf = np.asarray(leaf)
    return leaf if leaf.flags.c_contiguous else None


def sum_words(
    leaf: np.ndarray,
    runs: tuple[int, int] | None = None,
    first: int = 0,
    stride: int = 0,
    target: np.ndarray | None = None,
) -> tuple[int, int, int] | None:
    """(the two sums of publication/manifest.py, the number of values that are NaN or infinite) of a host_view.

    The values are `runs` = (number, width) of consecutive positions; the first run begins at the position `first`, each
    other one `stride` after the run before it. None = one run. With `target`, contiguous words of this width, they are
    also written to its elements of these positions. Returns None for unknown dtypes and without the library.
    """
    counted = np.issubdtype(leaf.dtype, np.floating) or leaf.dtype.kind == 'V'
    if leaf.dtype not in _EXPONENTS and (counted or leaf.dtype.kind not in 'iub'):
        return None
    if leaf.dtype.itemsize > 4 or not library.is_available():
        return None
    sums = (ctypes.c_uint64 * 3)()
    library.register().areal_jax_digest(
        ctypes.c_void_p(leaf.ctypes.data),
        *map(ctypes.c_int64, (*(runs or (1, leaf.size)), first, stride, leaf.dtype.itemsize)),
        ctypes.c_uint32(_EXPONENTS.get(leaf.dtype, 0)),
        ctypes.c_void_p(None if target is None else target.ctypes.data), sums,
    )  # fmt: skip
    return int(sums[0]), int(sums[1]), int(sums[2])


def pack_panels(matrix: np.ndarray, *, by_rows: bool) -> np.ndarray:
    """Packs float32 [in, out], or [out, in] with `by_rows`, as [out / PANEL_ROWS, in, PANEL_ROWS].

    The memory is aligned for jax. The library must be registered, and PANEL_ROWS must divide `out`.
    """
    features, rows = reversed(matrix.shape) if by_rows else matrix.shape
    packed = empty_aligned((rows // PANEL_ROWS, features, PANEL_ROWS))
    library.register().areal_jax_panels(
        ctypes.c_void_p(matrix.ctypes.data), ctypes.c_int64(features), ctypes.c_int64(rows), ctypes.c_bool(by_rows),
        ctypes.c_void_p(packed.ctypes.data),
    )  # fmt: skip
    return packed


def pack_bytes(matrix: np.ndarray, *, by_rows: bool) -> tuple[np.ndarray, np.ndarray]:
    """Packs float32 [in, out], or [out, in] with `by_rows`, as (uint8 [out / 16, in / 4, 16, 4], float32 scales [out]).

    Panels and groups are filled up, see native/bytes.h. The memory is aligned for jax. The library must be registered.
    """
    features, rows = reversed(matrix.shape) if by_rows else matrix.shape
    panels = empty_aligned((-(-rows // BYTE_ROWS), -(-features // BYTE_GROUP), BYTE_ROWS, BYTE_GROUP), np.uint8)
    scales = empty_aligned((rows,))
    library.register().areal_jax_bytes(
        ctypes.c_void_p(matrix.ctypes.data), ctypes.c_int64(features), ctypes.c_int64(rows), ctypes.c_bool(by_rows),
        ctypes.c_void_p(panels.ctypes.data), ctypes.c_void_p(scales.ctypes.data),
    )  # fmt: skip
    return panels, scales


def empty_aligned(shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> np.ndarray:
    """An uninitialised array that begins at a cache line, allocated by the library, which must be registered."""
    kernels, size = library.register(), math.prod(shape) * np.dtype(dtype).itemsize
    allocate = kernels.areal_jax_allocate
    allocate.restype = ctypes.c_void_p
    address = allocate(ctypes.c_uint64(_LINE), ctypes.c_uint64(max(size, 4)))
    if address is None:
        raise MemoryError(f'{size} bytes for weights in the form for decoding')
    memory = (ctypes.c_char * size).from_address(address)
    # blocks that are still in use when the process ends belong to programs that may be running
    weakref.finalize(memory, kernels.areal_jax_free, ctypes.c_void_p(address)).atexit = False
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)


# Kernels for the changes between two versions of a 16-bit array; native/changes.h documents the computation.
#
# They run in the calling thread, without the interpreter's lock. publication/delta.py has the same in numpy.


Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # gaps uint8, large gaps uint32, low and high bytes uint8


def find_changes(base: np.ndarray, current: np.ndarray, exponent: int, lists: Lists) -> tuple[int, ...] | None:
    """Fills `lists` with the changes from `base` to `current`, uint16 [n] each, and makes `base` equal to `current`.

    The lists must have room for n entries, the large gaps for n / 256.

    Returns (changes, large gaps, new values whose bits under `exponent` are all set, the change of the two sums of the
    digest mod 2^32); None without the library.
    """
    if not library.is_available():
        return None
    found = (ctypes.c_uint64 * 5)()
    library.register().areal_jax_find_changes(
        _address(base), _address(current), ctypes.c_int64(base.size), ctypes.c_uint32(exponent),
        *map(_address, lists), found,
    )  # fmt: skip
    return tuple(map(int, found))


def apply_changes(words: np.ndarray, rows: int, lists: Lists, *, back: bool) -> tuple[int, int] | None:
    """Adds changes to uint16 [n], or with `back` subtracts them; returns the change of the two sums of the digest.

    `rows` > 0: positions count in a matrix of `rows` rows, and `words` is its transpose. Returns None if a position is
    outside; an unknown part of the changes is made then. The library must be registered.
    """
    found = (ctypes.c_uint64 * 2)()
    apply = library.register().areal_jax_apply_changes
    apply.restype = ctypes.c_bool
    gaps, large, low, high = lists
    fits = apply(
        _address(words), ctypes.c_int64(words.size), ctypes.c_int64(rows),
        _address(gaps), _address(large), _address(low), _address(high),
        ctypes.c_int64(gaps.size), ctypes.c_int64(large.size), ctypes.c_bool(back), found,
    )  # fmt: skip
    return (int(found[0]), int(found[1])) if fits else None


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
