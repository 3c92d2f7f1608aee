"""The fields of the section `agent`. docs/agents.md is their page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import config_dict

from areal_jax.config.fields import COUNT, COUNT_OR_OFF, POSITIVE, Choice, Field, Integer, Path, Real, Text, Texts
from areal_jax.config.objectives import find_objective
from areal_jax.errors import suggest
from areal_jax.plugins import is_environment, is_own

HERMES = 'hermes'
PROGRAM = 'program'  # rollout.workflow: programs that talk to a gateway
PYTHON = 'python'  # agent.tools: runs code of the model
TOOLS = (PYTHON,)

AGENT_FIELDS: Mapping[str, Field] = {
    'max_turns': Integer(32, COUNT_OR_OFF, 'turns of an episode, those of sub-agents included; 0 = no bound'),
    'max_turn_tokens': Integer(
        0, COUNT_OR_OFF, 'tokens sampled in a turn; 0 = bounded by rollout.max_new_tokens alone'
    ),
    'tool_calls': Integer(8, COUNT, 'tools that are called at once; others wait'),
    'tool_deadline_s': Real(30.0, POSITIVE, 'of a call; then its result is an error that the model reads'),
    'tool_bytes': Integer(65536, COUNT, 'of the result of a tool, in UTF-8; the rest is cut off'),
    'mcp_servers': Texts((), "MCP servers of an agent: 'python server.py' or 'http://host:port/mcp'"),
    'tools': Texts((), "tools of this package for an own agent: 'python' runs code that the model wrote"),
    'command': Text('', "rollout.workflow='program': the command line of an episode, e.g. 'python agent.py'"),
    'function': Path('', "or an `async def` that long-lived workers run: 'FILE.py:FUNCTION'"),
    'workers': Integer(1, COUNT, 'processes that run agent.function or an environment, each for several episodes'),
    'preload': Texts((), 'modules that Python programs of agent.command find imported: they start from a fork'),
    'programs': Integer(64, COUNT, 'programs at once; other episodes wait'),
    'notation': Text(HERMES, "of calls in answers: hermes, or a renderer of the package renderers: 'qwen3', 'llama-3'"),
    'required': Choice(
        'wish', ('wish', 'refuse'), 'calls and JSON that a program requires: shown to the model and counted, or refused'
    ),
}


def find_agent_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that a config breaks: the fields, their values and the fix."""
    agent, deadline_s = c.agent, c.rollout.episode_deadline_s
    if unknown := [name for name in agent.tools if name not in TOOLS]:
        yield (
            f'agent.tools={agent.tools!r}: {unknown[0]!r} is no tool of this package{suggest(unknown[0], TOOLS)}; use '
            f'some of {", ".join(TOOLS)}, or ()'
        )
    if c.rollout.workflow != PROGRAM:
        if is_environment(c.task.name) and find_objective(c.loss.objective).generates:
            yield f'task.name={c.task.name!r} needs rollout.workflow={PROGRAM!r}: its environment runs the episodes'
        for name in ('command', 'function'):
            if agent[name]:
                yield (
                    f'agent.{name}={agent[name]!r} needs rollout.workflow={PROGRAM!r}, and it is {c.rollout.workflow!r}'
                )
        if deadline_s and ':' not in c.rollout.workflow and not c.simulation.prices:
            yield f'rollout.episode_deadline_s={deadline_s} is for agents, and rollout.workflow={c.rollout.workflow!r}'
        return
    if is_environment(c.task.name):
        for name in ('command', 'function'):
            if agent[name]:
                yield f'agent.{name}={agent[name]!r}: task.name={c.task.name!r} brings its own program; leave it out'
    elif bool(agent.command) == bool(agent.function):
        yield (
            f'rollout.workflow={PROGRAM!r} needs agent.command or agent.function, one of them; they are '
            f'{agent.command!r} and {agent.function!r}'
        )
    if c.simulation.prices:
        return  # no program runs
    if c.run.clock != 'real':
        yield f"rollout.workflow={PROGRAM!r} needs run.clock='real': programs take time of their own"
    if not 0 < deadline_s < c.run.stall_timeout_s:
        yield (
            f'rollout.workflow={PROGRAM!r} needs a rollout.episode_deadline_s above 0 and below run.stall_timeout_s='
            f'{c.run.stall_timeout_s}, and it is {deadline_s}: a program may wait for ever'
        )


# Sandboxes for code that a model wrote: levels of task.sandbox, rules of the task `code` and of tools that run it.


AUTO, NONE, LANDLOCK, BUBBLEWRAP = 'auto', 'none', 'landlock', 'bubblewrap'
CONFINING = (LANDLOCK, BUBBLEWRAP)  # the same as in workers/sandbox/confinement.py
LEVELS = (AUTO, *CONFINING, NONE)
RUN_MODEL_CODE = ('code',)  # task.name: tasks of this package whose scorers run what a model wrote

NAME, HUMAN_EVAL = 'code', 'humaneval'  # task.name, task.path
_CHECKS, _WALL = 2, 3  # checks per answer: visible and hidden tests; wall seconds per CPU second of the limit
_CHECK_SHARE = 0.9  # of task.verifier_deadline_s; the worker starts and ends its programs in the rest
_FIELDS = ('show_tests', 'partial_credit')
PACKAGES = ('numpy',)  # the default of task.packages

Config: TypeAlias = Any  # a ConfigDict, a TrackedConfig, or sections with the fields of one as attributes


def runs_model_code(task: Config) -> bool:
    """Whether the section `task` names a scorer of this package that runs code that a model wrote."""
    return task.name in RUN_MODEL_CODE and not task.reward


def has_own_scorer(task: Config) -> bool:
    """Whether the user's own function scores: only the user knows whether it runs code that a model wrote."""
    return bool(task.reward) or is_own(task.name)


def resolve_sandbox(task: Config) -> str:
    """The sandbox level of the scorer that the section `task` names: one of CONFINING, or NONE."""
    if not (runs_model_code(task) or has_own_scorer(task)):
        return NONE  # task.sandbox applies to tools only
    if task.sandbox != AUTO:
        return str(task.sandbox)
    return LANDLOCK if runs_model_code(task) else NONE


def runs_tools(c: Config) -> bool:
    """Whether a tool of agent.tools runs code that a model wrote."""
    return PYTHON in c.agent.tools


def resolve_tool_sandbox(task: Config) -> str:
    """The sandbox level of a tool that runs a model's code: one of CONFINING; `find_sandbox_problems` refuses NONE."""
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
    """Yields a sentence for code that a model wrote and no sandbox confines."""
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
    """The wall seconds for all checks of an answer: they end before `deadline_s`, when the worker is killed."""
    return _CHECK_SHARE * deadline_s


def find_least_deadline(time_limit_s: float, checks: int = _CHECKS) -> float:
    """The least task.verifier_deadline_s, rounded up to 0.1 s, for `checks` checks of `time_limit_s` CPU seconds."""
    return math.ceil(10 * checks * _WALL * time_limit_s / _CHECK_SHARE) / 10


def find_training_problems(c: Config) -> Iterator[str]:
    """Yields a sentence for a task that must not be trained on."""
    if c.task.name == NAME and c.task.path == HUMAN_EVAL:
        yield (
            f'task.path={HUMAN_EVAL!r} is for evaluation only: training on it would spoil what it measures; use '
            "task.path='' or a file of your own, and areal-eval for HumanEval"
        )
