"""Under arrow 8 and checkpoints: weights and optimizer state as others hold them, one leaf per layer, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.learning import trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.layers import stack_layers, unstack_layers
from areal_jax.models.lora import merge_adapters
from areal_jax.sharding.placement import gather
from areal_jax.sharding.rules import path_name


def export_weights(decoder: Decoder, dtype: str, params: Any, frozen: Any) -> Any:
    """Trained and frozen weights as engines read them: adapters merged, one leaf per layer, all of `dtype`."""
    whole = trees.join(params, frozen)
    if decoder.lora:
        whole = merge_adapters(whole, decoder.lora)
    return trees.cast(_listed(decoder, whole), dtype)


def take_snapshot(decoder: Decoder, params: Any, state: Any) -> dict[str, Any]:
    """{'params': nested dict, 'optimizer': {path: array}} in numpy arrays of their own, layers as a list.

    A collective where the arrays lie over several processes.
    """
    leaves = jax.tree_util.tree_leaves_with_path(_listed(decoder, state))
    return {
        'params': jax.tree.map(gather, _listed(decoder, params)),
        'optimizer': {path_name(path): gather(leaf) for path, leaf in leaves},
    }


def read_snapshot(decoder: Decoder, saved: Mapping[str, Any], params: Any, state: Any) -> tuple[Any, Any]:
    """(weights, optimizer state) of a snapshot, in numpy, of the form and dtypes of `params` and `state`.

    Raises ValueError where names or shapes differ from theirs.
    """
    listed = lambda tree: jax.eval_shape(lambda t: _listed(decoder, t), tree)
    new_params = _like(saved['params'], listed(params), 'params')
    leaves, structure = jax.tree_util.tree_flatten_with_path(listed(state))
    expected = {path_name(path): leaf for path, leaf in leaves}
    flat = _like(saved['optimizer'], expected, 'optimizer')
    new_state = jax.tree.unflatten(structure, [flat[path] for path in expected])
    if decoder.layers == 'stacked':
        return stack_layers(new_params), _restack(new_state, state)
    return new_params, new_state


def _listed(decoder: Decoder, tree: Any) -> Any:
    return unstack_layers(tree, decoder.config.n_layers) if decoder.layers == 'stacked' else tree


def _restack(state: Any, like: Any) -> Any:
    """An optimizer state in stacked form; a placeholder that had no axis of layers is the same in all of them."""
    return jax.tree.map(lambda x, current: x if x.shape == current.shape else x[0], stack_layers(state), like)


def _like(saved: Any, current: Any, name: str) -> Any:
    """Copies of the saved leaves, in the dtypes of `current`, after a check of names and shapes."""
    saved_shapes = {path_name(p): np.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(saved)}
    shapes = {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(current)}
    if saved_shapes != shapes:
        differing = sorted(set(saved_shapes.items()) ^ set(shapes.items()))
        raise ValueError(
            f"saved {name} differ from the learner's in {len(differing)} names or shapes, the first {differing[:2]}: "
            'restore with the model and optimizer of the run that saved'
        )
    return jax.tree.map(lambda s, c: np.array(s, c.dtype, copy=True), saved, current)
