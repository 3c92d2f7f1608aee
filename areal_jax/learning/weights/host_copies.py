"""Copies of weights on the host, in memory that is used again: fresh pages cost several times the copy itself."""

from __future__ import annotations

import collections
import weakref

import jax
import numpy as np

from areal_jax.types import Tree


class HostCopies:
    """Copies float32 arrays of one CPU device.

    As much memory is kept as copies were alive at once. Not for several threads.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = collections.defaultdict(list)  # float32, by their number of elements

    def copy(self, tree: Tree) -> Tree:
        """The same tree of numpy arrays, whose memory is used again when nothing refers to any part of it."""
        return jax.tree.map(self._copy_leaf, tree)

    def _copy_leaf(self, leaf: jax.Array) -> np.ndarray:
        free = self._free[leaf.size]
        memory = free.pop() if free else np.empty(leaf.size, np.float32)
        # the base is no array: a view of the copy then refers to the copy, which keeps the memory from being used again
        copied = np.frombuffer(memory.data, np.float32)
        weakref.finalize(copied, free.append, memory).atexit = False
        copied[:] = np.asarray(leaf).reshape(-1)  # a view, which is gone when the next update asks for the buffer
        return copied.reshape(leaf.shape)
