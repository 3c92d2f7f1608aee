"""Measures a model on a task with the engines, verifier and evaluator of a run, without a learner."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import time
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.evaluate.evaluation_config import adapt_config, read_version
from areal_jax.app.model.model import Model, build_model
from areal_jax.app.model.text_model import describe_loading, describe_source
from areal_jax.app.parts.compilations import use_compilation_cache
from areal_jax.app.parts.engines import build_backends, build_engines, describe_caches, place_of
from areal_jax.app.parts.host import build_clock
from areal_jax.app.parts.part_settings import build_sampling, find_ends
from areal_jax.app.parts.sizes import require_room_to_evaluate
from areal_jax.app.parts.task_builder import (
    build_task,
    build_verifier,
    name_tasks,
    require_known_tasks,
    try_scorer_sandbox,
)
from areal_jax.app.parts.workflow_builder import load_workflow, require_tools_shown
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.process.setup import require_extras
from areal_jax.app.workdir.environment import git_commit, hardware, package_versions
from areal_jax.app.workdir.run_directory import EvaluationWorkdir, note_weights, sample_digest
from areal_jax.config import TrackedConfig, validate_evaluation
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.xla_flags import FIELD as XLA_FLAGS
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.evaluation.evaluator import Deliver, Evaluator
from areal_jax.evaluation.results import Answer, AnsweredProblem, AnswerFile, Results, SourcesOfResults, Tally
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.learning import weights as trees
from areal_jax.learning.weights import require_finite_shards
from areal_jax.protocols import Event
from areal_jax.publication.files_channel import DeviceChannel
from areal_jax.publication.manifest import weights_sha256
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.stream import WITHOUT_TRAINING
from areal_jax.sharding.placement import move_to
from areal_jax.sharding.rules import allocate_engines
from areal_jax.tasks.mixture import final_answer
from areal_jax.tasks.task import PromptSet, TaskError
from areal_jax.telemetry.progress import StartProgress
from areal_jax.text.chat_template import ConversationError
from areal_jax.types import Prompt

PHASE = 'alone'  # in the event log
_OPEN_PER_SLOT = 4  # answers under way: in a slot, waiting for one, or being verified


def evaluate_model(
    config: config_dict.ConfigDict,
    workdir: pathlib.Path,
    *,
    model: str | None = None,
    resume: bool = False,
    source: str = '',
    overrides: Collection[str] = (),
    interrupts: StopRequests | None = None,
) -> Results | None:
    """Answers evaluation.problems held-out problems greedily and evaluation.samples times; writes and returns scores.

    The sampling noise equals the noise of evaluations of a run with this config and seed, so equal weights give equal
    answers.

    Args:
      config: as an experiment file gives it, overrides applied; a config that could not be trained may pass.
      workdir: the directory for answers.jsonl and results.json.
      model: the --workdir of a run, one of its checkpoints, a directory of Hugging Face files, a GGUF file, or
        'package:NAME/FILE'; None = the model that config.model names.
      resume: keep the problems that are complete in the workdir, and answer the others.
      source: where the config came from, for results.json.
      overrides: the fields that the command line sets; one that the evaluation does not use is refused.
      interrupts: asks the evaluation to stop when a signal comes; None = signals are left alone.

    Returns results.json, or None after a requested stop. Raises UserError for errors that the user can fix.
    """
    adapted = adapt_config(config, model, overrides)
    validate_evaluation(adapted)
    require_extras(adapted)
    require_known_tasks(adapted)
    with _Evaluation(adapted, workdir, resume, source, overrides, interrupts) as evaluation:
        return evaluation.run()


class _Evaluation:
    """The parts of one evaluation. The constructor builds every part that can make it fail; `run` runs it."""

    def __init__(
        self,
        config: config_dict.ConfigDict,
        workdir: pathlib.Path,
        resume: bool,
        source: str,
        overrides: Collection[str],
        interrupts: StopRequests | None,
    ):
        self.config = TrackedConfig(config, overrides, purpose=Purpose.EVALUATION)
        self.config.note_used([XLA_FLAGS])  # by the command, before jax
        self._source, self._interrupts = source, interrupts
        self.workdir = EvaluationWorkdir(workdir, self.config.as_dict(), resume=resume)
        self.workdir.require_usable()
        self._parts = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(self)
            lock = files.DirectoryLock(workdir)
            self._parts.callback(lock.release)
            self.workdir.require_usable()  # no other evaluation may have started meanwhile
            undo.callback(self.workdir.discard)
            check = interrupts.check if interrupts else lambda: None
            self._start = StartProgress(self.config.telemetry.progress, check=check)
            self._parts.callback(self._start.end)
            self._parts.enter_context(use_compilation_cache(self.config))
            self.allocation = allocate_engines(parse_engines(self.config.cluster.engines))
            require_room_to_evaluate(config, self.allocation)
            self._build()
            self.config.require_all_read()
            self.workdir.begin()
            undo.pop_all()

    def __enter__(self) -> _Evaluation:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def run(self) -> Results | None:
        """Answers the remaining problems; returns results.json, or None after a requested stop."""
        if self._left:
            self._warm_up()
            if not self._answer():
                complete = f'{len(self.tally)} of {self._problems} problems are complete'
                print(f'stopped: {complete} in {self.workdir.answers}', flush=True)
                return None
        results = self._results()
        files.write_json(self.workdir.results, results)
        return results

    # Building.

    def _build(self) -> None:
        config = self.config
        require_tools_shown(config)
        self._start.begin(describe_loading(config))
        self._model = model = build_model(config, self._start.count_bytes)
        note_weights(self.workdir.path, model.source, resume=self.workdir.has_answers)
        self._start.begin(f'preparing task {name_tasks(config)}')
        task = self._build_task(model)
        self._samples, self._seed = config.evaluation.samples, config.run.seed
        prompts = {prompt.draw: prompt for prompt in task.held_out(config.evaluation.problems, self._seed)}
        self._sources = {draw: prompt.source for draw, prompt in prompts.items()}
        self._answers = AnswerFile(self.workdir.answers, prompts, self._samples)
        self._parts.callback(self._answers.close)
        self.tally = Tally(self._samples)
        of_sources = sorted({source for source in self._sources.values() if source})
        self._tallies = {source: Tally(self._samples) for source in of_sources}
        for problem in self._answers.read():
            self._count(problem)
        self._problems = len(prompts)
        self._left = [prompt for draw, prompt in prompts.items() if draw not in self.tally]
        (self.workdir.path / EVENTS).unlink(missing_ok=True)  # of an earlier attempt
        self.log = EventLog(self.workdir.path / EVENTS)
        self._parts.callback(self.log.close)
        ends_process = self._interrupts is not None and self._interrupts.ends_process
        self.clock = build_clock(config, self.log, 0.0, waits_for_work=not ends_process)
        self._sandbox = try_scorer_sandbox(config)
        self.verifier = build_verifier(config, self.clock, task, model.tokenizer.decode, sandbox=self._sandbox)
        self._parts.callback(self.verifier.close)
        self.verifier.start()
        self.supervisor = Supervisor(self.clock)
        self._engines = self._build_engines(model)
        self.evaluator = self._build_evaluator(task, model, self._left)

    def _build_task(self, model: Model) -> PromptSet:
        try:
            return build_task(self.config, model.tokenizer)
        except TaskError as error:
            if not isinstance(error.__cause__, ConversationError):
                raise
            name, path = name_tasks(self.config), self.config.model.path
            raise ConfigError(
                f'the tokenizer of the model {path!r} does not fit task.name={name!r}: {error}; evaluate it on the '
                'task that it was made for'
            ) from error

    def _build_engines(self, model: Model) -> list[LocalEngine]:
        """Builds engines that hold the model's weights in the dtype of publication."""
        config = self.config
        self._backends = build_backends(config, model.decoder, self.allocation)
        self._start.begin(f'building the engines; {describe_caches(self._backends)}')
        params = trees.cast(model.params, config.publication.dtype)
        model.params = None
        require_finite_shards(params, *describe_source(config, model.source))
        self._version = read_version(model.source) or 0
        first = place_of(config, model.decoder, self.allocation.engines[0])
        channel = DeviceChannel(None, verify=config.publication.verify)
        published = channel.transfer(self._version, move_to(params, first))  # the first engine decodes with these
        self._weights_sha256 = weights_sha256(channel.receive(published))
        return build_engines(
            config, model.decoder, self.allocation, self._backends, {}, channel, published, self.clock, self.log,
            WITHOUT_TRAINING,
        )  # fmt: skip

    def _build_evaluator(self, task: PromptSet, model: Model, problems: list[Prompt]) -> Evaluator:
        return Evaluator(
            pool=Pool(self._engines, self.clock, self.log, self.supervisor),
            verifier=self.verifier,
            clock=self.clock,
            supervisor=self.supervisor,
            log=self.log,
            problems=problems,
            sampling=build_sampling(self.config, model.tokenizer),
            samples=self._samples,
            seed=self._seed,
            decode=model.tokenizer.decode,
            final_answer=functools.partial(final_answer, task),
            max_failed=self.config.task.max_failed_groups,
            announce=self._start.count_answers,
            make_workflow=load_workflow(self.config, model.tokenizer)(self.clock),
        )

    # Running.

    def _warm_up(self) -> None:
        began, programs = time.monotonic(), 0
        self._start.begin('compiling what generates:')
        for devices, engines in self.allocation.by_devices().items():  # a program is compiled for its devices
            programs += self._backends[devices].warm_up(self._engines[engines[0]].params, self._start.count_programs)
        self._start.end()
        print(f'compiled {programs} programs in {time.monotonic() - began:.0f} s', flush=True)

    def _answer(self) -> bool:
        """Answers the remaining problems; returns False after a requested stop."""
        if isinstance(self.clock, RealClock):
            self.clock.restart()
        stop = self.clock.event('stop requested')
        request = lambda number: self.clock.post_signal(number, stop)
        then, interrupts = 'keeping the problems that are complete', self._interrupts
        with interrupts.deferred(request, then, self.clock.abandon) if interrupts else contextlib.nullcontext():
            return self.clock.execute(self.supervisor.run(self._program(stop)))

    async def _program(self, stop: Event) -> bool:
        for engine in self._engines:
            engine.start(self.supervisor)
        already = f', {len(self.tally)} more are complete already' if len(self.tally) else ''
        self._start.begin(f'evaluating {len(self._left)} problems{already}')
        most_open = _OPEN_PER_SLOT * self.config.rollout.slots * len(self._engines)
        complete = await self.evaluator.answer_all(PHASE, stop, self._collect_answers(), most_open)
        self._start.end()
        return complete

    def _collect_answers(self) -> Deliver:
        """Returns a function that collects the answers to each problem; the last one writes and counts the problem."""
        before, began = self.tally.seconds, time.monotonic()
        incomplete: dict[int, dict[int, Answer]] = {}  # by row, by column

        def collect(row: int, column: int, answer: Answer) -> None:
            found = incomplete.setdefault(row, {})
            found[column] = answer
            if len(found) <= self._samples:
                return
            del incomplete[row]
            prompt = self._left[row]
            answers = tuple(found[column] for column in range(1 + self._samples))
            problem = AnsweredProblem(prompt.draw, round(before + time.monotonic() - began, 3), answers)
            self._answers.append(problem, self._model.tokenizer.decode(prompt.tokens))
            self._count(problem)

        return collect

    def _count(self, problem: AnsweredProblem) -> None:
        self.tally.add(problem)
        if source := self._sources[problem.draw]:
            self._tallies[source].add(problem)

    # The results.

    def _results(self) -> Results:
        seconds, config, tokenizer = self.tally.seconds, self.config, self._model.tokenizer
        return {
            'model': {
                'source': config.model.source,
                'path': config.model.path,
                'files': None if self._model.source is None else str(self._model.source),
                'samples_sha256': None if self._model.source is None else sample_digest(self._model.source),
                'weights_sha256': self._weights_sha256,
                'version': self._version,
            },
            'task': name_tasks(config),
            **self.tally.scores(self._seed),
            **self._score_sources(),
            'seed': self._seed,
            'temperature': config.rollout.temperature,
            'ends': tokenizer.token_bytes.name(find_ends(config, tokenizer)),
            'seconds': seconds,
            'tokens_per_second': self.tally.generated_tokens / seconds if seconds else None,
            'config_file': self._source,
            'config': _spell_infinity(config.as_dict()),
            'versions': package_versions(),
            'git_commit': git_commit(),
            'hardware': dict(hardware()),
            'sandbox': self._sandbox,
        }

    def _score_sources(self) -> SourcesOfResults:
        """The scores by source; empty for a single task."""
        scores = {source: tally.scores(self._seed) for source, tally in self._tallies.items()}
        if not scores:
            return {}
        return {'sources': {s: {'problems': own['problems'], 'metrics': own['metrics']} for s, own in scores.items()}}


def _spell_infinity(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a nested dict with 'inf' for infinity, which JSON does not have."""
    spell = lambda value: str(value) if isinstance(value, float) and not math.isfinite(value) else value
    return {
        name: _spell_infinity(value) if isinstance(value, Mapping) else spell(value) for name, value in values.items()
    }
