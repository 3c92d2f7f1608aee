"""Where code that a model wrote runs: levels of task.sandbox, rules of the task `code` and of tools that run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from areal_jax.config.agent_fields import PYTHON
from areal_jax.plugins import is_own

AUTO, NONE, LANDLOCK, BUBBLEWRAP = 'auto', 'none', 'landlock', 'bubblewrap'
CONFINING = (LANDLOCK, BUBBLEWRAP)  # the same as in workers/sandbox/confinement.py
LEVELS = (AUTO, *CONFINING, NONE)
RUN_MODEL_CODE = ('code',)  # task.name: tasks of this package whose scorers run what a model wrote

NAME, HUMAN_EVAL = 'code', 'humaneval'  # task.name, task.path
_CHECKS, _WALL = 2, 3  # of an answer: its tests and the hidden ones; wall seconds for a CPU second of the limit
_CHECK_SHARE = 0.9  # of task.verifier_deadline_s: its worker starts and ends what it runs in the rest
_FIELDS = ('show_tests', 'partial_credit')
PACKAGES = ('numpy',)  # task.packages, where nobody sets it

Config: TypeAlias = Any  # a ConfigDict, a TrackedConfig, or sections with the fields of one as attributes


def runs_model_code(task: Config) -> bool:
    """Whether the scorer of this package that the section `task` names runs code of a model."""
    return task.name in RUN_MODEL_CODE and not task.reward


def has_own_scorer(task: Config) -> bool:
    """Whether a function of the user's own scores: nobody but the user knows whether it runs code of a model."""
    return bool(task.reward) or is_own(task.name)


def resolve_sandbox(task: Config) -> str:
    """The level of the scorer that the section `task` asks for, one of CONFINING or NONE."""
    if not (runs_model_code(task) or has_own_scorer(task)):
        return NONE  # task.sandbox is that of a tool
    if task.sandbox != AUTO:
        return str(task.sandbox)
    return LANDLOCK if runs_model_code(task) else NONE


def runs_tools(c: Config) -> bool:
    """Whether a tool of agent.tools runs code of a model."""
    return PYTHON in c.agent.tools


def resolve_tool_sandbox(task: Config) -> str:
    """The level of such a tool, one of CONFINING; NONE is refused."""
    return LANDLOCK if task.sandbox == AUTO else str(task.sandbox)


def find_sandbox_problems(c: Config) -> Iterator[str]:
    """A sentence for each rule that a config breaks: the fields, their values and the fix."""
    task = c.task
    if runs_tools(c) and task.sandbox == NONE:
        yield (
            f'task.sandbox={NONE!r} with agent.tools={c.agent.tools!r}: code that the model wrote would run with all '
            f'rights of the user who starts the run; use task.sandbox={AUTO!r}'
        )
    is_scored = runs_model_code(task) or has_own_scorer(task)
    if task.sandbox in CONFINING and not (is_scored or runs_tools(c)):
        yield (
            f'task.sandbox={task.sandbox!r} is for a scorer that runs code, and that of task.name={task.name!r} runs '
            f'none; set task.reward or agent.tools, or task.sandbox={AUTO!r}'
        )
    if task.verifier != 'inline':
        return
    if runs_model_code(task):
        yield (
            f"task.verifier='inline' would run code of a model in the process of the run, and task.name={task.name!r} "
            "runs such code; use task.verifier='process'"
        )
    elif task.sandbox in CONFINING and is_scored:
        yield (
            f"task.sandbox={task.sandbox!r} confines a worker process, and task.verifier='inline' has none; use "
            "task.verifier='process'"
        )


def find_sandbox_warnings(c: Config) -> Iterator[str]:
    """A sentence for code of a model that nothing confines."""
    if runs_model_code(c.task) and c.task.sandbox == NONE:
        yield (
            f'task.sandbox={NONE!r} with task.name={c.task.name!r}: code that the model wrote ran with all rights of '
            f'the user who started the run, on its files, its network and its processes; use task.sandbox={LANDLOCK!r}'
        )


def find_code_problems(c: Config) -> Iterator[str]:
    """A sentence for each rule that a config breaks, for training, evaluating and scoring alike."""
    task = c.task
    if tuple(task.packages) != PACKAGES and not (runs_model_code(task) or runs_tools(c)):
        yield (
            f'task.packages={tuple(task.packages)!r} is for code of a model, and neither task.name={task.name!r} nor '
            f'agent.tools={tuple(c.agent.tools)!r} runs any; leave it at {PACKAGES!r}'
        )
    if task.name != NAME:
        for field in _FIELDS:
            if getattr(task, field):
                yield f'task.{field}=True is for task.name={NAME!r}, and it is {task.name!r}; remove one of them'
        return
    least_s = find_least_deadline(task.time_limit_s)
    if not task.reward and task.verifier_deadline_s < least_s:
        yield (
            f'task.verifier_deadline_s={task.verifier_deadline_s:g} would end checks that task.time_limit_s='
            f'{task.time_limit_s:g} allows: {_CHECKS} checks of {_WALL} wall seconds for each CPU second; raise it to '
            f'{least_s:g} or more'
        )


def find_check_budget(deadline_s: float) -> float:
    """Wall seconds of the whole check of an answer, which end before its worker is killed."""
    return _CHECK_SHARE * deadline_s


def find_least_deadline(time_limit_s: float, checks: int = _CHECKS) -> float:
    """The least task.verifier_deadline_s, rounded up to tenths, for so many checks with a limit of CPU seconds."""
    return math.ceil(10 * checks * _WALL * time_limit_s / _CHECK_SHARE) / 10


def find_training_problems(c: Config) -> Iterator[str]:
    """The same for what is trained on."""
    if c.task.name == NAME and c.task.path == HUMAN_EVAL:
        yield (
            f'task.path={HUMAN_EVAL!r} is for evaluation only: training on it would spoil what it measures; use '
            "task.path='' or a file of your own, and areal-eval for HumanEval"
        )
