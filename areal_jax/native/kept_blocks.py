"""Memory that XLA frees is given to it again: the settings of blocks.h for this process."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import jax

from areal_jax.native import compiled_library as library

_XLA = b'libjax_common'  # part of the file name of XLA's library


class BlockCounts(NamedTuple):
    """Blocks of at least 1 MiB that XLA allocated since `keep_blocks`."""

    kept_bytes: int  # free, for XLA alone
    used_bytes: int
    given_again: int  # blocks


def keep_blocks() -> bool:
    """For the rest of this process, where it computes on a CPU; True where blocks are kept.

    What is in use and what is kept are together at most 5/4 of what was in use at once, since the last
    `free_kept_blocks`.
    """
    if not _has_kernels():
        return False
    keep = library.register().areal_jax_keep_blocks
    keep.restype = ctypes.c_bool
    return bool(keep(_XLA))


def free_kept_blocks() -> None:
    """Returns what is kept to the system, before something else needs much memory."""
    if _has_kernels():
        library.register().areal_jax_free_kept_blocks()


def count_blocks() -> BlockCounts:
    """The library must be registered."""
    counts = (ctypes.c_uint64 * 3)()
    library.register().areal_jax_count_blocks(counts)
    return BlockCounts(*map(int, counts))


def _has_kernels() -> bool:
    """Elsewhere than on a CPU they are not compiled for this alone."""
    return jax.default_backend() == 'cpu' and library.is_available()
