"""The task of an environment: its problems come from another interpreter, its reward from the episode."""

from __future__ import annotations

import pathlib
import sys

import pytest

from areal_jax.errors import UserError
from areal_jax.tasks.environments.verifiers_task import describe_environment, make_messages, score
from areal_jax.tasks.registry import make_task, value_names
from areal_jax.tasks.task import TaskError
from areal_jax.text.tokenizer import CharacterTokenizer

NAME = 'verifiers:toy'
TASKS = [{'prompt': text, 'answer': text} for text in 'abcdefab']


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(pathlib.Path(__file__).parents[2] / 'agents' / 'toy'))
    monkeypatch.setenv('AREAL_JAX_VERIFIERS_PYTHON', sys.executable)


def make(name=NAME, path='', most=50, **options):
    values = {'path': path, 'dataset_size': most, 'held_out_fraction': 0.5}
    assert value_names(name) == tuple(values)
    return make_task(name, CharacterTokenizer('abcdef'), options, **values)


def write(tmp_path, text):
    file = tmp_path / 'environment.toml'
    file.write_text(text)
    return str(file)


def test_the_tasks_are_split_and_equal_ones_count_once():
    task = make(tasks=TASKS)
    listed = [problem for side in ('train', 'held_out') for problem in task.problems[side]]
    assert sorted(problem['prompt'] for problem in listed) == list('abcdef')
    assert task.sizes()['held_out'] > 0
    again = make(tasks=TASKS[::-1])  # the side of a task depends on the task alone
    sides = [{problem['prompt'] for problem in one.problems['held_out']} for one in (task, again)]
    assert sides[0] == sides[1]


def test_a_taskset_without_an_end_is_cut():
    assert sum(make(most=4, tasks=TASKS, endless=True).sizes().values()) == 4


def test_the_environment_is_that_of_the_file_and_options_are_fields_of_its_taskset(tmp_path):
    file = write(tmp_path, 'model = "m"\n[env.taskset]\nlevel = 1\nmode = "x"\n[env.agent.harness]\nid = "bash"\n')
    found = describe_environment(NAME, file, {'level': 2}, most_tasks=3, max_turns=4, workers=5)
    taskset = {'id': 'toy', 'level': 2, 'mode': 'x'}
    assert found == {
        'environment': {'taskset': taskset, 'agent': {'harness': {'id': 'bash'}}}, 'most_tasks': 3, 'max_turns': 4,
        'workers': 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ('text', 'said'),
    [('[en', 'cannot be read as TOML'), ('env = 1', 'no section'), ('[env]\ntaskset = 1', 'env.taskset is no section')],
)
def test_a_file_that_is_no_environment_is_refused(tmp_path, text, said):
    with pytest.raises(TaskError, match=said):
        make(path=write(tmp_path, text))


def test_what_cannot_be_loaded_is_said_in_one_sentence(monkeypatch):
    with pytest.raises(TaskError, match=r"cannot be loaded by .*: ModuleNotFoundError: taskset 'other' not found$"):
        make('verifiers:other')
    with pytest.raises(TaskError, match='it has the agents a, b: one is trained'):
        make(seats=['a', 'b'])
    with pytest.raises(TaskError, match='task 1 has no prompt: a user must open it'):
        make(tasks=[{'prompt': 'a'}, {'prompt': None}])
    monkeypatch.setenv('AREAL_JAX_VERIFIERS_PYTHON', '/nowhere/python')
    with pytest.raises(UserError, match=r"task.name='verifiers:toy' needs an interpreter that has verifiers, and /now"):
        make()


def test_the_prompt_has_the_system_prompt_of_the_task():
    assert make_messages({'prompt': 'q', 'system_prompt': None}) == [{'role': 'user', 'content': 'q'}]
    turns = [{'role': 'user', 'content': 'q'}]
    assert make_messages({'prompt': turns, 'system_prompt': 's'}) == [{'role': 'system', 'content': 's'}, *turns]


def test_the_reward_is_that_of_the_episode_and_without_one_there_is_none():
    assert score({}, '', 'stop', {'outcome': {'reward': 0.25}}) == 0.25
    with pytest.raises(ValueError, match='is scored by its environment'):
        score({}, '', 'stop', {'outcome': None})
