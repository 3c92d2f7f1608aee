"""The settings of an update, and its brakes.

Settings are sections of the config, and values derived from other sections. A brake shrinks or skips an optimizer step
whose data say little about the policy that it changes; `optimizer.brake` chooses one. 'ess' and 'lag' multiply the
learning rate of a step, which is an argument of its program: Adam would undo the scaling of a gradient. 'projection'
changes the gradient. docs/staleness_methods.md has the sources, and says which parts are ours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from areal_jax.config.generation import RolloutSection
from areal_jax.config.loss import CriticSection, LossSection
from areal_jax.config.training import DiagnosticsSection, LearnerSection, OptimizerSection, StalenessSection
from areal_jax.learning.objective.objective import PROXIMAL, Objective
from areal_jax.learning.objective.ratios import namespace, sequence_sums
from areal_jax.types import Tree

Array = Any  # of numpy or jax
COSINE_LOW, COSINE_HIGH = 0.05, 0.3  # of 'projection'
_LARGEST = 1e30  # bounds a log-weight: the difference of two infinities is NaN


@dataclasses.dataclass(frozen=True)
class Brake:
    """The brake that the settings of the optimizer choose."""

    settings: OptimizerSection
    shown: bool  # diagnostics.brakes: also measures the inputs of the other brakes

    @property
    def kind(self) -> str:
        """'none' | 'ess' | 'lag' | 'projection'."""
        return self.settings.brake

    @property
    def lag(self) -> float:
        """The age in optimizer steps up to which 'lag' does not brake."""
        return self.settings.brake_lag

    def lag_factor(self, lag: float) -> float:
        """The factor of the learning rate for data of mean lag `lag`, S: min(1, S₀ / S); 1 with another brake.

        Above S₀ it keeps the product of lag and learning rate constant, which bounds the bias of stale gradients (arXiv
        2607.01083).
        """
        return self.lag / max(self.lag, lag) if self.kind == 'lag' else 1.0

    def ess_factor(self, size: Array) -> Array:
        """√min(1, ESS / base), as VCPO scales the rate of AdamW (arXiv 2602.17616); 0 if ESS is NaN."""
        xp = namespace(size)
        return xp.where(xp.isnan(size), 0.0, xp.sqrt(xp.minimum(1.0, size / self.settings.brake_base)))


def sequence_effective_sample_size(policy: Array, behavior: Array, loss_mask: Array, sequence_starts: Array) -> Array:
    """(Σ w)² / (B Σ w²) in (0, 1] over the B answers with a loss token: w = Π π_θ / π_behav, whatever its size.

    1 without any answer. VCPO, arXiv 2602.17616; weights are divided by the largest, which changes nothing. Arrays are
    [..., R, N], of numpy (computed in float64) or jax.

    Args:
      sequence_starts: int, the place in the row of the first loss token of the same answer.
    """
    xp = namespace(policy)
    dtype = np.float64 if xp is np else jnp.float32
    by_row = lambda x: x.reshape(-1, x.shape[-1])
    mask, starts = by_row(loss_mask), by_row(sequence_starts)
    policy, behavior = (xp.where(mask, by_row(x), 0.0).astype(dtype) for x in (policy, behavior))
    logs = sequence_sums(policy - behavior, mask, starts)
    trained = sequence_sums(xp.where(mask, 1.0, 0.0), mask, starts) > 0
    return effective_sample_size(logs, trained & (starts == np.arange(starts.shape[-1])))  # each at its first place


def effective_sample_size(log_weights: Array, answers: Array) -> Array:
    """(Σ w)² / (B Σ w²) over the B entries of log w [...] where `answers`, bool [...], is set; 1 without any."""
    xp, logs = namespace(log_weights), log_weights
    logs = xp.where(answers, xp.clip(logs, -_LARGEST, _LARGEST), -xp.inf)
    top = xp.where(answers.any(), logs.max(), 0.0)
    weights, count = xp.exp(logs - top), answers.sum()
    return xp.where(count > 0, weights.sum() ** 2 / xp.maximum(count * (weights**2).sum(), 1.0), 1.0)


class Compared(NamedTuple):
    """A gradient compared with the previous one; float32 scalars."""

    cosine: jax.Array  # 0 if one of them is 0
    factor: jax.Array  # norm of the projected gradient / norm of the gradient; 0: the step is left out
    along: jax.Array  # multiple of the previous gradient to subtract from this one


def compare_gradients(gradients: Tree, before: Tree, norm: jax.Array) -> Compared:
    """GAC (arXiv 2603.01501): shortens the part of a gradient along the previous one if their cosine is above `low`.

    g = g∥ + g⊥ with g∥ along the previous gradient: g∥ is shortened until the new cosine is `low`, |g∥| = low /
    √(1 - low²) |g⊥|. Above `high` the step is left out. `low` is COSINE_LOW, `high` COSINE_HIGH.

    Args:
      norm: of `gradients`.
    """
    norm_before = optax.tree.norm(before)
    product = norm * norm_before
    cosine = jnp.where(product > 0, optax.tree.vdot(gradients, before) / jnp.where(product > 0, product, 1.0), 0.0)
    across = norm * jnp.sqrt(jnp.maximum(1.0 - cosine**2, 0.0))
    shortened = COSINE_LOW / math.sqrt(1 - COSINE_LOW**2) * across
    cuts = cosine > COSINE_LOW
    along = jnp.where(cuts, (cosine * norm - shortened) / jnp.where(cuts, norm_before, 1.0), 0.0)
    length = across / math.sqrt(1 - COSINE_LOW**2) / jnp.where(cuts, norm, 1.0)
    factor = jnp.where(cosine > COSINE_HIGH, 0.0, jnp.where(cuts, length, 1.0))
    return Compared(cosine, factor, along)


def take_along(gradients: Tree, before: Tree, along: jax.Array) -> Tree:
    """gradients - along * before."""
    return jax.tree.map(lambda g, b: g - along.astype(g.dtype) * b, gradients, before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """All settings of an update except the weights, the mesh and the optimizer."""

    learner: LearnerSection
    rollout: RolloutSection = dataclasses.field(compare=False)  # programs read neither this nor `loss`
    loss: LossSection = dataclasses.field(compare=False)
    staleness: StalenessSection
    diagnostics: DiagnosticsSection
    max_microbatches: int  # 'scan' only: the largest number of micro-batches for which `warm_up` compiles
    strategy: str
    publish_dtype: str  # of the weights that engines get
    # what `publish` returns if a mesh spans processes: 'gathered', all leaves in every process; 'leaves', whole leaves
    # for each process to write as files; 'shards', the leaves as they are sharded, for each process to send. A single
    # process on a CPU copies the weights on the host, unless 'gathered'
    publication: Literal['gathered', 'leaves', 'shards']
    objective: Objective
    scores: bool  # `warm_up` compiles the programs of SpmdLearner.score
    seed: int  # of the run: part of the names of its answers
    brake: Brake
    critic: CriticSection | None  # if the objective trains values, see weights.py
    records_routes: bool  # engines record which experts tokens have reached: rows of programs have them

    def __post_init__(self) -> None:
        if (self.critic is not None) != self.objective.trains_values:
            raise ValueError(f'critic={self.critic} with an objective of which trains_values is not so')

    @property
    def steps(self) -> int:
        return self.learner.n_minibatches * self.learner.epochs

    @property
    def recomputes(self) -> bool:
        """Whether log-probs of the weights before the update are needed after its first step."""
        return PROXIMAL in self.objective.reads and self.steps > 1

    @property
    def filters(self) -> bool:
        """Whether groups of equal rewards are left out."""
        return self.learner.filter_equal_rewards and self.objective.contrasts
