"""Trees of arrays: the choice of trained leaves, the working copy that a pass computes with, and the critic's leaves.

Works on nested dicts by path, independent of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.errors import UserError
from areal_jax.models.weights import is_adapter
from areal_jax.sharding.rules import WeightAxes
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


def cast(tree: Tree, dtype: str) -> Tree:
    """The tree with every leaf in `dtype`, on the same devices; leaves that already have it are not copied."""
    if isinstance(tree, Mapping):
        return {name: cast(value, dtype) for name, value in tree.items()}
    return tree if tree.dtype == jnp.dtype(dtype) else tree.astype(jnp.dtype(dtype))


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
    """Chooses the trained leaves: the policy's adapters or all its leaves, and a critic's except a vocabulary head."""

    def trains(path: str) -> bool:
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
