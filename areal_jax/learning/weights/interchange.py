"""Weights and optimizer state in interchange form, one leaf per layer, and back to the learner's own form.

`export_weights` is for publication, `take_snapshot` for saving, `match_snapshot` and `read_snapshot` for restoring.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import merge_adapters, unstack_layers
from areal_jax.sharding.placement import Region, place_regions, view_shards
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree


class HostCopies:
    """Copies float32 arrays of one CPU device into memory that it reuses.

    It keeps the memory of the most copies that were alive at once. Not thread-safe.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = collections.defaultdict(list)  # float32, by their number of elements

    def copy(self, tree: Tree) -> Tree:
        """Copies the tree to numpy arrays; the memory of an array is reused once nothing refers to any part of it."""
        return jax.tree.map(self._copy_leaf, tree)

    def _copy_leaf(self, leaf: jax.Array) -> np.ndarray:
        free = self._free[leaf.size]
        memory = free.pop() if free else np.empty(leaf.size, np.float32)
        # the base is not an array, so a view of the copy refers to the copy and keeps its memory from being reused
        copied = np.frombuffer(memory.data, np.float32)
        weakref.finalize(copied, free.append, memory).atexit = False
        copied[:] = np.asarray(leaf).reshape(-1)  # a view, freed before the next update needs the buffer
        return copied.reshape(leaf.shape)


# Weights and optimizer state in interchange form, one leaf per layer, and back to the learner's own form.
#
# `export_weights` is for publication, `take_snapshot` for saving, `match_snapshot` and `read_snapshot` for restoring.


def export_weights(decoder: Decoder, dtype: str, params: Tree, frozen: Tree) -> Tree:
    """Trained and frozen weights as engines read them: no critic, adapters merged, one leaf per layer, of `dtype`."""
    whole = trees.policy_leaves(trees.join(params, frozen))
    if decoder.lora:
        whole = merge_adapters(whole, decoder.lora)
    return trees.cast(_listed(decoder, whole), dtype)


def take_snapshot(decoder: Decoder, params: Tree, state: Tree) -> dict[str, Tree]:
    """{'params': nested dict, 'optimizer': {path: leaf}}, layers as a list, on the host.

    Leaves are numpy arrays, or HostShards of the part that this process saves if the mesh spans several. Arrays that
    are not on the host are copied there first, and all are split into per-layer views there. Slicing on the device
    would need a second copy of all weights.
    """
    listed = _listed(decoder, jax.tree.map(view_shards, state))
    leaves = jax.tree_util.tree_leaves_with_path(listed)
    return {
        'params': _listed(decoder, jax.tree.map(view_shards, params)),
        'optimizer': {path_name(path): leaf for path, leaf in leaves},
    }


def read_snapshot(
    decoder: Decoder, saved: Mapping[str, Tree], current: Mapping[str, Tree], shardings: Mapping[str, Tree]
) -> dict[str, Tree]:
    """{'params', 'optimizer'} of a snapshot, in the form and dtypes of `current`, placed as `shardings` says.

    Each process reads only the regions that its own devices hold.

    Args:
      saved: leaves have a shape and are indexed by regions: numpy arrays, or stored arrays of a checkpoint.
      current: leaves need a shape and a dtype only.

    Raises ValueError as `match_snapshot` does.
    """
    sources = match_snapshot(decoder, saved, current)

    def read(name: str) -> Tree:
        leaves, structure = jax.tree.flatten(current[name])
        over = jax.tree.leaves(shardings[name])
        return jax.tree.unflatten(structure, [_read_leaf(*of) for of in zip(sources[name], leaves, over, strict=True)])

    return {name: read(name) for name in sources}


def match_snapshot(
    decoder: Decoder, saved: Mapping[str, Tree], current: Mapping[str, Tree]
) -> dict[str, list[_Source]]:
    """For each leaf of `current`, the leaves of `saved` from which it is built; reads no values.

    Raises ValueError for names or shapes that differ.
    """
    return {name: _sources(decoder, saved[name], current[name], name) for name in ('params', 'optimizer')}


def _listed(decoder: Decoder, tree: Tree) -> Tree:
    return unstack_layers(tree, decoder.config.n_layers) if decoder.layers == 'stacked' else tree


class _StoredLeaf(Protocol):
    """An array of a snapshot, read region by region."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, region: Region) -> np.ndarray: ...


_Source = Mapping[int | None, _StoredLeaf]  # by layer of the learner's leaf; None = all of it is in one stored leaf


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a leaf in interchange form in the learner's form. Indexing gives the place of one layer."""

    index: int  # of the learner's leaf
    shape: tuple[int, ...]
    layer: int | None = None  # None: all of it

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, layer: int) -> _Place:
        return _Place(self.index, self.shape[1:], layer)


def _sources(decoder: Decoder, saved: Tree, current: Tree, what: str) -> list[_Source]:
    """The source of every leaf of `current`, after a check of names and shapes."""
    leaves, structure = jax.tree.flatten(current)
    places = jax.tree.unflatten(structure, [_Place(index, leaf.shape) for index, leaf in enumerate(leaves)])
    listed = _by_path(_listed(decoder, places))
    found = _by_path(saved)
    saved_shapes, shapes = ({path: tuple(leaf.shape) for path, leaf in side.items()} for side in (found, listed))
    if saved_shapes != shapes:
        differing = sorted(set(saved_shapes.items()) ^ set(shapes.items()))
        raise ValueError(
            f"saved {what} differ from the learner's in {len(differing)} names or shapes, the first {differing[:2]}: "
            'restore with the model and optimizer of the run that saved'
        )
    sources: list[dict[int | None, _StoredLeaf]] = [{} for _ in leaves]
    for path, place in listed.items():
        # an optimizer may have placeholders without an axis of layers: they are equal in all layers, so use the first
        sources[place.index].setdefault(place.layer, found[path])
    return list(sources)


def _by_path(tree: Tree) -> dict[str, Tree]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read_leaf(source: _Source, current: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
    def read(region: Region) -> np.ndarray:
        if None in source:
            whole = source[None]
            return np.array(whole[region], current.dtype, copy=True if isinstance(whole, np.ndarray) else None)
        values = np.empty([s.stop - s.start for s in region], current.dtype)
        for row, layer in enumerate(range(region[0].start, region[0].stop)):
            values[row] = source[layer][region[1:]]
        return values

    return place_regions(read, current.shape, sharding)
