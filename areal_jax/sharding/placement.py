"""Under arrow 7: arrays onto a mesh and back, also where the mesh spans several processes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def place(tree: Any, shardings: Any) -> Any:
    """The leaves (numpy or jax arrays) laid out as `shardings` says: one sharding, or a tree of them.

    Where devices of other processes take part, every process must hold the same values and call this; nothing is
    compared between them. Buffers may be shared with the argument where nothing has to move.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    whole = isinstance(shardings, jax.sharding.Sharding)
    over = jax.tree.map(lambda _: shardings, tree) if whole else shardings
    return jax.tree.map(_place_leaf, tree, over)


def gather(leaf: Any) -> np.ndarray:
    """The whole array on the host, a copy of its own: on CPU jax hands out views, and a buffer with a view cannot be
    reused by the next update. A collective where other processes hold parts of it: all must call it."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
        return np.array(multihost_utils.process_allgather(leaf, tiled=True), copy=True)
    return np.array(jax.device_get(leaf), copy=True)


def _place_leaf(leaf: Any, sharding: Any) -> jax.Array:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
