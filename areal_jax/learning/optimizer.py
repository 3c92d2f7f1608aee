"""Arrow 7, the step: mean gradients become new weights. The learning rate is data, so no value of it recompiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.declarations import require_allowed
from areal_jax.learning.quantized import scale_by_adam
from areal_jax.ranges import ConfigError
from areal_jax.sharding.rules import logical_axes, path_name

NAMES = ('adamw', 'adamw8bit', 'adafactor', 'lion', 'sgd')
SCHEDULES = ('constant', 'cosine', 'linear')
DECAYS = ('all', 'matrices')


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The learning rate over its value: linear warm-up, then `kind` from 1 down to `final_ratio` at the last step.

    Steps are those applied: a skipped one is not counted.
    """

    kind: str = 'constant'  # see SCHEDULES
    warmup_steps: int = 0  # the step of this number is the first with the whole rate
    total_steps: int = 0  # number of the last step, beyond which `final_ratio` holds; 'constant' does not read it
    final_ratio: float = 0.0  # in [0, 1]; 'constant' does not read it

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigError(f'optimizer.schedule={self.kind!r} is unknown; use one of {", ".join(SCHEDULES)}')
        if self.kind != 'constant' and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f'optimizer.schedule={self.kind!r} falls over {self.total_steps} optimizer steps (run.steps * '
                f'learner.n_minibatches * learner.epochs), which must be more than optimizer.warmup_steps='
                f'{self.warmup_steps}: raise run.steps or shorten the warm-up'
            )
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError(f'optimizer.final_ratio={self.final_ratio} must lie in [0, 1]')

    def factor(self, step: jax.Array) -> jax.Array:
        """float32 scalar for the step after `step` applied ones."""
        number = (step + 1).astype(jnp.float32)
        warmup = jnp.minimum(number / max(self.warmup_steps, 1), 1.0)
        if self.kind == 'constant':
            return warmup
        done = jnp.clip((number - self.warmup_steps) / (self.total_steps - self.warmup_steps), 0.0, 1.0)
        left = 0.5 * (1 + jnp.cos(np.pi * done)) if self.kind == 'cosine' else 1 - done
        return warmup * (self.final_ratio + (1 - self.final_ratio) * left)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Clipping by the global norm, the direction of `transform`, `schedule`; non-finite gradients are skipped.

    The state is {'transform': optax state, 'step': int32 scalar, steps applied}.
    """

    transform: optax.GradientTransformation  # gradients to a descent direction; the learning rate comes after it
    clip_norm: float  # 0 = off
    schedule: Schedule

    def init(self, params: Any) -> dict[str, Any]:
        return {'transform': self.transform.init(params), 'step': jnp.zeros((), jnp.int32)}

    def shardings(self, params: Any, param_shardings: Any, replicated: Any) -> dict[str, Any]:
        """Of the state: what has a parameter's axes lies as they do, everything else on every device.

        Args:
          params: leaves need a shape and a dtype only.
          param_shardings: a tree like `params` of NamedShardings.
          replicated: the sharding of what belongs to no parameter.
        """
        transform = optax.tree_map_params(
            self.transform,
            _moment_sharding,
            jax.eval_shape(self.transform.init, params),
            params,
            param_shardings,
            transform_non_params=lambda _: replicated,
        )
        return {'transform': transform, 'step': replicated}

    def apply(
        self, params: Any, state: dict[str, Any], gradients: Any, learning_rate: jax.Array
    ) -> tuple[Any, dict[str, Any], dict[str, jax.Array]]:
        """One step. A non-finite gradient norm leaves weights and state bit-equal and counts in `skip_count`.

        Returns (params, state, metrics): metrics hold the norm before clipping and the learning rate as scheduled.
        """
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        rate = learning_rate * self.schedule.factor(state['step'])

        def step(params: Any, state: dict[str, Any], gradients: Any) -> tuple[Any, dict[str, Any]]:
            if self.clip_norm > 0:
                scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
                gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
            directions, transform = self.transform.update(gradients, state['transform'], params)
            stepped = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), params, directions)
            return stepped, {'transform': transform, 'step': state['step'] + 1}

        def skip(params: Any, state: dict[str, Any], gradients: Any) -> tuple[Any, dict[str, Any]]:
            return params, state

        # a branch and not a select of every leaf, which would keep old and new of all of them alive at once
        new_params, new_state = jax.lax.cond(finite, step, skip, params, state, gradients)
        metrics = {
            'grad_norm': jnp.where(finite, norm, 0.0),
            'learning_rate': rate,
            'skip_count': 1.0 - finite.astype(jnp.float32),
        }
        return new_params, new_state, metrics


def make_optimizer(
    name: str,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: str = 'all',
    moment_dtype: str = 'float32',
    clip_norm: float = 1.0,
    warmup_steps: int = 0,
    schedule: str = 'constant',
    total_steps: int = 0,
    final_ratio: float = 0.0,
) -> Optimizer:
    """An optimizer by name, with decoupled weight decay (arXiv 1711.05101) whatever its direction.

    Bytes of state per parameter, and what each reads:
      'adamw' (arXiv 1412.6980): b1, b2, eps; 8, or 4 with moment_dtype='bfloat16'.
      'adamw8bit': b1, b2, eps; both moments in int8 with a scale per block, about 2 (see quantized.py).
      'adafactor' (arXiv 1804.04235): nothing. The second moment in row and column means where two axes have at least
        128 entries, decay 1 - n^-0.8 at step n, the direction clipped to a root mean square of 1 per matrix; no first
        moment, no rate relative to the weights. Near 0.
      'lion' (arXiv 2302.06675): b1, b2; the sign of a momentum, hence a rate 3 to 10 times below AdamW's; 4.
      'sgd': nothing; 0.

    `decay` says which leaves `weight_decay` shrinks: 'all', or 'matrices' (see `decay_matrices`).

    Raises ValueError for an unknown name or a setting out of its range, against another, or that would not be read.
    """
    numbers = {'b1': b1, 'b2': b2, 'eps': eps, 'weight_decay': weight_decay, 'clip_norm': clip_norm}
    numbers |= {'warmup_steps': warmup_steps, 'final_ratio': final_ratio}
    require_allowed({f'optimizer.{name}': value for name, value in numbers.items()})
    if name not in NAMES:
        raise ConfigError(f'optimizer.name={name!r} is unknown; use one of {", ".join(NAMES)}')
    if moment_dtype not in ('float32', 'bfloat16'):
        raise ConfigError(
            f"optimizer.moment_dtype={moment_dtype!r} is unknown; use 'float32' or 'bfloat16', or for int8 "
            "optimizer.name='adamw8bit'"
        )
    if name != 'adamw' and moment_dtype != 'float32':
        raise ConfigError(
            f"optimizer.moment_dtype={moment_dtype!r} is read by 'adamw' alone, not by optimizer.name={name!r}: "
            'leave it at float32'
        )
    if decay not in DECAYS:
        raise ConfigError(f'optimizer.decay={decay!r} is unknown; use one of {", ".join(DECAYS)}')
    if decay != 'all' and not weight_decay:
        raise ConfigError(
            f'optimizer.decay={decay!r} chooses what optimizer.weight_decay shrinks, which is 0: set optimizer.'
            "weight_decay above 0, or leave optimizer.decay='all'"
        )
    direction = {
        'adamw': lambda: scale_by_adam(b1, b2, eps, moment_dtype),
        'adamw8bit': lambda: scale_by_adam(b1, b2, eps, 'int8'),
        'adafactor': lambda: optax.chain(optax.scale_by_factored_rms(), clip_by_layer_rms(1.0)),
        'lion': lambda: optax.scale_by_lion(b1=b1, b2=b2),
        'sgd': optax.identity,
    }[name]()
    add_decay = optax.add_decayed_weights if decay == 'all' else decay_matrices
    decays = [add_decay(weight_decay)] if weight_decay else []
    return Optimizer(
        optax.chain(direction, *decays), clip_norm, Schedule(schedule, warmup_steps, total_steps, final_ratio)
    )


def decay_matrices(weight_decay: float) -> optax.GradientTransformation:
    """Decoupled weight decay of the projections, adapters and an untied head only.

    Norms, biases, a value head and the embedding (also where it is the head) keep their size. By logical axes and not
    by their number: a leaf that stacks layers has one axis more.
    """

    def decay(path: Any, update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_name(path)
        is_matrix = len([axis for axis in logical_axes(name, param.ndim) if axis != 'layers']) == 2
        return update + weight_decay * param if is_matrix and name != 'embedding' else update

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(decay, updates, params))


def clip_by_layer_rms(threshold: float) -> optax.GradientTransformation:
    """Scales every matrix to a root mean square of at most `threshold` (arXiv 1804.04235, section 6).

    A leaf that stacks layers (models/layers.py) holds one matrix for each, so that both forms step alike.
    """

    def clip(path: Any, update: jax.Array) -> jax.Array:
        names = [str(getattr(entry, 'key', entry)) for entry in path]
        stacked = 'layers' in names and not names[names.index('layers') + 1].isdigit()
        mean_square = jnp.mean(jnp.square(update), axis=tuple(range(int(stacked), update.ndim)), keepdims=True)
        return update / jnp.maximum(1.0, jnp.sqrt(mean_square) / threshold)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(clip, updates))


def step_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the optimizer steps of one update, from the metrics of `Optimizer.apply`."""
    skipped = sum(float(s['skip_count']) for s in steps)
    metrics = {'update/optimizer_steps': len(steps) - skipped, 'update/skipped_steps': skipped}
    if len(steps) > skipped:
        metrics['update/grad_norm'] = sum(float(s['grad_norm']) for s in steps) / (len(steps) - skipped)
        metrics['update/learning_rate'] = float(steps[-1]['learning_rate'])
    return metrics


def _moment_sharding(leaf: Any, param: Any, sharding: NamedSharding) -> NamedSharding:
    """Of a leaf that belongs to a parameter: a moment, its mean over one axis, scales of blocks, or a placeholder."""
    shape, mesh = tuple(param.shape), sharding.mesh
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    if leaf.shape == shape:
        return sharding
    if len(leaf.shape) == len(shape) and leaf.shape[:-1] == shape[:-1]:  # blocks of the last axis
        whole = leaf.shape[-1] % _shards(mesh, spec[-1]) == 0
        return NamedSharding(mesh, PartitionSpec(*spec[:-1], spec[-1] if whole else None))
    for axis in range(len(shape)):  # of two equal axes either will do: what remains has the same shape
        if leaf.shape == shape[:axis] + shape[axis + 1 :]:
            return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    return NamedSharding(mesh, PartitionSpec())


def _shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(mesh.shape[name] for name in names)
