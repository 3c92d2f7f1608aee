"""The tasks by name. app/ builds the one that `task.name` selects."""

from __future__ import annotations

import importlib
import inspect
import types

from areal_jax.tasks.task import Task, TaskError
from areal_jax.tasks.tokenizer import Tokenizer

# Each module has build(tokenizer, **values) -> Task and score(problem, answer_text, finish_reason) -> reward.
TASKS = {
    'jsonl': 'areal_jax.tasks.jsonl',
    'reasoning_gym': 'areal_jax.tasks.reasoning_gym',
    'token_reversal': 'areal_jax.tasks.token_reversal',
}


def make_task(name: str, tokenizer: Tokenizer, **values: object) -> Task:
    """The task `name`, built from `values` (see `value_names`). Raises TaskError for an unknown name or value."""
    known = value_names(name)
    if unknown := sorted(set(values) - set(known)):
        raise TaskError(f'task {name!r} does not use {unknown}; it takes {list(known)}')
    return _import_task(name).build(tokenizer, **values)


def value_names(name: str) -> tuple[str, ...]:
    """The config fields that a task uses, in the order of its builder."""
    return tuple(inspect.signature(_import_task(name).build).parameters)[1:]


def _import_task(name: str) -> types.ModuleType:
    if name not in TASKS:
        raise TaskError(f'task.name={name!r} is not known; tasks: {sorted(TASKS)}')
    return importlib.import_module(TASKS[name])
