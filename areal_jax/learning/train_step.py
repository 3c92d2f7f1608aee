"""The programs of one learner as jitted functions: passes with gradients, the optimizer step, copies and casts.

programs.py compiles them, passes.py prepares their arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.learning.brakes import sequence_effective_sample_size
from areal_jax.learning.critic import VALUE_HEAD, scale_gradient, score_states
from areal_jax.learning.forward import Rows, SeenRoutes, predicting_states, score_targets
from areal_jax.learning.objective.aggregation import token_weights
from areal_jax.learning.objective.objective import (
    PROXIMAL,
    REFERENCE,
    RETURNS,
    TEACHER,
    VALUES,
    LossTokens,
    Objective,
)
from areal_jax.learning.objective.own_objective import require_loss
from areal_jax.learning.objective.proximal import recomputed_logprobs
from areal_jax.learning.objective.sums import find_starts, masked_sum
from areal_jax.learning.optimizer.optimizer import Optimizer
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.vocabulary_statistics import TeacherForm, read_teacher, vocabulary_statistics
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.interchange import export_weights
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import measure_balance
from areal_jax.models.logprobs import TokenFunction, token_collisions, token_logprobs
from areal_jax.sharding.rules import Shares, replicated
from areal_jax.types import PackedBatch, Tree

# what differs from call to call, see `training_scalars`; and 'teacher', the weights of one that a step itself reads
Scalars = Mapping[str, Tree]
_Metrics = dict[str, Any]  # arrays, and SeenRoutes
_FOLLOWS, EXPERT_LOADS = 'follows_routes', 'expert_loads'  # in the scalars of a model with experts
SEEN_ROUTES = 'seen_routes'  # beside the metrics of a micro-batch: SeenRoutes
_ROW_FIELDS = (
    *('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets'),
    *('loss_mask', 'behavior_logprobs', 'advantages', 'policy_versions'),
)
_LOSS_FIELDS = (
    *('behavior_logprobs', 'advantages', 'loss_mask', 'policy_versions', 'sequence_starts', 'token_weights'),
)


@dataclasses.dataclass(frozen=True)
class KnownTokens:
    """What is known of the loss tokens of a batch before its step, float32 [M, R, N]; None = not needed."""

    proximal: np.ndarray | None = None  # log-probs
    reference: np.ndarray | None = None  # log-probs, or those of the teacher
    values: np.ndarray | None = None  # of the critic
    returns: np.ndarray | None = None
    policy: np.ndarray | None = None  # log-probs that came with the values


class _Scored(NamedTuple):
    """What one read of the trunk gives of the loss tokens of a micro-batch."""

    states: jax.Array  # [R, N, d], from which they are predicted
    logprobs: jax.Array  # [R, N], as what follows
    entropy: jax.Array
    values: jax.Array | None  # of the critic, where there is one
    routes: SeenRoutes | None  # of a model with experts


def training_rows(
    batch: PackedBatch,
    objective: Objective,
    known: KnownTokens | None = None,
    prepared: Mapping[str, np.ndarray] | None = None,
    prompts: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], float]:
    """A batch as the programs read it, leaves [M, R, ...], its columns by their names, and its denominator.

    Args:
      prepared: what `objective.prepare` returned; None = zeros, where nothing is trained.
      prompts: see aggregation.token_weights.
    """
    if prompts is None:
        prompts = np.zeros(batch.trajectory_ids.max(initial=0) + 1, np.int64)
    weights, denominator = token_weights(batch, objective.aggregation, objective.length_constant, prompts)
    rows = {name: getattr(batch, name) for name in _ROW_FIELDS} | dict(batch.columns) | dict(batch.inputs)
    known = known or KnownTokens()
    zeros = np.zeros_like(batch.behavior_logprobs)
    given = {'recomputed_logprobs': known.proximal, 'reference_logprobs': known.reference}
    if VALUES in objective.reads:
        given |= {VALUES: known.values, RETURNS: known.returns}
    rows |= {name: zeros if values is None else values for name, values in given.items()}
    rows |= dict.fromkeys(objective.prepares, zeros) | dict(prepared or {})
    return rows | {'token_weights': weights, 'sequence_starts': find_starts(batch.trajectory_ids)}, denominator


def training_scalars(
    *,
    denominator: float,
    version: int,
    temperature: float,
    weights_are_proximal: bool,
    follows_routes: bool | None = None,
) -> dict[str, np.generic]:
    """Scalars with fixed dtypes, so that no value recompiles a program.

    `follows_routes`: whether recorded routes are taken; None = rows have none.
    """
    routes = {} if follows_routes is None else {_FOLLOWS: np.bool_(follows_routes)}
    return routes | {
        'denominator': np.float32(denominator),
        'version': np.int32(version),
        'temperature': np.float32(temperature),
        'weights_are_proximal': np.bool_(weights_are_proximal),
    }


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions of one learner that are compiled; every public method returns one of them, jitted.

    `params` are the trained weights, float32; `frozen` are all others, in `settings.dtype`; `working` is `params` cast
    to that dtype, or `params` itself if that is float32. A function donates the weights, optimizer state or gradients
    for which it returns new values. The loss of a micro-batch is its part of the minibatch's loss, so loss and gradient
    of a minibatch are sums over its micro-batches. Shapes: see learning/__init__.py.
    """

    decoder: Decoder
    settings: LearnerSettings
    optimizer: Optimizer
    mesh: Mesh
    attention: str  # resolved implementation
    # what follows is given by the fields above
    params: Tree = dataclasses.field(compare=False)  # shardings of the trained weights
    frozen: Tree = dataclasses.field(compare=False)  # of the frozen ones
    state: Tree = dataclasses.field(compare=False)  # of the optimizer state
    exported: Tree = dataclasses.field(compare=False)  # of the interchange form
    # who publishes which leaves of it; None: every process has its shards of all
    shares: Shares | None = dataclasses.field(default=None, compare=False)
    # paths of the trained leaves, where a learner trains in blocks; the fields above give them otherwise
    trained: tuple[str, ...] | None = None
    teacher: TeacherForm | None = None  # whom a step itself reads

    def copy(self) -> jax.stages.Wrapped:
        """params -> the same values in buffers of their own."""
        return jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.params)

    def initial_state(self) -> jax.stages.Wrapped:
        """params -> optimizer state."""
        return jax.jit(self.optimizer.init, out_shardings=self.state)

    def zeros(self) -> jax.stages.Wrapped:
        """params -> gradients of nothing."""
        return jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=self.params)

    def cast(self) -> jax.stages.Wrapped:
        """params -> working."""
        return jax.jit(lambda params: trees.cast(params, self.settings.dtype), out_shardings=self.params)

    def export(self) -> jax.stages.Wrapped:
        """(params, frozen) -> the interchange form, in buffers of its own; or its leaves as `shares` spreads them."""
        shares = self.shares

        def export(*sides: Tree) -> Tree:
            whole = export_weights(self.decoder, self.settings.publish_dtype, *sides)
            return jax.tree.map(jnp.copy, whole) if shares is None else shares.spread(whole)

        return jax.jit(export, out_shardings=self.exported if shares is None else shares.shardings)

    def logprobs(self) -> jax.stages.Wrapped:
        """(working, frozen, rows, scalars) -> log-probs [R, N]."""

        def logprobs(*args: Tree) -> jax.Array:
            return self._forward(*args)[0]

        return jax.jit(logprobs, out_shardings=replicated(self.mesh))

    def collisions(self) -> jax.stages.Wrapped:
        """(working, frozen, rows, scalars) -> (log-probs, log Σ π²), [R, N] each."""

        def collisions(working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> tuple[jax.Array, jax.Array]:
            return self._forward(working, frozen, rows, scalars, compute=token_collisions)

        return jax.jit(collisions, out_shardings=replicated(self.mesh))

    def values(self) -> jax.stages.Wrapped:
        """(working, frozen, rows, scalars) -> (log-probs, values of the critic), [R, N] each."""

        def values(working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> tuple[jax.Array, jax.Array]:
            scored = self._scored(trees.join(working, frozen), rows, scalars)
            assert scored.values is not None, 'compiled for learners with a critic'
            return scored.logprobs, scored.values

        return jax.jit(values, out_shardings=replicated(self.mesh))

    def loads(self) -> jax.stages.Wrapped:
        """(working, frozen, rows, scalars) -> tokens that reach each expert, [L, E]."""

        def loads(working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> jax.Array:
            seen = self._policy_states(trees.join(working, frozen), rows, scalars)[1]
            assert seen is not None, 'compiled for learners of models with experts'
            return seen.loads

        return jax.jit(loads, out_shardings=replicated(self.mesh))

    def accumulate(self) -> jax.stages.Wrapped:
        """(gradients, working, frozen, rows, scalars) -> (gradients with the micro-batch added, metrics, log-probs
        [R, N])."""

        def accumulate(
            gradients: Tree, working: Tree, frozen: Tree, rows: Rows, scalars: Scalars
        ) -> tuple[Tree, _Metrics, jax.Array]:
            added, metrics, logprobs = self._gradients(working, frozen, rows, scalars)
            return self._add(gradients, added), metrics, logprobs

        everywhere = replicated(self.mesh)
        return jax.jit(accumulate, donate_argnums=0, out_shardings=(self.params, everywhere, everywhere))

    def apply(self) -> jax.stages.Wrapped:
        """(params, state, gradients, learning rate) -> (params, state, step metrics).

        `zeros` makes the next gradients: if this program cleared them in place, XLA would copy all of them first, since
        the optimizer's branch reads them.
        """
        shardings = (self.params, self.state, replicated(self.mesh))
        return jax.jit(self.optimizer.apply, donate_argnums=(0, 1), out_shardings=shardings)

    def scan(self) -> jax.stages.Wrapped:
        """(params, state, frozen, rows [M, R, ...], scalars, learning rate) -> (params, state, step metrics, metrics
        [M], log-probs [M, R, N]): a whole minibatch."""

        def scan(
            params: Tree, state: Tree, frozen: Tree, rows: Rows, scalars: Scalars, learning_rate: jax.Array
        ) -> tuple[Tree, Tree, _Metrics, _Metrics, jax.Array]:
            working = trees.cast(params, self.settings.dtype)  # once, outside the loop

            def body(gradients: Tree, microbatch: Rows) -> tuple[Tree, tuple[_Metrics, jax.Array]]:
                added, metrics, logprobs = self._gradients(working, frozen, microbatch, scalars)
                return self._add(gradients, added), (metrics, logprobs)

            # metrics [M], logprobs [M, R, N]
            gradients, (metrics, logprobs) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), rows)
            learning_rate, braked = self._brake(learning_rate, rows, logprobs)
            params_after, state, step_metrics = self.optimizer.apply(params, state, gradients, learning_rate)
            return params_after, state, step_metrics | braked, metrics, logprobs

        everywhere = replicated(self.mesh)
        shardings = (self.params, self.state, everywhere, everywhere, everywhere)
        return jax.jit(scan, donate_argnums=(0, 1), out_shardings=shardings)

    def _brake(self, learning_rate: jax.Array, rows: Rows, logprobs: jax.Array) -> tuple[jax.Array, _Metrics]:
        """(the rate of the step on a minibatch with these log-probs [M, R, N], metrics)."""
        brake = self.settings.brake
        if brake.kind != 'ess':
            return learning_rate, {}
        known = (rows[name] for name in ('behavior_logprobs', 'loss_mask', 'sequence_starts'))
        factor = brake.ess_factor(sequence_effective_sample_size(logprobs, *known)).astype(jnp.float32)
        return learning_rate * factor, {'brake': factor}

    def _add(self, gradients: Tree, added: Tree) -> Tree:
        """Adds in float32 and divides the loss scale out, which kept small gradients of a narrow dtype above 0."""
        unscale = 1.0 / self.settings.loss_scale
        return jax.tree.map(lambda total, g: total + g.astype(jnp.float32) * unscale, gradients, added)

    def _forward(
        self,
        working: Tree,
        frozen: Tree,
        rows: Rows,
        scalars: Scalars,
        compute: TokenFunction = token_logprobs,
    ) -> tuple[jax.Array, jax.Array]:
        weights = trees.join(working, frozen)
        states, _ = self._policy_states(weights, rows, scalars)
        return self._score_targets(weights, states, rows, scalars, compute)

    def _scored(self, weights: Tree, rows: Rows, scalars: Scalars) -> _Scored:
        states, routes = self._policy_states(weights, rows, scalars)
        values = self._values(weights, states, rows)
        if values is not None and self.settings.objective.scores_answers:  # the head over the vocabulary is not read
            return _Scored(states, jnp.zeros_like(values), jnp.zeros_like(values), values, routes)
        return _Scored(states, *self._score_targets(weights, states, rows, scalars), values, routes)

    def _policy_states(self, weights: Tree, rows: Rows, scalars: Scalars) -> tuple[jax.Array, SeenRoutes | None]:
        return predicting_states(
            self.decoder, weights, rows, attention=self.attention, mesh=self.mesh, follows=scalars.get(_FOLLOWS)
        )

    def _score_targets(
        self,
        weights: Tree,
        states: jax.Array,
        rows: Rows,
        scalars: Scalars,
        compute: TokenFunction = token_logprobs,
    ) -> tuple[jax.Array, jax.Array]:
        return score_targets(
            self.decoder, weights, states, rows['targets'], scalars['temperature'], mesh=self.mesh, compute=compute
        )

    def _values(self, weights: Tree, states: jax.Array, rows: Rows) -> jax.Array | None:
        """[R, N]: of the state before each loss token."""
        if (critic := self.settings.critic) is None:
            return None
        own = weights[trees.CRITIC]
        if critic.own_model:
            decoder = self.decoder.without_adapters()
            states, _ = predicting_states(decoder, own, rows, attention=self.attention, mesh=self.mesh)
        else:
            states = scale_gradient(states, critic.trunk_gradient)
        return score_states(own[VALUE_HEAD], states)

    def _statistics(self, weights: Tree, states: jax.Array, rows: Rows, scalars: Scalars) -> dict[str, jax.Array]:
        teacher = lambda: read_teacher(self.teacher, scalars['teacher'], rows, self.mesh)
        objective, head = self.settings.objective, self.decoder.head(weights)
        return vocabulary_statistics(objective, states, head, scalars['temperature'], self.mesh, teacher)

    def _gradients(self, working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> tuple[Tree, _Metrics, jax.Array]:
        def scaled(working: Tree) -> tuple[jax.Array, tuple[_Metrics, jax.Array]]:
            loss, rest = self._loss(working, frozen, rows, scalars)
            return loss * self.settings.loss_scale, rest

        (_, (metrics, logprobs)), gradients = jax.value_and_grad(scaled, has_aux=True)(working)
        return gradients, metrics, logprobs

    def _loss(
        self, working: Tree, frozen: Tree, rows: Rows, scalars: Scalars
    ) -> tuple[jax.Array, tuple[_Metrics, jax.Array]]:
        """(this micro-batch's part of the loss of its minibatch, (metrics, log-probs [R, N]))."""
        weights = trees.join(working, frozen)
        scored = self._scored(weights, rows, scalars)
        statistics = self._statistics(weights, scored.states, rows, scalars)
        loss, of_loss = require_loss(self.settings.objective, self._tokens(scored, statistics, rows, scalars))
        metrics: _Metrics = dict(of_loss)
        if (seen := scored.routes) is not None:
            metrics[SEEN_ROUTES] = seen
        if (experts := self.decoder.config.experts) and seen is not None and self.settings.router_aux_loss:
            balance = measure_balance(seen.scores, scalars[EXPERT_LOADS], experts.per_token)
            loss += self.settings.router_aux_loss * balance
            metrics['router_balance_sum'] = balance
        metrics |= {'loss_sum': loss, 'entropy_sum': masked_sum(scored.entropy, rows['loss_mask'])}
        return loss, (jax.lax.stop_gradient(metrics), scored.logprobs)

    def _tokens(self, scored: _Scored, statistics: Mapping[str, jax.Array], rows: Rows, scalars: Scalars) -> LossTokens:
        objective = self.settings.objective
        known = {name: rows[name] for name in objective.prepares}
        if VALUES in objective.reads:
            known |= {name: rows[name] for name in (VALUES, RETURNS)}
        if PROXIMAL in objective.reads:
            known[PROXIMAL] = recomputed_logprobs(
                scored.logprobs, rows['recomputed_logprobs'], scalars['weights_are_proximal']
            )
        for name in {REFERENCE, TEACHER} & objective.reads:
            known[name] = rows['reference_logprobs']
        return LossTokens(
            policy_logprobs=scored.logprobs,
            entropy=scored.entropy,
            denominator=scalars['denominator'],
            version=scalars['version'],
            known=known,
            values=scored.values,
            statistics=statistics,
            **{name: rows[name] for name in _LOSS_FIELDS},
        )
