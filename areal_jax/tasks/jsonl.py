"""The task `jsonl`: questions with integer answers from a file of JSON lines, and the scorer of its answers."""

from __future__ import annotations

import pathlib

from areal_jax.files import JsonObject
from areal_jax.tasks.integers import last_integer
from areal_jax.tasks.json_lines import read_objects, require_text
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.tasks.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason

_FINAL_ANSWER = '####'  # the mark before the final answer of a worked solution, as in GSM8K


def build(tokenizer: Tokenizer, path: str, system_prompt: str, held_out_fraction: float) -> ListedTask:
    """The distinct questions of the file, split by a hash of the question. Raises TaskError for a bad line."""
    if not path:
        raise TaskError("task.name='jsonl' needs task.path: a file of JSON lines with question and answer")
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in read_problems(pathlib.Path(path)):
        side: Split = 'held_out' if hash_fraction(problem['question']) < held_out_fraction else 'train'
        sides[side].append(problem)
    return ListedTask(
        'jsonl', score, sides, lambda problem: chat_messages(problem['question'], system_prompt), tokenizer
    )


def read_problems(path: pathlib.Path) -> list[dict[str, str]]:
    """question and answer (as `last_integer` gives it) of each line that is not blank; of equal questions the first."""
    problems: dict[str, dict[str, str]] = {}
    for place, row in read_objects(path):
        problem = _read_problem(row, place)
        problems.setdefault(problem['question'], problem)
    return list(problems.values())


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its last integer equals the problem's, else 0."""
    return float(finish_reason == 'stop' and last_integer(answer_text) == problem['answer'])


def _read_problem(row: JsonObject, place: str) -> dict[str, str]:
    if missing := [name for name in ('question', 'answer') if name not in row]:
        raise TaskError(f'{place}: expected an object with question and answer, {" and ".join(missing)} is missing')
    question, answer = require_text(row['question'], 'question', place), row['answer']
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) is int:
        answer = str(answer)
    answer = require_text(answer, 'answer', place)
    final = last_integer(answer.rpartition(_FINAL_ANSWER)[2])
    if final is None:
        raise TaskError(f'{place}: the answer {answer[-80:]!r} does not end in an integer, which this task compares')
    return {'question': question, 'answer': final}
