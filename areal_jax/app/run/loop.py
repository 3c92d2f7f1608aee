"""Builds the parts of the asynchronous loop in the order of their dependencies, and runs them.

Nothing here imports jax.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.host import Servers, build_clock, build_energy
from areal_jax.app.parts.part_settings import find_ends
from areal_jax.app.parts.task_builder import (
    TrySandbox,
    build_stream,
    build_task,
    build_verifier,
    name_tasks,
    try_scorer_sandbox,
)
from areal_jax.app.parts.workflow_builder import (
    WorkflowFactory,
    announce,
    build_frictions,
    build_training_workflow,
    load_workflow,
    warn_of_lengths,
)
from areal_jax.app.run.observer import UNDER_WAY, Scores, StepObserver, build_beside, evaluation_row, restore_rows
from areal_jax.app.run.reports import alone_seconds
from areal_jax.app.run.run import (
    Built,
    Checkpoint,
    LoopSite,
    ModelText,
    Rollout,
    RunContext,
    RunLearner,
    Site,
    State,
    keep_rollouts,
)
from areal_jax.app.workdir.environment import hardware, read_environment
from areal_jax.app.workdir.records import note_start
from areal_jax.app.workdir.run_directory import CHECKPOINTS, Report
from areal_jax.checkpoint.store import CheckpointError, decode_run_state, encode_run_state
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import find_sandbox_warnings
from areal_jax.config.loss import find_objective_warnings
from areal_jax.config.objectives import describe_method
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.controller import Controller, HostState
from areal_jax.control.event_writer import EventLog, truncate_events
from areal_jax.control.frictions import Disturbances
from areal_jax.control.lock_step import VersionRing
from areal_jax.control.reallocation import Reallocation
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import EvaluationBeside, Evaluator
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.lanes import EVALUATION_REWARD
from areal_jax.protocols import Channel
from areal_jax.report.event_log import lane_intervals, load_events, window
from areal_jax.report.report import write_report
from areal_jax.rollout.pool import Pool as LocalPool
from areal_jax.simulation.drawn_task import DrawnVerifier
from areal_jax.tasks.mixture import final_answer
from areal_jax.tasks.scoring.verifier import InlineMixture, InlineVerifier, ProcessVerifier, StartWorker
from areal_jax.tasks.task import PromptSet
from areal_jax.telemetry.facts import RunFacts
from areal_jax.telemetry.metrics import Line, MetricsWriter
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.rollout_writer import RolloutWriter
from areal_jax.telemetry.token_ledger import LedgerError, TokenLedger
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import NOT_GENERATED, PublishedWeights, SamplingParams, Segment, Tree
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord, try_sandbox
from areal_jax.workers.worker_process import WorkerProcess


def find_ledger_fault(ledger: TokenLedger | None, state: HostState) -> LedgerError | None:
    """Returns the error of a ledger that does not close; it is raised after everything else of the run is written.

    Args:
      ledger: None = the run has kept no ledger since its start.
      state: of the host side at an instant at which no engine decodes.
    """
    if ledger is None:
        return None
    rest: collections.Counter[int] = collections.Counter()
    for segment in _segments(state):
        if segment.policy_version != NOT_GENERATED:
            rest[segment.policy_version] += len(segment.tokens)
    for group in state['running']:
        for episode in group.episodes:
            if episode.finish_reason is None and not episode.label:  # its end event counts the discarded tokens
                rest.update(episode.discarded)
    try:
        ledger.require_closed(rest)
    except LedgerError as error:
        return error
    return None


def _segments(state: HostState) -> Iterator[Segment]:
    """Yields the segments of all answers that are admitted and in no batch yet."""
    for group in state['running']:
        for episode in group.episodes:
            yield from episode.all_segments()
    for finished in state['buffer']:
        for trajectory in finished.trajectories:
            yield from trajectory.segments


# The parts of a run of the asynchronous loop, built in the order of their dependencies. No jax here.


LoopVerifier: TypeAlias = ProcessVerifier | InlineVerifier | InlineMixture | DrawnVerifier
_RETURN_S = 30.0  # for engines to serve again after a restart of the run, which does not touch them
_RING = 'ring'  # in the arrays of a checkpoint: earlier versions that a lock-step schedule may still ask for


@dataclasses.dataclass(frozen=True)
class Outside:
    """Replacements of the outside world, for a replay or a simulation."""

    make_clock: Callable[..., LoopClock] | None = None  # in place of host.build_clock
    start_worker: StartWorker = WorkerProcess
    try_sandbox: TrySandbox = try_sandbox
    # for a simulation: in place of the task, its workflow and its verifier
    build_task: Callable[[TrackedConfig, Tokenizer], PromptSet] | None = None
    load_workflow: Callable[[TrackedConfig, Tokenizer], Callable[[LoopClock], WorkflowFactory]] | None = None
    build_verifier: Callable[..., LoopVerifier] | None = None  # takes the clock and settings
    build_servers: Callable[..., Servers] | None = None  # like server_builder.build_servers


IN_THE_WORLD = Outside()


class Origin(NamedTuple):
    """The state from which a run continues; without a checkpoint it begins at update 0."""

    version: int = 0
    checkpoint: Checkpoint | None = None
    snapshot: State | None = None


@dataclasses.dataclass(frozen=True)
class Host:
    """The parts that run in this process, regardless of the place of learner and engines."""

    config: TrackedConfig
    origin: Origin
    first_seq: int  # of the events of this start
    start_s: float  # on its clock
    model: ModelText
    task: PromptSet
    make_workflow: WorkflowFactory
    scores: Scores
    log: EventLog
    clock: LoopClock
    supervisor: Supervisor
    sandbox: SandboxRecord | None  # of its verifiers, for `build_verifier`
    verifier: LoopVerifier
    # evaluation during training has separate workers, so that its answers never queue behind training answers
    verifier_beside: LoopVerifier | None


class Generation(NamedTuple):
    """The engines and the weights that they generate with."""

    channel: Channel
    ring: VersionRing | None  # earlier versions, for a schedule in lock-step
    newest: PublishedWeights
    rollout: Rollout
    servers: Servers | None = None


class Evaluations(NamedTuple):
    """The evaluations before, after and during training; None: no such evaluation."""

    evaluator: Evaluator | None = None
    beside: EvaluationBeside | None = None
    under_way: int | None = None  # the version that was being evaluated when the checkpoint was taken


@dataclasses.dataclass(frozen=True)
class LoopParts:
    """A run that generates, scores and trains at the same time."""

    host: Host
    learner: RunLearner
    place: LoopSite
    generation: Generation
    metrics: MetricsWriter
    observer: StepObserver
    evaluations: Evaluations
    reallocation: Reallocation | None  # None: devices stay where they are
    controller: Controller


def build_loop(
    context: RunContext,
    model: ModelText,
    build_site: Callable[[Checkpoint | None], Site[RunLearner]],
    outside: Outside = IN_THE_WORLD,
) -> Built[Loop]:
    """Builds site and loop; for a resumed run that has finished, only the site, whose processes wait for the end."""
    config = context.config
    context.start.begin(f'preparing task {name_tasks(config)}')
    task = (outside.build_task or build_task)(config, model.tokenizer)
    workflow_of = (outside.load_workflow or load_workflow)(config, model.tokenizer)
    origin = _find_origin(context)
    scores = Scores(context.workdir, resume=context.resume, step=origin.version)
    if context.finished is not None:
        return build_site(origin.checkpoint), None
    host = _build_host(context, origin, model, task, workflow_of, scores, outside)
    site = build_site(origin.checkpoint)
    loop = Loop(context, site, _build_parts(context, site, host, outside))
    context.require_all_read()
    return site, loop


def _build_parts(context: RunContext, site: Site[RunLearner], host: Host, outside: Outside) -> LoopParts:
    host.verifier.start()
    if host.verifier_beside is not None:
        host.verifier_beside.start()
    place = site.open_loop()
    generation = _build_generation(
        context, place, host, site.learner, lambda: controller.stop_requested.set(), outside.build_servers
    )
    metrics = context.open_metrics(host.origin.version, evaluation_row(host.scores.get('before'), 0))
    if generation.servers is not None:
        metrics.listeners.append(generation.servers.note_update)
    energy = build_energy(host.config, place.find_devices)
    if energy:
        context.own(energy)
    observer = StepObserver(
        metrics, _build_progress(host), site.compilations, context.resources.cpu_seconds, host.start_s, place.rates,
        energy,
    )  # fmt: skip
    host.log.listeners.append(observer.on_event)
    sampling = build.build_sampling(host.config, host.model.tokenizer)
    evaluations = _build_evaluations(context, host, generation, observer, sampling)
    reallocation = _build_reallocation(host, generation, observer)
    rollouts = None
    if outside.build_task is None:  # a simulation has no text
        rollouts = context.open_rollouts(host.origin.version, host.model.tokenizer.split)
    controller = _build_controller(
        context, site, host, rollouts, generation, metrics, observer, evaluations, sampling, reallocation
    )
    if host.origin.snapshot:
        controller.restore(host.origin.snapshot)
        observer.restore(host.origin.snapshot['observer'])
    if evaluations.beside:
        restore_rows(context.workdir, host.scores, observer)
    return LoopParts(host, site.learner, place, generation, metrics, observer, evaluations, reallocation, controller)


def _build_host(
    context: RunContext, origin: Origin, model: ModelText, task: PromptSet,
    workflow_of: Callable[[LoopClock], WorkflowFactory], scores: Scores, outside: Outside,
) -> Host:  # fmt: skip
    config = context.config
    snapshot = origin.snapshot or {'clock_s': 0.0, 'next_seq': 0, 'next_run': 0}
    truncate_events(context.workdir / EVENTS, snapshot['next_seq'])
    log = context.own(EventLog(context.workdir / EVENTS, snapshot['next_seq'], snapshot['next_run']))
    make_clock = outside.make_clock or build_clock
    clock = make_clock(config, log, snapshot['clock_s'], waits_for_work=not context.ends_process())

    sandbox = None if outside.build_verifier else try_scorer_sandbox(config, outside.try_sandbox)

    def launch(**settings: Any) -> LoopVerifier:
        decode, start_worker = model.tokenizer.decode, outside.start_worker
        if outside.build_verifier:
            verifier = outside.build_verifier(clock, **settings)
        else:
            verifier = build_verifier(
                config, clock, task, decode, sandbox=sandbox, start_worker=start_worker, **settings
            )
        context.own(verifier).launch()
        return verifier

    return Host(
        config=config,
        origin=origin,
        first_seq=snapshot['next_seq'],
        start_s=snapshot['clock_s'],
        model=model,
        task=task,
        make_workflow=workflow_of(clock),
        scores=scores,
        log=log,
        clock=clock,
        sandbox=sandbox,
        verifier=launch(workdir=context.workdir),
        verifier_beside=launch(workers=1, lane=EVALUATION_REWARD) if config.evaluation.every else None,
        supervisor=Supervisor(clock),
    )


def _find_origin(context: RunContext) -> Origin:
    """Returns the state to continue from; raises CheckpointError for a checkpoint of another kind of run."""
    checkpoint = context.read_checkpoint()
    if checkpoint is None:
        return Origin()
    try:
        snapshot = decode_run_state(checkpoint.state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f'{context.workdir / CHECKPOINTS} is not of such a run: {error}') from error
    context.go_on(checkpoint.step)
    return Origin(checkpoint.step, checkpoint, snapshot)


def _build_progress(host: Host) -> Progress | None:
    if not host.config.telemetry.progress:
        return None
    return Progress(host.config.run.steps, first_step=host.origin.version, first_time=host.start_s)


def _build_generation(
    context: RunContext,
    place: LoopSite,
    host: Host,
    learner: RunLearner,
    stop: Callable[[], None],
    build_servers: Callable[..., Servers] | None,
) -> Generation:
    version, checkpoint, snapshot = host.origin
    channel, local = place.channel, place.local
    ring = None if local is None else build.build_ring(host.config, local.copy_version)
    if local is not None and ring and checkpoint:
        local.restore_ring(ring, checkpoint.arrays[_RING])
    newest = published = channel.transfer(version, learner.publish(version))
    if ring:
        ring.add(published)
        published = ring.in_use(snapshot['generated_update'] if snapshot else None)
    if local is not None:
        rollout = local.build(published, host.clock, host.log, host.supervisor)
        if ring is None:
            channel.release(version)  # all engines have it
        return Generation(channel, ring, newest, rollout)

    servers = (build_servers or _import_server_builder())(
        host.config, host.clock, host.log, host.supervisor,
        workdir=context.workdir, learner=learner, vocab_size=host.model.vocab_size, published=published,
        probe_prompt=host.task.prompts('train', host.config.run.seed).draw().tokens, stop=stop,
    )  # fmt: skip
    return Generation(channel, ring, newest, Rollout(servers.whole), servers)


def _import_server_builder() -> Callable[..., Servers]:
    from areal_jax.app.parts.server_builder import build_servers  # needs aiohttp, which runs without servers do not

    return build_servers


def _build_controller(
    context: RunContext,
    site: Site[RunLearner],
    host: Host,
    rollouts: RolloutWriter | None,
    generation: Generation,
    metrics: MetricsWriter,
    observer: StepObserver,
    evaluations: Evaluations,
    sampling: SamplingParams,
    reallocation: Reallocation | None,
) -> Controller:
    config, learner, beside = host.config, site.learner, evaluations.beside
    pool = generation.rollout.pool
    frictions = build_frictions(config, host.model.vocab_size)
    if frictions:
        announce(frictions)
    if config.rollout.answer_lengths and config.model.source != 'random':
        warn_of_lengths(config.rollout.answer_lengths)

    def save_checkpoint(step: int, arrays: dict[str, Tree], earlier: Mapping[int, Tree], snapshot: State) -> None:
        host.log.sync()  # a resumed run needs all events and metrics up to here, also after a loss of power
        metrics.sync()
        if rollouts:
            rollouts.sync()
        whole = {**arrays, _RING: {str(version): weights for version, weights in earlier.items()}}
        arrays.clear()  # lets the writer free each array once it is written
        context.save(step, whole, encode_run_state(snapshot), learner.followers)

    def note_published(published: PublishedWeights) -> None:
        if beside:
            beside.note_published(published)

    return Controller(
        build.build_settings(config),
        clock=host.clock,
        log=host.log,
        supervisor=host.supervisor,
        stream=build_stream(config, host.task),
        pool=pool,
        workflow=build_training_workflow(
            host.make_workflow,
            frictions,
            pool,
            sampling,
            build.build_sampling_seed(config),
            build.build_answer_limits(config),
        ),
        verifier=host.verifier,
        learner=keep_rollouts(site.trace(learner), learner.read_tokens, rollouts),
        channel=generation.channel,
        gate=build.build_gate(config),
        group_filter=build.build_group_filter(config),
        disturbances=Disturbances(frictions, host.log) if frictions else None,
        ring=generation.ring,
        update_tokens=learner.update_tokens,
        on_step=observer.on_step,
        observer_state=lambda: {**observer.state(), **({UNDER_WAY: beside.under_way} if beside else {})},
        on_published=note_published,
        save_checkpoint=save_checkpoint,
        reallocation=reallocation,
    )


def _build_reallocation(host: Host, generation: Generation, observer: StepObserver) -> Reallocation | None:
    rollout = generation.rollout
    if (moves := rollout.moves) is None:
        return None
    assert isinstance(rollout.pool, LocalPool)
    backend = rollout.engines[0].stream.backend
    return Reallocation(
        host.clock, host.log, host.supervisor,
        pool=rollout.pool, site=moves.site, choice=build.build_choice(host.config), split=moves.split,
        published=generation.newest, slots=backend.slots, cache_tokens=backend.cache_blocks * backend.block_tokens,
        on_moved=lambda split: observer.set_rates(moves.rates_of(split)),
    )  # fmt: skip


def _build_evaluations(
    context: RunContext, host: Host, generation: Generation, observer: StepObserver, sampling: SamplingParams
) -> Evaluations:
    config, seed = host.config, host.config.run.seed
    if not config.evaluation.problems:
        return Evaluations()
    problems = host.task.held_out(config.evaluation.problems, seed)
    make_evaluator = functools.partial(
        Evaluator,
        clock=host.clock,
        supervisor=host.supervisor,
        log=host.log,
        sampling=sampling,
        seed=seed,
        decode=host.model.tokenizer.decode,
        final_answer=functools.partial(final_answer, host.task),
        max_failed=config.task.max_failed_groups,
        make_workflow=host.make_workflow,
    )
    evaluator = make_evaluator(
        problems=problems,
        pool=generation.rollout.pool,
        verifier=host.verifier,
        samples=config.evaluation.samples,
        announce=context.start.count_answers,
    )
    if host.verifier_beside is None:
        return Evaluations(evaluator)
    servers = generation.servers
    beside = build_beside(
        config,
        pool=generation.rollout.pool,
        clock=host.clock,
        supervisor=host.supervisor,
        log=host.log,
        verifier=host.verifier_beside,
        problems=problems,
        make_evaluator=make_evaluator,
        scores=host.scores,
        observer=observer,
        lost=servers.beside.pool.lost if servers and servers.beside else None,
    )
    snapshot = host.origin.snapshot
    return Evaluations(evaluator, beside, snapshot['observer'].get(UNDER_WAY) if snapshot else None)


# The program of the asynchronous loop: warm up, evaluate, loop, evaluate, report. Nothing here imports jax.


class Loop:
    """The program of the asynchronous loop; see run.Program."""

    def __init__(self, context: RunContext, site: Site[RunLearner], parts: LoopParts):
        self.parts, self._context, self._site = parts, context, site
        self._plots = context.config.telemetry.plots
        self._compilation_budget = context.config.run.compilation_budget

    def run(self) -> bool:
        parts = self.parts
        host, clock = parts.host, parts.host.clock
        try:
            environment = read_environment(self._site.devices)
            note_start(self._context.workdir, host.first_seq, host.config, host.model.source, host.sandbox, environment)
            self.warm_up()
            if isinstance(clock, RealClock):
                clock.restart()
            stop = parts.controller.stop_requested
            with self._context.deferred_signals(lambda number: clock.post_signal(number, stop), clock.abandon):
                finished = clock.execute(self._run_to_end())
            if parts.generation.servers is not None:
                parts.generation.servers.ended_by.require_nothing()
            return finished
        except BaseException as error:
            with contextlib.suppress(OSError):  # on a full disk the first error is the one to show
                host.log.write('error', message=f'{type(error).__name__}: {error}')
            raise

    def warm_up(self) -> None:
        """Compiles the programs that the run needs first."""
        parts, began = self.parts, time.monotonic()
        rollout = parts.generation.rollout
        programs = parts.place.compile(rollout.compile)
        if parts.reallocation and rollout.moves:
            for split in parts.reallocation.prepared:  # splits prepared before the run was stopped
                rollout.moves.site.prepare(split)
        self._context.start.end()
        self._site.compilations.reset()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    async def _run_to_end(self) -> bool:
        """Runs the program; whatever ends it, no server stays paused for its other clients."""
        try:
            return await self.parts.host.supervisor.run(self._program())
        finally:
            if self.parts.generation.servers is not None:
                await self.parts.generation.servers.close()

    async def _program(self) -> bool:
        parts = self.parts
        controller, beside = parts.controller, parts.evaluations.beside
        for engine in parts.generation.rollout.engines:
            engine.start(parts.host.supervisor)
        if parts.generation.servers is not None:
            parts.generation.servers.start(parts.host.supervisor)
            await self._await_engines(parts.generation.servers)
        if parts.host.origin.version == 0:
            if not await self._evaluate('before') or controller.stop_requested.is_set():
                return False  # nothing was trained: --resume begins at update 0 without a checkpoint too
            if parts.place.finish_compiling:
                await parts.place.finish_compiling(parts.host.clock)
        elif beside:
            finished = [row.version for row in parts.host.scores.curve]
            beside.resume(parts.generation.newest, parts.evaluations.under_way, finished)
        has_finished = await controller.run()
        fault = find_ledger_fault(parts.observer.ledger, controller.snapshot())
        self._context.unsaved = self._context.unsaved or fault
        if not has_finished:
            return False
        if beside and not await beside.finish(controller.stop_requested):
            await controller.save_for_good()
            return False
        if not (is_evaluated := await self._evaluate('after')):
            await controller.save_for_good()  # --resume repeats the evaluation
        return is_evaluated

    async def _await_engines(self, servers: Servers) -> None:
        """Waits until all engines hold the first weights, at most run.stall_timeout_s; nothing is generated before.

        A resumed run waits at most _RETURN_S for lost engines: they may join later.
        """
        of_training, beside = self.parts.place.awaited_engines, self.parts.place.awaited_beside
        deadline_s = self._context.config.run.stall_timeout_s
        patience_s = _RETURN_S if self.parts.host.origin.version else math.inf
        if not (wanted := of_training + beside):
            return
        self._context.start.begin(f'waiting for {wanted} engines')
        clock, stop = self.parts.host.clock, self.parts.controller.stop_requested
        begun_s = clock.now()
        serving = await servers.pool.await_serving(of_training, deadline_s, stop, patience_s)
        if servers.beside:
            serving += await servers.beside.pool.evaluation.await_serving(beside, deadline_s, stop, patience_s)
        self._context.start.end()
        if serving < wanted and not stop.is_set():
            waited_s = clock.now() - begun_s
            print(f'warning: {serving} of {wanted} engines serve after {waited_s:.0f} s: the run begins', flush=True)

    async def _evaluate(self, phase: str) -> bool:
        """Evaluates; returns True if the evaluation is done or not wanted, False after a requested stop."""
        evaluator = self.parts.evaluations.evaluator
        if evaluator is None:
            return True
        self._context.start.begin(f'evaluating {self._context.config.evaluation.problems} problems')
        scores = await evaluator.evaluate(phase, self.parts.controller.stop_requested)
        self._context.start.end()
        if scores is None:
            return False
        self.parts.host.scores.add(phase, scores)
        if self._context.feed and phase == 'before':
            self._context.feed.put(0, self.scores_of(phase))
        return True

    def scores_of(self, phase: str) -> Line:
        steps = 0 if phase == 'before' else self._context.config.run.steps
        return evaluation_row(self.parts.host.scores.get(phase), steps)

    def report(self) -> tuple[Report, Tree]:
        parts, place, context = self.parts, self.parts.place, self._context
        context.resources.stop()  # the report is not part of what is measured
        config, clock, tokenizer = context.config, parts.host.clock, parts.host.model.tokenizer
        events = load_events(context.workdir / EVENTS)
        weights, digest = place.find_final_weights()
        computes_on = hardware(self._site.devices, self._site.xla_flags)
        facts = RunFacts(
            **context.describe(computes_on),
            compilations=self._site.compilations.count,
            eta=config.staleness.eta if config.staleness.schedule == 'natural' else None,
            schedule=config.staleness.schedule,
            clock=config.run.clock,
            objective=describe_method(config.loss),
            ends=tokenizer.token_bytes.name(find_ends(config, tokenizer)),
            warnings=(*find_objective_warnings(config), *find_sandbox_warnings(config)),
            sandbox=parts.host.sandbox,
            evaluation_before=parts.host.scores.get('before'),
            evaluation_after=parts.host.scores.get('after'),
            compilation_budget=self._compilation_budget,
            event_loop_lag_max=clock.max_lag_s if isinstance(clock, RealClock) else 0.0,
            weights_sha256=digest,
            alone_seconds=alone_seconds(lane_intervals(events), window(events), config.run.steps),
            cpu_seconds=None if context.resume else parts.observer.cpu_seconds_in_window,
            cores=computes_on['cores'],
            kv_cache_bytes=parts.generation.rollout.cache_bytes,
            **place.describe_engines(parts.reallocation.split if parts.reallocation else None),
            problems=parts.host.task.sizes(),
            energy=parts.observer.energy.facts() if parts.observer.energy else None,
        )
        facts.save(context.workdir)
        report = write_report(context.workdir, facts, plots=self._plots, events=events)
        place.close_learner()
        return report, weights
