"""The directions that optimizers step in, before clipping, schedule and learning rate.

A direction is an optax transformation of gradients. `used_if` of a field of OptimizerSection says which directions read
the field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from areal_jax.config.training import OptimizerSection
from areal_jax.learning.optimizer.quantized_moments import scale_by_adam
from areal_jax.models.weights import is_stacked
from areal_jax.sharding.rules import path_name


@functools.cache  # so that optimizers of equal settings are equal
def make_direction(settings: OptimizerSection) -> optax.GradientTransformation:
    """The direction of `settings.name`, with decoupled weight decay (arXiv 1711.05101) added to it."""
    direction = DIRECTIONS[settings.name](settings)
    if not settings.weight_decay:
        return optax.chain(direction)
    add_decay = optax.add_decayed_weights if settings.decay == 'all' else decay_matrices
    return optax.chain(direction, add_decay(settings.weight_decay))


def adamw(settings: OptimizerSection) -> optax.GradientTransformation:
    """arXiv 1412.6980. 8 bytes of state per parameter, 4 with moment_dtype='bfloat16'."""
    return scale_by_adam(settings.b1, settings.b2, settings.eps, settings.moment_dtype)


def adamw8bit(settings: OptimizerSection) -> optax.GradientTransformation:
    """AdamW with both moments in int8 and a scale per block (quantized_moments.py): about 2 bytes per parameter."""
    return scale_by_adam(settings.b1, settings.b2, settings.eps, 'int8')


def adafactor(settings: OptimizerSection) -> optax.GradientTransformation:
    """arXiv 1804.04235: nearly no state.

    The second moment is stored as row and column means if two axes have at least 128 entries. Its decay is 1 - n^-0.8
    at step n, and the direction of a matrix is clipped to a root mean square of 1. There is no first moment, and the
    learning rate is not relative to the weights.
    """
    return optax.chain(optax.scale_by_factored_rms(), clip_by_layer_rms(1.0))


def lion(settings: OptimizerSection) -> optax.GradientTransformation:
    """arXiv 2302.06675: the sign of a momentum, so use a rate 3 to 10 times below AdamW's. 4 bytes per parameter."""
    return optax.scale_by_lion(b1=settings.b1, b2=settings.b2)


def sgd(settings: OptimizerSection) -> optax.GradientTransformation:
    """The gradient itself; no state."""
    return optax.identity()


DIRECTIONS: Mapping[str, Callable[[OptimizerSection], optax.GradientTransformation]] = {
    'adamw': adamw,
    'adamw8bit': adamw8bit,
    'adafactor': adafactor,
    'lion': lion,
    'sgd': sgd,
}  # by optimizer.name


def decay_matrices(weight_decay: float) -> optax.GradientTransformation:
    """Decoupled weight decay of projections, adapters and an untied head only.

    Norms, biases and the embedding (tied or not) do not decay. A leaf that stacks layers has one axis
    more than a matrix.
    """

    def decay(path: KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_name(path)
        is_matrix = param.ndim - is_stacked(name) >= 2  # a leaf of experts is a stack of matrices
        return update + weight_decay * param if is_matrix and name != 'embedding' else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(decay, updates, params))


def clip_by_layer_rms(threshold: float) -> optax.GradientTransformation:
    """Scales every matrix to a root mean square of at most `threshold` (arXiv 1804.04235, section 6).

    In a leaf that stacks layers (models/weights.py), each layer is scaled separately, so that both forms of the weights
    take the same step.
    """

    def clip(path: KeyPath, update: jax.Array) -> jax.Array:
        names = [str(getattr(entry, 'key', entry)) for entry in path]
        stacked = 'layers' in names and not names[names.index('layers') + 1].isdigit()
        mean_square = jnp.mean(jnp.square(update), axis=tuple(range(int(stacked), update.ndim)), keepdims=True)
        return update / jnp.maximum(1.0, jnp.sqrt(mean_square) / threshold)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(clip, updates))
