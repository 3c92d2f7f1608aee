"""Under arrow 8 and checkpoints: weights and optimizer state as others hold them, one leaf per layer, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from areal_jax.learning import trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.layers import unstack_layers
from areal_jax.models.lora import merge_adapters
from areal_jax.sharding.placement import Region, copy_shards, place_regions
from areal_jax.sharding.rules import path_name


def export_weights(decoder: Decoder, dtype: str, params: Any, frozen: Any) -> Any:
    """Trained and frozen weights as engines read them: adapters merged, one leaf per layer, all of `dtype`."""
    whole = trees.join(params, frozen)
    if decoder.lora:
        whole = merge_adapters(whole, decoder.lora)
    return trees.cast(_listed(decoder, whole), dtype)


def take_snapshot(decoder: Decoder, params: Any, state: Any) -> dict[str, Any]:
    """{'params': nested dict, 'optimizer': {path: leaf}}, layers as a list, on the host.

    Leaves are numpy arrays, or HostShards where the mesh spans processes: what this one saves. Copied first and cut
    into layers there, in views: on the devices a slice of every leaf would be a second copy of all.
    """
    listed = _listed(decoder, jax.tree.map(copy_shards, state))
    leaves = jax.tree_util.tree_leaves_with_path(listed)
    return {
        'params': _listed(decoder, jax.tree.map(copy_shards, params)),
        'optimizer': {path_name(path): leaf for path, leaf in leaves},
    }


def read_snapshot(
    decoder: Decoder, saved: Mapping[str, Any], current: Mapping[str, Any], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    """{'params', 'optimizer'} of a snapshot, of the form and dtypes of `current`, laid out as `shardings` says.

    Leaves of `saved` have a shape and give regions: numpy arrays, or a checkpoint's, of which each process then reads
    what its devices hold. Of `current` only shapes and dtypes are read. Raises ValueError as `match_snapshot` does.
    """
    sources = match_snapshot(decoder, saved, current)

    def read(name: str) -> Any:
        leaves, structure = jax.tree.flatten(current[name])
        over = jax.tree.leaves(shardings[name])
        return jax.tree.unflatten(structure, [_read_leaf(*of) for of in zip(sources[name], leaves, over, strict=True)])

    return {name: read(name) for name in sources}


def match_snapshot(decoder: Decoder, saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Where each leaf of `current` is in `saved`; raises ValueError where names or shapes differ. Reads no values."""
    return {name: _sources(decoder, saved[name], current[name], name) for name in ('params', 'optimizer')}


def _listed(decoder: Decoder, tree: Any) -> Any:
    return unstack_layers(tree, decoder.config.n_layers) if decoder.layers == 'stacked' else tree


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a leaf in interchange form belongs: which leaf of the learner, and which layer of it."""

    index: int
    shape: tuple[int, ...]
    layer: int | None = None  # None: all of it

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, layer: int) -> _Place:
        return _Place(self.index, self.shape[1:], layer)


def _sources(decoder: Decoder, saved: Any, current: Any, what: str) -> list[dict[int | None, Any]]:
    """For every leaf of `current` the saved leaves that it is made of, by layer, after a check of names and shapes."""
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
    sources: list[dict[int | None, Any]] = [{} for _ in leaves]
    for path, place in listed.items():
        # a placeholder of an optimizer, which has no axis of layers, is the same in all of them
        sources[place.index].setdefault(place.layer, found[path])
    return sources


def _by_path(tree: Any) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _read_leaf(source: Mapping[int | None, Any], current: Any, sharding: Sharding) -> jax.Array:
    def read(region: Region) -> np.ndarray:
        if None in source:
            whole = source[None]
            return np.array(whole[region], current.dtype, copy=True if isinstance(whole, np.ndarray) else None)
        values = np.empty([s.stop - s.start for s in region], current.dtype)
        for row, layer in enumerate(range(region[0].start, region[0].stop)):
            values[row] = source[layer][region[1:]]
        return values

    return place_regions(read, current.shape, sharding)
