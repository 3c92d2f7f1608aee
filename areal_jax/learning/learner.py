"""The trainer that the controller drives: groups of one update in, weights of the next version out.

The controller calls it in a single process, distributed/ in several. The commands are here; row_layout.py packs rows,
passes.py makes the optimizer steps, programs.py compiles, weights.py converts weights for engines and checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.learning import weights as trees
from areal_jax.learning.diagnostics.compared_tokens import read_tokens
from areal_jax.learning.diagnostics.measurement import Metrics, measure
from areal_jax.learning.diagnostics.ratio_split import RatioSampler
from areal_jax.learning.objective.counting import UpdatePrice, denominator_scale, require_full_softmax
from areal_jax.learning.objective.objectives import require_advantages, require_finite_loss
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.passes import Declared, Update, train
from areal_jax.learning.programs import AHEAD, describe_cast, place_state
from areal_jax.learning.row_layout import RowLayout
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.trained_part import (
    PartMaker,
    PreparedMesh,
    TrainedPart,
    move_state,
    place_teacher,
    prepare_mesh,
)
from areal_jax.learning.weights import (
    HostCopies,
    Params,
    choose_trained,
    match_snapshot,
    read_snapshot,
    require_critic,
    require_finite,
    take_snapshot,
)
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import stack_layers
from areal_jax.native.compiled_library import free_kept_blocks, preferred
from areal_jax.sharding.placement import gather
from areal_jax.types import Prompt, Segment, TokenArrays, Trajectory, TrajectoryGroup, Tree


class SpmdLearner:
    """Weights and optimizer state on a mesh, and the commands of `protocols.Learner`. Blocking; for one lane's thread.

    The learner owns its buffers: it copies the weights that it is given, `publish` and `save` return copies, and an
    update replaces weights and optimizer state in place. On a mesh that spans processes, every process has a learner
    and calls the same commands in the same order (distributed/remote_learner.py); each packs the same groups to the
    same rows.
    """

    announce: Callable[[int, int], None] = staticmethod(lambda done, total: None)  # of every program of `warm_up`
    # the learners of other processes that must write a checkpoint, or a version, too (distributed/remote_learner.py)
    followers = writers = ()

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        mesh: Mesh,
        *,
        optimizer: Optimizer,
        learning_rate: float,
        settings: LearnerSettings,
        compile_ahead: bool = False,
        reference: Params | None = None,
        teacher: tuple[Decoder, Params] | None = None,
        critic: Params | None = None,
    ):
        """Places a copy of `params`, a nested dict of arrays in list form that fits the decoder, on the mesh.

        An objective that reads the reference compares with `reference`, weights of the same form and shapes that the
        caller does not change, or with `params` where it is None; `restore` changes neither. One that reads a teacher
        needs `teacher`, its decoder and weights in list form. One that trains values needs `critic`: a value head, and
        with `settings.critic.own_model` weights of the policy's shapes, in list form.

        If the decoder has adapters (lora), only they are trained; all other weights are kept in `learner.dtype`.
        With `compile_ahead`, a thread traces the programs of `warm_up` while the weights are copied, and compiles them
        from `begin_compiling` on.

        Raises ConfigError, naming the config field, for settings that cannot work, and AttentionError for an attention
        backend whose result differs from a dense one here.
        """
        self._decoder, self._mesh, self._settings = decoder, mesh, settings
        self._layout = RowLayout(decoder.config, mesh, settings)
        self.attention, self.passed_over = self._layout.attention, self._layout.passed_over
        self.packing = self._layout.packing
        masks_truncated = settings.objective.masks_truncated
        self._price = UpdatePrice(self.packing, settings.learner.epochs, settings.filters, masks_truncated)
        params = params if critic is None else {**params, trees.CRITIC: critic}
        if decoder.layers == 'stacked':
            params, reference = stack_layers(params), reference and stack_layers(reference)
        self._teacher, *read = place_teacher(teacher, decoder.config, mesh, settings, optimizer, self.packing)
        make = self._make = PartMaker(decoder, mesh, settings, optimizer, self._layout, learning_rate, *read)
        self.parts = self._make_parts(make, params)
        self._host_copies = HostCopies() if _is_on_host(decoder, mesh, settings) else None
        self._declared = self._declare()
        first = self.parts[0]
        self.programs, self._passes = first.programs, first.passes
        self._ratio: RatioSampler | None = None
        if settings.diagnostics.splits_ratio:
            working = describe_cast(first.described.params, settings.learner.dtype)
            self._ratio = RatioSampler(settings, self._passes, self._layout, self.programs, working)
        self._closing, self._is_traced, self._may_compile = False, threading.Event(), threading.Event()
        self._ahead: threading.Thread | None = None
        if compile_ahead:
            self._ahead = threading.Thread(target=self._compile_ahead, name=AHEAD, daemon=True)
            self._ahead.start()
        try:
            compared = None if reference is None else trees.split(reference, first.trains)
            self.state = place_state(*trees.split(params, first.trains), settings, self.programs, compared)
        except BaseException:
            self.close()
            raise
        self._version: int | None = None  # of the weights, once it was told
        self._copy: Tree = None  # what the last `publish` returned; None once the weights have changed
        self._update: Update | None = None  # the last one, until `publish`

    def warm_up(self) -> int:
        """Compiles, and does not run, every program of updates and publications; returns how many there are."""
        self.begin_compiling()
        for done, (programs, name, args) in enumerate(self._declared):
            self.announce(done, len(self._declared))
            programs.compile(name, *args)
        return sum(len(part.programs.compiled) for part in self.parts)

    def begin_compiling(self) -> None:
        """Lets the background thread, which traces first, compile."""
        self._may_compile.set()

    def wait_traced(self) -> None:
        """Waits until the background thread has finished tracing. Compilation, which follows, does not hold the GIL."""
        if self._ahead is not None:
            self._is_traced.wait()

    def finish_compiling(self) -> int:
        """Like `warm_up`; a learner that compiles ahead compiles nothing in the calling thread, which waits."""
        if self._ahead is not None:
            self._ahead.join()
        return self.warm_up()

    def _compile_ahead(self) -> None:
        with contextlib.suppress(Exception):  # `warm_up` raises it
            for programs, name, args in self._open_programs():
                programs.trace(name, *args)
        self._is_traced.set()
        self._may_compile.wait()
        with contextlib.suppress(Exception):
            for programs, name, args in self._open_programs():
                programs.compile(name, *args)

    def _open_programs(self) -> Iterator[Declared]:
        for declared in self._declared:
            if self._closing:
                break
            yield declared

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that `update` would read, to price it beforehand: filtered groups and shared prompts are left out."""
        return self._price.tokens(groups)

    def price(self) -> UpdatePrice:
        """The counting rule of `update_tokens`, for a process that has no learner."""
        return self._price

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Metrics:
        """Trains on one batch with `n_minibatches * epochs` optimizer steps; `version` is the version before it.

        If there is nothing to train (no group, none with a signal, all tokens too old), weights and optimizer state do
        not change by a bit. Metrics are floats, except for the histogram of token ages, which is a list; a metric that
        is not defined (the mean over nothing) is absent.

        Raises ValueError for a trajectory that does not fit a row, a reward that is not finite, or a token of a version
        after `version`; weights are untouched then.
        """
        settings, objective = self._settings, self._settings.objective
        began_s = time.perf_counter()
        if settings.loss.truncated_sampling == 'refuse':
            require_full_softmax(groups)
        kept = self._price.kept(groups)
        read, scale = self._price.read(kept), 1.0
        if settings.loss.denominator == 'all':
            scale = denominator_scale(self._price.read(groups), read, objective.aggregation)
        oldest_age = settings.staleness.oldest_trained
        oldest = None if oldest_age is None else version - oldest_age
        are_kept = {id(group) for group in kept}  # an own estimator sees all groups of the update
        estimated = zip(groups, require_advantages(objective, groups), strict=True)
        batches, report = self._layout.pack(
            kept,
            [advantages for group, advantages in estimated if id(group) in are_kept],
            n_minibatches=settings.learner.n_minibatches,
            oldest_version=oldest,
            newest_version=version,
            round_microbatches=settings.learner.accumulate == 'scan',
            masks_truncated=objective.masks_truncated,
            keeps_groups=objective.keeps_groups,
        )
        self._copy = self._version = None
        if self._ratio:
            self._ratio.require(version, self.state)
        with preferred():
            trained = train(self._passes, self.state, settings, batches, kept, version, scale, self._teacher)
        self._update = Update(groups, kept, read, self.packing, report, version, oldest, trained, began_s)
        metrics = measure(self._update, settings, self._decoder, self.state, self._ratio)
        require_finite_loss(objective, metrics.get('loss/value', 0.0), version)
        self._version = version + 1
        return metrics

    def read_tokens(self, draws: Sequence[int]) -> list[list[TokenArrays]]:
        """The arrays of compared_tokens.read_tokens for these draws, of the last update; call it before `publish`."""
        assert self._update is not None, 'no update was made, or it is published'
        return read_tokens(self._update, self._settings, draws)

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Measures the objective on data that is not trained on, at the temperature of training; changes nothing.

        Returns:
          For the likelihood {'nll': nats per token, 'tokens': their number}, see Objective.measure_held_out; {'tokens':
          0} without any tokens. Independent of the packing.

        Raises ValueError for a trajectory that does not fit a row, NonFiniteError for a result that is not finite.
        """
        objective = self._settings.objective
        advantages = objective.advantages(groups)
        batches, _ = self._layout.pack(groups, advantages, n_minibatches=1, keeps_groups=objective.keeps_groups)
        if not batches:
            return {'tokens': 0.0}
        (batch,) = batches  # one minibatch, all of whose tokens are in the loss
        return objective.measure_held_out(batch, self._passes.held_out(self.state, batch))

    def score(self, version: int, prompt_tokens: np.ndarray, answer_tokens: np.ndarray) -> np.ndarray | None:
        """float32 [A]: log-probs of an answer under the weights of `version`, at the temperature of training.

        None if the learner has other weights by now. `prompt_tokens` int32 [P], `answer_tokens` int32 [A], A >= 1.
        """
        if version != self._version:
            return None
        answer = Segment(answer_tokens, np.zeros(len(answer_tokens), np.float32), 0)
        prompt = Prompt(0, prompt_tokens, '', {})
        trajectory = Trajectory(prompt, 0, (answer,), 0.0, 'length', '', admitted_s=0.0, finished_s=0.0)
        return self._logprobs([TrajectoryGroup(0, (trajectory,))])

    def _logprobs(self, groups: Sequence[TrajectoryGroup]) -> np.ndarray:
        """float32 [tokens], one for each generated token; the tokens of a trajectory are in order."""
        ones = [np.ones(len(group.trajectories), np.float32) for group in groups]
        batches, _ = self._layout.pack(groups, ones, n_minibatches=1)
        if not batches:
            return np.zeros(0, np.float32)
        (batch,) = batches  # one minibatch, all of whose tokens are in the loss
        working = self._passes.working(self.state)
        logprobs = self._passes.logprobs(working, self.state.frozen, batch, version=0)  # [M, R, N]
        return logprobs[batch.loss_mask]

    def publish(self, version: int) -> Tree:
        """The weights in interchange form, adapters merged, in buffers that no later update touches.

        They are on this learner's devices, sharded as in training; on one CPU with `settings.publishes_files`, numpy
        arrays. If the mesh spans processes: a tree of SharedLeaf, or, without that setting, all leaves on every host.
        """
        if self._copy is not None and self._version == version:  # it was published, and nothing was trained since
            return self._copy
        self._version, self._update = version, None
        if self._ratio:
            self._ratio.keep(version, self.state)
        if self._host_copies:
            self._copy = self._host_copies.copy(trees.policy_leaves(trees.join(self.state.params, self.state.frozen)))
            return self._copy
        copy = self.programs.run('export', self.state.params, self.state.frozen)
        if (shares := self.programs.definitions.shares) is not None:
            return shares.collect(copy)
        self._copy = copy if jax.process_count() == 1 else jax.tree.map(gather, copy)
        return self._copy

    def save(self) -> dict[str, Tree]:
        """{'params': nested dict, 'optimizer': {path: leaf}} on the host, in memory that no later update touches.

        In interchange form, one leaf per layer, whatever form and mesh this learner has: numpy arrays, or, on a mesh
        that spans processes, HostShards of the part that this process writes. Arrays on a CPU are views, see
        `view_shards`. The copy made by the last `publish` is reused for the policy's weights if it holds them all (one
        process, no adapters, float32) and no update has run since.

        Raises NonFiniteError for weights or optimizer state with NaN or infinity: no checkpoint may hold them.
        """
        self.require_finite('the trained weights', 'lower optimizer.learning_rate')
        free_kept_blocks()  # there may be no room for them and the copies
        reusable = jax.process_count() == 1 and not self._decoder.lora and self._settings.publish_dtype == 'float32'
        copied = reusable and self._copy is not None
        params = trees.join(self.state.params, self.state.frozen)
        if copied:
            params = {name: params[name] for name in params.keys() - self._copy.keys()}  # the weights of a critic
        saved = take_snapshot(self._decoder, params, self._whole_optimizer())
        return saved | {'params': saved['params'] | jax.device_get(self._copy)} if copied else saved

    def _whole_optimizer(self) -> Tree:
        return self.state.optimizer

    def restore(self, saved: Mapping[str, Tree]) -> None:
        """Restores the result of `save` in one process, or the contents of a checkpoint, on any mesh and in either form
        of layers. Every process reads only the parts that its own devices hold.

        The old state is freed before the new one is read, so that the devices need no room for both: a reader that
        fails leaves the learner empty.

        Raises ValueError for names or shapes that differ from this learner's, which is unchanged then, and
        NonFiniteError if the restored values hold NaN or infinity.
        """
        programs, state = self.programs.definitions, self.state
        current = {'params': trees.join(state.params, state.frozen), 'optimizer': state.optimizer}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), current)
        if self._settings.critic is not None:
            require_critic(saved['params'])
        match_snapshot(self._decoder, saved, shapes)
        del current
        state.params = state.frozen = state.optimizer = state.working = self._copy = None
        if self._ratio:
            self._ratio.forget()
        shardings = {'params': trees.join(programs.params, programs.frozen), 'optimizer': programs.state}
        new = read_snapshot(self._decoder, saved, shapes, shardings)
        state.params, state.frozen = trees.split(new['params'], self.parts[0].trains)
        state.optimizer = new['optimizer']
        self.require_finite('the checkpoint', 'remove it to go on from the one before, or start again')

    def require_finite(self, what: str, fix: str) -> None:
        """Raises NonFiniteError for NaN or infinity in weights or optimizer state, see finiteness.require_finite."""
        require_finite(self.state.weights_and_optimizer, self._mesh, what, fix)

    def close(self, wait: bool = True) -> None:
        """Ends the thread that compiles ahead after its current program; `CommandLeader` releases the followers.

        Without `wait` it returns at once. XLA cannot be interrupted, and a process that ends needs no more programs.
        """
        self._closing = True
        self._may_compile.set()
        if self._ahead is not None and wait:
            self._ahead.join()

    def _make_parts(self, make: PartMaker, params: Params) -> list[TrainedPart]:
        """A single part: it trains the adapters if there are any, else every weight."""
        return [make.make(params, choose_trained(adapters=bool(self._decoder.lora)))]

    def _declare(self) -> list[Declared]:
        exports = self._host_copies is None
        declared = [one for part in self.parts for one in part.declared_programs(exports=exports)]
        return declared + ([] if self._teacher is None else list(self._teacher.declared_programs()))


def _is_on_host(decoder: Decoder, mesh: Mesh, settings: LearnerSettings) -> bool:
    """Whether the weights are on the host in the form in which a version is written."""
    has_form = decoder.layers == 'list' and not decoder.lora and settings.publish_dtype == 'float32'
    is_here = mesh.size == jax.process_count() == 1 and mesh.devices.flat[0].platform == 'cpu'
    return settings.publishes_files and has_form and is_here


# The learner that continues on another mesh between two updates, for cluster.reallocate.


class MovingLearner(SpmdLearner):
    """`protocols.Learner` that moves. For one process, an objective without a teacher, and no split of the ratio."""

    def __init__(self, *args: Any, **options: Any):
        """See SpmdLearner; config/splits.py refuses settings with which a learner cannot move."""
        super().__init__(*args, **options)
        # with the mesh in use: its programs are kept for the way back
        self._prepared = {self._mesh: PreparedMesh(self._mesh, self._layout, self.parts[0])}

    def prepare(self, mesh: Mesh) -> list[Tree]:
        """Compiles the programs that `move` to this mesh needs, once; in any thread, while updates run.

        Returns shapes and shardings of the results of `publish`: on the mesh in use, and on `mesh`.

        Raises ConfigError for a mesh over which the model or the rows cannot be sharded.
        """
        if mesh not in self._prepared:
            prepared = prepare_mesh(self._make, self.parts[0], mesh)
            prepared.compile()
            self._prepared[mesh] = prepared
        return [self._prepared[one].describe_publication() for one in (self._mesh, mesh)]

    def move(self, mesh: Mesh) -> None:
        """Continues on another mesh, between two updates; weights and optimizer state keep their bits."""
        if mesh == self._mesh:
            return
        self.prepare(mesh)
        prepared, self._copy = self._prepared[mesh], None
        move_state(self.state, prepared.part)
        self._mesh, self._layout, self.parts = mesh, prepared.layout, [prepared.part]
        self.programs, self._passes = prepared.part.programs, prepared.part.passes
        self.attention, self.packing = self._layout.attention, self._layout.packing
        self._price = self._price._replace(packing=self.packing)
        self._declared = self._declare()
