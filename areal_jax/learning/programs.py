"""The programs of one learner: functions that are compiled by name and shape, and the state that they update.

passes.py prepares their arguments.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import KeyPath

from areal_jax.learning import weights as trees
from areal_jax.learning.forward import (
    Rows,
    SeenRoutes,
    TeacherForm,
    predicting_states,
    read_teacher,
    score_targets,
    vocabulary_statistics,
)
from areal_jax.learning.objective.objective import PROXIMAL, REFERENCE, RETURNS, TEACHER, VALUES, LossTokens
from areal_jax.learning.objective.objectives import require_loss
from areal_jax.learning.objective.policy_loss import recomputed_logprobs
from areal_jax.learning.objective.ratios import masked_sum
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.settings import LearnerSettings, sequence_effective_sample_size
from areal_jax.learning.weights import VALUE_HEAD, Params, export_weights, scale_gradient, score_states
from areal_jax.models.attention.backends import jax_settings
from areal_jax.models.decoder import Decoder
from areal_jax.models.experts import measure_balance
from areal_jax.models.layer_parts import CHUNK
from areal_jax.models.logprobs import TokenFunction, token_collisions, token_logprobs
from areal_jax.models.weights import is_router_state, leaf_dtype
from areal_jax.sharding.placement import place
from areal_jax.sharding.rules import Shares, path_name, replicated
from areal_jax.types import Tree

# values that change between calls, see passes.training_scalars; 'teacher': the weights of one that a step itself runs
Scalars = Mapping[str, Tree]
_Metrics = dict[str, Any]  # arrays, and SeenRoutes
FOLLOWS, EXPERT_LOADS = 'follows_routes', 'expert_loads'  # in the scalars of a model with experts
SEEN_ROUTES = 'seen_routes'  # an entry of the metrics of a micro-batch: SeenRoutes
_LOSS_FIELDS = (
    *('behavior_logprobs', 'advantages', 'loss_mask', 'policy_versions', 'sequence_starts', 'token_weights'),
)


class _Scored(NamedTuple):
    """The results of one pass of the trunk for the loss tokens of a micro-batch."""

    states: jax.Array  # [R, N, d], from which they are predicted
    logprobs: jax.Array  # [R, N], like the next two
    entropy: jax.Array
    values: jax.Array | None  # of the critic, if there is one
    routes: SeenRoutes | None  # of a model with experts


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions of one learner that are compiled; every public method returns one of them, jitted.

    `params` are the trained weights, float32; `frozen` are all others, in `learner.dtype`; `working` is `params` cast
    to that dtype, or `params` itself if that is float32. A function donates the weights, optimizer state or gradients
    for which it returns new values. The loss of a micro-batch is its part of the minibatch's loss, so loss and gradient
    of a minibatch are sums over its micro-batches. Shapes: see learning/__init__.py.
    """

    decoder: Decoder
    settings: LearnerSettings
    optimizer: Optimizer
    mesh: Mesh
    attention: str  # resolved implementation
    # the following fields are functions of the fields above
    params: Tree = dataclasses.field(compare=False)  # shardings of the trained weights
    frozen: Tree = dataclasses.field(compare=False)  # of the frozen ones
    state: Tree = dataclasses.field(compare=False)  # of the optimizer state
    exported: Tree = dataclasses.field(compare=False)  # of the interchange form
    # which process publishes which leaves of `exported`; None: every process has its shards of all leaves
    shares: Shares | None = dataclasses.field(default=None, compare=False)
    # paths of the trained leaves if a learner trains in blocks; otherwise the fields above determine them
    trained: tuple[str, ...] | None = None
    teacher: TeacherForm | None = None  # the teacher that a step itself runs

    @property
    def on_accelerator(self) -> bool:
        return bool(self.mesh.devices.flat[0].platform != 'cpu')

    @property
    def keeps_working(self) -> bool:
        """Whether the optimizer's program makes the working copy of the next step too, which is kept until then.

        On a CPU each step makes its own, so that none takes memory beside the engines.
        """
        learner = self.settings.learner
        return self.on_accelerator and learner.accumulate == 'dispatch' and learner.dtype != 'float32'

    @property
    def _stepping(self) -> Optimizer:
        return dataclasses.replace(self.optimizer, selects=True) if self.on_accelerator else self.optimizer

    def copy(self) -> jax.stages.Wrapped:
        """params -> the same values in new buffers."""
        return jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.params)

    def initial_state(self) -> jax.stages.Wrapped:
        """params -> optimizer state."""
        return jax.jit(self.optimizer.init, out_shardings=self.state)

    def cast(self) -> jax.stages.Wrapped:
        """params -> working."""
        return jax.jit(lambda params: trees.cast(params, self.settings.learner.dtype), out_shardings=self.params)

    def export(self) -> jax.stages.Wrapped:
        """(params, frozen) -> the interchange form, in new buffers; or its leaves as `shares` spreads them."""
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

    def single_tokens(self) -> jax.stages.Wrapped:
        """`logprobs`, with the rule of delta nets token by token."""

        def single_tokens(working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> jax.Array:
            weights = trees.join(working, frozen)
            states, _ = self._policy_states(weights, rows, scalars, chunk=1)
            return self._score_targets(weights, states, rows, scalars)[0]

        return jax.jit(single_tokens, out_shardings=replicated(self.mesh))

    def latent_forms(self) -> jax.stages.Wrapped:
        """What absorbed latent attention adds to `logprobs`, [R, N], where both forms compute in `publish_dtype`."""
        own = self.decoder
        absorbed = Decoder(own.config.absorb(), layers=own.layers, lora=own.lora)

        def latent_forms(working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> jax.Array:
            weights = trees.cast(trees.join(working, frozen), self.settings.publish_dtype)

            def score(decoder: Decoder) -> jax.Array:
                states, _ = predicting_states(
                    decoder, weights, rows, mesh=self.mesh, follows=scalars.get(FOLLOWS),
                    attention='blocked',  # takes heads as long as a latent, which kernels may not
                    expert_parallel=self.settings.learner.expert_parallel,
                )  # fmt: skip
                return self._score_targets(weights, states, rows, scalars)[0]

            return score(absorbed) - score(own)

        return jax.jit(latent_forms, out_shardings=replicated(self.mesh))

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

    def zeros(self) -> jax.stages.Wrapped:
        """params -> gradients that are all zero."""
        return jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=self.params)

    def accumulate(self) -> jax.stages.Wrapped:
        """(gradients, working, frozen, rows, scalars) -> (gradients with the micro-batch added, metrics, log-probs
        [R, N])."""

        def accumulate(
            gradients: Tree, working: Tree, frozen: Tree, rows: Rows, scalars: Scalars
        ) -> tuple[Tree, _Metrics, jax.Array]:
            added, metrics, logprobs = self._gradients(working, frozen, rows, scalars)
            return _add(gradients, self._unscale(added)), metrics, logprobs

        everywhere = replicated(self.mesh)
        return jax.jit(accumulate, donate_argnums=0, out_shardings=(self.params, everywhere, everywhere))

    def gradients(self) -> jax.stages.Wrapped:
        """(working, frozen, rows, scalars) -> (gradients of a micro-batch like `working`, metrics, log-probs [R, N]).

        They are still multiplied by the loss scale.
        """
        everywhere = replicated(self.mesh)
        return jax.jit(self._gradients, out_shardings=(self.params, everywhere, everywhere))

    def add_first(self) -> jax.stages.Wrapped:
        """(gradients of a micro-batch, those of another) -> their sum in float32."""
        return jax.jit(lambda one, other: _add(self._unscale(one), self._unscale(other)), out_shardings=self.params)

    def add(self) -> jax.stages.Wrapped:
        """(sum in float32, gradients of a micro-batch) -> their sum, in the buffers of the first."""
        add = lambda total, added: _add(total, self._unscale(added))
        return jax.jit(add, donate_argnums=0, out_shardings=self.params)

    def apply(self) -> jax.stages.Wrapped:
        """(params, state, sum of gradients, learning rate) -> (params, state, step metrics)."""
        shardings = (self.params, self.state, replicated(self.mesh))
        return jax.jit(self._stepping.apply, donate_argnums=(0, 1), out_shardings=shardings)

    def apply_only(self) -> jax.stages.Wrapped:
        """`apply` for the gradients of the only micro-batch."""

        def apply(params: Tree, state: Tree, gradients: Tree, learning_rate: jax.Array) -> tuple[Tree, Tree, _Metrics]:
            return self._stepping.apply(params, state, self._unscale(gradients), learning_rate)

        return jax.jit(apply, donate_argnums=(0, 1), out_shardings=(self.params, self.state, replicated(self.mesh)))

    def apply_and_cast(self) -> jax.stages.Wrapped:
        """(params, state, sum of gradients, learning rate) -> (params, state, step metrics, working)."""
        return self._apply_and_cast(lambda gradients: gradients)

    def apply_only_and_cast(self) -> jax.stages.Wrapped:
        """`apply_and_cast` for the gradients of the only micro-batch."""
        return self._apply_and_cast(self._unscale)

    def _apply_and_cast(self, unscale: Callable[[Tree], Tree]) -> jax.stages.Wrapped:
        def apply(
            params: Tree, state: Tree, gradients: Tree, learning_rate: jax.Array
        ) -> tuple[Tree, Tree, _Metrics, Tree]:
            params, state, metrics = self._stepping.apply(params, state, unscale(gradients), learning_rate)
            return params, state, metrics, trees.cast(params, self.settings.learner.dtype)

        shardings = (self.params, self.state, replicated(self.mesh), self.params)
        return jax.jit(apply, donate_argnums=(0, 1), out_shardings=shardings)

    def scan(self) -> jax.stages.Wrapped:
        """(params, state, frozen, rows [M, R, ...], scalars, learning rate) -> (params, state, step metrics, metrics
        [M], log-probs [M, R, N]): a whole minibatch."""

        def scan(
            params: Tree, state: Tree, frozen: Tree, rows: Rows, scalars: Scalars, learning_rate: jax.Array
        ) -> tuple[Tree, Tree, _Metrics, _Metrics, jax.Array]:
            working = trees.cast(params, self.settings.learner.dtype)  # once, outside the loop

            def body(gradients: Tree, microbatch: Rows) -> tuple[Tree, tuple[_Metrics, jax.Array]]:
                added, metrics, logprobs = self._gradients(working, frozen, microbatch, scalars)
                return _add(gradients, self._unscale(added)), (metrics, logprobs)

            # metrics [M], logprobs [M, R, N]
            gradients, (metrics, logprobs) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), rows)
            learning_rate, braked = self._brake(learning_rate, rows, logprobs)
            params_after, state, step_metrics = self._stepping.apply(params, state, gradients, learning_rate)
            return params_after, state, step_metrics | braked, metrics, logprobs

        everywhere = replicated(self.mesh)
        shardings = (self.params, self.state, everywhere, everywhere, everywhere)
        return jax.jit(scan, donate_argnums=(0, 1), out_shardings=shardings)

    def _brake(self, learning_rate: jax.Array, rows: Rows, logprobs: jax.Array) -> tuple[jax.Array, _Metrics]:
        """(the learning rate for a minibatch with these log-probs [M, R, N], metrics)."""
        brake = self.settings.brake
        if brake.kind != 'ess':
            return learning_rate, {}
        known = (rows[name] for name in ('behavior_logprobs', 'loss_mask', 'sequence_starts'))
        factor = brake.ess_factor(sequence_effective_sample_size(logprobs, *known)).astype(jnp.float32)
        return learning_rate * factor, {'brake': factor}

    def _unscale(self, gradients: Tree) -> Tree:
        """In float32, without the loss scale, which kept small gradients of a narrow dtype above 0."""
        unscale = 1.0 / self.settings.learner.loss_scale
        return jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, gradients)

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
        if values is not None and self.settings.objective.scores_answers:  # skip the head over the vocabulary
            return _Scored(states, jnp.zeros_like(values), jnp.zeros_like(values), values, routes)
        return _Scored(states, *self._score_targets(weights, states, rows, scalars), values, routes)

    def _policy_states(
        self, weights: Tree, rows: Rows, scalars: Scalars, chunk: int = CHUNK
    ) -> tuple[jax.Array, SeenRoutes | None]:
        return predicting_states(
            self.decoder, weights, rows, attention=self.attention, mesh=self.mesh, follows=scalars.get(FOLLOWS),
            chunk=chunk, expert_parallel=self.settings.learner.expert_parallel,
        )  # fmt: skip

    def _score_targets(
        self,
        weights: Tree,
        states: jax.Array,
        rows: Rows,
        scalars: Scalars,
        compute: TokenFunction = token_logprobs,
    ) -> tuple[jax.Array, jax.Array]:
        return score_targets(
            self.decoder, weights, states, rows['targets'], scalars['temperature'], mesh=self.mesh,
            stored=self._stored_head, compute=compute,
        )  # fmt: skip

    @property
    def _stored_head(self) -> tuple[PartitionSpec]:
        return (self.decoder.head(trees.join(self.params, self.frozen)).spec,)

    def _values(self, weights: Tree, states: jax.Array, rows: Rows) -> jax.Array | None:
        """[R, N]: the critic's value of the state before each loss token; None without a critic."""
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
        caps = self.decoder.config.logit_cap, self.teacher.decoder.config.logit_cap if self.teacher else None
        return vocabulary_statistics(
            objective, states, head, scalars['temperature'], self.mesh, teacher, caps, self._stored_head
        )

    def _gradients(self, working: Tree, frozen: Tree, rows: Rows, scalars: Scalars) -> tuple[Tree, _Metrics, jax.Array]:
        def scaled(working: Tree) -> tuple[jax.Array, tuple[_Metrics, jax.Array]]:
            loss, rest = self._loss(working, frozen, rows, scalars)
            return loss * self.settings.learner.loss_scale, rest

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
        if (experts := self.decoder.config.experts) and seen is not None and self.settings.learner.evens_experts:
            balance = measure_balance(seen.scores, scalars[EXPERT_LOADS], experts.per_token)
            loss += self.settings.learner.router_aux_loss * balance
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


# The compiled programs of one learner, by name.


_Shapes = tuple[tuple[int, ...], ...]
_Key = tuple[str, _Shapes]  # of a program: its name and the shapes of its rows
_KeptKey = tuple[Programs, _Key, str]  # and jax's settings
_T = TypeVar('_T')
AHEAD = 'learner warm-up'  # name of the thread that compiles programs before their first call
MOST_KEPT = 64  # programs that equal learners of one process share


def _add(gradients: Tree, added: Tree) -> Tree:
    return jax.tree.map(jnp.add, gradients, added)


class CompiledPrograms:
    """Compiles each program once for every shape of rows that it is called with; from any thread.

    Programs are compiled ahead of their first call, so that warming up runs nothing and needs no memory for results.
    Learners of equal definitions share their compiled programs while jax's settings are the same: a second run of a
    process compiles nothing.
    """

    kept: ClassVar[collections.OrderedDict[_KeptKey, jax.stages.Compiled]] = collections.OrderedDict()

    def __init__(self, definitions: Programs):
        self.definitions = definitions
        self._lock = threading.Lock()
        self.traced: dict[_Key, Future[jax.stages.Lowered]] = {}  # until they are compiled
        self._programs: dict[_Key, Future[jax.stages.Compiled]] = {}

    @property
    def compiled(self) -> dict[_Key, jax.stages.Compiled]:
        """The programs by name and the shapes of their rows; waits for the ones being compiled."""
        return {key: program.result() for key, program in self._programs.copy().items()}

    @property
    def temporary_bytes(self) -> int:
        """The most memory that one of the compiled programs needs on a device while it runs; 0 if unknown."""
        found = [program.memory_analysis() for program in self.compiled.values()]
        return max((int(analysis.temp_size_in_bytes) for analysis in found if analysis is not None), default=0)

    def trace(self, name: str, *args: Tree) -> None:
        """Runs the first half of `compile`, the one that holds the interpreter's lock."""
        if self._kept_key(_key(name, args)) not in self.kept:
            self._trace(name, args)

    def _trace(self, name: str, args: tuple[Tree, ...]) -> jax.stages.Lowered:
        return self._once(self.traced, _key(name, args), lambda: getattr(self.definitions, name)().lower(*args))

    def compile(self, name: str, *args: Tree) -> jax.stages.Compiled:
        """Compiles the program `name` (a method of Programs) for `args`, of which only the shapes matter.

        If another thread is compiling it, this one waits for the result.
        """
        key = _key(name, args)

        def compile_traced() -> jax.stages.Compiled:
            if (program := self.kept.get(self._kept_key(key))) is None:
                program = self._trace(name, args).compile()
                self._keep(key, program)
            self.traced.pop(key, None)
            return program

        return self._once(self._programs, key, compile_traced)

    def _kept_key(self, key: _Key) -> _KeptKey:
        return self.definitions, key, jax_settings()

    def _keep(self, key: _Key, program: jax.stages.Compiled) -> None:
        self.kept[self._kept_key(key)] = program
        while len(self.kept) > MOST_KEPT:
            self.kept.popitem(last=False)

    def run(self, name: str, *args: Tree) -> Tree:
        return self.compile(name, *args)(*args)

    def _once(self, made: dict[_Key, Future[_T]], key: _Key, make: Callable[[], _T]) -> _T:
        """Returns the result of `make` in the first thread that asks; the others wait. All of them raise its error."""
        with self._lock:
            known = key in made
            future = made.setdefault(key, Future())
        if not known:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
                raise
        return future.result()


def _key(name: str, args: tuple[Tree, ...]) -> _Key:
    return name, tuple(arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg)


# The state that a learner keeps on its mesh between commands.


@dataclasses.dataclass
class LearnerState:
    """Trees of arrays over the mesh. The programs of an update donate `params` and `optimizer`.

    Every field that a program donates is replaced by its result at once: its old buffers must not be read again. Who
    gives it other `params` sets `working` to None.
    """

    params: Tree  # trained weights, float32
    frozen: Tree  # all other weights, in learner.dtype; without adapters only the state of routers
    optimizer: Tree  # see optimizer.Optimizer
    reference: Tree = None  # trained weights of the reference, in learner.dtype; None if the objective reads none
    working: Tree = None  # `params` in learner.dtype if Programs.keeps_working; None = not made yet
    reference_routers: Tree = dataclasses.field(default_factory=dict)  # the reference's own state of routers

    @property
    def reference_frozen(self) -> Tree:
        """The frozen weights of the reference."""
        return trees.join(self.reference_routers, trees.split(self.frozen, lambda path: not is_router_state(path))[0])

    @property
    def weights_and_optimizer(self) -> dict[str, Tree]:
        """The contents of a checkpoint in one tree, for `require_finite`."""
        return trees.join(self.params, self.frozen) | {'optimizer': self.optimizer}


def place_state(
    trained: Params,
    frozen: Params,
    settings: LearnerSettings,
    programs: CompiledPrograms,
    reference: tuple[Params, Params] | None = None,
) -> LearnerState:
    """Copies weights to the mesh and makes the state of an optimizer that has done no step.

    Args:
      reference: weights of the shapes of `trained` and `frozen`, if the objective reads a reference; None = these.
    """
    shardings = programs.definitions
    params = _copy(trees.cast(trained, 'float32'), programs)
    own, other = reference or (None, frozen)
    routers, over = (trees.policy_leaves(trees.split(tree, is_router_state)[0]) for tree in (other, shardings.frozen))
    return LearnerState(
        params=params,
        frozen=place(trees.cast(frozen, settings.learner.dtype), shardings.frozen),
        optimizer=programs.run('initial_state', params),
        reference=_place_reference(params, own, settings, programs),
        reference_routers=place(routers, over),
    )


def describe_state(trained: Params, frozen: Params, settings: LearnerSettings, programs: Programs) -> LearnerState:
    """The shapes, dtypes and shardings of `place_state`'s result, to compile before it exists."""
    params = _describe(trained, programs.params, 'float32')
    return LearnerState(
        params=params,
        frozen=_describe(frozen, programs.frozen, settings.learner.dtype),
        optimizer=_describe(jax.eval_shape(programs.optimizer.init, params), programs.state),
        reference=describe_cast(trees.policy_leaves(params), settings.learner.dtype)
        if REFERENCE in settings.objective.reads
        else None,
        working=describe_cast(params, settings.learner.dtype) if programs.keeps_working else None,
    )


def describe_cast(tree: Tree, dtype: str) -> Tree:
    """Descriptions of arrays (given as arrays or descriptions) cast to `dtype`."""
    describe = lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, _own(path, dtype), sharding=leaf.sharding)
    return jax.tree_util.tree_map_with_path(describe, tree)


def _place_reference(
    params: Tree, reference: Params | None, settings: LearnerSettings, programs: CompiledPrograms
) -> Tree:
    if REFERENCE not in settings.objective.reads:
        return None
    if reference is None:
        return trees.policy_leaves(programs.run('copy' if settings.learner.dtype == 'float32' else 'cast', params))
    return place(trees.cast(reference, settings.learner.dtype), trees.policy_leaves(programs.definitions.params))


def _describe(tree: Tree, shardings: Tree, dtype: str | None = None) -> Tree:
    own = lambda path, leaf: leaf.dtype if dtype is None else _own(path, dtype)
    describe = lambda path, leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, own(path, leaf), sharding=sharding)
    return jax.tree_util.tree_map_with_path(describe, tree, shardings)


def _own(path: KeyPath, dtype: str) -> np.dtype:
    return jnp.dtype(leaf_dtype(path_name(path), dtype))


def _copy(trained: Params, programs: CompiledPrograms) -> Tree:
    shardings = programs.definitions.params
    on_host = all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(trained))
    if on_host and jax.process_count() == 1:  # copied once, while they are placed
        return jax.device_put(trained, shardings, may_alias=False)
    return programs.run('copy', place(trained, shardings))
