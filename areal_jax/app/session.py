"""One run from a config to its report: build, warm up, evaluate, loop, evaluate, report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import platform
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

from areal_jax import files
from areal_jax.app import build
from areal_jax.app.alone import alone_seconds
from areal_jax.app.compilations import CompilationCounter
from areal_jax.app.extras import require_extras
from areal_jax.app.interrupt import Interrupts
from areal_jax.app.observer import StepObserver
from areal_jax.app.processes import lead
from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.app.sizes import require_room
from areal_jax.app.start_warnings import print_warnings
from areal_jax.app.workdir import (
    CHECKPOINTS,
    continue_run,
    describe_unsaved,
    note_weights,
    prepare_workdir,
    read_prolongations,
    read_report,
    start_again,
)
from areal_jax.checkpoint.state import decode_run_state, encode_run_state
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config import TrackedConfig, validate
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.controller import Controller
from areal_jax.control.events import truncate_events
from areal_jax.control.schedule import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.files import DirectoryLock
from areal_jax.learning.finiteness import NonFiniteError
from areal_jax.publication.manifest import weights_sha256
from areal_jax.report.report import write_report
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry.events import FILE as EVENTS
from areal_jax.telemetry.events import lane_intervals, load_events, window
from areal_jax.telemetry.facts import EVALUATIONS, EvaluationScores, RunFacts, discard_facts, read_scores
from areal_jax.telemetry.metrics import MetricsWriter
from areal_jax.telemetry.progress import Progress, StartProgress
from areal_jax.telemetry.resources import ResourceSampler
from areal_jax.types import SamplingParams

_RING = 'ring'  # in the arrays of a checkpoint: earlier versions that a lock-step schedule may still ask for


class Session:
    """Everything of one run. Use `train`; the parts are attributes so that a test can look at them.

    Args:
      config: as an experiment file gives it, overrides applied.
      workdir: where the run leaves what it leaves.
      resume: go on from the newest checkpoint in the workdir, or start again at update 0 where there is none.
      source: where the config came from, for the report.
      overrides: the fields that the command line sets; one that the run does not use is refused.
      interrupts: signals; None = they do what they do without a run.

    Raises UserError for what the user can mend.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        *,
        resume: bool = False,
        source: str = '',
        overrides: Collection[str] = (),
        interrupts: Interrupts | None = None,
    ):
        validate(config)
        require_extras(config)
        require_room(config)
        print_warnings(config)
        self.started = time.monotonic()
        self.workdir, self._source, self._resume, self._interrupts = workdir, source, resume, interrupts
        self.config = TrackedConfig(config, overrides)
        self._unsaved: CheckpointError | None = None  # why the checkpoint after the last update is missing
        self._finished: dict[str, Any] | None = None  # the report, where nothing is left to do
        self.resources, self.compilations = ResourceSampler(), CompilationCounter()
        self.version_at_start = 0
        self._start = StartProgress(config.telemetry.progress)
        self._lock = DirectoryLock(workdir)
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self._lock.release)
                prepare_workdir(workdir, self.config.as_dict(), resume=resume)
                self._store = CheckpointStore(workdir / CHECKPOINTS, keep=self.config.checkpoint.keep)
                self._store.remove_unfinished()
                self._build()
                undo.pop_all()
        finally:
            self._start.end()

    # Building, in the order in which parts need each other.

    def _build(self) -> None:
        config = self.config
        build.use_compilation_cache(config)
        self.resources.start()
        self.compilations.__enter__()
        self._start.begin(build.describe_loading(config))
        model = build.build_model(config)
        note_weights(self.workdir, model.source, resume=self._resume)
        self.decoder = model.decoder
        self._start.begin(f'preparing task {config.task.name}')
        task = build.build_task(config, model.tokenizer)
        self._problems = task.sizes()
        snapshot, arrays = self._load_checkpoint()
        self._scores = read_scores(self.workdir / EVALUATIONS) if self._resume else {}
        if self._finished is not None:
            self._build_learner(model, None)  # other processes wait for it, to be let go
            self.resources.stop()
            self.compilations.__exit__()
            return
        log_path = self.workdir / EVENTS
        next_seq = snapshot['next_seq'] if snapshot else 0
        truncate_events(log_path, next_seq)
        start_s = snapshot['clock_s'] if snapshot else 0.0
        self.log, self.clock = build.build_log_and_clock(config, log_path, next_seq, start_s)
        self.verifier = build.build_verifier(config, self.clock, task, model.tokenizer.decode)
        self.verifier.start()
        self.supervisor = Supervisor(self.clock)
        self._start.begin('building the learner')
        self._build_learner(model, arrays)
        self.allocation = build.build_allocation(config)
        self._channel = build.build_channel(config, self.workdir, model.decoder, self.allocation)
        ring, self._engines = self._build_engines(model, snapshot, arrays)
        self.pool = Pool(self._engines, self.log)
        self.metrics = MetricsWriter(self.workdir, config.telemetry.tensorboard)
        self.metrics.truncate(self.version_at_start)
        self.observer = StepObserver(
            self.metrics, self._progress(start_s), self.compilations, self.resources.cpu_seconds, start_s
        )
        self.log.listeners.append(self.observer.on_event)
        sampling = build.build_sampling(config, model.tokenizer)
        self._build_controller(task, sampling, ring)
        if snapshot:
            self.controller.restore(snapshot)
            self.observer.restore(snapshot['observer'])
        self._build_evaluator(task, sampling, model)
        self._plots = config.telemetry.plots
        self._compilation_budget = config.run.compilation_budget
        config.require_all_read()
        self._idle_fields = config.idle_fields()

    def _build_learner(self, model: build.Model, arrays: Any) -> None:
        learner = build.build_learner(self.config, model)
        learner.announce = self._start.count_programs
        self.learner = lead(self.config, learner, self.workdir)
        model.params = None  # the learner has its copy
        build.require_finite_weights(self.config, self.learner, model)
        if arrays is not None:
            try:
                self.learner.restore({name: arrays[name] for name in ('params', 'optimizer')})
            except NonFiniteError as error:
                raise CheckpointError(f'{self.workdir / CHECKPOINTS}: {error}') from error
            except ValueError as error:
                raise CheckpointError(f'{self.workdir / CHECKPOINTS} is of another model: {error}') from error

    def _build_engines(
        self, model: build.Model, snapshot: Mapping[str, Any] | None, arrays: Any
    ) -> tuple[VersionRing | None, list[Engine]]:
        config, version = self.config, self.version_at_start
        ring = build.build_ring(config)
        if ring and snapshot:
            for earlier, weights in sorted(arrays[_RING].items(), key=lambda item: int(item[0])):
                copy = jax.device_put(jax.tree.map(np.asarray, weights), jax.local_devices()[0])
                ring.add(self._channel.transfer(int(earlier), copy))
        published = self._channel.transfer(version, self.learner.publish(version))
        if ring:
            ring.add(published)
            published = ring.in_use(snapshot['generated_update'] if snapshot else None)
        self._backends = build.build_backends(config, model.decoder, self.allocation)
        receive = self._channel.receive
        engines = [
            Engine(
                build.engine_name(index),
                self._backends[device],
                self.clock,
                self.log,
                receive=functools.partial(receive, device=device),
                version=published.version,
                params=receive(published, device),
                kv_policy=config.rollout.kv_policy,
                decode_steps=config.rollout.decode_steps,
            )
            for index, device in enumerate(self.allocation.engines)
        ]
        return ring, engines

    def _build_controller(self, task: Any, sampling: SamplingParams, ring: VersionRing | None) -> None:
        config, seed = self.config, self.config.run.seed
        self.controller = Controller(
            build.build_settings(config),
            clock=self.clock,
            log=self.log,
            supervisor=self.supervisor,
            stream=task.prompts('train', seed),
            pool=self.pool,
            workflow=SingleTurn(self.pool, sampling, seed),
            verifier=self.verifier,
            learner=self.learner,
            channel=self._channel,
            gate=build.build_gate(config),
            ring=ring,
            update_tokens=self.learner.update_tokens,
            on_step=self.observer.on_step,
            observer_state=self.observer.state,
            save_checkpoint=self._save_checkpoint,
            copy_version=lambda published: jax.device_get(self._channel.receive(published)),
        )

    def _build_evaluator(self, task: Any, sampling: SamplingParams, model: build.Model) -> None:
        evaluation, seed = self.config.evaluation, self.config.run.seed
        self.evaluator = None
        if evaluation.problems:
            self.evaluator = Evaluator(
                pool=self.pool,
                verifier=self.verifier,
                clock=self.clock,
                supervisor=self.supervisor,
                log=self.log,
                problems=task.held_out(evaluation.problems, seed),
                sampling=sampling,
                samples=evaluation.samples,
                seed=seed,
                decode=model.tokenizer.decode,
                max_failed=self.config.task.max_failed_groups,
                announce=self._start.count_answers,
            )

    def _progress(self, start_s: float) -> Progress | None:
        config = self.config
        if not config.telemetry.progress:
            return None
        return Progress(config.run.steps, first_step=self.version_at_start, first_time=start_s)

    # Running.

    def train(self) -> dict[str, Any] | None:
        """Run to the end (the report) or to a requested stop (None; the checkpoint is saved).

        Raises CheckpointError, after the report is written, where the checkpoint after the last update failed.
        """
        try:
            if self._finished is not None:
                return self._finished
            discard_facts(self.workdir)
            report = self._report() if self._run() else None
            if self._unsaved:
                raise self._unsaved
            return report
        finally:
            self.learner.close()
            self._lock.release()

    def _run(self) -> bool:
        try:
            self._warm_up()
            with self._deferred_signals():
                finished = self.clock.execute(self.supervisor.run(self._program()))
        except BaseException as error:
            with contextlib.suppress(OSError):  # on a full disk the first error is the one to show
                self.log.write('error', message=f'{type(error).__name__}: {error}')
            with contextlib.suppress(OSError):
                self.close()
            raise
        self.close()
        return finished

    def close(self) -> None:
        """Free processes, threads and files; all of them, whatever the first to fail raises."""
        with contextlib.ExitStack() as parts:
            parts.callback(self.compilations.__exit__)
            parts.callback(self.resources.stop)
            parts.callback(self.log.close)
            parts.callback(self.metrics.close)
            parts.callback(self.verifier.close)
            parts.callback(self._start.end)

    def _deferred_signals(self) -> contextlib.AbstractContextManager[None]:
        """While the loop runs a signal asks it to stop."""
        if self._interrupts is None:
            return contextlib.nullcontext()
        stop = self.controller.stop_requested
        then = 'finishing the update under way, then saving'
        return self._interrupts.deferred(lambda number: self.clock.post_signal(number, stop), then)

    def _warm_up(self) -> None:
        began = time.monotonic()
        self._start.begin('compiling what trains:')
        programs = self.learner.warm_up()
        self._start.begin('compiling what generates:')
        by_device = self.allocation.by_device()
        for index, (device, engines) in enumerate(by_device.items()):  # a program is compiled for one device
            announce = lambda done, total, index=index: self._start.count_programs(
                index * total + done, len(by_device) * total
            )
            programs += self._backends[device].warm_up(self._engines[engines[0]].params, announce)
        self._start.end()
        self.compilations.reset()
        if isinstance(self.clock, RealClock):
            self.clock.restart()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    async def _program(self) -> bool:
        for engine in self._engines:
            engine.start(self.supervisor)
        if self.version_at_start == 0:
            await self._evaluate('before')
        if not await self.controller.run():
            return False
        if await self._evaluate('after'):
            return True
        await self.controller.save_for_good()  # --resume repeats the evaluation
        return False

    async def _evaluate(self, phase: str) -> bool:
        """True when the evaluation is done, or none is wanted."""
        if self.evaluator is None:
            return True
        self._start.begin(f'evaluating {self.config.evaluation.problems} problems')
        scores = await self.evaluator.evaluate(phase, self.controller.stop_requested)
        self._start.end()
        if scores is None:
            return False
        self._write_scores(phase, scores)
        sampled = [score for row in scores.sampled for score in row]
        means = sum(sampled) / max(1, len(sampled)), sum(scores.greedy) / len(scores.greedy)
        print(f'accuracy {phase}: sampled {means[0]:.3f}, greedy {means[1]:.3f}', flush=True)
        return True

    # What stays.

    def _load_checkpoint(self) -> tuple[dict[str, Any] | None, Any]:
        if not self._resume:
            return None, None
        if self._store.latest() is None:
            start_again(self.workdir, self.config.as_dict())
            return None, None
        step, arrays, run_state = self._store.restore_latest()
        self.version_at_start = step
        try:
            snapshot = decode_run_state(run_state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS} is not of such a run: {error}') from error
        continue_run(self.workdir, self.config.as_dict(), step)
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)
        if step == self.config.run.steps:
            self._finished = read_report(self.workdir, step)
        return snapshot, arrays

    def _save_checkpoint(self, step: int, arrays: Any, earlier: Mapping[int, Any], snapshot: Mapping[str, Any]) -> None:
        self.log.sync()  # a resumed run needs all events and metrics up to here, also after a loss of power
        self.metrics.sync()
        whole = {**arrays, _RING: {str(version): weights for version, weights in earlier.items()}}
        try:
            self._store.save(step, whole, encode_run_state(snapshot), self.learner.followers)
        except CheckpointError as error:
            if step < self.config.run.steps:
                raise
            self._unsaved = describe_unsaved(error, self.workdir)

    def _write_scores(self, phase: str, scores: EvaluationScores) -> None:
        self._scores[phase] = scores
        known = {phase: dataclasses.asdict(scores) for phase, scores in self._scores.items()}
        files.write_json(self.workdir / EVALUATIONS, known, indent=None)

    def _report(self) -> dict[str, Any]:
        config = self.config
        events = load_events(self.workdir / EVENTS)
        alone = alone_seconds(lane_intervals(events), window(events), config.run.steps)
        lag = self.clock.max_lag_s if isinstance(self.clock, RealClock) else 0.0
        facts = RunFacts(
            config=self._source,
            seed=config.run.seed,
            eta=config.staleness.eta if config.staleness.schedule == 'natural' else None,
            schedule=config.staleness.schedule,
            clock=config.run.clock,
            planned_steps=config.run.steps,
            wall_seconds=time.monotonic() - self.started,
            evaluation_before=self._scores.get('before'),
            evaluation_after=self._scores.get('after'),
            compilations=self.compilations.count,
            compilation_budget=self._compilation_budget,
            peak_memory_bytes=self.resources.peak_bytes,
            event_loop_lag_max=lag,
            weights_sha256=weights_sha256(self.learner.publish(config.run.steps)),
            git_commit=git_commit(),
            versions=package_versions(),
            hardware=hardware() | {'platform': platform.platform()},
            alone_seconds=alone,
            cpu_seconds=None if self._resume else self.observer.cpu_seconds_in_window,
            cores=hardware()['cores'],
            lanes_own_devices=self.allocation.lanes_own_devices,
            devices=self.allocation.describe(),
            prolonged=read_prolongations(self.workdir),
            idle_fields=self._idle_fields,
            problems=self._problems,
        )
        facts.save(self.workdir)
        return write_report(self.workdir, facts, plots=self._plots)
