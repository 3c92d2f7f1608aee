"""Builds the task of a run: its problems or demonstrations, and the verifier of its answers.

tasks/ has the implementations.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import cast

import numpy as np
from ml_collections import config_dict

from areal_jax import lanes
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import (
    NONE,
    PYTHON,
    has_own_scorer,
    resolve_sandbox,
    resolve_tool_sandbox,
    runs_model_code,
    runs_tools,
)
from areal_jax.config.fields import Config
from areal_jax.config.objectives import PAIRS, find_objective
from areal_jax.config.sources import list_tasks
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.plugins import absolute_spec, load_function
from areal_jax.protocols import PromptStream
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.code.code_task import require_time
from areal_jax.tasks.demonstrations import Demonstrations, contrast_task, read_demonstrations, read_pairs, solve_task
from areal_jax.tasks.mixture import Mixture, naming_source, split_problems
from areal_jax.tasks.registry import make_task, require_known, value_names
from areal_jax.tasks.scoring.verifier import (
    Audit,
    InlineMixture,
    InlineVerifier,
    ProcessVerifier,
    StartWorker,
    TaskScoring,
)
from areal_jax.tasks.scoring.worker import takes_episode
from areal_jax.tasks.task import (
    ClientStream,
    ListedTask,
    Problem,
    PromptSet,
    Scorer,
    Split,
    Task,
    TaskError,
    shuffle,
)
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.workers.sandbox.packages import find_packages
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord, describe_sandbox, describe_unconfined, try_sandbox
from areal_jax.workers.worker_process import WorkerProcess

TrySandbox = Callable[[str, tuple[str, ...]], SandboxRecord | None]  # level, packages by name


def require_known_tasks(config: config_dict.ConfigDict) -> None:
    """Raises TaskError for a task of the config that has no such name; loads nothing."""
    for source, task in list_tasks(config).items():
        with naming_source(source):
            require_known(task.name)


def name_tasks(config: TrackedConfig) -> str:
    """The names of the tasks, for messages: 'jsonl', or 'mixture of easy, hard' by their sources."""
    tasks = config.list_tasks()
    return tasks[''].name if '' in tasks else f'mixture of {", ".join(tasks)}'


def build_task(config: TrackedConfig, tokenizer: Tokenizer) -> PromptSet:
    """Builds the task, or the mixture of tasks.

    Problems whose prompts exceed the context are dropped or refused (task.over_length).
    """
    built, of_sources = {}, config.list_tasks()
    for source, of_source in of_sources.items():
        with naming_source(source):
            built[source] = _build_fitting(config, of_source, tokenizer)
            if config.evaluation.problems:
                _require_held_out(config, built[source])
    task = built.get('') or Mixture(built, {source: of_source.weight for source, of_source in of_sources.items()})
    if task.sizes()['held_out'] < config.evaluation.problems:
        print(
            f'evaluation.problems={config.evaluation.problems}: all {task.sizes()["held_out"]} held-out problems are '
            'evaluated',
            flush=True,
        )
    return task


def _require_held_out(config: TrackedConfig, task: Task) -> None:
    """Raises TaskError for a task without a held-out problem."""
    wanted = config.evaluation.problems
    if not task.sizes()['held_out']:
        task.held_out(wanted, config.run.seed)  # raises for a listed task, and says why it has none
        raise TaskError(
            f'task {task.name!r} has no held-out problem, but evaluation.problems={wanted}: hold some out, or set '
            'evaluation.problems=0'
        )


def _build_fitting(config: TrackedConfig, of_source: Config, tokenizer: Tokenizer) -> Task:
    """Builds one task without problems that are too long; `of_source` has its fields of the section `task`."""
    task = build_whole_task(of_source, tokenizer)
    room = config.rollout.context_tokens - config.rollout.max_new_tokens
    task = task.fitting(room, of_source.over_length)
    sizes = task.sizes()
    if sizes['dropped']:
        print(
            f'dropped {sizes["dropped"]} of {sum(sizes.values())} problems: their prompts have more than {room} tokens',
            flush=True,
        )
    return task


def build_stream(config: TrackedConfig, task: PromptSet) -> PromptStream:
    """Returns the prompts to train on; each of several clients gets a different part."""
    seed, ours = config.run.seed, config.distributed
    if ours.clients == 1:
        return task.prompts('train', seed)
    part = lambda stream: ClientStream(stream, ours.client, ours.clients)
    return task.prompts('train', seed, part) if isinstance(task, Mixture) else part(task.prompts('train', seed))


def build_demonstrations(config: TrackedConfig, tokenizer: Tokenizer) -> Demonstrations:
    """Builds the demonstrations, or pairs of answers, that loss.objective learns from.

    They come from the file task.path if task.name='jsonl', else from another task's problems with their answers.
    """
    pairs = find_objective(config.loss.objective).given == PAIRS
    if config.task.name == 'jsonl':
        task, read = config.task, read_pairs if pairs else read_demonstrations
        found = read(task.path, tokenizer, task.system_prompt, task.held_out_fraction, _columns(task))
    else:
        found = (contrast_task if pairs else solve_task)(build_whole_task(config.task, tokenizer), tokenizer)
    return found.fitting(config.learner.row_room, config.task.over_length)


def build_whole_task(of_source: Config, tokenizer: Tokenizer) -> Task:
    """Builds a task with all of its problems, regardless of the length of their prompts.

    Args:
      of_source: the section `task`, or the same of one source.
    """
    name, options = of_source.name, of_source.options
    values = {field: getattr(of_source, field) for field in value_names(name) if field != 'columns'}
    if 'columns' in value_names(name):
        values['columns'] = _columns(of_source)
    return make_task(name, tokenizer, {key: options[key] for key in options}, **values)


def _columns(of_source: Config) -> dict[str, str]:
    return {name: of_source.columns[name] for name in of_source.columns}


def try_scorer_sandbox(config: TrackedConfig, try_out: TrySandbox = try_sandbox) -> SandboxRecord | None:
    """Tries out the sandbox of the tasks' scorers and of agent.tools once before a run; None if none needs one.

    Raises UserError for a level that does not work on this machine, and for task.packages that do not exist.
    """
    level, runs_code = _find_level(config), _runs_code(config)
    if runs_tools(config):  # if both are confined, they have the same level
        record = try_out(resolve_tool_sandbox(config.task), config.task.packages)
        if record is not None:
            scorers = ['the scorer'] if level != NONE else []
            record = {**record, 'runners': [*scorers, f'the tool {PYTHON}']}
    elif level != NONE:
        record = try_out(level, config.task.packages if runs_code else ())
    elif runs_code:
        record = describe_unconfined()
    else:
        return None
    if record is not None and not (runs_code or runs_tools(config)):
        record = record.copy()
        record.pop('group', None)  # an own scorer's processes have separate bounds
    if record is not None:
        print(describe_sandbox(record), flush=True)
    return record


def _runs_code(config: TrackedConfig) -> bool:
    """Whether a scorer of the run, of any source, runs code that a model wrote."""
    return any(map(runs_model_code, config.list_tasks().values()))


def _find_level(config: TrackedConfig) -> str:
    """The sandbox level of the workers, which score the answers of all sources; sources that need one agree on it."""
    levels = map(resolve_sandbox, config.list_tasks().values())
    return next((level for level in levels if level != NONE), NONE)


def build_verifier(
    config: TrackedConfig,
    clock: LoopClock,
    task: PromptSet,
    decode: Callable[[np.ndarray], str],
    *,
    sandbox: SandboxRecord | None,
    workers: int | None = None,
    lane: str = lanes.REWARD,
    workdir: pathlib.Path | None = None,
    start_worker: StartWorker = WorkerProcess,
) -> ProcessVerifier | InlineVerifier | InlineMixture:
    """Builds the verifier of the answers to a task or a mixture; a scorer is task.reward if that is set.

    An own scorer is called once, with an empty answer, when the verifier starts. A verifier that compares some answers
    twice writes to WORKDIR/audit.jsonl. `workers`: None = task.verifier_workers. A `start_worker` that starts no
    process scores nothing, so the scorer is not tried out. `sandbox`: from `try_scorer_sandbox`.
    Raises UserError for a scorer that workers cannot load, for a problem whose time limit exceeds the deadline, and,
    at the start, for a scorer that fails.
    """
    of_sources, tasks = config.list_tasks(), split_problems(task)
    if config.task.verifier == 'inline':
        inline = {
            source: _build_inline(config, of_source, tasks[source], decode) for source, of_source in of_sources.items()
        }
        return inline[''] if '' in inline else InlineMixture(inline)
    starts = start_worker is WorkerProcess
    audit = build_audit(config, workdir)
    scorings = {}
    for source, of_source in of_sources.items():
        with naming_source(source):
            scorings[source] = _build_scoring(
                config, of_source, tasks[source], audit, starts=starts, is_first=starts and lane == lanes.REWARD
            )
    if sandbox is not None and starts:
        level = _find_level(config)  # a tool may have another
        readable = find_packages(config.task.packages) if _runs_code(config) else ()
        start_worker = functools.partial(WorkerProcess, sandbox=level, readable=readable)
    return ProcessVerifier(
        clock,
        scorings,
        decode,
        workers=config.task.verifier_workers if workers is None else workers,
        deadline_s=config.task.verifier_deadline_s,
        attempts=config.task.verifier_attempts,
        memory_mb=config.task.verifier_memory_mb,
        lane=lane,
        start_worker=start_worker,
    )


def _build_inline(
    config: TrackedConfig, of_source: Config, task: Task, decode: Callable[[np.ndarray], str]
) -> InlineVerifier:
    reward = of_source.reward
    score = cast(Scorer, load_function(reward, 'task.reward')) if reward else task.score
    trial = _find_trial(config, task) if has_own_scorer(of_source) else None
    return InlineVerifier(score, decode, trial, reward or task.scorer)


def _build_scoring(
    config: TrackedConfig, of_source: Config, task: Task, audit: Audit | None, *, starts: bool, is_first: bool
) -> TaskScoring:
    """Says how worker processes score the answers to one task; `starts`, `is_first`: whether they try out problems."""
    reward, own = of_source.reward, has_own_scorer(of_source)
    _require_time(config, of_source, task)
    scorer = absolute_spec(reward or task.scorer)
    return TaskScoring(
        scorer,
        trial=_find_trial(config, task) if own and starts else None,
        references=_list_references(of_source, task) if is_first else (),
        audit=audit if _is_mathematics(of_source) else None,
        with_episode=takes_episode(_load_scorer(scorer, task, reward) if own else task.score),
    )


def _require_time(config: TrackedConfig, of_source: Config, task: Task) -> None:
    """Raises TaskError for a code problem whose checks would exceed the deadline of its worker."""
    if runs_model_code(of_source) and isinstance(task, ListedTask):
        for side in task.problems.values():
            for problem in side:
                require_time(problem, config.task.verifier_deadline_s)


def _list_references(of_source: Config, task: Task) -> list[Problem]:
    """Lists the user's code problems that come with a solution, which must pass."""
    if not runs_model_code(of_source) or not of_source.path or not isinstance(task, ListedTask):
        return []
    return [problem for side in task.problems.values() for problem in side if problem['answer']]


def build_audit(config: TrackedConfig, workdir: pathlib.Path | None) -> Audit | None:
    """Builds the audit, which scores some answers of mathematics twice; None if the config asks for no audit."""
    if not any(map(_is_mathematics, config.list_tasks().values())):
        return None
    if not config.task.audit_fraction or workdir is None:
        return None
    return Audit(workdir, config.task.audit_fraction, mathematics.compare_texts)


def _is_mathematics(of_source: Config) -> bool:
    return bool(of_source.name == 'jsonl' and of_source.answer == 'math' and not of_source.reward)


def _find_trial(config: TrackedConfig, task: Task) -> Problem:
    """Returns the first problem, whose empty answer an own scorer scores when the verifier starts."""
    return _first_problem(task, 'train' if task.sizes()['train'] else 'held_out', config.run.seed)


def _first_problem(task: Task, side: Split, seed: int) -> Problem:
    """Returns the problem of the first draw; a listed task skips tokenizing, because a scorer needs no tokens."""
    if isinstance(task, ListedTask):
        listed = task.problems[side]
        return dict(listed[int(shuffle(len(listed), seed, 0)[0])])
    return dict(task.prompts(side, seed).draw().problem)


def _load_scorer(scorer: str, task: Task, reward: str) -> Scorer:
    """Loads a scorer; raises UserError if a worker process would not find it."""
    if not reward and not scorer.rpartition(':')[2].isidentifier():
        raise TaskError(
            f'the scorer {scorer} of task {task.name!r} is not at the top level of its file, so that worker processes '
            "cannot load it: declare it there, or set task.verifier='inline'"
        )
    return cast(Scorer, load_function(scorer, 'task.reward' if reward else f'scorer of task {task.name!r}'))
