"""Leaves of a version that the version before had as the same arrays: they need not be carried again.

A learner that trains some of its leaves returns the others as the arrays of its last publication. The references here
are weak, so that nothing is kept alive for the comparison.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Generic, TypeVar

import jax
import numpy as np

from areal_jax.sharding.placement import Place, move_to
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

Leaf = np.ndarray | jax.Array
Made = TypeVar('Made')


class UnchangedLeaves(Generic[Made]):
    """What was made of each leaf of the last version, by path."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[weakref.ref[Leaf], Made]] = {}

    def find(self, leaves: Mapping[str, Leaf]) -> dict[str, Made]:
        """What was made of those that are the same arrays as in the last call of `note`."""
        known = {path: self._made[path] for path in leaves if path in self._made}
        return {path: made for path, (source, made) in known.items() if source() is leaves[path]}

    def note(self, leaves: Mapping[str, Leaf], made: Mapping[str, Made]) -> None:
        """Remembers what was made of the leaves of a version, in place of the one before."""
        self._made = {path: (weakref.ref(leaf), made[path]) for path, leaf in leaves.items()}


class Mover:
    """Moves versions to one place, and of each version only the leaves that the last one did not have.

    A moved leaf that nothing else refers to any more is moved again.
    """

    def __init__(self, place: Place):
        self._place = place
        self._moved: UnchangedLeaves[weakref.ref[jax.Array]] = UnchangedLeaves()

    def move(self, params: Tree) -> Tree:
        """The tree at the place; leaves that are there are returned as such."""
        leaves, structure = jax.tree.flatten(params)
        paths = list(by_path(params))
        found = self._moved.find(dict(zip(paths, leaves, strict=True)))
        known = {path: leaf for path, reference in found.items() if (leaf := reference()) is not None}
        new = [index for index, path in enumerate(paths) if path not in known]
        over = self._place if isinstance(self._place, jax.Device) else jax.tree.leaves(self._place)
        cut = over if isinstance(over, jax.Device) else [over[index] for index in new]
        arrived = move_to([leaves[index] for index in new], cut)
        known |= {paths[index]: leaf for index, leaf in zip(new, arrived, strict=True)}
        moved = [known[path] for path in paths]
        references = [weakref.ref(leaf) for leaf in moved]
        self._moved.note(dict(zip(paths, leaves, strict=True)), dict(zip(paths, references, strict=True)))
        return jax.tree.unflatten(structure, moved)


def by_path(params: Tree) -> dict[str, Leaf]:
    """Leaves by path, in the order of the tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
