"""Under arrows 3 and 7: the two forms of a tree of weights, one subtree per layer or all layers stacked.

The list form is the interchange form: {'layers': {'0': {...}, '1': {...}}}; the stacked form has the same leaves with
a leading axis of layers: {'layers': {...}}. Both functions move bits and nothing else; they work on numpy and on jax
arrays, inside jax.jit and outside, and on trees that contain such a tree (an optimizer's moments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FORMS = ('list', 'stacked')
_LAYERS = 'layers'


def stack_layers(tree: Any) -> Any:
    """Every {'layers': {'0': ..., '1': ...}} inside `tree` with its layers stacked."""
    return _convert(tree, lambda layers: _stack([layers[str(index)] for index in range(len(layers))]))


def unstack_layers(tree: Any, n_layers: int) -> Any:
    """The inverse of `stack_layers`; a leaf without the axis (a placeholder of an optimizer) goes to every layer."""

    def split(layers: Any) -> dict[str, Any]:
        at = lambda index: jax.tree.map(lambda x: x[index] if _has_layers(x, n_layers) else x, layers)
        return {str(index): at(index) for index in range(n_layers)}

    return _convert(tree, split)


def _has_layers(leaf: Any, n_layers: int) -> bool:
    return np.ndim(leaf) > 0 and np.shape(leaf)[0] == n_layers


def _stack(layers: Sequence[Any]) -> Any:
    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], np.ndarray):
            return np.stack(leaves)
        # on a CPU numpy stacks without compiling a program for each shape
        return jnp.asarray(np.stack(leaves)) if all(_lies_on_cpu(leaf) for leaf in leaves) else jnp.stack(leaves)

    return jax.tree.map(join, *layers)


def _lies_on_cpu(leaf: jax.Array) -> bool:
    return not isinstance(leaf, jax.core.Tracer) and [device.platform for device in leaf.devices()] == ['cpu']


def _convert(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """`tree` with every value under the key 'layers' converted; containers other than dicts are looked into."""
    if isinstance(tree, dict):
        return {key: convert(value) if key == _LAYERS else _convert(value, convert) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, '_fields'):
        return type(tree)(*(_convert(value, convert) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_convert(value, convert) for value in tree)
    return tree
