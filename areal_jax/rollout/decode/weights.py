"""Weights as the decode programs take them, and how engines on the same devices share them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable

import jax

from areal_jax.models.weights import Params
from areal_jax.types import PublishedWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedWeights:
    """What `prepare` of a backend returned; every backend of the same decoder on the same devices takes it."""

    params: Params


def share_prepared(
    receive: Callable[[PublishedWeights], Params], prepare: Callable[[Params], PreparedWeights]
) -> Callable[[PublishedWeights], PreparedWeights]:
    """`receive` with prepared weights: a version is received and prepared once for all who hold it at the same time."""
    held: weakref.WeakValueDictionary[tuple[int, str], PreparedWeights] = weakref.WeakValueDictionary()
    lock = threading.Lock()  # engines fetch on lanes of their own

    def fetch(published: PublishedWeights) -> PreparedWeights:
        key = published.version, published.manifest_hash
        with lock:
            weights = held.get(key)
            if weights is None:
                held[key] = weights = prepare(receive(published))
        return weights

    return fetch
