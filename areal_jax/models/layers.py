"""The two forms of a tree of weights: one subtree per layer, or one subtree with all layers stacked.

The list form is the interchange form: {'layers': {'0': {...}, '1': {...}}}. The stacked form has the same leaves with a
leading axis of layers: {'layers': {...}}. The conversions change no bit. They take numpy and jax arrays, inside jax.jit
and outside, and trees that contain a tree of weights (the moments of an optimizer).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import Tree

FORMS = ('list', 'stacked')
_LAYERS = 'layers'


def stack_layers(tree: Tree) -> Tree:
    """Every {'layers': {'0': ..., '1': ...}} inside `tree` with its layers stacked."""
    return _convert(tree, lambda layers: _stack([layers[str(index)] for index in range(len(layers))]))


def unstack_layers(tree: Tree, n_layers: int) -> Tree:
    """The inverse of `stack_layers`; every layer gets a leaf that lacks the axis (a placeholder of an optimizer)."""

    def split(layers: Tree) -> dict[str, Tree]:
        at = lambda index: jax.tree.map(lambda x: x[index] if _has_layers(x, n_layers) else x, layers)
        return {str(index): at(index) for index in range(n_layers)}

    return _convert(tree, split)


def is_stacked(path: str) -> bool:
    """Whether 'layers/mlp/up/weight' is the path of a leaf with an axis of layers; false of 'layers/0/mlp_norm'."""
    return re.match(r'layers/(?!\d+/)', path) is not None


def _has_layers(leaf: Tree, n_layers: int) -> bool:
    return np.ndim(leaf) > 0 and np.shape(leaf)[0] == n_layers


def _stack(layers: Sequence[Tree]) -> Tree:
    def join(*leaves: Tree) -> Tree:
        if isinstance(leaves[0], np.ndarray):
            return np.stack(leaves)
        # on a CPU numpy stacks without compiling a program for each shape
        return jnp.asarray(np.stack(leaves)) if all(_lies_on_cpu(leaf) for leaf in leaves) else jnp.stack(leaves)

    return jax.tree.map(join, *layers)


def _lies_on_cpu(leaf: jax.Array) -> bool:
    return not isinstance(leaf, jax.core.Tracer) and [device.platform for device in leaf.devices()] == ['cpu']


def _convert(tree: Tree, convert: Callable[[Tree], Tree]) -> Tree:
    """`tree` with every value under the key 'layers' converted, also inside of lists and tuples."""
    if isinstance(tree, dict):
        return {key: convert(value) if key == _LAYERS else _convert(value, convert) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, '_fields'):
        return type(tree)(*(_convert(value, convert) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_convert(value, convert) for value in tree)
    return tree
