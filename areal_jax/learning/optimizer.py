"""The optimizer: gradients become new weights. The learning rate is an argument, so a new value recompiles nothing.

A direction is an optax transformation of gradients, before clipping, schedule and learning rate. `used_if` of a field
of OptimizerSection says which directions read the field. Adam computes its moments in float32 and may store them in
fewer bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, SupportsFloat, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from areal_jax.config.fields import ConfigError
from areal_jax.config.training import OptimizerSection
from areal_jax.learning.settings import compare_gradients, take_along
from areal_jax.learning.weights import CRITIC, policy_leaves
from areal_jax.models.weights import is_stacked
from areal_jax.sharding.rules import path_name
from areal_jax.types import Tree

MOMENT_DTYPES = ('float32', 'bfloat16', 'int8')
_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 32  # values that share a scale
_SHARDS = 16  # a last axis sharded over up to 16 devices is cut between blocks, if its size allows
_SIGNED_LEVELS, _UNSIGNED_LEVELS = 127, 255


class AdamState(NamedTuple):
    """Moments in the shapes of the parameters; scales of their blocks for int8, else None."""

    step: jax.Array  # int32 scalar, updates done
    mu: Tree  # first moment, see `quantize`
    nu: Tree  # second moment
    mu_scale: Tree = None  # float32 [..., blocks of the last axis]
    nu_scale: Tree = None


def scale_by_adam(b1: float, b2: float, eps: float, moment_dtype: str) -> optax.GradientTransformation:
    """Adam's direction m̂ / (√v̂ + ε) (arXiv 1412.6980, algorithm 1) from moments stored as `moment_dtype`.

    'bfloat16' and 'int8' (see `quantize`) use stochastic rounding, which is unbiased. Rounding to nearest could freeze
    a moment: b2 = 0.999 changes it by 0.1% a step, but half the gap between two bfloat16 numbers is up to 0.4%. The
    noise is a hash of step and index, so it is the same on any number of devices. The direction is computed before the
    rounding.

    Raises ValueError for an unknown `moment_dtype`.
    """
    if moment_dtype not in MOMENT_DTYPES:
        raise ConfigError(f'optimizer.moment_dtype={moment_dtype!r} is unknown; use one of {", ".join(MOMENT_DTYPES)}')
    blocks = moment_dtype == 'int8'

    def init(params: Tree) -> AdamState:
        def zeros() -> Tree:
            return jax.tree.map(lambda p: jnp.zeros(p.shape, moment_dtype), params)

        def scales() -> Tree:
            return jax.tree.map(lambda p: jnp.zeros(_scale_shape(p.shape), jnp.float32), params) if blocks else None

        return AdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), scales(), scales())

    def update(gradients: Tree, state: AdamState, params: Tree = None) -> tuple[Tree, AdamState]:
        number = state.step + 1
        corrections = tuple(1 - b ** number.astype(jnp.float32) for b in (b1, b2))

        def one(index: int, gradient: jax.Array, *stored: jax.Array) -> tuple[jax.Array, ...]:
            g = gradient.astype(jnp.float32)
            if blocks:
                old = dequantize(stored[0], stored[2], signed=True), dequantize(stored[1], stored[3], signed=False)
            else:
                old = stored[0].astype(jnp.float32), stored[1].astype(jnp.float32)
            mu, nu = b1 * old[0] + (1 - b1) * g, b2 * old[1] + (1 - b2) * g * g
            direction = (mu / corrections[0]) / (jnp.sqrt(nu / corrections[1]) + eps)
            if moment_dtype == 'float32':
                return direction, mu, nu
            noise = _noise(g.shape, number, index)
            mu_noise, nu_noise = noise & 0xFFFF, noise >> 16
            if not blocks:
                return direction, _round_bfloat16(mu, mu_noise), _round_bfloat16(nu, nu_noise)
            (mu_codes, mu_scale), (nu_codes, nu_scale) = (
                quantize(mu, mu_noise, signed=True),
                quantize(nu, nu_noise, signed=False),
            )
            return direction, mu_codes, nu_codes, mu_scale, nu_scale

        leaves = jax.tree.leaves(gradients)
        stored = [jax.tree.leaves(tree) for tree in state[1:] if tree is not None]
        results = [one(index, *leaf) for index, leaf in enumerate(zip(leaves, *stored, strict=True))]
        structure = jax.tree.structure(gradients)
        directions, *moments = (jax.tree.unflatten(structure, tree) for tree in zip(*results, strict=True))
        return directions, AdamState(number, *moments)

    return optax.GradientTransformation(init, update)


def quantize(values: jax.Array, noise: jax.Array, *, signed: bool) -> tuple[jax.Array, jax.Array]:
    """int8 codes in the shape of float32 `values` and the float32 scale of each block: its largest magnitude.

    A block is up to 256 neighbours on the last axis. The code is the fourth root of value / scale in 127 levels and
    a sign, or in 255 (stored minus 128) for values that are never negative: steps of 3% or 1.6% at the scale, and 8 or
    9 decades below it. Rounding is stochastic and unbiased: `noise` (integers in [0, 2^16)) picks the lower or the
    upper code. A positive second moment is never rounded to 0, because Adam divides by its root.
    """
    blocks = _in_blocks(jnp.abs(values))
    scale = blocks.max(axis=-1)
    ratio = (blocks / jnp.where(scale > 0, scale, 1.0)[..., None]).reshape(values.shape)
    levels = _SIGNED_LEVELS if signed else _UNSIGNED_LEVELS
    below = jnp.floor(jnp.sqrt(jnp.sqrt(ratio)) * levels)
    low, high = ((k / levels) ** 4 for k in (below, below + 1))
    code = below + (noise.astype(jnp.float32) / 2**16 < (ratio - low) / (high - low))
    code = jnp.minimum(code, levels)
    if signed:
        return (code * jnp.sign(values)).astype(jnp.int8), scale
    code = jnp.maximum(code, (values > 0).astype(code.dtype))
    return (code - (_SIGNED_LEVELS + 1)).astype(jnp.int8), scale


def dequantize(codes: jax.Array, scale: jax.Array, *, signed: bool) -> jax.Array:
    """The float32 values of `quantize`'s codes."""
    levels = codes.astype(jnp.float32)
    root = levels / _SIGNED_LEVELS if signed else (levels + (_SIGNED_LEVELS + 1)) / _UNSIGNED_LEVELS
    power = jnp.square(jnp.square(root)) * (jnp.sign(root) if signed else 1.0)
    return (_in_blocks(power) * scale[..., None]).reshape(codes.shape)


def block_size(size: int) -> int:
    """The number of neighbours that share a scale: the largest divisor up to 256 that leaves a multiple of 16 blocks.

    An axis sharded over 2, 4, 8 or 16 devices is then split between blocks, so no device needs values of another. If
    there is no such divisor of at least 32, the largest divisor from 32 to 256 is used, and without one a single block.
    """
    divisors = [b for b in range(_LARGEST_BLOCK, _SMALLEST_BLOCK - 1, -1) if size % b == 0]
    aligned = [b for b in divisors if size // b % _SHARDS == 0]
    return next(iter(aligned + divisors), size)


def _scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    size = shape[-1] if shape else 1
    return *shape[:-1], size // block_size(size)


def _in_blocks(values: jax.Array) -> jax.Array:
    return values.reshape(*_scale_shape(values.shape), -1)


def _round_bfloat16(values: jax.Array, noise: jax.Array) -> jax.Array:
    """Stochastic rounding, unbiased: adds 16 random bits below the last bit that is kept, then drops the lower half."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + noise
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _noise(shape: tuple[int, ...], step: jax.Array, leaf: int) -> jax.Array:
    """Pseudo-random uint32, a hash of index, step and leaf: far cheaper than jax.random, which is cryptographic."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    return _mix(_mix(index) ^ _mix(_mix(step.astype(jnp.uint32)) + jnp.uint32(leaf)))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 after which every bit depends on every bit: the last step of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


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
    """AdamW with both moments in int8 and a scale per block (see `quantize`): about 2 bytes per parameter."""
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

    Norms, biases, taps and the embedding (tied or not) do not decay. A leaf that stacks layers has one axis
    more than a matrix.
    """

    def decay(path: KeyPath, update: jax.Array, param: jax.Array) -> jax.Array:
        name = path_name(path)
        # a leaf of experts is a stack of matrices, or of biases
        is_matrix = param.ndim - is_stacked(name) >= 2 and not name.endswith(('_bias', '_taps'))
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
    # Whether a skipped step is computed and not taken, instead of a branch. XLA:CPU keeps the old and the new value of
    # every leaf then; on accelerators it is the branch that copies them.
    selects: bool = False

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

        if self.selects:
            take = lambda new, old: jnp.where(applied, new, old)
            new_params, new_state = jax.tree.map(take, step(params, state, gradients), (params, state))
        else:
            new_params, new_state = jax.lax.cond(applied, step, skip, params, state, gradients)
        metrics = {
            'grad_norm': jnp.where(applied, norm, 0.0),
            'learning_rate': rate,
            'skip_count': 1.0 - applied.astype(jnp.float32),
        }
        return new_params, new_state, metrics


def make_optimizer(settings: OptimizerSection, total_steps: int, *, compares: bool = False) -> Optimizer:
    """The optimizer of `settings`; DIRECTIONS says what each name is and how much state it needs.

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


@dataclasses.dataclass(frozen=True)
class CriticOptimizer(Optimizer):
    """The policy's optimizer, and one for the critic that clips, steps and skips independently.

    The state is the policy's, with the critic's under CRITIC.
    """

    critic_rate: float = 0.0  # learning rate of the critic, with the policy's schedule

    def init(self, params: Tree) -> OptimizerState:
        return super().init(policy_leaves(params)) | {CRITIC: super().init(params[CRITIC])}

    def shardings(self, params: Tree, param_shardings: Tree, replicated: NamedSharding) -> OptimizerState:
        own = super().shardings(policy_leaves(params), policy_leaves(param_shardings), replicated)
        return own | {CRITIC: super().shardings(params[CRITIC], param_shardings[CRITIC], replicated)}

    def apply(
        self, params: Tree, state: OptimizerState, gradients: Tree, learning_rate: jax.Array
    ) -> tuple[Tree, OptimizerState, dict[str, jax.Array]]:
        policy, policy_state, metrics = super().apply(
            policy_leaves(params), policy_leaves(state), policy_leaves(gradients), learning_rate
        )
        critic, critic_state, measured = super().apply(
            params[CRITIC], state[CRITIC], gradients[CRITIC], jnp.float32(self.critic_rate)
        )
        of_critic = {name: measured[name.removeprefix('critic_')] for name in CRITIC_METRICS}
        return policy | {CRITIC: critic}, policy_state | {CRITIC: critic_state}, metrics | of_critic


def add_critic_optimizer(optimizer: Optimizer, rate: float) -> CriticOptimizer:
    fields = {field.name: getattr(optimizer, field.name) for field in dataclasses.fields(optimizer)}
    return CriticOptimizer(**fields, critic_rate=rate)
