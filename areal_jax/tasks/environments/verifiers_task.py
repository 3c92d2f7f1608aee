"""The task `verifiers:TASKSET`: problems of a taskset of verifiers, scored by its own reward.

A server of verifiers runs its episodes (agents/environment_host.py); the server's outcome is in the episode.
verifiers_program.py lists the problems, in the interpreter of the environment.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.plugins import VERIFIERS
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.text.chat_template import Messages
from areal_jax.text.tokenizer import Tokenizer
from areal_jax.types import FinishReason
from areal_jax.workers.descendants import Interpreter

PROGRAM_FILE = pathlib.Path(__file__).with_name('verifiers_program.py')
VALUES = ('path', 'dataset_size', 'held_out_fraction')  # fields of the section `task` that `build` gets
_LIST_S = 900.0  # a taskset may load a large data set
_POSITION = 'idx'  # of a task in its taskset: no part of its content
_LONGEST_REASON = 300  # characters


def build(
    tokenizer: Tokenizer,
    name: str,
    options: Mapping[str, object],
    path: str,
    dataset_size: int,
    held_out_fraction: float,
) -> ListedTask:
    """The distinct tasks of the taskset, split by a hash of each.

    Args:
      options: fields of the taskset's config by name.
      path: of a TOML file with the section [env] of verifiers; '' = no file.
      dataset_size: most tasks of a taskset without an end.

    Raises TaskError for a taskset that cannot be loaded, or a task without a prompt.
    """
    setup = describe_environment(name, path, options, most_tasks=dataset_size)
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    seen: set[str] = set()
    for problem in _list_problems(name, setup):
        if not problem.get('prompt'):
            raise TaskError(f'task.name={name!r}: task {problem.get(_POSITION)} has no prompt: a user must open it')
        content = json.dumps({key: value for key, value in problem.items() if key != _POSITION}, sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()
        if key not in seen:
            seen.add(key)
            sides['held_out' if hash_fraction(key) < held_out_fraction else 'train'].append(problem)
    return ListedTask(name, score, sides, make_messages, tokenizer)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason, episode: JsonObject) -> float:
    outcome = episode.get('outcome')
    if not isinstance(outcome, dict) or 'reward' not in outcome:
        raise ValueError(f"task.name='{VERIFIERS}...' is scored by its environment, and this answer comes from none")
    return float(outcome['reward'])


def describe_environment(
    name: str, path: str, options: Mapping[str, object], *, most_tasks: int = 0, max_turns: int = 0, workers: int = 1
) -> JsonObject:
    """The input of verifiers_program.py. Raises TaskError for a file that is no TOML with a section [env]."""
    environment = _read_section(path) if path else {}
    taskset = environment.setdefault('taskset', {})
    if not isinstance(taskset, dict):
        raise TaskError(f'task.path={path}: env.taskset is no section')
    environment['taskset'] = {**taskset, **options, 'id': name.removeprefix(VERIFIERS)}
    return {'environment': environment, 'most_tasks': most_tasks, 'max_turns': max_turns, 'workers': workers}


def find_python(name: str) -> str:
    """The interpreter that has verifiers; raises UserError if it does not exist."""
    return Interpreter(
        f'task.name={name!r}', 'verifiers', 'AREAL_JAX_VERIFIERS_PYTHON', '.venv-verifiers/bin/python',
        'launch/verifiers_environment.sh',
    ).find()  # fmt: skip


def make_messages(problem: Problem) -> Messages:
    """The messages that open the conversation; a harness may put more around them."""
    prompt, system = problem['prompt'], problem.get('system_prompt')
    turns: Messages = [{'role': 'user', 'content': prompt}] if isinstance(prompt, str) else prompt
    return [{'role': 'system', 'content': system}, *turns] if system else turns


def _read_section(path: str) -> JsonObject:
    try:
        found = tomllib.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise TaskError(f'task.path={path} cannot be read as TOML: {error}') from error
    if not isinstance(found.get('env'), dict):
        raise TaskError(f'task.path={path} has no section [env], which is what verifiers reads of it')
    return found['env']


def _list_problems(name: str, setup: JsonObject) -> Sequence[Problem]:
    python = find_python(name)
    with tempfile.TemporaryDirectory(prefix='areal-tasks-') as folder:
        file = pathlib.Path(folder) / 'tasks.jsonl'
        try:
            done = subprocess.run(
                [python, str(PROGRAM_FILE), 'tasks', str(file)], input=json.dumps(setup) + '\n',
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_LIST_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise TaskError(f'task.name={name!r}: its tasks were not listed within {_LIST_S:g} s') from error
        except OSError as error:
            raise UserError(f'task.name={name!r}: {python} cannot be started: {error.strerror}') from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
            raise TaskError(f'task.name={name!r} cannot be loaded by {python}: {reason[:_LONGEST_REASON]}')
        return [json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()]
