"""One run of supervised training from a config to its report: build, warm up, then draw, update, measure, save."""

from __future__ import annotations

import contextlib
import pathlib
import platform
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax.app import build
from areal_jax.app.compilations import CompilationCounter
from areal_jax.app.extras import require_extras
from areal_jax.app.interrupt import Interrupts
from areal_jax.app.processes import lead
from areal_jax.app.provenance import git_commit, hardware, package_versions
from areal_jax.app.sft_report import SftFacts, write_sft_report
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
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config import TrackedConfig, validate
from areal_jax.files import DirectoryLock
from areal_jax.learning.finiteness import NonFiniteError
from areal_jax.publication.export import export_hf
from areal_jax.publication.manifest import weights_sha256
from areal_jax.tasks.demonstrations import Demonstrations, read_demonstrations, solve_task
from areal_jax.tasks.registry import make_task, value_names
from areal_jax.tasks.tokenizer import Tokenizer
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import discard_facts
from areal_jax.telemetry.metrics import MetricsWriter, merge
from areal_jax.telemetry.numerals import format_duration
from areal_jax.telemetry.progress import StartProgress, describe_skipped_steps
from areal_jax.telemetry.resources import ResourceSampler

EXPORT = 'export'
_OF_ROLLOUTS = ('reward/', 'staleness/', 'update/filtered_')  # metrics of the learner that given answers do not have


class SftSession:
    """Everything of one supervised run. Use `train`; the parts are attributes so that a test can look at them.

    The learner, its rows and programs are those of the asynchronous loop; there is nothing to wait for, so no clock.

    Args:
      config: as an experiment file gives it, overrides applied; its loss.objective is 'sft'.
      workdir: where the run leaves what it leaves.
      resume: go on from the newest checkpoint in the workdir, or start again at update 0 where there is none.
      source: where the config came from, for the report.
      overrides: the fields that the command line sets; one that the run does not use is refused.
      interrupts: signals; None = they do what they do without a run.
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
        self._started = time.monotonic()
        self.workdir, self._source, self._interrupts = workdir, source, interrupts
        self.stop_requested = threading.Event()
        self.config = TrackedConfig(config, overrides)
        self._unsaved: CheckpointError | None = None  # why the checkpoint after the last update is missing
        self._finished: dict[str, Any] | None = None  # the report, where nothing is left to do
        self.resources, self.compilations = ResourceSampler(), CompilationCounter()
        self.step, self._seconds, self._trained_tokens = 0, 0.0, 0.0
        self._held_out_nll: dict[int, float] = {}  # by update
        self._start = StartProgress(config.telemetry.progress)
        self._lock = DirectoryLock(workdir)
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self._lock.release)
                prepare_workdir(workdir, self.config.as_dict(), resume=resume)
                self._store = CheckpointStore(workdir / CHECKPOINTS, keep=self.config.checkpoint.keep)
                self._store.remove_unfinished()
                self._build(resume)
                undo.pop_all()
        finally:
            self._start.end()

    def _build(self, resume: bool) -> None:
        config = self.config
        build.use_compilation_cache(config)
        self._start.begin(build.describe_loading(config))
        model = build.build_model(config)
        note_weights(self.workdir, model.source, resume=resume)
        self.decoder = model.decoder
        self._start.begin(f'preparing demonstrations of task {config.task.name}')
        self.demonstrations = build_demonstrations(config, model.tokenizer)
        self.stream = self.demonstrations.stream(config.run.seed)
        self._held_out = self.demonstrations.held_out_groups(config.evaluation.problems, config.run.seed)
        self._start.begin('building the learner')
        learner = build.build_learner(config, model)
        learner.announce = self._start.count_programs
        self.learner = lead(config, learner, self.workdir)
        model.params = None  # the learner has its copy
        build.require_finite_weights(config, self.learner, model)
        if resume:
            self._restore()
        self._steps, self._per_update = config.run.steps, config.learner.groups_per_update
        self._evaluate_every, self._save_every = config.sft.evaluate_every, config.checkpoint.every
        self._shows_progress = config.telemetry.progress
        self._export_dtype = config.sft.export_dtype
        self._companions = model.companions
        use_tensorboard = config.telemetry.tensorboard
        config.require_all_read()
        self._idle_fields = config.idle_fields()
        self.metrics = MetricsWriter(self.workdir, use_tensorboard)
        self.metrics.truncate(self.step)

    # Running.

    def train(self) -> dict[str, Any] | None:
        """Run to the end (the report) or to a requested stop (None; the checkpoint is saved)."""
        try:
            with self.resources, self.compilations:
                if self._finished is not None:
                    return self._finished
                discard_facts(self.workdir)
                self._warm_up()
                with self._deferred_signals():
                    finished = self._run()
                if not finished:
                    return None
                report = self._report()
                if self._unsaved:
                    raise self._unsaved
                return report
        finally:
            self.metrics.close()
            self.learner.close()
            self._lock.release()

    def _deferred_signals(self) -> contextlib.AbstractContextManager[None]:
        """Between updates a signal asks the run to stop."""
        if self._interrupts is None:
            return contextlib.nullcontext()
        then = 'finishing the update under way, then saving'
        return self._interrupts.deferred(lambda _: self.stop_requested.set(), then)

    def _warm_up(self) -> None:
        began = time.monotonic()
        self._start.begin('compiling what trains:')
        try:
            programs = self.learner.warm_up()
        finally:
            self._start.end()
        self.compilations.reset()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)
        all_of_them = ' (all)' if 0 < len(self._held_out) < self.config.evaluation.problems else ''
        sizes = f'{self.stream.size} to train on, {len(self._held_out)} held out to measure{all_of_them}'
        dropped = f', {self.demonstrations.dropped} dropped: they fit no row' if self.demonstrations.dropped else ''
        print(f'demonstrations: {sizes}{dropped}; {self._epochs(self._steps):.3g} epochs', flush=True)

    def _run(self) -> bool:
        """Updates up to the last (True) or to a requested stop, saved (False)."""
        if self.step == 0 and not self._held_out_nll:
            self._evaluate()
        self._first_step = self.step
        self._first_seconds, self._resumed_at = self._seconds, time.monotonic()
        saved = None
        while self.step < self._steps and not self.stop_requested.is_set():
            self._update()
            if self.step == self._steps or (self._save_every and self.step % self._save_every == 0):
                saved = self._save()
        if self.step < self._steps:
            if saved != self.step:
                self._save()
            return False
        if self.step not in self._held_out_nll:  # a finished run that is resumed with other problems
            self._evaluate()
        return True

    def _update(self) -> None:
        began, compiled = time.monotonic(), self.compilations.count
        groups = [self.stream.draw() for _ in range(self._per_update)]
        metrics = self.learner.update(groups, self.step)
        self.step += 1
        train_seconds = time.monotonic() - began
        trained = metrics['update/trained_tokens']
        self._trained_tokens += trained
        learned = {name: value for name, value in metrics.items() if not name.startswith(_OF_ROLLOUTS)}
        measures = self.step == self._steps or (self._evaluate_every and self.step % self._evaluate_every == 0)
        held_out = self._evaluate() if measures else {}
        self._seconds = self._first_seconds + time.monotonic() - self._resumed_at
        counted: dict[str, Any] = {
            names.TIME: self._seconds,
            names.EPOCH: self._epochs(self.step),
            names.TRAIN_RATE: trained / max(train_seconds, 1e-9),
            names.TOKENS_TRAINED: trained,
            names.COMPILATIONS: self.compilations.count - compiled,
        }
        values = merge(learner=learned, evaluation=held_out, session=counted)
        self.metrics.write(self.step, values)
        if self._shows_progress:
            print(self._progress(values), flush=True)

    def _evaluate(self) -> dict[str, float]:
        """Held-out likelihood under the weights as they are."""
        if not self._held_out:
            return {}
        measured = self.learner.evaluate(self._held_out)
        self._held_out_nll[self.step] = measured['nll']
        print(f'held-out nll after {self.step} updates: {measured["nll"]:.4f} nats a token', flush=True)
        return {names.HELD_OUT_NLL: measured['nll'], names.HELD_OUT_TOKENS: measured['tokens']}

    def _epochs(self, step: int) -> float:
        return step * self._per_update / self.stream.size

    def _progress(self, values: Mapping[str, Any]) -> str:
        seconds = self._seconds - self._first_seconds
        left = seconds / (self.step - self._first_step) * (self._steps - self.step)
        parts = (
            f'step {self.step:>{len(str(self._steps))}}/{self._steps}',
            f'nll {values.get("loss/nll", float("nan")):.4f}',
            f'epoch {values[names.EPOCH]:.2f}',
            f'train {values[names.TRAIN_RATE]:.0f} tok/s',
            describe_skipped_steps(values),
            f'left {format_duration(left)}',
        )
        return '  '.join(part for part in parts if part)

    # What stays.

    def _save(self) -> int:
        state = {
            'stream': dict(self.stream.state()),
            'seconds': self._seconds,
            'trained_tokens': self._trained_tokens,
            'held_out': len(self._held_out),
            'held_out_nll': {str(step): nll for step, nll in self._held_out_nll.items()},
        }
        self.metrics.sync()  # a resumed run needs all lines up to here, also after a loss of power
        try:
            self._store.save(self.step, self.learner.save(), state, self.learner.followers)
        except CheckpointError as error:
            if self.step < self._steps:
                raise
            self._unsaved = describe_unsaved(error, self.workdir)
        return self.step

    def _restore(self) -> None:
        if self._store.latest() is None:
            start_again(self.workdir, self.config.as_dict())
            return
        step, arrays, state = self._store.restore_latest()
        try:
            self.learner.restore(arrays)
        except NonFiniteError as error:
            raise CheckpointError(f'{self.workdir}/{CHECKPOINTS}: {error}') from error
        except ValueError as error:
            raise CheckpointError(f'{self.workdir}/{CHECKPOINTS} is of another model: {error}') from error
        try:
            self.stream.restore(state['stream'])
            self._seconds, self._trained_tokens = float(state['seconds']), float(state['trained_tokens'])
            measured = {int(step): float(nll) for step, nll in state['held_out_nll'].items()}
            measured_on = int(state['held_out'])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{self.workdir}/{CHECKPOINTS} is not of supervised training: {error}') from error
        self.step = step
        if measured_on == len(self._held_out):
            self._held_out_nll = measured
        else:
            print('evaluation.problems was changed: the report leaves out what was measured before', flush=True)
        continue_run(self.workdir, self.config.as_dict(), step)
        if step == self.config.run.steps:
            self._finished = read_report(self.workdir, step)
        print(f'resumed after update {step} from {self.workdir / CHECKPOINTS}', flush=True)

    def _report(self) -> dict[str, Any]:
        self.learner.require_finite('the trained weights', 'lower optimizer.learning_rate')
        params = self.learner.publish(self.step)
        export_hf(self.workdir / EXPORT, params, self.decoder.config, dtype=self._export_dtype, source=self._companions)
        facts = SftFacts(
            config=self._source,
            seed=self.config.run.seed,
            steps=self.step,
            epochs=self._epochs(self.step),
            demonstrations={
                'train': self.stream.size,
                'held_out': len(self._held_out),
                'dropped': self.demonstrations.dropped,
            },
            held_out_nll=self._held_out_nll,
            trained_tokens=int(self._trained_tokens),
            training_seconds=self._seconds,
            wall_seconds=time.monotonic() - self._started,
            compilations=self.compilations.count,
            peak_memory_bytes=self.resources.peak_bytes,
            weights_sha256=weights_sha256(params),
            prolonged=read_prolongations(self.workdir),
            idle_fields=self._idle_fields,
            git_commit=git_commit(),
            versions=package_versions(),
            hardware=hardware() | {'platform': platform.platform()},
            planned_steps=self._steps,
        )
        facts.save(self.workdir)
        return write_sft_report(self.workdir, facts)


def build_demonstrations(config: TrackedConfig, tokenizer: Tokenizer) -> Demonstrations:
    """Those of the file task.path (task.name='jsonl'), or the problems of another task with their answers."""
    name = config.task.name
    if name == 'jsonl':
        task = config.task
        found = read_demonstrations(task.path, tokenizer, task.system_prompt, task.held_out_fraction)
    else:
        values = {field: getattr(config.task, field) for field in value_names(name)}
        found = solve_task(make_task(name, tokenizer, **values), tokenizer)
    return found.fitting(config.learner.row_tokens, config.learner.row_loss_tokens, config.task.over_length)
