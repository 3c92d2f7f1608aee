"""Trees of arrays: which leaves of the weights are trained, and the working copy that a pass computes with.

It walks nested dicts by path and knows nothing of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from areal_jax.types import Tree

Params = Mapping[str, Tree]  # a nested dict of weights
CRITIC = 'critic'  # root of the critic's weights beside those of the policy, see learning/critic.py
Trainable = Callable[[str], bool]  # of a leaf's path, 'layers/0/attention/query/weight'


def split(params: Params, trainable: Trainable, prefix: str = '') -> tuple[dict[str, Tree], dict[str, Tree]]:
    """(trained, frozen): two nested dicts that `join` puts together again; branches without a leaf are left out."""
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
    """The nested dict that `split` took apart."""
    joined = dict(frozen)
    for name, value in trained.items():
        joined[name] = join(value, frozen[name]) if name in frozen else value
    return joined


def policy_leaves(tree: Params) -> dict[str, Tree]:
    """The tree without the critic's weights: what engines and log-probs need."""
    return {name: value for name, value in tree.items() if name != CRITIC}


def cast(tree: Tree, dtype: str) -> Tree:
    """The tree with every leaf in `dtype`, on the same devices; leaves that already have it are not copied."""
    if isinstance(tree, Mapping):
        return {name: cast(value, dtype) for name, value in tree.items()}
    return tree if tree.dtype == jnp.dtype(dtype) else tree.astype(jnp.dtype(dtype))
