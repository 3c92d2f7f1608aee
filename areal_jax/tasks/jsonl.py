"""The task `jsonl`: questions with gold answers from a file of JSON lines, compared as `task.answer` says.

The kinds of answers are in tasks/answers/; docs/answers.md shows what each reads.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks.answers import exact, mathematics, normalised, number
from areal_jax.tasks.answers import gold_answers as golds
from areal_jax.tasks.answers.extraction import MARK, last_boxed, marked_answers
from areal_jax.tasks.integers import has_number, last_integer
from areal_jax.tasks.line_keys import OF_TASKS, LineKeys
from areal_jax.tasks.scoring.score_call import UNPARSED
from areal_jax.tasks.task import ListedTask, Problem, Scorer, Split, TaskError, hash_fraction, integer_or_text
from areal_jax.tasks.user_lines import read_objects, require_text
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason

_QUESTION = ('question', 'problem')  # names of the prompt; the first that a line has counts
_GOLD = ('answer', 'solution')  # the same for the gold


@dataclasses.dataclass(frozen=True)
class AnswerKind:
    """How gold answers are read, and how answers are scored and compared with each other."""

    read_gold: Callable[[str], str | None]  # from a gold text to what `score` finds in problem['answer']; None: not one
    reads: str  # what a gold must hold
    score: Scorer  # in a module of its own, which worker processes import
    final_answer: Callable[[str], str]  # see Task.final_answer


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """The kind 'integer': 1 if the answer ended by itself and its last integer equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    return float(last_integer(answer_text) == problem['answer']) if has_number(answer_text) else UNPARSED


def _read_integer(text: str) -> str | None:
    return last_integer(text.rpartition(MARK)[2])


KINDS: Mapping[str, AnswerKind] = {
    'integer': AnswerKind(_read_integer, 'an integer at its end', score, integer_or_text),
    **{
        name: AnswerKind(kind.read_gold, kind.READS, kind.score, kind.final_answer)
        for name, kind in (('number', number), ('exact', exact), ('normalised', normalised), ('math', mathematics))
    },
}


def build(tokenizer: Tokenizer, path: str, answer: str, system_prompt: str, held_out_fraction: float) -> ListedTask:
    """The distinct questions of the file, split by a hash of the question. Raises TaskError for a bad line."""
    if not path:
        raise TaskError("task.name='jsonl' needs task.path: a file of JSON lines with question and answer")
    if answer == 'math' and not mathematics.is_installed():
        raise TaskError(f"task.answer='math' needs the package math-verify: {describe_install('tasks')}")
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in read_problems(pathlib.Path(path), answer):
        side: Split = 'held_out' if hash_fraction(problem['question']) < held_out_fraction else 'train'
        sides[side].append(problem)
    return ListedTask(
        'jsonl',
        KINDS[answer].score,
        sides,
        lambda problem: chat_messages(problem['question'], system_prompt),
        tokenizer,
        KINDS[answer].final_answer,
    )


def read_problems(path: pathlib.Path, answer: str) -> list[dict[str, str]]:
    """question and answer (as the kind reads it) of each line that is not blank; of equal questions the first."""
    problems: dict[str, dict[str, str]] = {}
    places: dict[str, str] = {}  # of the gold answers
    keys = LineKeys(path, (*_QUESTION, *_GOLD), OF_TASKS, _QUESTION, _GOLD)
    for place, row in read_objects(path):
        problem = _read_problem(row, place, answer)
        keys.require(row, place)
        if problems.setdefault(problem['question'], problem) is problem:
            places.setdefault(problem['answer'], place)
    keys.tell()
    if answer == 'math' and (fault := golds.find_fault(list(places))):
        raise TaskError(
            f'{places[fault.gold]}: the gold answer {fault.gold[-80:]!r} {fault.reason}: mend it, remove the line, or '
            "compare by text with task.answer='normalised'"
        )
    return list(problems.values())


def _read_problem(row: JsonObject, place: str, answer: str) -> dict[str, str]:
    names = [next((name for name in pair if name in row), None) for pair in (_QUESTION, _GOLD)]
    if missing := [' or '.join(pair) for pair, name in zip((_QUESTION, _GOLD), names, strict=True) if name is None]:
        raise TaskError(f'{place}: expected an object with question and answer, {" and ".join(missing)} is missing')
    asked, given = (str(name) for name in names)
    question, gold = require_text(row[asked], asked, place), row[given]
    if isinstance(gold, float) and gold.is_integer():
        gold = int(gold)
    if type(gold) is int or (answer != 'integer' and isinstance(gold, float) and abs(gold) < float('inf')):
        gold = str(gold)
    gold = require_text(gold, given, place)
    final = KINDS[answer].read_gold(_final_part(gold, place) if given == 'solution' else gold)
    if final is None and answer == 'integer':
        raise TaskError(
            f'{place}: the {given} {gold[-80:]!r} does not end in an integer, which this task compares; '
            'see task.answer for other kinds'
        )
    if final is None:
        raise TaskError(
            f'{place}: the {given} {gold[-80:]!r} does not hold {KINDS[answer].reads} (task.answer={answer})'
        )
    return {'question': question, 'answer': final}


def _final_part(solution: str, place: str) -> str:
    r"""The final answer that a worked solution marks, for every kind: in \boxed{} or after '####'."""
    marked = last_boxed(solution) if MARK not in solution else next(marked_answers(solution), None)
    if marked is None:
        raise TaskError(
            f'{place}: the solution {solution[-80:]!r} marks no final answer: put it into \\boxed{{}} or after ####, '
            "or give it as 'answer'"
        )
    return marked
