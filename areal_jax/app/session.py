"""One run from a config to its report: build, warm up, evaluate, loop, evaluate, report."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import platform
import signal
import time
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app import build
from areal_jax.app.alone import alone_seconds
from areal_jax.app.compilations import CompilationCounter
from areal_jax.app.extras import require_extras
from areal_jax.app.observer import StepObserver
from areal_jax.app.processes import lead
from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.app.sizes import require_room
from areal_jax.app.start_warnings import print_warnings
from areal_jax.app.workdir import CHECKPOINTS, note_weights, prepare_workdir
from areal_jax.checkpoint.state import decode_run_state, encode_run_state
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config import TrackedConfig, validate
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.controller import Controller
from areal_jax.control.events import truncate_events
from areal_jax.control.schedule import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Evaluator
from areal_jax.publication.manifest import weights_sha256
from areal_jax.ranges import ConfigError
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry.events import lane_intervals, load_events, window
from areal_jax.telemetry.facts import EvaluationScores, RunFacts, read_scores
from areal_jax.telemetry.metrics import MetricsWriter
from areal_jax.telemetry.progress import Progress, StartProgress
from areal_jax.telemetry.report import write_report
from areal_jax.telemetry.resources import ResourceSampler
from areal_jax.types import SamplingParams

EVALUATIONS = 'evaluations.json'


class Session:
    """Everything of one run. Use `train`; the parts are attributes so that a test can look at them.

    Args:
      config: as an experiment file gives it, overrides applied.
      workdir: where the run leaves what it leaves.
      resume: go on from the newest checkpoint in the workdir.
      source: where the config came from, for the report.
      overrides: the fields that the command line sets; one that the run does not use is refused.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        *,
        resume: bool = False,
        source: str = '',
        overrides: Collection[str] = (),
    ):
        validate(config)
        require_extras(config)
        require_room(config)
        print_warnings(config)
        self.resumable = config.staleness.schedule == 'natural'
        if resume and not self.resumable:
            raise ConfigError(
                f'--resume with staleness.schedule={config.staleness.schedule!r}: a lock-step run keeps no checkpoint; '
                'start it again without --resume'
            )
        self.started = time.monotonic()
        self.workdir, self._source, self._resume = workdir, source, resume
        self.config = TrackedConfig(config, overrides)
        prepare_workdir(workdir, self.config.as_dict(), resume=resume)
        self._store = CheckpointStore(workdir / CHECKPOINTS, keep=self.config.checkpoint.keep)
        self.resources, self.compilations = ResourceSampler(), CompilationCounter()
        self.version_at_start = 0
        self._start = StartProgress(config.telemetry.progress)
        try:
            self._build()
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
        self._scores = read_scores(self.workdir / EVALUATIONS) if self._resume else {}
        snapshot, arrays = self._load_checkpoint()
        log_path = self.workdir / 'events.jsonl'
        next_seq = snapshot['next_seq'] if snapshot else 0
        truncate_events(log_path, next_seq)
        start_s = snapshot['clock_s'] if snapshot else 0.0
        self.log, self.clock = build.build_log_and_clock(config, log_path, next_seq, start_s)
        self.verifier = build.build_verifier(config, self.clock, task, model.tokenizer.decode)
        self.verifier.start()
        self.supervisor = Supervisor(self.clock)
        self._start.begin('building the learner')
        self._build_learner(model, arrays)
        self._channel = build.build_channel(config, self.workdir, model.decoder)
        ring, self._engines = self._build_engines(model)
        self.pool = Pool(self._engines, self.log)
        self.metrics = MetricsWriter(self.workdir, config.telemetry.tensorboard)
        self.metrics.truncate(self.version_at_start)
        self.observer = StepObserver(
            self.metrics, self._progress(start_s), self.compilations, self.resources.cpu_seconds, start_s
        )
        self.log.listeners += [self.observer.on_event, self._announce_stop]
        sampling = build.build_sampling(config, model.tokenizer)
        self._build_controller(task, sampling, ring)
        if snapshot:
            self.controller.restore(snapshot)
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
        if arrays is not None:
            try:
                self.learner.restore(arrays)
            except ValueError as error:
                raise CheckpointError(f'{self.workdir / CHECKPOINTS} is of another model: {error}') from error

    def _build_engines(self, model: build.Model) -> tuple[VersionRing | None, list[Engine]]:
        config, version = self.config, self.version_at_start
        published = self._channel.transfer(version, self.learner.publish(version))
        ring = build.build_ring(config)
        if ring:
            ring.add(published)
        backend = build.build_backend(config, model.decoder)
        engines = [
            Engine(
                build.engine_name(index),
                backend,
                self.clock,
                self.log,
                receive=self._channel.receive,
                version=version,
                params=self._channel.receive(published),
                kv_policy=config.rollout.kv_policy,
                decode_steps=config.rollout.decode_steps,
            )
            for index in range(config.rollout.engines)
        ]
        self._backend = backend
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
            save_checkpoint=self._save_checkpoint if self.resumable else None,
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
                announce=self._start.count_answers,
            )

    def _progress(self, start_s: float) -> Progress | None:
        config = self.config
        if not config.telemetry.progress:
            return None
        return Progress(config.run.steps, first_step=self.version_at_start, first_time=start_s)

    # Running.

    def train(self) -> dict[str, Any] | None:
        """Run to the end (the report) or to a requested stop (None; the checkpoint is saved if there can be one)."""
        try:
            return self._report() if self._run() else None
        finally:
            self.learner.close()

    def _run(self) -> bool:
        try:
            self._warm_up()
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

    def _warm_up(self) -> None:
        began = time.monotonic()
        self._start.begin('compiling what trains:')
        programs = self.learner.warm_up()
        self._start.begin('compiling what generates:')
        programs += self._backend.warm_up(self._engines[0].params, self._start.count_programs)
        self._start.end()
        self.compilations.reset()
        if isinstance(self.clock, RealClock):
            self.clock.restart()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    async def _program(self) -> bool:
        stop = self.controller.stop_requested
        self.clock.on_signal(signal.SIGINT, stop)
        self.clock.on_signal(signal.SIGTERM, stop)
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

    def _announce_stop(self, event: Mapping[str, Any]) -> None:
        if event['kind'] == 'signal':
            then = 'saving' if self.resumable else 'ending'
            print(
                f'{event["name"]}: finishing the update under way, then {then}; once more to quit at once', flush=True
            )

    # What stays.

    def _load_checkpoint(self) -> tuple[dict[str, Any] | None, Any]:
        if not self._resume:
            return None, None
        step, arrays, run_state = self._store.restore_latest()
        self.version_at_start = step
        try:
            snapshot = decode_run_state(run_state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{self.workdir / CHECKPOINTS} is not of such a run: {error}') from error
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)
        return snapshot, arrays

    def _save_checkpoint(self, step: int, arrays: Any, snapshot: Mapping[str, Any]) -> None:
        self._store.save(step, arrays, encode_run_state(snapshot), self.learner.followers)

    def _write_scores(self, phase: str, scores: EvaluationScores) -> None:
        self._scores[phase] = scores
        known = {phase: dataclasses.asdict(scores) for phase, scores in self._scores.items()}
        files.write_json(self.workdir / EVALUATIONS, known, indent=None)

    def _report(self) -> dict[str, Any]:
        config = self.config
        events = load_events(self.workdir / 'events.jsonl')
        alone = alone_seconds(lane_intervals(events), window(events), config.run.steps)
        lag = self.clock.max_lag_s if isinstance(self.clock, RealClock) else 0.0
        facts = RunFacts(
            config=self._source,
            seed=config.run.seed,
            eta=config.staleness.eta,
            clock=config.run.clock,
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
            cpu_seconds=self.observer.cpu_seconds_in_window,
            cores=hardware()['cores'],
            lanes_own_devices=False,
            idle_fields=self._idle_fields,
        )
        facts.save(self.workdir)
        return write_report(self.workdir, facts, plots=self._plots)
