"""Weights in the forms that learner, engines and files use: trees of leaves, checked numbers, interchange form.

Trees are nested dicts by path, independent of the model: the trained leaves, the working copy that a pass computes with
and the critic's leaves. `require_finite` refuses weights and optimizer state that hold NaN or infinity, with the same
verdict on every process: a learner checks before the first update, before a save and after a restore; an engine or
server checks loaded weights. The interchange form has one leaf per layer: `export_weights` is for publication,
`take_snapshot` for saving, `match_snapshot` and `read_snapshot` for restoring.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jax.tree_util import KeyPath

from areal_jax.errors import UserError
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import correct_load
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import (
    is_adapter,
    is_router_state,
    is_stacked,
    leaf_dtype,
    list_layers,
    merge_adapters,
    unstack_layers,
    weight_table,
)
from areal_jax.native.arrays import host_view, sum_words
from areal_jax.sharding.placement import Region, place, place_regions, view_shards
from areal_jax.sharding.rules import WeightAxes, path_name, replicated
from areal_jax.types import Tree

Params = Mapping[str, Tree]  # a nested dict of weights
CRITIC = 'critic'  # root of the critic's weights, next to the policy's weights
Trainable = Callable[[str], bool]  # of a leaf's path, 'layers/0/attention/query/weight'


def split(params: Params, trainable: Trainable, prefix: str = '') -> tuple[dict[str, Tree], dict[str, Tree]]:
    """(trained, frozen): two nested dicts that `join` merges again; branches without a leaf are left out."""
    trained: dict[str, Tree] = {}
    frozen: dict[str, Tree] = {}
    for name, value in params.items():
        path = f'{prefix}{name}'
        if isinstance(value, Mapping):
            for side, part in zip((trained, frozen), split(value, trainable, f'{path}/'), strict=True):
                if part:
                    side[name] = part
        else:
            (trained if trainable(path) else frozen)[name] = value
    return trained, frozen


def join(trained: Params, frozen: Params) -> dict[str, Tree]:
    """Merges the two nested dicts of `split`."""
    joined = dict(frozen)
    for name, value in trained.items():
        joined[name] = join(value, frozen[name]) if name in frozen else value
    return joined


def policy_leaves(tree: Params) -> dict[str, Tree]:
    """The tree without the critic's weights: what engines and log-probs need."""
    return {name: value for name, value in tree.items() if name != CRITIC}


def cast(tree: Tree, dtype: str, name: str = '') -> Tree:
    """The tree with every leaf in its `leaf_dtype`, on the same devices; leaves that already have it are not copied."""
    if isinstance(tree, Mapping):
        return {key: cast(value, dtype, key) for key, value in tree.items()}
    own = jnp.dtype(leaf_dtype(name, dtype))
    return tree if tree.dtype == own else tree.astype(own)


def correct_routers(config: ModelConfig, frozen: Params, loads: np.ndarray, rate: float) -> dict[str, Tree]:
    """The frozen leaves with the corrections of the policy's routers changed, see experts.correct_load.

    Args:
      loads: float32 [L, E], tokens of a step that reached each expert, by layer with experts.
    """
    rows = {path: row for spec in weight_table(config).values() for row, path in enumerate(spec.paths)}

    def correct(path: KeyPath, leaf: jax.Array) -> jax.Array:
        name = path_name(path)
        of_leaf = loads if is_stacked(name) else loads[rows[name]]
        return place(correct_load(np.asarray(leaf), of_leaf, rate), leaf.sharding)

    routers, others = split(frozen, lambda path: is_router_state(path) and not path.startswith(f'{CRITIC}/'))
    return join(jax.tree_util.tree_map_with_path(correct, routers), others)


# The critic: values of the states of loss tokens, by a head on the policy's trunk or on a separate model.
#
# Its weights are trained leaves of the learner, under CRITIC next to the policy's weights: they are sharded over the
# mesh, checkpointed and restored like them. Engines never get them, and they have a separate optimizer.


VALUE_HEAD = 'value_head'  # {'weight': [d], 'bias': []}, below CRITIC


class CriticError(UserError):
    """Weights of a critic that are missing or do not fit; the message names their place and the fix."""


def make_value_head(width: int) -> dict[str, np.ndarray]:
    """A head for hidden states of size `width` that gives every state the value 0."""
    return {'weight': np.zeros(width, np.float32), 'bias': np.zeros((), np.float32)}


def score_states(head: Mapping[str, Tree], states: jax.Array) -> jax.Array:
    """float32 [...]: w·h + b of hidden states [..., d]."""
    product = jnp.einsum('...d,d->...', states, head['weight'], preferred_element_type=jnp.float32)
    return product + head['bias'].astype(jnp.float32)


def scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    """Returns `x`; a gradient that flows back through it is multiplied by `factor`."""
    if factor == 1.0:
        return x
    fixed = jax.lax.stop_gradient(x)
    return fixed if factor == 0.0 else fixed + factor * (x - fixed)


def choose_trained(*, adapters: bool) -> Trainable:
    """Chooses the trained leaves: the policy's adapters or all its leaves, and a critic's except a vocabulary head.

    The state of routers is not trained, see models/weights.is_router_state.
    """

    def trains(path: str) -> bool:
        if is_router_state(path):
            return False
        if path.startswith(f'{CRITIC}/'):
            return path != f'{CRITIC}/head'
        return not adapters or is_adapter(path)

    return trains


def critic_axes(axes: WeightAxes) -> WeightAxes:
    """The logical axes of a critic's weights, below CRITIC, from the axes of the policy's weights."""
    head = {f'{VALUE_HEAD}/weight': ('value',), f'{VALUE_HEAD}/bias': ()}
    return WeightAxes({**axes.by_path, **head}, axes.units)


def require_critic(saved: Mapping[str, Tree]) -> None:
    """Raises CriticError if the weights of a checkpoint have no critic."""
    if CRITIC not in saved:
        raise CriticError(
            'the checkpoint holds no critic, whose values the objective reads: resume with the loss.objective that '
            "wrote it, or begin a run from it with model.source='run'"
        )


class NonFiniteError(UserError, ArithmeticError):
    """Numbers from which training cannot continue; the message names their place, their number and the fix."""


def require_finite(tree: Tree, mesh: Mesh, what: str, fix: str) -> None:
    """Raises NonFiniteError that names the first leaf with NaN or infinity, and the number of such values.

    The values are counted on the devices of `mesh`, which hold the leaves. A collective if the mesh spans processes:
    all must call it, and either all raise or none. If a leaf is not in the memory of the host, one small program is
    compiled for each shape; a single program over all leaves would take seconds to compile if layers are listed.

    Args:
      what: the source of the tree, the start of the message.
      fix: the end of the message.
    """
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = {path: leaf for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    count = _counter(mesh)
    # wait for each count before the next: on virtual CPU devices, collectives of concurrent programs block each other
    _refuse(leaves, {path: _count_here(leaf, count) for path, leaf in leaves.items()}, what, fix)


def require_finite_shards(tree: Tree, what: str, fix: str) -> None:
    """`require_finite` for arrays of this process alone. No collectives, so dispatches may run on the devices."""
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    leaves = {path: jnp.asarray(leaf) for path, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    parts = {
        path: [_count_here(shard.data, _count_shard) for shard in leaf.addressable_shards if shard.replica_id == 0]
        for path, leaf in leaves.items()
    }
    _refuse(leaves, {path: sum(counts) for path, counts in parts.items()}, what, fix)


def _count_here(leaf: jax.Array, count: jax.stages.Wrapped) -> int:
    """Counts the values that are not finite; runs no program if they are in the memory of the host."""
    held = leaf.addressable_shards if leaf.is_fully_addressable else []
    views = [host_view(shard.data) for shard in held if shard.replica_id == 0]
    found = [sums[2] for view in views if view is not None and (sums := sum_words(view)) is not None]
    return sum(found) if views and len(found) == len(views) else int(jax.device_get(count(leaf)))


def _refuse(leaves: Mapping[str, jax.Array], counts: Mapping[str, int], what: str, fix: str) -> None:
    wrong = {path: n for path, n in counts.items() if n}
    for path, n in wrong.items():
        others = f', and {len(wrong) - 1} other leaves have such values too' if len(wrong) > 1 else ''
        raise NonFiniteError(
            f'{what}: {n} of the {leaves[path].size} values of {path!r} are NaN or infinite{others}; {fix}'
        )


@functools.cache
def _counter(mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(_count, out_shardings=replicated(mesh))


def _count(leaf: jax.Array) -> jax.Array:
    counts = jnp.isnan(leaf).astype(jnp.int32), jnp.isinf(leaf).astype(jnp.int32)
    # two sums in one pass: XLA:CPU writes the summands of a single one to memory, which takes 10 times as long
    add = lambda totals, more: (totals[0] + more[0], totals[1] + more[1])
    return sum(jax.lax.reduce(counts, (np.int32(0),) * 2, add, tuple(range(leaf.ndim))))


_count_shard = jax.jit(_count)


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
    """Trained and frozen weights as engines read them: no critic, adapters merged, one leaf per layer, in `dtype`."""
    whole = policy_leaves(join(params, frozen))
    if decoder.lora:
        whole = merge_adapters(whole, decoder.lora)
    return cast(_listed(decoder, whole), dtype)


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
    if decoder.layers != 'stacked':
        return tree
    return unstack_layers(tree, decoder.config.n_layers, list_layers(decoder.config, decoder.lora))


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
    for path, own in listed.items():
        # an optimizer may have placeholders without an axis of layers: they are equal in all layers, so use the first
        sources[own.index].setdefault(own.layer, found[path])
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
