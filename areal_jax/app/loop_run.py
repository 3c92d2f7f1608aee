"""The run of the asynchronous loop: build, warm up, evaluate, loop, evaluate, report. Nothing here imports jax.

session.py adds a learner and engines of this process, controller_run.py a learner in other processes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.app import build
from areal_jax.app.alone import alone_seconds
from areal_jax.app.beside import UNDER_WAY, build_beside, restore_rows
from areal_jax.app.clock import build_clock
from areal_jax.app.ledger_check import find_ledger_fault
from areal_jax.app.loop_parts import LoopParts, ModelText
from areal_jax.app.observer import StepObserver
from areal_jax.app.run import Checkpoint, State
from areal_jax.app.scores import Scores
from areal_jax.app.served import Servers
from areal_jax.app.starts import note_start
from areal_jax.app.task import build_task, build_verifier
from areal_jax.app.workdir import CHECKPOINTS, Report
from areal_jax.app.workflow import build_workflow
from areal_jax.checkpoint.state import decode_run_state, encode_run_state
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.controller import Controller
from areal_jax.control.events import EventLog, truncate_events
from areal_jax.control.schedule import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.beside import EvaluationBeside
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.events import FILE as EVENTS
from areal_jax.lanes import EVALUATION_REWARD
from areal_jax.protocols import Pool
from areal_jax.report.event_log import load_events
from areal_jax.report.lanes import lane_intervals
from areal_jax.report.report import write_report
from areal_jax.report.window import window
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.tasks.task import Task
from areal_jax.tasks.verifier import InlineVerifier, ProcessVerifier
from areal_jax.telemetry.facts import RunFacts
from areal_jax.telemetry.progress import Progress
from areal_jax.types import PublishedWeights, SamplingParams, Tree

_RETURN_S = 30.0  # for engines to serve again after a restart of the run, which leaves them alone
_RING = 'ring'  # in the arrays of a checkpoint: earlier versions that a lock-step schedule may still ask for


class LoopRun(LoopParts):
    """A run that generates, scores and trains at the same time; see Run. The parts are attributes for tests."""

    version_at_start = 0
    _engines: Sequence[LocalEngine] = ()  # in this process
    # remote engines that must serve before the run starts: for training, for evaluation
    _awaited_engines = _awaited_beside = 0
    _servers: Servers | None = None
    _evaluated_at_start: int | None = None  # the version that was being evaluated when the checkpoint was taken

    # Building, in the order in which parts need each other.

    def _build(self) -> None:
        config = self.config
        model = self._load_model()
        self._source_of_weights = model.source
        self._start.begin(f'preparing task {config.task.name}')
        task = build_task(config, model.tokenizer)
        self._problems = task.sizes()
        self._make_workflow = build_workflow(config, model.tokenizer)
        checkpoint = self._read_checkpoint()
        snapshot = self._restore_snapshot(checkpoint) if checkpoint else None
        self._scores = Scores(self.workdir, resume=self._resume, step=self.version_at_start)
        if self._finished is not None:
            self._build_learner(model, None)  # the other processes wait for their learner's first command: to end
            return
        start_s = snapshot['clock_s'] if snapshot else 0.0
        self.log = self._open_log(*((snapshot['next_seq'], snapshot['next_run']) if snapshot else (0, 0)))
        self.clock = self._build_clock(start_s)
        self.verifier = self._launch_verifier(task, model, workdir=self.workdir)
        # Evaluation has workers of its own, so its answers never queue behind training answers.
        self._beside_verifier = (
            self._launch_verifier(task, model, workers=1, lane=EVALUATION_REWARD) if config.evaluation.every else None
        )
        self.supervisor = Supervisor(self.clock)
        self._build_learner(model, checkpoint)
        self.verifier.start()
        if self._beside_verifier is not None:
            self._beside_verifier.start()
        rates = self._find_rates()
        ring, self.pool = self._build_pool(task, checkpoint, snapshot)
        self.metrics = self._open_metrics(self.version_at_start)
        if self._servers is not None:
            self.metrics.listeners.append(self._servers.note_update)
        self.observer = StepObserver(
            self.metrics,
            self._progress(start_s),
            self.compilations,
            self.resources.cpu_seconds,
            start_s,
            rates,
        )
        self.log.listeners.append(self.observer.on_event)
        sampling = build.build_sampling(config, model.tokenizer)
        self._build_controller(task, sampling, ring)
        if snapshot:
            self.controller.restore(snapshot)
            self.observer.restore(snapshot['observer'])
            self._evaluated_at_start = snapshot['observer'].get(UNDER_WAY)
        self._build_evaluator(task, sampling, model)
        self._plots = config.telemetry.plots
        self._compilation_budget = config.run.compilation_budget
        self._require_all_read()

    def _build_clock(self, start_s: float) -> LoopClock:
        return build_clock(self.config, self.log, start_s, waits_for_work=not self._ends_process())

    def _launch_verifier(self, task: Task, model: ModelText, **settings: Any) -> ProcessVerifier | InlineVerifier:
        verifier = self._own(build_verifier(self.config, self.clock, task, model.tokenizer.decode, **settings))
        verifier.launch()
        return verifier

    def _restore_snapshot(self, checkpoint: Checkpoint) -> State:
        self.version_at_start = checkpoint.step
        try:
            snapshot = decode_run_state(checkpoint.state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS} is not of such a run: {error}') from error
        self._continue(checkpoint.step)
        return snapshot

    def _open_log(self, next_seq: int, next_run: int) -> EventLog:
        path, self._first_seq = self.workdir / EVENTS, next_seq
        truncate_events(path, next_seq)
        return self._own(EventLog(path, next_seq, next_run))

    def _build_pool(
        self, task: Task, checkpoint: Checkpoint | None, snapshot: State | None
    ) -> tuple[VersionRing | None, Pool]:
        config, version = self.config, self.version_at_start
        self._channel = self._build_channel()
        ring = build.build_ring(config)
        if ring and checkpoint:
            self._restore_ring(ring, checkpoint.arrays[_RING])
        self._newest = published = self._channel.transfer(version, self.learner.publish(version))
        if ring:
            ring.add(published)
            published = ring.in_use(snapshot['generated_update'] if snapshot else None)
        if build.uses_servers(config):
            self._servers = self._build_servers(task, published)
            return ring, self._servers.whole
        return ring, self._build_pool_here(published)

    def _build_servers(self, task: Task, published: PublishedWeights) -> Servers:
        from areal_jax.app.servers import build_servers  # needs aiohttp, which runs without servers do not

        return build_servers(
            self.config, self.clock, self.log, self.supervisor,
            workdir=self.workdir, learner=self.learner, vocab_size=self._find_vocab_size(), published=published,
            probe_prompt=task.prompts('train', self.config.run.seed).draw().tokens,
            stop=lambda: self.controller.stop_requested.set(),
        )  # fmt: skip

    def _build_controller(self, task: Task, sampling: SamplingParams, ring: VersionRing | None) -> None:
        config, seed = self.config, self.config.run.seed
        self.controller = Controller(
            build.build_settings(config),
            clock=self.clock,
            log=self.log,
            supervisor=self.supervisor,
            stream=task.prompts('train', seed),
            pool=self.pool,
            workflow=self._make_workflow(self.pool, sampling, seed),
            verifier=self.verifier,
            learner=self._traced_learner(),
            channel=self._channel,
            gate=build.build_gate(config),
            group_filter=build.build_group_filter(config),
            ring=ring,
            update_tokens=self.learner.update_tokens,
            on_step=self.observer.on_step,
            observer_state=self._observer_state,
            on_published=self._note_published,
            save_checkpoint=self._save_checkpoint,
            copy_version=self._copy_version,
        )

    def _build_evaluator(self, task: Task, sampling: SamplingParams, model: ModelText) -> None:
        evaluation, seed = self.config.evaluation, self.config.run.seed
        self.evaluator: Evaluator | None = None
        self.beside: EvaluationBeside | None = None
        if not evaluation.problems:
            return
        problems = task.held_out(evaluation.problems, seed)
        make_evaluator = functools.partial(
            Evaluator,
            clock=self.clock,
            supervisor=self.supervisor,
            log=self.log,
            sampling=sampling,
            seed=seed,
            decode=model.tokenizer.decode,
            final_answer=task.final_answer,
            max_failed=self.config.task.max_failed_groups,
            make_workflow=self._make_workflow,
        )
        self.evaluator = make_evaluator(
            problems=problems,
            pool=self.pool,
            verifier=self.verifier,
            samples=evaluation.samples,
            announce=self._start.count_answers,
        )
        if self._beside_verifier is not None:
            self.beside = build_beside(
                self.config,
                pool=self.pool,
                clock=self.clock,
                supervisor=self.supervisor,
                log=self.log,
                verifier=self._beside_verifier,
                problems=problems,
                make_evaluator=make_evaluator,
                scores=self._scores,
                observer=self.observer,
                lost=self._servers.beside.pool.lost if self._servers and self._servers.beside else None,
            )
            restore_rows(self.workdir, self._scores, self.observer)

    def _progress(self, start_s: float) -> Progress | None:
        if not self.config.telemetry.progress:
            return None
        return Progress(self.config.run.steps, first_step=self.version_at_start, first_time=start_s)

    # Running.

    def _run(self) -> bool:
        try:
            note_start(self.workdir, self._first_seq, self.config, self._source_of_weights, self._read_environment())
            self._warm_up()
            if isinstance(self.clock, RealClock):
                self.clock.restart()
            stop = self.controller.stop_requested
            with self._deferred_signals(lambda number: self.clock.post_signal(number, stop), self.clock.abandon):
                finished = self.clock.execute(self.supervisor.run(self._program()))
            if self._servers is not None:
                self._servers.ended_by.require_nothing()
            return finished
        except BaseException as error:
            with contextlib.suppress(OSError):  # on a full disk the first error is the one to show
                self.log.write('error', message=f'{type(error).__name__}: {error}')
            raise

    async def _program(self) -> bool:
        for engine in self._engines:
            engine.start(self.supervisor)
        if self._servers is not None:
            self._servers.start(self.supervisor)
            await self._await_engines(self._servers)
        if self.version_at_start == 0:
            if not await self._evaluate('before') or self.controller.stop_requested.is_set():
                return False  # nothing is trained: --resume begins at update 0 without a checkpoint too
            await self._finish_compiling()
        elif self.beside:
            finished = [row.version for row in self._scores.curve]
            self.beside.resume(self._newest, self._evaluated_at_start, finished)
        has_finished = await self.controller.run()
        self._unsaved = self._unsaved or find_ledger_fault(self.observer.ledger, self.controller.snapshot())
        if not has_finished:
            return False
        if self.beside and not await self.beside.finish(self.controller.stop_requested):
            await self.controller.save_for_good()
            return False
        if not (is_evaluated := await self._evaluate('after')):
            await self.controller.save_for_good()  # --resume repeats the evaluation
        return is_evaluated

    async def _await_engines(self, servers: Servers) -> None:
        """Nothing is generated before all of them hold the first weights, or run.stall_timeout_s has passed.

        A run that goes on waits for those that were lost no longer than _RETURN_S: they may join later.
        """
        of_training, beside = self._awaited_engines, self._awaited_beside
        deadline_s = self.config.run.stall_timeout_s
        patience_s = _RETURN_S if self.version_at_start else math.inf
        if not (wanted := of_training + beside):
            return
        self._start.begin(f'waiting for {wanted} engines')
        begun_s, stop = self.clock.now(), self.controller.stop_requested
        serving = await servers.pool.await_serving(of_training, deadline_s, stop, patience_s)
        if servers.beside:
            serving += await servers.beside.pool.evaluation.await_serving(beside, deadline_s, stop, patience_s)
        self._start.end()
        if serving < wanted and not self.controller.stop_requested.is_set():
            waited_s = self.clock.now() - begun_s
            print(f'warning: {serving} of {wanted} engines serve after {waited_s:.0f} s: the run begins', flush=True)

    async def _evaluate(self, phase: str) -> bool:
        """True when the evaluation is done, or none is wanted."""
        if self.evaluator is None:
            return True
        self._start.begin(f'evaluating {self.config.evaluation.problems} problems')
        scores = await self.evaluator.evaluate(phase, self.controller.stop_requested)
        self._start.end()
        if scores is None:
            return False
        self._note_scores(phase, scores)
        return True

    def _note_published(self, published: PublishedWeights) -> None:
        if self.beside:
            self.beside.note_published(published)

    def _observer_state(self) -> Mapping[str, object]:
        return {**self.observer.state(), **({UNDER_WAY: self.beside.under_way} if self.beside else {})}

    # Checkpoints and the report.

    def _save_checkpoint(self, step: int, arrays: Tree, earlier: Mapping[int, Tree], snapshot: State) -> None:
        self.log.sync()  # a resumed run needs all events and metrics up to here, also after a loss of power
        self.metrics.sync()
        whole = {**arrays, _RING: {str(version): weights for version, weights in earlier.items()}}
        self._save(step, whole, encode_run_state(snapshot))

    def _report(self) -> tuple[Report, Tree]:
        self.resources.stop()  # the report is not part of what is measured
        config = self.config
        events = load_events(self.workdir / EVENTS)
        weights = self._find_final_weights()
        facts = RunFacts(
            **self._common_facts(),
            eta=config.staleness.eta if config.staleness.schedule == 'natural' else None,
            schedule=config.staleness.schedule,
            clock=config.run.clock,
            evaluation_before=self._scores.get('before'),
            evaluation_after=self._scores.get('after'),
            compilation_budget=self._compilation_budget,
            event_loop_lag_max=self.clock.max_lag_s if isinstance(self.clock, RealClock) else 0.0,
            weights_sha256=self._digest(weights),
            alone_seconds=alone_seconds(lane_intervals(events), window(events), config.run.steps),
            cpu_seconds=None if self._resume else self.observer.cpu_seconds_in_window,
            cores=self._find_hardware()['cores'],
            **self._find_engine_facts(),
            problems=self._problems,
        )
        facts.save(self.workdir)
        return write_report(self.workdir, facts, plots=self._plots), weights
