"""The tasks by name: tasks of this package, and your own, 'FILE.py:FUNCTION' or 'MODULE:FUNCTION'.

app/ builds the task that `task.name` selects. areal_jax/plugins.py loads the builder of your own task.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from areal_jax.errors import suggest
from areal_jax.plugins import is_environment, is_own, load_function, raising_user_error
from areal_jax.tasks.environments import verifiers_task
from areal_jax.tasks.task import ListedTask, Task, TaskError, require_json
from areal_jax.text.tokenizer import Tokenizer

# Each module has build(tokenizer, **values) -> Task and score(problem, answer_text, finish_reason) -> reward.
TASKS = {
    'code': 'areal_jax.tasks.code.code_task',
    'jsonl': 'areal_jax.tasks.jsonl',
    'reasoning_gym': 'areal_jax.tasks.reasoning_gym',
    'running_sums': 'areal_jax.tasks.running_sums',
    'token_reversal': 'areal_jax.tasks.token_reversal',
}
# Fields of the section `task` that the builder of an own task gets if it has a parameter of that name.
FOR_OWN = ('path', 'system_prompt', 'held_out_fraction')
_FIELD = 'task.name'
_PROTOCOL = ('name', 'scorer', 'fitting', 'sizes', 'prompts', 'held_out', 'score', 'final_answer')

Builder = Callable[..., Task]


def make_task(
    name: str, tokenizer: Tokenizer, options: Mapping[str, object] | None = None, /, **values: object
) -> Task:
    """Builds the task `name` from `values` (see `value_names`) and, if it is your own task, from `options`.

    Raises TaskError for an unknown name, value or option, and UserError for a builder of your own that cannot be
    loaded, that raises, or that returns no task.
    """
    options = options or {}
    if is_own(name):
        return _make_own_task(name, tokenizer, values, options)
    if is_environment(name):
        return cast(Task, verifiers_task.build(tokenizer, name, options, **cast(dict[str, Any], values)))
    if options:
        given = ', '.join(f'task.options.{key}={value!r}' for key, value in options.items())
        raise TaskError(f'{given}: task.name={name!r} takes no options; remove them, or name a task of your own')
    known = value_names(name)
    if unknown := sorted(set(values) - set(known)):
        raise TaskError(f'task {name!r} does not use {unknown}; it takes {list(known)}')
    return _load_builder(name)(tokenizer, **values)


def value_names(name: str) -> tuple[str, ...]:
    """The config fields that a task uses, in the order of its builder."""
    if is_environment(name):
        return verifiers_task.VALUES
    names = tuple(inspect.signature(_load_builder(name)).parameters)[1:]
    return tuple(field for field in names if field in FOR_OWN) if is_own(name) else names


def require_known(name: str) -> None:
    """Raises TaskError if `name` is no task here and has no form of an own task or an environment; loads nothing."""
    if name not in TASKS and not is_own(name) and not is_environment(name):
        fix = (
            f'; name the function that builds the task, {name}:build' if name.endswith('.py') else suggest(name, TASKS)
        )
        raise TaskError(
            f'task.name={name!r} is not known{fix}; tasks: {sorted(TASKS)}, verifiers:TASKSET, or FILE.py:FUNCTION'
        )


def _load_builder(name: str) -> Builder:
    if is_own(name):
        return cast(Builder, load_function(name, _FIELD))
    require_known(name)
    return importlib.import_module(TASKS[name]).build


def _make_own_task(
    name: str, tokenizer: Tokenizer, values: Mapping[str, object], options: Mapping[str, object]
) -> Task:
    build = _load_builder(name)
    _require_options(name, build, options)
    with raising_user_error(name, _FIELD):
        task = build(tokenizer, **values, **options)
    if missing := [attribute for attribute in _PROTOCOL if not hasattr(task, attribute)]:
        raise TaskError(
            f'{_FIELD}={name}: it returned {_describe(task)}, which is no task (it has no {missing[0]!r}); return '
            'question_task(...) of areal_jax/tasks/questions.py, or an object with the protocol Task of '
            'areal_jax/tasks/task.py'
        )
    if isinstance(task, ListedTask):
        for side, problems in task.problems.items():
            for index, problem in enumerate(problems):
                require_json(problem, f'{_FIELD}={name}: problem {index} of the side {side!r}')
    return task


def _require_options(name: str, build: Builder, options: Mapping[str, object]) -> None:
    parameters = list(inspect.signature(build).parameters.values())[1:]
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = [p.name for p in named if p.name not in FOR_OWN]
    for key in options:
        if key in FOR_OWN:
            raise TaskError(f'task.options.{key}: the builder gets the field task.{key}; set --config.task.{key}')
        if key not in own and not takes_any:
            takes = f'it takes {", ".join(own)}' if own else 'it takes none'
            raise TaskError(f'task.options.{key}: {_FIELD}={name} has no such option; {takes}{suggest(key, own)}')
    if lacking := [p.name for p in named if p.default is p.empty and p.name not in (*FOR_OWN, *options)]:
        raise TaskError(
            f'{_FIELD}={name} needs the option {lacking[0]!r}: set --config.task.options.{lacking[0]}=VALUE, or give '
            'the parameter a default'
        )


def _describe(value: object) -> str:
    return 'None' if value is None else f'a {type(value).__name__}'
