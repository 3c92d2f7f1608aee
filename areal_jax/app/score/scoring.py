"""Scores given answers with the verifier of a task, and sums up the scores."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Collection

from ml_collections import config_dict

from areal_jax import lanes
from areal_jax.app.model.text_model import describe_text_model
from areal_jax.app.parts.task_builder import build_verifier, build_whole_task, try_scorer_sandbox
from areal_jax.app.process.ending import StopRequests
from areal_jax.app.process.setup import require_extras
from areal_jax.app.score.answer_files import GivenAnswer, ProblemIndex, ScoreFile, make_score, read_answers
from areal_jax.config import TrackedConfig, flatten, validate_scoring
from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.config.sources import SOURCES
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.plugins import is_own, source_file
from areal_jax.protocols import Event
from areal_jax.tasks.scoring.verifier import InlineMixture, InlineVerifier, ProcessVerifier
from areal_jax.tasks.task import Task
from areal_jax.telemetry.progress import StartProgress
from areal_jax.types import Verdict


@dataclasses.dataclass
class ScoreTally:
    """Sums over the scores of a file, including the scores of earlier calls."""

    labels: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # without a reward
    reward: float = 0.0  # sum

    def add(self, score: JsonObject) -> None:
        """Adds a line of the file."""
        self.labels[score['label']] += 1
        if score['reward'] is None:
            self.failures[score['label']] += 1
        else:
            self.reward += score['reward']

    @property
    def answers(self) -> int:
        return self.labels.total()

    @property
    def mean_reward(self) -> float | None:
        """The mean over the answers that have a reward; None if no answer has a reward."""
        scored = self.answers - self.failures.total()
        return self.reward / scored if scored else None

    def summarise(self, scored_before: int, seconds: float, out: str) -> JsonObject:
        """Returns all numbers, in the form that --json prints."""
        return {
            'answers': self.answers,
            'scored_before': scored_before,
            'labels': dict(self.labels.most_common()),
            'failed': self.failures.total(),
            'mean_reward': self.mean_reward,
            'seconds': round(seconds, 3),
            'out': out,
        }


def render_summary(summary: JsonObject) -> str:
    """Renders the numbers of `summarise` as a short table."""
    width = max(len(label) for label in ('label', *summary['labels']))
    rows = [f'{"label":{width}}  answers   share']
    for label, count in summary['labels'].items():
        rows.append(f'{label:{width}}  {count:7}  {count / summary["answers"]:5.1%}')
    mean = summary['mean_reward']
    shown = 'no answer has a reward' if mean is None else f'mean reward {mean:.4f}'
    if summary['failed'] and mean is not None:
        shown += f' of the {summary["answers"] - summary["failed"]} that have one'
    before = f', {summary["scored_before"]} of them before' if summary['scored_before'] else ''
    seconds = f'{summary["seconds"]:.1f} s'
    return '\n'.join([*rows, '', shown, f'{summary["answers"]} answers in {seconds}{before}', summary['out']])


def describe_failures(tally: ScoreTally, out: str) -> str:
    """Describes the answers that have no reward; '' if all have a reward."""
    if not tally.failures:
        return ''
    found = ', '.join(f'{count} {label}' for label, count in tally.failures.most_common())
    return (
        f'{tally.failures.total()} of {tally.answers} answers have no reward ({found}): {out} has the reason of each; '
        'mend the scorer, or raise the limits task.verifier_*, and score them into another --out'
    )


# Scores given answers to the problems of a task with the verifier of a run: no engine, no weights, no learner.


_WORKERS = 'task.verifier_workers'
# nothing is generated, trained or tracked, so packages for these are not needed
_UNUSED = {
    **{
        name: FIELDS[name].default
        for name in ('rollout.server', 'rollout.workflow', 'agent.notation', 'agent.mcp_servers', 'agent.tools')
    },
    'telemetry.tensorboard': False,
    'telemetry.plots': False,
    'telemetry.tracker': 'none',
}
# fields of the task that affect neither rewards nor labels
_MAY_CHANGE = ('task.verifier', _WORKERS, 'task.held_out_fraction', 'task.over_length', 'task.audit_fraction')
_MAY_CHANGE_ALL = ('task.filter', 'task.max_')
MOST_AHEAD = 4096  # scores in memory that wait for earlier ones: an answer may take many attempts
_SPARE_S = 300.0  # added to the deadline of an attempt: for the start of a worker
_OPEN_INLINE = 1  # without workers, answers are scored one after the other


class Scoring:
    """The scoring of one file of answers. The constructor checks all of it; `run` scores the answers without a score.

    Args:
      config: as an experiment file gives it, overrides applied.
      answers: JSON lines, see answer_files.py.
      out: the file of scores; scores that it already holds are kept, and their answers are not scored again.
      workers: None = task.verifier_workers.
      overrides: the fields that the command line sets; one that scoring does not use is refused.
      interrupts: asks to stop when a signal comes; None = signals are left alone.

    Raises UserError for errors that the user can fix.
    """

    def __init__(
        self,
        config: config_dict.ConfigDict,
        answers: pathlib.Path,
        out: pathlib.Path,
        *,
        workers: int | None = None,
        overrides: Collection[str] = (),
        interrupts: StopRequests | None = None,
    ):
        require_places(answers, out)
        adapted = _adapt(config, workers, overrides)
        self.answers, self.out, self.tally = answers, out, ScoreTally()
        self.scored_before, self.seconds = 0, 0.0
        self._config, self._interrupts = TrackedConfig(adapted, overrides, purpose=Purpose.SCORING), interrupts
        self._is_stopping = threading.Event()
        self._parts = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(self)
            self._progress = StartProgress(self._config.telemetry.progress)
            self._parts.callback(self._progress.end)
            self._build()
            self._check()
            self._config.require_all_read()
            undo.pop_all()

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def run(self) -> bool:
        """Scores the remaining answers in their order; returns False after a requested stop."""
        self._left = self.answers_in_all - self.scored_before
        if not self._left:
            return True
        already = f', {self.scored_before} more are scored already' if self.scored_before else ''
        self._progress.begin(f'scoring {self._left} answers{already}')
        began = time.monotonic()
        self._verifier.start()
        self._clock.restart()
        stop = self._clock.event('stop requested')
        try:
            with self._deferred(stop):
                return self._clock.execute(self._supervisor.run(self._program(stop)))
        finally:
            self.seconds = time.monotonic() - began
            self._progress.end()

    # Building.

    def _build(self) -> None:
        config = self._config
        self._progress.begin(f'preparing task {config.task.name}')
        tokenizer = describe_text_model(config).tokenizer
        task = build_whole_task(config.task, tokenizer)
        self._index = ProblemIndex(task, config.run.seed)
        stall_s = config.task.verifier_deadline_s + _SPARE_S
        self._clock = RealClock({lanes.REWARD: config.task.verifier_workers}, EventLog(keeps=False), stall_s)
        self._supervisor = Supervisor(self._clock)
        sandbox = try_scorer_sandbox(config)
        self._verifier: ProcessVerifier | InlineVerifier | InlineMixture = build_verifier(
            config, self._clock, task, tokenizer.decode, sandbox=sandbox
        )
        self._parts.callback(self._verifier.close)
        self._scores = ScoreFile(self.out, describe_scorer(config, task, self._index))
        self._parts.callback(self._scores.close)

    def _check(self) -> None:
        """Reads all answers, and compares them with the scores that are already in the file."""
        self._progress.begin(f'checking {self.answers}')
        answers = read_answers(self.answers, self._index)
        for score in self._scores.read():
            self._scores.require_answer(score, next(answers, None), self.answers)
            self.tally.add(score)
            self.scored_before += 1
        self.answers_in_all = self.scored_before + sum(1 for _ in answers)

    # Running.

    def _deferred(self, stop: Event) -> contextlib.AbstractContextManager[None]:
        if self._interrupts is None:
            return contextlib.nullcontext()

        def request(number: signal.Signals) -> None:
            self._is_stopping.set()  # read between two answers that are scored on the loop itself
            self._clock.post_signal(number, stop)

        return self._interrupts.deferred(request, 'keeping the scores', self._clock.abandon)

    async def _program(self, stop: Event) -> bool:
        all_ended = self._clock.event('the last score')
        answers = itertools.islice(read_answers(self.answers, self._index), self.scored_before, None)
        writer = _OrderedWriter(self._clock.event('room for a score'), self._write)
        jobs = enumerate(answers)

        is_inline = isinstance(self._verifier, InlineVerifier)
        running = _OPEN_INLINE if is_inline else self._config.task.verifier_workers

        async def work() -> None:
            nonlocal running
            for position, answer in jobs:
                while not writer.has_room(position):
                    await self._clock.wait(writer.room)
                if self._is_stopping.is_set():
                    return
                writer.add(position, make_score(answer, await self._verify(answer)))
            running -= 1
            if not running:
                all_ended.set()

        async def watch_stop() -> None:
            await self._clock.wait(stop)
            all_ended.set()

        for number in range(running):
            self._supervisor.start(f'scoring {number}', work())
        self._supervisor.start('scoring stop', watch_stop())
        await self._clock.wait(all_ended)
        return not self._is_stopping.is_set() or not running

    async def _verify(self, answer: GivenAnswer) -> Verdict:
        prompt = dataclasses.replace(self._index.prompts[answer.place], draw=answer.line)  # messages name the draw
        return await self._verifier.verify(prompt, answer.text, answer.finish_reason)

    def _write(self, score: JsonObject) -> None:
        self._scores.append(score)
        self.tally.add(score)
        self._progress.count_answers(self.tally.answers - self.scored_before, self._left)


class _OrderedWriter:
    """Writes scores in the order of their positions; a bounded number of later ones waits."""

    def __init__(self, room: Event, write: Callable[[JsonObject], None]):
        self.room = room  # set whenever `has_room` may have changed
        self._write = write
        self._next = 0
        self._waiting: dict[int, JsonObject] = {}

    def has_room(self, position: int) -> bool:
        """Whether the score of this position may wait for earlier ones; clears `room` if it may not."""
        is_near = position - self._next < MOST_AHEAD
        if not is_near:
            self.room.clear()
        return is_near

    def add(self, position: int, score: JsonObject) -> None:
        self._waiting[position] = score
        while self._next in self._waiting:
            self._write(self._waiting.pop(self._next))
            self._next += 1
        self.room.set()


def require_places(answers: pathlib.Path, out: pathlib.Path) -> None:
    """Raises UserError for an --out that cannot be written, or is the file of the answers; creates nothing."""
    parent = out.absolute().parent
    if out.exists() and not out.is_file():
        raise UserError(f'--out={out} is no regular file: name a file for the scores')
    if not parent.is_dir():
        raise UserError(f'--out={out} cannot be written: there is no directory {parent}; make it, or name another file')
    if not os.access(out if out.exists() else parent, os.W_OK):
        raise UserError(f'--out={out} cannot be written: permission was denied; name a file of your own')
    if out.exists() and answers.exists() and out.samefile(answers):
        raise UserError(f'--out={out} is the file of --answers: give the scores a file of their own')


def describe_scorer(config: TrackedConfig, task: Task, index: ProblemIndex) -> dict[str, object]:
    """Returns the facts that decide a reward besides the answer: task fields, problems, and an own scorer's file."""
    fields = {
        name: value
        for name, value in flatten({'task': config.as_dict()['task']})
        if name not in _MAY_CHANGE and not name.startswith(_MAY_CHANGE_ALL)
    }
    own = {}
    if config.task.reward or is_own(config.task.name):
        file = source_file(config.task.reward or task.scorer, 'task.reward' if config.task.reward else 'task.name')
        if file is not None:
            own = {'sha256 of the file of the scorer': hashlib.sha256(file.read_bytes()).hexdigest()}
    return {**fields, **own, 'sha256 of the problems': index.digest()}


def _adapt(config: config_dict.ConfigDict, workers: int | None, overrides: Collection[str]) -> config_dict.ConfigDict:
    """Returns a valid copy with `workers` workers. Raises ConfigError."""
    adapted = config.copy_and_resolve_references()
    if sources := list(adapted.task.sources):
        raise ConfigError(
            f'{SOURCES} mixes {", ".join(sorted(sources))}, and answers to one task are scored: give a config whose '
            'section task has that task alone'
        )
    if workers is not None:
        if _WORKERS in overrides:
            raise ConfigError(
                f'--workers and --config.{_WORKERS} are both given, and both say the same thing: remove one'
            )
        if adapted.task.verifier == 'inline':
            raise ConfigError(
                f"--workers={workers}, but task.verifier='inline' scores without workers: remove the flag, or set "
                '--config.task.verifier=process'
            )
        adapted.task.verifier_workers = workers
    validate_scoring(adapted)
    used = adapted.copy_and_resolve_references()
    used.update_from_flattened_dict(_UNUSED)
    require_extras(used)
    return adapted
