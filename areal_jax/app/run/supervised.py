"""Runs supervised and preference training: build, warm up, then draw, update, measure, save."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping

from areal_jax.app.parts.part_settings import build_device_rates, build_mesh
from areal_jax.app.parts.task_builder import build_demonstrations
from areal_jax.app.run.own_site import OwnLearner, build_own_site, count_compilations, load_model
from areal_jax.app.run.reports import SftFacts, describe_held_out, describe_update, write_sft_report
from areal_jax.app.run.run import Built, Checkpoint, ModelText, RunContext, Site, keep_rollouts
from areal_jax.app.workdir.environment import hardware
from areal_jax.app.workdir.run_directory import CHECKPOINTS, Report
from areal_jax.checkpoint.store import CheckpointError
from areal_jax.config.objectives import find_objective
from areal_jax.models.weights import Params
from areal_jax.publication.manifest import weights_sha256
from areal_jax.sharding.rules import Allocation
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, merge
from areal_jax.telemetry.progress import describe_skipped_steps, format_duration

_OF_ROLLOUTS = ('reward/', 'staleness/', 'update/filtered_')  # learner metrics that only generated answers have


def build_training(context: RunContext) -> Built[SftTraining]:
    """Builds a run of supervised or preference training."""
    compilations, model = count_compilations(context), load_model(context)
    training = SftTraining(context, model, functools.partial(build_own_site, context, compilations, model))
    return training.site, training


class SftTraining:
    """Training on given data, demonstrations or pairs of answers; see run.Program.

    It uses the learner, packed rows and programs of asynchronous training. Only the learner works: there is no clock.
    """

    def __init__(
        self, context: RunContext, model: ModelText, build_site: Callable[[Checkpoint | None], Site[OwnLearner]]
    ):
        config = context.config
        self._context, self._config = context, config
        self.stop_requested = threading.Event()
        self.step, self._seconds, self._trained_tokens = 0, 0.0, 0.0
        self._measured: Mapping[int, Mapping[str, float]] = {}  # by update, see Objective.measure_held_out
        self._noun = find_objective(config.loss.objective).given
        context.start.begin(f'preparing {self._noun} of task {config.task.name}')
        self.demonstrations = build_demonstrations(config, model.tokenizer)
        self.stream = self.demonstrations.stream(config.run.seed)
        self._held_out = self.demonstrations.held_out_groups(config.evaluation.problems, config.run.seed)
        checkpoint = context.read_checkpoint()
        self.site = build_site(checkpoint)
        self.learner = self.site.learner
        if checkpoint:
            self._restore(checkpoint)
        self._steps, self._per_update = config.run.steps, config.learner.groups_per_update
        self._evaluate_every, self._save_every = config.sft.evaluate_every, config.checkpoint.every
        self._shows_progress = config.telemetry.progress
        self._rates = build_device_rates(config, Allocation(build_mesh(config), ()))
        self.metrics = context.open_metrics(self.step, before={})
        self._rollouts = context.open_rollouts(self.step, model.tokenizer.split)
        self._traced = keep_rollouts(self.site.trace(self.learner), self.learner.read_tokens, self._rollouts)
        context.require_all_read()

    def _restore(self, checkpoint: Checkpoint) -> None:
        state, workdir = checkpoint.state, self._context.workdir
        try:
            self.stream.restore(state['stream'])
            self._seconds, self._trained_tokens = float(state['seconds']), float(state['trained_tokens'])
            measured = {int(step): {'nll': float(nll)} for step, nll in state['held_out_nll'].items()}
            measured |= {int(step): dict(values) for step, values in state.get('held_out_pairs', {}).items()}
            measured_on = int(state['held_out'])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f'{workdir / CHECKPOINTS} is not of supervised training: {error}') from error
        self.step = checkpoint.step
        if measured_on == len(self._held_out):
            self._measured = measured
        else:
            print('evaluation.problems was changed: the report leaves out what was measured before', flush=True)
        self._context.go_on(self.step)

    # Running.

    def run(self) -> bool:
        self.warm_up()
        self._describe_demonstrations()
        with self._context.deferred_signals(lambda _: self.stop_requested.set()):
            return self._make_updates()

    def warm_up(self) -> None:
        """Compiles every program of the run."""
        began = time.monotonic()
        self._context.start.begin('compiling what trains:')
        programs = self.learner.warm_up()
        self._context.start.end()
        self.site.compilations.reset()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    def scores_of(self, phase: str) -> Line:
        """Returns an empty row: held-out likelihood is already a metric of every row."""
        return {}

    def _describe_demonstrations(self) -> None:
        all_of_them = ' (all)' if 0 < len(self._held_out) < self._config.evaluation.problems else ''
        sizes = f'{self.stream.size} to train on, {len(self._held_out)} held out to measure{all_of_them}'
        dropped = f', {self.demonstrations.dropped} dropped: they fit no row' if self.demonstrations.dropped else ''
        print(f'{self._noun}: {sizes}{dropped}; {self._epochs(self._steps):.3g} epochs', flush=True)

    def _make_updates(self) -> bool:
        """Makes updates up to the last (True) or to a requested stop, then saves (False)."""
        if self.step == 0 and not self._measured:
            self._evaluate()
        self._first_step = self.step
        self._first_seconds, self._resumed_at = self._seconds, time.monotonic()
        saved = None
        while self.step < self._steps and not self.stop_requested.is_set():
            self._update()
            if self.step == self._steps or (self._save_every and self.step % self._save_every == 0):
                saved = self._save_checkpoint()
        if self.step < self._steps:
            if saved != self.step:
                self._save_checkpoint()
            return False
        if self.step not in self._measured:  # a finished run that is resumed with other problems
            self._evaluate()
        return True

    def _update(self) -> None:
        began, compiled = time.monotonic(), self.site.compilations.count
        groups = [self.stream.draw() for _ in range(self._per_update)]
        metrics = self._traced.update(groups, self.step)
        self.step += 1
        train_seconds = time.monotonic() - began
        trained = metrics['update/trained_tokens']
        self._trained_tokens += trained
        learned = {name: value for name, value in metrics.items() if not name.startswith(_OF_ROLLOUTS)}
        measures = self.step == self._steps or (self._evaluate_every and self.step % self._evaluate_every == 0)
        held_out = self._evaluate() if measures else {}
        self._seconds = self._first_seconds + time.monotonic() - self._resumed_at
        counted: dict[str, float] = {
            names.TIME: self._seconds,
            names.EPOCH: self._epochs(self.step),
            names.TRAIN_RATE: trained / max(train_seconds, 1e-9),
            names.TOKENS_TRAINED: trained,
            names.COMPILATIONS: self.site.compilations.count - compiled,
        }
        rates = self._rates.of_learner(metrics, train_seconds)
        values = merge(learner=learned, evaluation=held_out, session=counted, devices=rates)
        self.metrics.write(self.step, values)
        if self._shows_progress:
            print(self._progress(values), flush=True)

    def _evaluate(self) -> dict[str, float]:
        """Measures the current weights on held-out data; returns the metrics."""
        if not self._held_out:
            return {}
        measured = self.learner.evaluate(self._held_out)
        self._measured = {**self._measured, self.step: measured}
        print(describe_held_out(self.step, measured), flush=True)
        return {names.HELD_OUT + name: value for name, value in measured.items()}

    def _epochs(self, step: int) -> float:
        return step * self._per_update / self.stream.size

    def _progress(self, values: Mapping[str, float]) -> str:
        seconds = self._seconds - self._first_seconds
        left = seconds / (self.step - self._first_step) * (self._steps - self.step)
        parts = (
            f'step {self.step:>{len(str(self._steps))}}/{self._steps}',
            describe_update(values),
            f'epoch {values[names.EPOCH]:.2f}',
            f'train {values[names.TRAIN_RATE]:.0f} tok/s',
            describe_skipped_steps(values),
            f'left {format_duration(left)}',
        )
        return '  '.join(part for part in parts if part)

    # Checkpoints and the report.

    def _save_checkpoint(self) -> int:
        state = {
            'stream': dict(self.stream.state()),
            'seconds': self._seconds,
            'trained_tokens': self._trained_tokens,
            'held_out': len(self._held_out),
            'held_out_nll': {str(step): values['nll'] for step, values in self._measured.items() if 'nll' in values},
            'held_out_pairs': {str(step): dict(values) for step, values in self._measured.items() if 'pairs' in values},
        }
        self.metrics.sync()  # a resumed run needs all lines up to here, also after a loss of power
        if self._rollouts:
            self._rollouts.sync()
        self._context.save(self.step, self.learner.save(), state, self.learner.followers)
        return self.step

    def report(self) -> tuple[Report, Params]:
        self.learner.require_finite('the trained weights', 'lower optimizer.learning_rate')
        params = self.learner.publish(self.step)
        facts = SftFacts(
            **self._context.describe(hardware()),
            compilations=self.site.compilations.count,
            steps=self.step,
            epochs=self._epochs(self.step),
            demonstrations={
                'train': self.stream.size,
                'held_out': len(self._held_out),
                'dropped': self.demonstrations.dropped,
            },
            held_out_nll={step: values['nll'] for step, values in self._measured.items() if 'nll' in values},
            held_out_pairs={step: values for step, values in self._measured.items() if 'pairs' in values},
            trained_tokens=int(self._trained_tokens),
            training_seconds=self._seconds,
            weights_sha256=weights_sha256(params),
        )
        facts.save(self._context.workdir)
        return write_sft_report(self._context.workdir, facts), params
