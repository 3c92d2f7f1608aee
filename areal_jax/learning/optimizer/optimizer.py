"""The optimizer: gradients become new weights. The learning rate is an argument, so a new value recompiles nothing.

directions.py has the update rule of each optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import SupportsFloat, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.config.training import OptimizerSection
from areal_jax.learning.brakes import compare_gradients, take_along
from areal_jax.learning.optimizer.directions import make_direction
from areal_jax.types import Tree

BRAKES = ('brake', 'gradient_cosine')  # metrics of a step that exist with some settings only
CRITIC_METRICS = ('critic_grad_norm', 'critic_skip_count')  # metrics of a critic's own optimizer
OptimizerState: TypeAlias = dict[str, Tree]
Shaped: TypeAlias = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate: linear warm-up, then from 1 down to `final_ratio` at the last step.

    Only applied steps are counted, not skipped ones.
    """

    kind: str  # 'constant' | 'cosine' | 'linear'
    warmup_steps: int  # the step with this number is the first at the full rate
    total_steps: int  # number of the last step, after which `final_ratio` holds; 'constant' does not read it
    final_ratio: float  # in [0, 1]; 'constant' does not read it

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
    """Clips gradients by their global norm and steps along `transform` at the rate of `schedule`.

    A non-finite gradient skips that step and is counted: the weights may recover. The state is
    {'transform': optax state, 'step': int32 scalar, the number of steps applied}, and, if it `compares`, 'gradients':
    the gradients of the previous step, zeros at first and after a step that `projects` has left out.
    """

    transform: optax.GradientTransformation  # gradients to a descent direction, before the learning rate
    clip_norm: float  # 0 = off
    schedule: Schedule
    compares: bool = False  # whether the cosine of consecutive gradients is measured
    projects: bool = False  # whether it also shortens a gradient, see brakes.compare_gradients; needs `compares`

    def init(self, params: Tree) -> OptimizerState:
        state = {'transform': self.transform.init(params), 'step': jnp.zeros((), jnp.int32)}
        return state | {'gradients': jax.tree.map(jnp.zeros_like, params)} if self.compares else state

    def shardings(self, params: Tree, param_shardings: Tree, replicated: NamedSharding) -> OptimizerState:
        """Shardings of the state: moments are sharded like their parameter, everything else is replicated.

        Args:
          params: leaves need a shape and a dtype only.
          param_shardings: a tree like `params` of NamedShardings.
          replicated: the sharding of a leaf that belongs to no parameter.
        """
        transform = optax.tree_map_params(
            self.transform,
            _moment_sharding,
            jax.eval_shape(self.transform.init, params),
            params,
            param_shardings,
            transform_non_params=lambda _: replicated,
        )
        shardings = {'transform': transform, 'step': replicated}
        return shardings | {'gradients': param_shardings} if self.compares else shardings

    def apply(
        self, params: Tree, state: OptimizerState, gradients: Tree, learning_rate: jax.Array
    ) -> tuple[Tree, OptimizerState, dict[str, jax.Array]]:
        """Makes one step. A non-finite gradient norm leaves weights and state bit-equal and counts in `skip_count`.

        Returns (params, state, metrics): metrics hold the norm before clipping and the learning rate as scheduled.
        """
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        if not self.compares:
            return self._step(params, state, gradients, learning_rate, norm, finite)
        before, raw = state['gradients'], gradients
        compared = compare_gradients(raw, before, norm)
        length, applied = norm, finite
        if self.projects:
            gradients = take_along(raw, before, compared.along)
            length, applied = norm * compared.factor, finite & (compared.factor > 0)
        own = {name: leaf for name, leaf in state.items() if name != 'gradients'}
        params, own, metrics = self._step(params, own, gradients, learning_rate, length, applied)
        keep = lambda new, old: jnp.where(finite, jnp.where(applied, new, 0.0), old)
        metrics |= {'gradient_cosine': jnp.where(finite, compared.cosine, 0.0)}
        metrics |= {'brake': jnp.where(finite, compared.factor, 1.0)} if self.projects else {}
        return params, own | {'gradients': jax.tree.map(keep, raw, before)}, metrics

    def _step(
        self,
        params: Tree,
        state: OptimizerState,
        gradients: Tree,
        learning_rate: jax.Array,
        norm: jax.Array,
        applied: jax.Array,
    ) -> tuple[Tree, OptimizerState, dict[str, jax.Array]]:
        """Steps along gradients of this norm if `applied`."""
        rate = learning_rate * self.schedule.factor(state['step'])

        def step(params: Tree, state: OptimizerState, gradients: Tree) -> tuple[Tree, OptimizerState]:
            if self.clip_norm > 0:
                scale = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
                gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
            directions, transform = self.transform.update(gradients, state['transform'], params)
            stepped = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), params, directions)
            return stepped, {'transform': transform, 'step': state['step'] + 1}

        def skip(params: Tree, state: OptimizerState, gradients: Tree) -> tuple[Tree, OptimizerState]:
            return params, state

        # cond and not a select per leaf, which would keep the old and the new value of every leaf in memory
        new_params, new_state = jax.lax.cond(applied, step, skip, params, state, gradients)
        metrics = {
            'grad_norm': jnp.where(applied, norm, 0.0),
            'learning_rate': rate,
            'skip_count': 1.0 - applied.astype(jnp.float32),
        }
        return new_params, new_state, metrics


def make_optimizer(settings: OptimizerSection, total_steps: int, *, compares: bool = False) -> Optimizer:
    """The optimizer of `settings`; directions.py says what each name is and how much state it needs.

    Args:
      total_steps: optimizer steps of the run; the schedule 'constant' does not read it.
      compares: measures the cosine of consecutive gradients even if no brake reads it.
    """
    schedule = Schedule(settings.schedule, settings.warmup_steps, total_steps, settings.final_ratio)
    projects = settings.brake == 'projection'
    return Optimizer(
        make_direction(settings), settings.clip_norm, schedule, compares=compares or projects, projects=projects
    )


def step_metrics(steps: Sequence[Mapping[str, SupportsFloat]]) -> dict[str, float]:
    """The metrics of an update, from the metrics that `Optimizer.apply` returned for each of its steps."""
    total = lambda name: sum(float(step[name]) for step in steps)
    rate = float(steps[-1]['learning_rate']) if steps else 0.0
    means = {f'update/{name}': total(name) / len(steps) for name in BRAKES if steps and name in steps[0]}
    metrics = mean_step_metrics(len(steps), total('skip_count'), total('grad_norm'), rate) | means
    if not (steps and CRITIC_METRICS[0] in steps[0]):
        return metrics
    norms, skipped = (total(name) for name in CRITIC_METRICS)
    applied = len(steps) - skipped
    metrics['update/critic_skipped_steps'] = skipped
    return metrics | ({'update/critic_grad_norm': norms / applied} if applied else {})


def mean_step_metrics(made: float, skipped: float, grad_norms: float, last_rate: float) -> dict[str, float]:
    """The metrics of an update from its number of steps (skipped ones included), summed norms and last rate."""
    metrics = {'update/optimizer_steps': made - skipped, 'update/skipped_steps': skipped}
    if made > skipped:
        metrics['update/grad_norm'] = grad_norms / (made - skipped)
        metrics['update/learning_rate'] = last_rate
    return metrics


def _moment_sharding(leaf: Shaped, param: Shaped, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf that belongs to a parameter: a moment, its mean over one axis, or scales of its blocks."""
    shape, mesh = tuple(param.shape), sharding.mesh
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    if leaf.shape == shape:
        return sharding
    if len(leaf.shape) == len(shape) and leaf.shape[:-1] == shape[:-1]:  # blocks of the last axis
        whole = leaf.shape[-1] % _shards(mesh, spec[-1]) == 0
        return NamedSharding(mesh, PartitionSpec(*spec[:-1], spec[-1] if whole else None))
    for axis in range(len(shape)):  # if two axes have one size, either may be the one left out
        if leaf.shape == shape[:axis] + shape[axis + 1 :]:
            return NamedSharding(mesh, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    return NamedSharding(mesh, PartitionSpec())


def _shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(mesh.shape[name] for name in names)
