"""Kernels for the changes between two versions of an array of 16 bits; native/changes.h says what they compute.

They run in the calling thread, without the interpreter's lock. publication/delta.py has the same in numpy.
"""

from __future__ import annotations

import ctypes

import numpy as np

from areal_jax.native import compiled_library as library

Lists = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # gaps uint8, large gaps uint32, low and high bytes uint8


def find_changes(base: np.ndarray, current: np.ndarray, exponent: int, lists: Lists) -> tuple[int, ...] | None:
    """Fills `lists` with what differs between uint16 [n] and [n], and makes `base` equal to `current`.

    The lists have room for n entries, the large gaps for n / 256.

    Returns (changes, large gaps, new values whose bits under `exponent` are all set, the change of the two sums of the
    digest mod 2^32); None where there is no library.
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

    `rows` > 0: positions are those of a matrix of so many rows, whose transpose the words are. None, with an unknown
    part of the changes made, where a position is outside. The library must be registered.
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
