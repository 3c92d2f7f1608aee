"""Rules of the task `code`: what it takes its problems from, and how long a check may take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

NAME, HUMAN_EVAL = 'code', 'humaneval'  # task.name, task.path
_CHECKS, _WALL = 2, 3  # of an answer: its tests and the hidden ones; wall seconds for a CPU second of the limit
_FIELDS = ('show_tests', 'partial_credit')

Config: TypeAlias = Any  # a ConfigDict, a TrackedConfig, or sections with the fields of one as attributes


def find_code_problems(c: Config) -> Iterator[str]:
    """A sentence for each rule that a config breaks, for training, evaluating and scoring alike."""
    task = c.task
    if task.name != NAME:
        for field in _FIELDS:
            if getattr(task, field):
                yield f'task.{field}=True is for task.name={NAME!r}, and it is {task.name!r}; remove one of them'
        return
    least_s = _CHECKS * _WALL * task.time_limit_s
    if not task.reward and task.verifier_deadline_s < least_s:
        yield (
            f'task.verifier_deadline_s={task.verifier_deadline_s:g} would end checks that task.time_limit_s='
            f'{task.time_limit_s:g} allows: {_CHECKS} checks of {_WALL} wall seconds for each CPU second; raise it to '
            f'{least_s:g} or more'
        )


def find_training_problems(c: Config) -> Iterator[str]:
    """The same for what is trained on."""
    if c.task.name == NAME and c.task.path == HUMAN_EVAL:
        yield (
            f'task.path={HUMAN_EVAL!r} is for evaluation only: training on it would spoil what it measures; use '
            "task.path='' or a file of your own, and areal-eval for HumanEval"
        )
