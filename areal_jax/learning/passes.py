"""Passes of the model over minibatches, and the optimizer steps of an update that consist of them.

row_layout.py cuts and places the rows, programs.py has the programs that run on the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.columns import of_models
from areal_jax.learning.forward import TeacherForm
from areal_jax.learning.led_passes import (
    REFERENCE_WEIGHTS,
    STEP,
    TEACHER_WEIGHTS,
    TRAINED_WEIGHTS,
    PassCall,
    PassFollower,
    PassLeader,
    PassRows,
)
from areal_jax.learning.objective.counting import find_starts, token_weights
from areal_jax.learning.objective.objective import COLLISION, END_VALUES, POLICY, REFERENCE, RETURNS, VALUES, Objective
from areal_jax.learning.objective.objectives import require_prepared, require_token_advantages
from areal_jax.learning.packed_rows import PackingReport
from areal_jax.learning.programs import (
    EXPERT_LOADS,
    FOLLOWS,
    SEEN_ROUTES,
    CompiledPrograms,
    LearnerState,
    Scalars,
    describe_cast,
)
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings, sequence_effective_sample_size
from areal_jax.learning.weights import correct_routers, policy_leaves
from areal_jax.sharding.placement import describe, place
from areal_jax.sharding.rules import replicated
from areal_jax.types import NOT_GENERATED, PackedBatch, Segment, Trajectory, TrajectoryGroup, Tree

Declared = tuple[CompiledPrograms, str, tuple[Tree, ...]]  # a program by its name, and arguments of its shapes
_ROW_FIELDS = (
    *('tokens', 'positions', 'segment_ids', 'parent_ids', 'sources', 'targets'),
    *('loss_mask', 'behavior_logprobs', 'advantages', 'policy_versions'),
)


@dataclasses.dataclass(frozen=True)
class KnownTokens:
    """Values of the loss tokens of a batch that are known before its step, float32 [M, R, N]; None = not needed."""

    proximal: np.ndarray | None = None  # log-probs
    reference: np.ndarray | None = None  # log-probs of the reference or the teacher
    values: np.ndarray | None = None  # of the critic
    returns: np.ndarray | None = None
    policy: np.ndarray | None = None  # log-probs that came with the values


def training_rows(
    batch: PackedBatch,
    objective: Objective,
    known: KnownTokens | None = None,
    prepared: Mapping[str, np.ndarray] | None = None,
    prompts: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], float]:
    """A batch as the programs read it, leaves [M, R, ...], its columns by their names, and its denominator.

    Args:
      prepared: the result of `objective.prepare`; None = zeros, if nothing is trained.
      prompts: see counting.token_weights.
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
    routes = {} if follows_routes is None else {FOLLOWS: np.bool_(follows_routes)}
    return routes | {
        'denominator': np.float32(denominator),
        'version': np.int32(version),
        'temperature': np.float32(temperature),
        'weights_are_proximal': np.bool_(weights_are_proximal),
    }


class StepRoutes(NamedTuple):
    """The choices of the routers in the passes of a step, see forward.SeenRoutes."""

    differs: np.ndarray  # int32 [M, R, N]
    loads: np.ndarray  # float32 [L, E], the sum over the micro-batches


class StepResult(NamedTuple):
    """The report of an optimizer step, on the host."""

    step: Mapping[str, np.ndarray]  # metrics of the step, see Optimizer.apply
    microbatches: Sequence[Mapping[str, np.ndarray]]  # metrics of the loss: scalars, or arrays [M]
    logprobs: np.ndarray  # float32 [M, R, N], of the weights before the step
    prepared: Mapping[str, np.ndarray] = MappingProxyType({})  # the result of Objective.prepare before it
    lag: float = 0.0  # see mean_lag
    factor: float = 1.0  # of the learning rate, for that lag
    routes: StepRoutes | None = None  # of a model with experts


class PassWeights(NamedTuple):
    """Weights of a pass, in the form of Passes.working; only 'values' reads a critic among them."""

    name: str | int  # see PassCall.weights
    params: Tree
    frozen: Tree


class Passes:
    """Runs passes on the mesh. Rows come as numpy arrays [M, R, ...]; only `step` changes the state."""

    link: PassLeader | PassFollower | None = None  # to the other processes; None = every process has all rows

    def __init__(
        self,
        layout: RowLayout,
        programs: CompiledPrograms,
        settings: LearnerSettings,
        mesh: Mesh,
        learning_rate: float,
        teacher: Tree = None,
    ):
        """`teacher`: the weights of a teacher that the step itself runs."""
        self.programs, self._layout, self._settings = programs, layout, settings
        self._mesh, self._learning_rate = mesh, learning_rate
        self._beside = {} if teacher is None else {'teacher': teacher}

    @property
    def on_accelerator(self) -> bool:
        """Whether steps are made as accelerators like them.

        On an accelerator one program is queued behind the running one, so that it does not wait for the host; on a
        CPU XLA allocates the temporary memory of each program when it is queued. An accelerator adds gradients in a
        program of their own, and not for a single micro-batch. On a CPU the program of a micro-batch adds its own:
        XLA rounds the sum together with a gradient's last product there, and the bits of runs stay what they were.
        """
        return self.programs.definitions.on_accelerator

    def working(self, state: LearnerState) -> Tree:
        """The trained weights in the dtype that passes compute with."""
        if self._settings.learner.dtype == 'float32':
            return state.params
        if state.working is not None:
            return state.working
        working = self.programs.run('cast', state.params)
        if self.programs.definitions.keeps_working:
            state.working = working
        return working

    def trained(self, state: LearnerState) -> PassWeights:
        return PassWeights(TRAINED_WEIGHTS, self.working(state), state.frozen)

    def reference(self, state: LearnerState) -> PassWeights:
        return PassWeights(REFERENCE_WEIGHTS, state.reference, state.reference_frozen)

    def step(
        self,
        state: LearnerState,
        rows: Mapping[str, np.ndarray],
        denominator: float,
        version: int,
        first: bool,
        factor: float = 1.0,
    ) -> StepResult:
        """Makes one optimizer step on a minibatch, at `factor` times the learning rate.

        `first` says that no step of this update came before it.
        """
        call = PassCall(STEP, TRAINED_WEIGHTS, denominator, version, first, factor)
        return self.repeat_step(state, call, self._share(call, rows))

    def repeat_step(self, state: LearnerState, call: PassCall, rows: PassRows) -> StepResult:
        """Makes the step of a call; see `step`."""
        scalars = self._scalars(call)
        if self._settings.learner.evens_experts:  # the load of the whole minibatch weights each micro-batch's scores
            loads = self._loads(state, rows, scalars)
            scalars = {**scalars, **self._place_loads(loads)}
        run = self._scan if self._settings.learner.accumulate == 'scan' else self._dispatch
        result = run(state, rows, scalars, call.factor)
        rate = self._settings.learner.router_bias_rate
        if rate and result.routes is not None and not float(result.step['skip_count']):
            decoder = self.programs.definitions.decoder
            state.frozen = correct_routers(decoder.config, state.frozen, result.routes.loads, rate)
        return result

    def logprobs(
        self, weights: PassWeights, batch: PackedBatch, version: int, follows: bool | None = None
    ) -> np.ndarray:
        """Log-probs float32 [M, R, N] under given weights; `follows`: see PassCall."""
        rows, denominator = training_rows(batch, self._settings.objective)
        if not self._settings.records_routes:  # the routes in the batch belong to another model
            for column in of_models():
                rows.pop(column.name, None)
        call = PassCall('logprobs', weights.name, denominator, version, follows=follows)
        return self._layout.join_logprobs(self.repeat(call, weights, self._share(call, rows)))

    def compare_rule(self, state: LearnerState, batch: PackedBatch, version: int) -> np.ndarray:
        """Log-probs float32 [M, R, N] of the trained weights, with the rule of delta nets token by token."""
        return self._layout.join_logprobs(self._pass('single_tokens', self.trained(state), batch, version))

    def compare_latents(self, state: LearnerState, batch: PackedBatch, version: int) -> np.ndarray:
        """What absorbed latent attention adds to log-probs of the trained weights, float32 [M, R, N]."""
        return self._layout.join_logprobs(self._pass('latent_forms', self.trained(state), batch, version))

    def repeat(self, call: PassCall, weights: PassWeights, rows: PassRows) -> list[Any]:
        """The results of the program of a call for each micro-batch."""
        return self._run_each(call.program, weights, rows, self._scalars(call))

    def _pass(self, program: str, weights: PassWeights, batch: PackedBatch, version: int) -> list[Any]:
        rows, denominator = training_rows(batch, self._settings.objective)
        call = PassCall(program, weights.name, denominator, version)
        return self.repeat(call, weights, self._share(call, rows))

    def _share(self, call: PassCall, arrays: Mapping[str, np.ndarray]) -> PassRows:
        """The rows of a pass. The other processes, if this one leads, get the call and their rows."""
        rows = self._layout.fit(arrays)
        if isinstance(self.link, PassLeader):
            self.link.share(call, rows)
        return rows

    def _run_each(self, program: str, weights: PassWeights, rows: PassRows, scalars: Scalars) -> list[Any]:
        params, frozen = weights.params, weights.frozen
        if program != 'values':
            params, frozen = policy_leaves(params), policy_leaves(frozen)
        run = self.programs.run
        return [run(program, params, frozen, microbatch, scalars) for microbatch in self._layout.place_each(rows)]

    def _loads(self, state: LearnerState, rows: PassRows, scalars: Scalars) -> np.ndarray:
        """float32 [L, E]: tokens of a minibatch that reach each expert, from an additional pass."""
        passed = self._run_each('loads', self.trained(state), rows, scalars)
        return np.asarray(np.sum(jax.device_get(passed), axis=0), np.float32)

    def _place_loads(self, loads: np.ndarray) -> dict[str, jax.Array]:
        return place({EXPERT_LOADS: loads}, replicated(self._mesh))

    def collisions(self, state: LearnerState, batch: PackedBatch, version: int) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, log Σ π²) of the trained weights, float32 [M, R, N] each."""
        return self._pair('collisions', state, batch, version)

    def values(self, state: LearnerState, batch: PackedBatch, version: int) -> tuple[np.ndarray, np.ndarray]:
        """(log-probs, values of the critic) of the trained weights, float32 [M, R, N] each, from one pass."""
        return self._pair('values', state, batch, version)

    def end_values(self, state: LearnerState, groups: Sequence[TrajectoryGroup], version: int) -> np.ndarray:
        """float32 [rows of the groups]: the value of the state after each row that ended at its limit, else 0.

        Needs a pass over these rows: the other passes do not compute the state, because they do not read a row's last
        token.
        """
        rows = [row for group in groups for row in group.trajectories]
        cut = [number for number, row in enumerate(rows) if row.finish_reason == 'length']
        found = np.zeros(len(rows), np.float32)
        if cut:
            longer = [TrajectoryGroup(0, (with_next_token(rows[number]),)) for number in cut]
            (batch,), _ = self._layout.pack(longer, [np.zeros(1, np.float32)] * len(cut), n_minibatches=1)
            _, values = self.values(state, batch, version)
            found[np.array(cut)[batch.trajectory_ids[batch.loss_mask]]] = values[batch.loss_mask]
        return found

    def held_out(self, state: LearnerState, batch: PackedBatch) -> dict[str, np.ndarray]:
        """The input of Objective.measure_held_out, for a batch that is not trained on, float32 [M, R, N] each."""
        logprobs = lambda weights: self.logprobs(weights, batch, version=0)
        if self._settings.objective.trains_values:
            passed = dict(zip((POLICY, VALUES), self.values(state, batch, version=0), strict=True))
        else:
            passed = {POLICY: logprobs(self.trained(state))}
        return passed if state.reference is None else passed | {REFERENCE: logprobs(self.reference(state))}

    def _pair(
        self, program: str, state: LearnerState, batch: PackedBatch, version: int
    ) -> tuple[np.ndarray, np.ndarray]:
        passed = self._pass(program, self.trained(state), batch, version)
        first, second = (self._layout.join_logprobs(parts) for parts in zip(*passed, strict=True))
        return first, second

    def declared_programs(self, state: LearnerState) -> Iterator[tuple[str, tuple[Tree, ...]]]:
        """(name, arguments) of every program that updates run; `state` may be described only."""
        settings = self._settings
        working, rate = state.params, describe(np.float32(0), replicated(self._mesh))
        if settings.learner.dtype != 'float32':
            working = state.working or describe_cast(state.params, settings.learner.dtype)
            yield 'cast', (state.params,)
        for batch in self._layout.empty_batches():
            rows, denominator = training_rows(batch, settings.objective)
            scalars = training = self._describe_scalars(denominator)
            one = self._layout.describe({name: array[0] for name, array in rows.items()})
            if settings.learner.evens_experts:
                loads = jax.ShapeDtypeStruct(self._layout.expert_shape, np.float32, sharding=replicated(self._mesh))
                training = {**scalars, EXPERT_LOADS: loads}
                yield 'loads', (policy_leaves(working), policy_leaves(state.frozen), one, scalars)
            if settings.learner.accumulate == 'scan':
                whole = self._layout.describe(rows)
                yield 'scan', (state.params, state.optimizer, state.frozen, whole, training, rate)
            if settings.learner.accumulate == 'dispatch':
                given = working, state.frozen, one, training
                yield ('gradients', given) if self.on_accelerator else ('accumulate', (state.params, *given))
            objective = settings.objective
            measured = not objective.learns_from_answers and not objective.trains_values
            scores = settings.scores or settings.diagnostics.splits_ratio or measured
            policy = policy_leaves(working), policy_leaves(state.frozen)
            recomputes = settings.recomputes and VALUES not in objective.reads  # values come with log-probs
            if recomputes or state.reference is not None or scores or POLICY in objective.reads:
                yield 'logprobs', (*policy, one, scalars)
            if COLLISION in objective.reads:
                yield 'collisions', (*policy, one, scalars)
            if settings.diagnostics.delta_rule:
                yield 'single_tokens', (*policy, one, scalars)
            if settings.diagnostics.latent_form:
                yield 'latent_forms', (*policy, one, scalars)
            if settings.critic is not None:
                yield 'values', (working, state.frozen, one, scalars)
        if settings.learner.accumulate == 'dispatch':
            # sums of gradients are like params
            yield self._applying(only=False), (state.params, state.optimizer, state.params, rate)
            if not self.on_accelerator:
                yield 'zeros', (state.params,)
                return
            gradients = describe_cast(state.params, settings.learner.dtype)
            yield 'add_first', (gradients, gradients)
            yield 'add', (state.params, gradients)
            yield self._applying(only=True), (state.params, state.optimizer, gradients, rate)

    def declared_logprobs(self, weights: Tree, frozen: Tree) -> Iterator[tuple[str, tuple[Tree, ...]]]:
        """(name, arguments) of every program that `logprobs` runs for such weights."""
        for batch in self._layout.empty_batches():
            rows, denominator = training_rows(batch, self._settings.objective)
            one = self._layout.describe({name: array[0] for name, array in rows.items()})
            yield 'logprobs', (policy_leaves(weights), policy_leaves(frozen), one, self._describe_scalars(denominator))

    def _scan(self, state: LearnerState, rows: PassRows, scalars: Scalars, factor: float) -> StepResult:
        whole = self._layout.place(rows.arrays, rows.own)
        state.params, state.optimizer, step, metrics, logprobs = self.programs.run(
            'scan', state.params, state.optimizer, state.frozen, whole, scalars, self._rate(factor)
        )
        measured: list[dict[str, Any]] = [dict(jax.device_get(metrics))]
        routes = self._take_routes(measured)
        return StepResult(jax.device_get(step), measured, jax.device_get(logprobs), routes=routes)

    def _take_routes(self, metrics: Sequence[dict[str, Any]]) -> StepRoutes | None:
        found = [one.pop(SEEN_ROUTES) for one in metrics if SEEN_ROUTES in one]
        if not found:
            return None
        if found[0].differs.ndim == 3:
            return StepRoutes(found[0].differs, found[0].loads.sum(axis=0))
        differs = self._layout.join_logprobs([one.differs for one in found]).astype(np.int32)
        return StepRoutes(differs, np.sum([one.loads for one in found], axis=0))

    def _dispatch(self, state: LearnerState, rows: PassRows, scalars: Scalars, factor: float) -> StepResult:
        metrics: list[Mapping[str, jax.Array]] = []
        logprobs: list[jax.Array] = []  # one [R, N] for each micro-batch
        working, queued = self.working(state), int(self.on_accelerator)
        gradients = None if self.on_accelerator else self.programs.run('zeros', state.params)
        for microbatch in self._layout.place_each(rows):  # the next is placed while one runs
            if len(metrics) > queued:  # queue no more, so that programs of other lanes get a turn
                jax.block_until_ready(metrics[-1 - queued])
            gradients, measured, predicted = self._accumulate(
                gradients, len(metrics), (working, state.frozen, microbatch, scalars)
            )
            metrics.append(measured)
            logprobs.append(predicted)
        factor, braked = self._brake(factor, rows.arrays, logprobs)
        del working  # the next copy takes its room
        step = self._apply(state, gradients, factor, only=len(metrics) == 1)
        del gradients  # no gradients are kept between steps
        whole = self._layout.join_logprobs(logprobs)
        found = [dict(one) for one in jax.device_get(metrics)]
        routes = self._take_routes(found)
        return StepResult({**jax.device_get(step), **braked}, found, whole, routes=routes)

    def _accumulate(
        self, gradients: Tree, earlier: int, given: tuple[Tree, ...]
    ) -> tuple[Tree, Mapping[str, jax.Array], jax.Array]:
        """(the sum of the gradients of `earlier` micro-batches and of one more, its metrics, its log-probs)."""
        if not self.on_accelerator:
            return self.programs.run('accumulate', gradients, *given)  # type: ignore[no-any-return]
        added, metrics, logprobs = self.programs.run('gradients', *given)
        if earlier:
            added = self.programs.run('add' if earlier > 1 else 'add_first', gradients, added)
        return added, metrics, logprobs

    def _apply(self, state: LearnerState, gradients: Tree, factor: float, *, only: bool) -> Mapping[str, jax.Array]:
        """Changes the state by gradients, of the `only` micro-batch or summed; returns the metrics of the step."""
        state.working = None
        state.params, state.optimizer, step, *working = self.programs.run(
            self._applying(only=only), state.params, state.optimizer, gradients, self._rate(factor)
        )
        if working:
            [state.working] = working
        return step  # type: ignore[no-any-return]

    def _applying(self, *, only: bool) -> str:
        """The name of the optimizer's program."""
        name = 'apply_only' if self.on_accelerator and only else 'apply'
        return f'{name}_and_cast' if self.programs.definitions.keeps_working else name

    def _brake(
        self, factor: float, rows: Mapping[str, np.ndarray], logprobs: Sequence[jax.Array]
    ) -> tuple[float, dict[str, np.ndarray]]:
        """(the factor of the rate of the step on a minibatch, metrics); waits for log-probs if the brake reads them."""
        brake = self._settings.brake
        if brake.kind != 'ess':
            return factor, {}

        def compute() -> float:
            known = (rows[name] for name in ('behavior_logprobs', 'loss_mask', 'sequence_starts'))
            return float(brake.ess_factor(sequence_effective_sample_size(self._layout.join_logprobs(logprobs), *known)))

        factor *= compute() if self.link is None else self.link.agree(compute)
        return factor, {'brake': np.asarray(factor, np.float32)}

    def _scalars(self, call: PassCall) -> Scalars:
        given = self._host_scalars(call.denominator, call.version, call.first, call.follows)
        return place(given, replicated(self._mesh)) | self._beside

    def _describe_scalars(self, denominator: float) -> Scalars:
        return describe(self._host_scalars(denominator, 0, True, None), replicated(self._mesh)) | self._beside

    def _host_scalars(
        self, denominator: float, version: int, first: bool, follows: bool | None
    ) -> dict[str, np.generic]:
        settings = self._settings
        return training_scalars(
            follows_routes=(settings.learner.routes == 'replay' if follows is None else follows)
            if settings.records_routes
            else None,
            denominator=denominator,
            version=version,
            temperature=settings.rollout.temperature,
            weights_are_proximal=first,
        )

    def _rate(self, factor: float = 1.0) -> jax.Array:
        return place(np.float32(self._learning_rate * factor), replicated(self._mesh))


# The optimizer steps of one update, over its minibatches and epochs.


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model with which the objective compares the trained one; no update changes its weights.

    Its decoder may have another architecture than the trained one; the vocabulary is the same. It reads the rows that
    are packed for the trained model. A pass before the steps gives its log-probs of their tokens. For an objective that
    compares whole distributions, the teacher runs inside each step, with `form` and `weights`: to keep hidden states of
    an earlier pass would take memory for N * d' numbers for N tokens.
    """

    passes: Passes
    weights: Tree  # on the learner's mesh, in `learner.dtype`
    form: TeacherForm
    gives_logprobs: bool

    def logprobs(self, batch: PackedBatch, version: int) -> np.ndarray:
        """Log-probs float32 [M, R, N] of the targets of a batch."""
        return self.passes.logprobs(self.pass_weights, batch, version)

    @property
    def pass_weights(self) -> PassWeights:
        return PassWeights(TEACHER_WEIGHTS, self.weights, {})

    def declared_programs(self) -> Iterator[Declared]:
        """The programs that `logprobs` runs, one for each shape of rows."""
        if self.gives_logprobs:
            for name, args in self.passes.declared_logprobs(self.weights, {}):
                yield self.passes.programs, name, args


@dataclasses.dataclass(frozen=True)
class Trained:
    """The results of an update's steps."""

    results: list[StepResult]  # step i is on minibatch i % minibatches
    known: list[KnownTokens]  # per minibatch, as the steps after the first used them
    batches: Sequence[PackedBatch]  # with the advantages that were trained
    # log-probs of the first minibatch before the update, by the rule token by token; None = not measured
    single_tokens: np.ndarray | None = None
    # what absorbed latent attention adds to log-probs of that minibatch; None = not measured
    of_latents: np.ndarray | None = None

    def steps_applied(self) -> list[bool]:
        """Per step, whether it changed the weights: it does not if the gradient is not finite or a brake skips it."""
        return [not float(result.step['skip_count']) for result in self.results]

    def was_applied(self, n_batches: int) -> list[bool]:
        """Per minibatch, whether one of its steps was applied."""
        steps = self.steps_applied()
        return [any(steps[index::n_batches]) for index in range(n_batches)]


@dataclasses.dataclass(frozen=True)
class Update:
    """The record of one update: its data, how they were packed, and the results of its steps."""

    groups: Sequence[TrajectoryGroup]
    kept: Sequence[TrajectoryGroup]  # the groups that the filter of equal rewards left
    read: Sequence[TrajectoryGroup]  # the kept groups, with only the rows that passes read
    packing: str  # 'shared_prompt' | 'ordinary'
    rows: PackingReport
    version: int  # of the weights before it
    oldest: int | None  # the oldest version whose tokens are in the loss; None = all are
    trained: Trained
    began_s: float  # by the wall clock of the process


def train(
    passes: Passes,
    state: LearnerState,
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    groups: Sequence[TrajectoryGroup],
    version: int,
    scale: float,
    teacher: Teacher | None = None,
) -> Trained:
    """Trains on every minibatch, `learner.epochs` times.

    Args:
      groups: the packed ones.
      version: of the weights before the update.
      scale: multiplies every denominator, see counting.denominator_scale.
    """
    known = _known_tokens(passes, state, settings, batches, version, teacher)
    batches, known = _replace_advantages(passes, state, settings.objective, batches, groups, known, version)
    prompts = number_prompts(groups)
    measures_rule = settings.diagnostics.delta_rule and len(batches) > 0
    single_tokens = passes.compare_rule(state, batches[0], version) if measures_rule else None
    measures_latents = settings.diagnostics.latent_form and len(batches) > 0
    of_latents = passes.compare_latents(state, batches[0], version) if measures_latents else None
    results: list[StepResult] = []
    for number in range(settings.learner.epochs * len(batches)):
        index, first = number % len(batches), number == 0
        prepared = _prepare(passes, state, settings, batches[index], version)
        rows, denominator = training_rows(batches[index], settings.objective, known[index], prepared, prompts)
        lag = mean_lag(batches[index], version, settings.steps, number)
        factor = settings.brake.lag_factor(lag)
        result = passes.step(state, rows, denominator * scale, version, first, factor)
        results.append(result._replace(prepared=prepared, lag=lag, factor=factor))
        if first and settings.recomputes:  # the first pass uses the weights before the update
            known[0] = dataclasses.replace(known[0], proximal=first_logprobs(results, batches))
    return Trained(results, known, batches, single_tokens, of_latents)


def mean_lag(batch: PackedBatch, version: int, steps: int, step: int) -> float:
    """S: the mean number of optimizer steps between the policy that drew a loss token and this step; 0 without tokens.

    Args:
      steps: optimizer steps of an update.
      step: number of this one in its update, from 0.
    """
    versions = batch.policy_versions[batch.loss_mask]
    return float((version - versions).mean()) * steps + step if len(versions) else 0.0


def with_next_token(trajectory: Trajectory) -> Trajectory:
    """The row with one more token, the only one in the loss, which the state after the row predicts."""
    read = (dataclasses.replace(segment, policy_version=NOT_GENERATED) for segment in trajectory.segments)
    following = Segment(np.zeros(1, np.int32), np.zeros(1, np.float32), 0)
    return dataclasses.replace(trajectory, segments=(*read, following))


def number_prompts(groups: Sequence[TrajectoryGroup]) -> np.ndarray:
    """int64 [trajectories]: the number of each trajectory's group."""
    return np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups])


def _replace_advantages(
    passes: Passes,
    state: LearnerState,
    objective: Objective,
    batches: Sequence[PackedBatch],
    groups: Sequence[TrajectoryGroup],
    known: list[KnownTokens],
    version: int,
) -> tuple[Sequence[PackedBatch], list[KnownTokens]]:
    """(batches with the advantages that need a pass before the first step, known tokens with the returns)."""
    if not objective.replaces_advantages:
        return batches, known
    passed: list[dict[str, np.ndarray]] = []
    ends = passes.end_values(state, groups, version) if END_VALUES in objective.reads else None
    for batch, own in zip(batches, known, strict=True):
        of_batch = {REFERENCE: own.reference, VALUES: own.values, POLICY: own.policy}
        found = {name: values for name, values in of_batch.items() if values is not None}
        if COLLISION in objective.reads:
            found[POLICY], found[COLLISION] = passes.collisions(state, batch, version)
        if ends is not None:
            found[END_VALUES] = np.where(batch.loss_mask, ends[np.where(batch.loss_mask, batch.trajectory_ids, 0)], 0.0)
        passed.append(found)
    replaced = require_token_advantages(objective, groups, batches, passed)
    return (
        [dataclasses.replace(b, advantages=of.advantages) for b, of in zip(batches, replaced, strict=True)],
        [dataclasses.replace(own, returns=of.returns) for own, of in zip(known, replaced, strict=True)],
    )


def _prepare(
    passes: Passes, state: LearnerState, settings: LearnerSettings, batch: PackedBatch, version: int
) -> Mapping[str, np.ndarray]:
    """The arrays of Objective.prepare before a step on a minibatch; needs another pass if it reads POLICY."""
    objective, logprobs = settings.objective, None
    if not objective.prepares:
        return {}
    if POLICY in objective.reads:
        logprobs = np.reshape(passes.logprobs(passes.trained(state), batch, version), batch.targets.shape)
    return require_prepared(objective, batch, logprobs)


def _known_tokens(
    passes: Passes,
    state: LearnerState,
    settings: LearnerSettings,
    batches: Sequence[PackedBatch],
    version: int,
    teacher: Teacher | None,
) -> list[KnownTokens]:
    """Per batch the log-probs of the weights before the update, if a later step needs them, and of the reference.

    A teacher's log-probs take the place of the reference's.

    The first batch needs no pass, because its first step computes the same log-probs. If the objective reads values,
    one pass per batch gives both.
    """
    recompute = settings.recomputes
    passed: Sequence[tuple[np.ndarray | None, np.ndarray | None]]
    if VALUES in settings.objective.reads:
        passed = [passes.values(state, batch, version) for batch in batches]
    else:
        before = passes.trained(state) if recompute and len(batches) > 1 else None
        later = [None if before is None else passes.logprobs(before, batch, version) for batch in batches[1:]]
        passed = [(logprobs, None) for logprobs in (None, *later)][: len(batches)]
    known = []
    for batch, (policy, values) in zip(batches, passed, strict=True):
        reference = _compare(passes, state, batch, version, teacher)
        known.append(KnownTokens(policy if recompute else None, reference, values, policy=policy))
    return known


def _compare(
    passes: Passes, state: LearnerState, batch: PackedBatch, version: int, teacher: Teacher | None
) -> np.ndarray | None:
    if teacher is not None and teacher.gives_logprobs:
        return teacher.logprobs(batch, version)
    return None if state.reference is None else passes.logprobs(passes.reference(state), batch, version)


def first_logprobs(results: Sequence[StepResult], batches: Sequence[PackedBatch]) -> np.ndarray:
    """Log-probs float32 [M, R, N] of the first batch under the weights before the update."""
    return np.reshape(results[0].logprobs, batches[0].targets.shape)
