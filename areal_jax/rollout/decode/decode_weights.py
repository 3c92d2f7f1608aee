"""Weights in the form that decode programs take, shared by engines on the same devices."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable

import jax

from areal_jax.config.declarations import choices
from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Lora, Params
from areal_jax.sharding.rules import path_name
from areal_jax.types import PublishedWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedWeights:
    """The result of a backend's `prepare`; valid for every backend of the same decoder on the same devices."""

    params: Params


def require_quantizable(weights: str, dtype: str, lora: Lora | None, config: ModelConfig) -> None:
    """Raises ConfigError for an unknown form of weights, and if these weights cannot be in 8 bits."""
    if weights not in choices('rollout.weights'):
        raise ConfigError(f'weights={weights!r} is unknown; use one of {", ".join(choices("rollout.weights"))}')
    if weights == 'int8' and dtype != 'float32':
        raise ConfigError(f"weights='int8' with dtype={dtype!r}: float32 is what is quantized; use dtype='float32'")
    if weights == 'int8' and lora:
        raise ConfigError(f"weights='int8' with adapters of rank {lora.rank}: these stay in float32; use 'published'")
    if weights == 'int8' and config.experts:
        raise ConfigError(
            f"weights='int8' with {config.experts.count} experts: these are not quantized; use 'published'"
        )


def find_transposed(decoder: Decoder, dtype: str) -> frozenset[str] | None:
    """Returns the paths of the published leaves that the decoder takes transposed; it takes all others unchanged.

    None if it takes a leaf in another form (panels or 8 bits): then every version is prepared as a whole. Found by
    preparing abstract matrices with unequal sides: the shape of each result shows how its leaf is changed.
    """
    rows, columns = 16, 24  # which panels of kernels divide
    of_matrix = lambda shape: (*shape[:-2], rows, columns) if len(shape) > 1 else shape
    probe = lambda leaf: jax.ShapeDtypeStruct(of_matrix(leaf.shape), dtype)
    published = jax.tree.map(probe, decoder.abstract())
    prepared = jax.eval_shape(decoder.prepare, published)
    leaves, outcome = jax.tree_util.tree_leaves_with_path(published), jax.tree.leaves(prepared)
    if len(leaves) != len(outcome):  # a matrix in 8 bits is two arrays
        return None
    found = []
    for (path, before), after in zip(leaves, outcome, strict=True):
        if after.dtype != before.dtype or sorted(after.shape) != sorted(before.shape):
            return None
        if after.shape != before.shape:
            found.append(path_name(path))
    return frozenset(found)


def share_prepared(
    receive: Callable[[PublishedWeights], Params], prepare: Callable[[Params], PreparedWeights]
) -> Callable[[PublishedWeights], PreparedWeights]:
    """Wraps `receive` to return prepared weights: a version is received and prepared once while any engine holds it."""
    held: weakref.WeakValueDictionary[tuple[int, str], PreparedWeights] = weakref.WeakValueDictionary()
    lock = threading.Lock()  # engines fetch on separate lanes

    def fetch(published: PublishedWeights) -> PreparedWeights:
        key = published.version, published.manifest_hash
        with lock:
            weights = held.get(key)
            if weights is None:
                held[key] = weights = prepare(receive(published))
        return weights

    return fetch
