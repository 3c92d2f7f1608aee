"""Which level of the sandbox a task gets, and what is refused and warned of."""

from __future__ import annotations

import pytest

from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.agent_fields import (
    LEVELS,
    NONE,
    PACKAGES,
    RUN_MODEL_CODE,
    find_code_problems,
    find_sandbox_problems,
    find_sandbox_warnings,
    resolve_sandbox,
    resolve_tool_sandbox,
    runs_model_code,
    runs_tools,
)
from areal_jax.config.fields import ConfigError
from areal_jax.workers.sandbox import confinement
from areal_jax.workers.sandbox.confinement import CONFINING


def make(tools=(), **fields):
    config = default_config()
    config.update_from_flattened_dict({f'task.{name}': value for name, value in fields.items()})
    config.agent.tools = tools
    return config


def test_the_levels_that_confine_are_those_that_the_sandbox_has():
    assert set(LEVELS) == {'auto', NONE, *CONFINING}
    assert tuple(confinement.LEVELS) == CONFINING


@pytest.mark.parametrize(
    ('fields', 'level'),
    [
        ({}, 'none'),
        ({'name': 'code'}, 'landlock'),
        ({'name': 'code', 'sandbox': 'bubblewrap'}, 'bubblewrap'),
        ({'name': 'code', 'sandbox': 'none'}, 'none'),
        ({'name': 'code', 'reward': 'my.py:score'}, 'none'),
        ({'name': 'my.py:build'}, 'none'),
        ({'name': 'my.py:build', 'sandbox': 'landlock'}, 'landlock'),
        ({'reward': 'my.py:score', 'sandbox': 'bubblewrap'}, 'bubblewrap'),
    ],
)
def test_auto_confines_what_runs_code_of_a_model(fields, level):
    config = make(**fields)
    assert resolve_sandbox(config.task) == level
    assert resolve_sandbox(TrackedConfig(config).task) == level
    assert list(find_sandbox_problems(config)) == []


@pytest.mark.parametrize(
    ('fields', 'said'),
    [
        (
            {'sandbox': 'landlock'},
            "task.sandbox='landlock' is for a scorer that runs code, and that of task.name='token_reversal' runs none; "
            "set task.reward or agent.tools, or task.sandbox='auto'",
        ),
        (
            {'name': 'code', 'verifier': 'inline'},
            "task.verifier='inline' would run code of a model in the process of the run, and task.name='code' runs "
            "such code; use task.verifier='process'",
        ),
        (
            {'reward': 'my.py:score', 'sandbox': 'bubblewrap', 'verifier': 'inline'},
            "task.sandbox='bubblewrap' confines a worker process, and task.verifier='inline' has none; use "
            "task.verifier='process'",
        ),
        (
            {'sandbox': 'none', 'tools': ('python',)},
            "task.sandbox='none' with agent.tools=('python',): code that the model wrote would run with all rights of "
            "the user who starts the run; use task.sandbox='auto'",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_with_the_fix(fields, said):
    config = make(**fields)
    assert list(find_sandbox_problems(config)) == [said]
    with pytest.raises(ConfigError) as raised:
        validate(config)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ('fields', 'scorer', 'tool'),
    [
        ({}, 'none', 'landlock'),
        ({'sandbox': 'bubblewrap'}, 'none', 'bubblewrap'),
        ({'sandbox': 'bubblewrap', 'verifier': 'inline'}, 'none', 'bubblewrap'),
        ({'reward': 'my.py:score'}, 'none', 'landlock'),
        ({'reward': 'my.py:score', 'sandbox': 'bubblewrap'}, 'bubblewrap', 'bubblewrap'),
        ({'name': 'code'}, 'landlock', 'landlock'),
    ],
)
def test_a_tool_that_runs_code_is_confined_whatever_the_scorer_is(fields, scorer, tool):
    config = make(('python',), **fields)
    assert (resolve_sandbox(config.task), resolve_tool_sandbox(config.task)) == (scorer, tool)
    assert list(find_sandbox_problems(config)) == []
    assert runs_tools(config)
    assert not runs_tools(make(**fields))


def test_packages_are_for_what_runs_code():
    assert make().task.packages == PACKAGES
    for allowed in (make(name='code', packages=('sympy',)), make(('python',), packages=())):
        assert not [said for said in find_code_problems(allowed) if 'packages' in said]
    with pytest.raises(ConfigError) as raised:
        validate(make(packages=('sympy',)))
    assert str(raised.value) == (
        "task.packages=('sympy',) is for code of a model, and neither task.name='token_reversal' nor agent.tools=() "
        "runs any; leave it at ('numpy',)"
    )


def test_a_level_that_is_none_is_refused():
    with pytest.raises(
        ConfigError, match=r"^task\.sandbox='docker' is not known; use one of auto, landlock, bubblewrap, none$"
    ):
        validate(make(sandbox='docker'))


def test_code_of_a_model_without_a_sandbox_is_warned_of():
    (said,) = find_sandbox_warnings(make(name='code', sandbox='none'))
    assert said.startswith("task.sandbox='none' with task.name='code': code that the model wrote ran with all rights")
    for fields in ({}, {'name': 'code'}, {'sandbox': 'none'}, {'name': 'my.py:build', 'sandbox': 'none'}):
        assert list(find_sandbox_warnings(make(**fields))) == []


def test_the_tasks_that_run_such_code():
    assert RUN_MODEL_CODE == ('code',)
    assert not runs_model_code(make(name='code', reward='my.py:score').task)
