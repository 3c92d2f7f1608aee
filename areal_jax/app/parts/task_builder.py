"""Builds the task of a run: its problems or demonstrations, and the verifier of its answers.

tasks/ has the implementations.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import cast

import numpy as np

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
from areal_jax.config.objectives import PAIRS, find_objective
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.plugins import absolute_spec, load_function
from areal_jax.protocols import PromptStream
from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.code.code_task import require_time
from areal_jax.tasks.demonstrations import Demonstrations, contrast_task, read_demonstrations, read_pairs, solve_task
from areal_jax.tasks.registry import make_task, value_names
from areal_jax.tasks.scoring.verifier import Audit, InlineVerifier, ProcessVerifier, StartWorker
from areal_jax.tasks.scoring.worker import takes_episode
from areal_jax.tasks.task import ClientStream, ListedTask, Problem, Scorer, Split, Task, TaskError, shuffle
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.workers.sandbox.packages import find_packages
from areal_jax.workers.sandbox.sandbox_trial import SandboxRecord, describe_sandbox, describe_unconfined, try_sandbox
from areal_jax.workers.worker_process import WorkerProcess

TrySandbox = Callable[[str, tuple[str, ...]], SandboxRecord | None]  # level, packages by name


def build_task(config: TrackedConfig, tokenizer: Tokenizer) -> Task:
    """Builds the task; problems whose prompts exceed the context are dropped or refused (task.over_length)."""
    task = build_whole_task(config, tokenizer)
    room = config.rollout.context_tokens - config.rollout.max_new_tokens
    task = task.fitting(room, config.task.over_length)
    sizes = task.sizes()
    if sizes['dropped']:
        print(
            f'dropped {sizes["dropped"]} of {sum(sizes.values())} problems: their prompts have more than {room} tokens',
            flush=True,
        )
    wanted = config.evaluation.problems
    if wanted and not sizes['held_out']:
        task.held_out(wanted, config.run.seed)  # raises for a listed task, and says why it has none
        raise TaskError(
            f'task {task.name!r} has no held-out problem, but evaluation.problems={wanted}: hold some out, or set '
            'evaluation.problems=0'
        )
    if 0 < sizes['held_out'] < wanted:
        print(f'evaluation.problems={wanted}: all {sizes["held_out"]} held-out problems are evaluated', flush=True)
    return task


def build_stream(config: TrackedConfig, task: Task) -> PromptStream:
    """Returns the prompts to train on; each of several clients gets a different part."""
    whole, ours = task.prompts('train', config.run.seed), config.distributed
    return whole if ours.clients == 1 else ClientStream(whole, ours.client, ours.clients)


def build_demonstrations(config: TrackedConfig, tokenizer: Tokenizer) -> Demonstrations:
    """Builds the demonstrations, or pairs of answers, that loss.objective learns from.

    They come from the file task.path if task.name='jsonl', else from another task's problems with their answers.
    """
    pairs = find_objective(config.loss.objective).given == PAIRS
    if config.task.name == 'jsonl':
        task, read = config.task, read_pairs if pairs else read_demonstrations
        found = read(task.path, tokenizer, task.system_prompt, task.held_out_fraction, _columns(config))
    else:
        found = (contrast_task if pairs else solve_task)(build_whole_task(config, tokenizer), tokenizer)
    return found.fitting(config.learner.row_room, config.task.over_length)


def build_whole_task(config: TrackedConfig, tokenizer: Tokenizer) -> Task:
    """Builds the task with all of its problems, regardless of the length of their prompts."""
    name, options = config.task.name, config.task.options
    values = {field: getattr(config.task, field) for field in value_names(name) if field != 'columns'}
    if 'columns' in value_names(name):
        values['columns'] = _columns(config)
    return make_task(name, tokenizer, {key: options[key] for key in options}, **values)


def _columns(config: TrackedConfig) -> dict[str, str]:
    return {name: config.task.columns[name] for name in config.task.columns}


def try_scorer_sandbox(config: TrackedConfig, try_out: TrySandbox = try_sandbox) -> SandboxRecord | None:
    """Tries out the sandbox of the task's scorer and of agent.tools once before a run; None if neither needs one.

    Raises UserError for a level that does not work on this machine, and for task.packages that do not exist.
    """
    level = resolve_sandbox(config.task)
    if runs_tools(config):  # if both are confined, they have the same level
        record = try_out(resolve_tool_sandbox(config.task), config.task.packages)
        if record is not None:
            scorers = ['the scorer'] if level != NONE else []
            record = {**record, 'runners': [*scorers, f'the tool {PYTHON}']}
    elif level != NONE:
        record = try_out(level, config.task.packages if runs_model_code(config.task) else ())
    elif runs_model_code(config.task):
        record = describe_unconfined()
    else:
        return None
    if record is not None and not (runs_model_code(config.task) or runs_tools(config)):
        record = record.copy()
        record.pop('group', None)  # an own scorer's processes have separate bounds
    if record is not None:
        print(describe_sandbox(record), flush=True)
    return record


def build_verifier(
    config: TrackedConfig,
    clock: LoopClock,
    task: Task,
    decode: Callable[[np.ndarray], str],
    *,
    sandbox: SandboxRecord | None,
    workers: int | None = None,
    lane: str = lanes.REWARD,
    workdir: pathlib.Path | None = None,
    start_worker: StartWorker = WorkerProcess,
) -> ProcessVerifier | InlineVerifier:
    """Builds the verifier of the task's answers; the scorer is task.reward if that is set.

    An own scorer is called once, with an empty answer, when the verifier starts. A verifier that compares some answers
    twice writes to WORKDIR/audit.jsonl. `workers`: None = task.verifier_workers. A `start_worker` that starts no
    process scores nothing, so the scorer is not tried out. `sandbox`: from `try_scorer_sandbox`.
    Raises UserError for a scorer that workers cannot load, for a problem whose time limit exceeds the deadline, and,
    at the start, for a scorer that fails.
    """
    reward = config.task.reward
    own = has_own_scorer(config.task)
    side: Split = 'train' if task.sizes()['train'] else 'held_out'
    trial = _first_problem(task, side, config.run.seed) if own else None
    if start_worker is not WorkerProcess and config.task.verifier == 'process':
        trial = None
    if config.task.verifier == 'inline':
        score = cast(Scorer, load_function(reward, 'task.reward')) if reward else task.score
        return InlineVerifier(score, decode, trial, reward or task.scorer)
    _require_time(config, task)
    is_first = start_worker is WorkerProcess and lane == lanes.REWARD
    references = _list_references(config, task) if is_first else []
    if sandbox is not None and start_worker is WorkerProcess:
        level = resolve_sandbox(config.task)  # a tool may have another
        readable = find_packages(config.task.packages) if runs_model_code(config.task) else ()
        start_worker = functools.partial(WorkerProcess, sandbox=level, readable=readable)
    scorer = absolute_spec(reward or task.scorer)
    with_episode = takes_episode(_load_scorer(scorer, task, reward) if own else task.score)
    return ProcessVerifier(
        clock,
        scorer,
        decode,
        workers=config.task.verifier_workers if workers is None else workers,
        deadline_s=config.task.verifier_deadline_s,
        attempts=config.task.verifier_attempts,
        memory_mb=config.task.verifier_memory_mb,
        lane=lane,
        trial=trial,
        references=references,
        audit=build_audit(config, workdir),
        with_episode=with_episode,
        start_worker=start_worker,
    )


def _require_time(config: TrackedConfig, task: Task) -> None:
    """Raises TaskError for a code problem whose checks would exceed the deadline of its worker."""
    if runs_model_code(config.task) and isinstance(task, ListedTask):
        for side in task.problems.values():
            for problem in side:
                require_time(problem, config.task.verifier_deadline_s)


def _list_references(config: TrackedConfig, task: Task) -> list[Problem]:
    """Lists the user's code problems that come with a solution, which must pass."""
    if not runs_model_code(config.task) or not config.task.path or not isinstance(task, ListedTask):
        return []
    return [problem for side in task.problems.values() for problem in side if problem['answer']]


def build_audit(config: TrackedConfig, workdir: pathlib.Path | None) -> Audit | None:
    """Builds the audit, which scores some answers of mathematics twice; None if the config asks for no audit."""
    if config.task.name != 'jsonl' or config.task.answer != 'math' or config.task.reward:
        return None
    if not config.task.audit_fraction or workdir is None:
        return None
    return Audit(workdir, config.task.audit_fraction, mathematics.compare_texts)


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
