"""The sources of a mixture: tasks with a weight each, `task.sources`, and the rules of them.

A field that a source leaves out has the value of the section `task`, except options and columns, which belong to one
task. Every other part of the program reads the tasks of a config with `list_tasks`, and checks them one by one with
`split_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.agent_fields import CONFINING, has_own_scorer, runs_model_code
from areal_jax.config.declarations import OF_SOURCE, SECTIONS
from areal_jax.config.fields import Config, Options
from areal_jax.config.objectives import find_objective
from areal_jax.plugins import is_environment

SOURCES = 'task.sources'
# fields of the section `task` that only some tasks use: for a source of another task, the common value says nothing
_OF_SOME: Mapping[str, Callable[[Config], bool]] = {
    'show_tests': runs_model_code,
    'partial_credit': runs_model_code,
    'packages': runs_model_code,
    'sandbox': lambda task: runs_model_code(task) or has_own_scorer(task),
}


class SourceTask:
    """The section `task` as one source has it: its own fields, and the common ones that it leaves out.

    Args:
      name: of the source.
      own, common: its section, and the section `task`.
      note: called with the path of each own field that is read.
    """

    def __init__(self, name: str, own: Config, common: Config, note: Callable[[str], object]):
        self.source, self.own = name, own
        self._common, self._note = common, note

    def __getattr__(self, field: str) -> Config:
        if field in self.own:
            self._note(f'{SOURCES}.{self.source}.{field}')
            return self.own[field]
        declared = SECTIONS['task'].get(field)
        return declared.initial() if isinstance(declared, Options) else getattr(self._common, field)


def list_tasks(
    c: config_dict.ConfigDict, common: Config = None, note: Callable[[str], object] = lambda path: None
) -> dict[str, Config]:
    """Returns the tasks of a config by source, in the order of the names; {'': the section `task`} without sources.

    The order decides between sources that are due at the same draw, and a config that was saved keeps no other one.

    Args:
      common: reads the section `task`; None = that of `c`.
      note: see SourceTask.
    """
    common, sources = c.task if common is None else common, c.task.sources
    if not sources:
        return {'': common}
    return {name: SourceTask(name, sources[name], common, note) for name in sorted(sources)}


def find_path(task: Config, field: str) -> str:
    """Returns where a task of `list_tasks` has the value of a field: 'task.path', or 'task.sources.gsm8k.path'."""
    own = isinstance(task, SourceTask) and field in task.own
    return f'{SOURCES}.{task.source}.{field}' if own else f'task.{field}'


def split_config(c: config_dict.ConfigDict) -> Iterator[tuple[str, config_dict.ConfigDict]]:
    """Yields the beginning of a sentence on the task, and a config of it alone; ('', c) without sources."""
    sources = c.task.sources
    for name, task in list_tasks(c).items():
        if not name:
            yield '', c
            continue
        alone = c.copy_and_resolve_references()
        with alone.task.unlocked(), alone.task.ignore_type():
            alone.task.sources = config_dict.ConfigDict()
            for field in OF_SOURCE:
                alone.task[field] = getattr(task, field)
            for field, is_used in _OF_SOME.items():
                if field not in sources[name] and not is_used(alone.task):
                    alone.task[field] = SECTIONS['task'][field].default
        yield f'{SOURCES}.{name}: ', alone


def find_source_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each rule of mixtures that a config breaks; other rules hold for each source alone."""
    if not c.task.sources:
        return
    if not find_objective(c.loss.objective).generates:
        yield (
            f'{SOURCES} and loss.objective={c.loss.objective!r}: given answers come from one task; remove the sources, '
            'or join the files'
        )
    if c.model.source == 'random' and c.model.outputs == 'symbols':
        yield f"{SOURCES} and model.outputs='symbols': use model.outputs='all', which can answer every task"
    tasks = list_tasks(c)
    for name, task in tasks.items():
        if 'weight' not in c.task.sources[name]:
            yield f'{SOURCES}.{name} has no weight: set {SOURCES}.{name}.weight=1.0, or another share'
        if is_environment(task.name):
            yield f'{SOURCES}.{name}.name={task.name!r}: an environment runs its own episodes; train it alone'
    own = [name for name, task in tasks.items() if has_own_scorer(task)]
    code = [name for name, task in tasks.items() if runs_model_code(task)]
    if own and code and c.task.sandbox in CONFINING:
        yield (
            f'task.sandbox={c.task.sandbox!r} with {SOURCES}.{own[0]} and {SOURCES}.{code[0]}: a worker that is '
            "confined for an own scorer cannot start the programs of code; use task.sandbox='auto', or two runs"
        )
