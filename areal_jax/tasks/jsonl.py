"""The task `jsonl`: questions with gold answers from a file of JSON lines, compared as `task.answer` says.

The kinds of answers are in tasks/answers/; docs/answers.md shows what each reads.
"""

from __future__ import annotations

import decimal
import json
import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks.answers import gold_answers as golds
from areal_jax.tasks.answers import kinds, mathematics
from areal_jax.tasks.answers.extraction import MARK, last_boxed, last_marked
from areal_jax.tasks.answers.kinds import AnswerKind
from areal_jax.tasks.answers.number_reader import MOST_DIGITS
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.tasks.user_lines import OF_TASKS, LineKeys, read_objects, require_text
from areal_jax.text.tokenizer import Tokenizer, chat_messages

_QUESTION = ('question', 'problem')  # names of the prompt; the first that a line has counts
_GOLD = ('answer', 'solution')  # the same for the gold
_SPELLED_OUT = 30  # digits of a decimal in a file that are written without an exponent


class WrittenNumber(float):
    """A number of a file with a point or an exponent; `text` keeps every digit."""

    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        number = super().__new__(cls, text)
        number.text = text
        return number


_DECODER = json.JSONDecoder(parse_float=WrittenNumber)


KINDS: Mapping[str, AnswerKind] = {
    'integer': kinds.INTEGER,
    'number': kinds.NUMBER,
    'exact': kinds.EXACT,
    'normalised': kinds.NORMALISED,
    'math': AnswerKind(mathematics.read_gold, 'mathematics', mathematics.score, mathematics.final_answer),
}


def build(
    tokenizer: Tokenizer,
    path: str,
    answer: str,
    system_prompt: str,
    held_out_fraction: float,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> ListedTask:
    """Reads the distinct questions, split by a hash of the question. Raises TaskError for a bad line.

    Args:
      path: a file, or 'hf:ORG/NAME' of a data set.
      columns: see `rename_columns`.
    """
    if not path:
        raise TaskError("task.name='jsonl' needs task.path: a file, or hf:ORG/NAME, with question and answer")
    if answer == 'math' and not mathematics.is_installed():
        raise TaskError(f"task.answer='math' needs the package math-verify: {describe_install('tasks')}")
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in read_problems(path, answer, columns):
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


def read_problems(
    path: str | pathlib.Path, answer: str, columns: Mapping[str, str] = MappingProxyType({})
) -> list[dict[str, str]]:
    """Reads question and answer (as the kind reads it) of each line that is not blank; equal questions count once."""
    problems: dict[str, dict[str, str]] = {}
    places: dict[str, str] = {}  # of the gold answers
    keys = LineKeys(path, (*_QUESTION, *_GOLD), OF_TASKS, _QUESTION, _GOLD)
    for place, row in read_objects(path, _DECODER.decode, columns):
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
    asked, given = _first_of(_QUESTION, row), _first_of(_GOLD, row)
    if asked is None or given is None:
        missing = [' or '.join(pair) for pair, name in ((_QUESTION, asked), (_GOLD, given)) if name is None]
        raise TaskError(f'{place}: expected an object with question and answer, {" and ".join(missing)} is missing')
    question, gold = require_text(row[asked], asked, place), require_text(_spell(row[given]), given, place)
    final = KINDS[answer].read_gold(_final_part(gold, place) if given == 'solution' else gold)
    if final is None and answer == 'integer':
        raise TaskError(
            f'{place}: the {given} {gold[-80:]!r} does not end in an integer, which this task compares, and in nothing '
            'else: mend it, remove the line, or see task.answer for other kinds'
        )
    if final is None:
        raise TaskError(
            f'{place}: the {given} {gold[-80:]!r} does not hold {KINDS[answer].reads} (task.answer={answer}) and '
            'nothing else: mend it, remove the line, or choose another task.answer'
        )
    return {'question': question, 'answer': final}


def _first_of(names: Sequence[str], row: JsonObject) -> str | None:
    for name in names:
        if name in row:
            return name
    return None


def _spell(gold: object) -> object:
    """The text of a number as the file writes it, with all its digits; anything else unchanged."""
    if type(gold) is int:
        return str(gold)
    if not isinstance(gold, WrittenNumber):
        return gold
    number = decimal.Decimal(gold.text)
    if number.adjusted() < MOST_DIGITS and number == number.to_integral_value():
        return str(int(number))
    return f'{number:f}' if abs(number.adjusted()) < _SPELLED_OUT else gold.text


def _final_part(solution: str, place: str) -> str:
    r"""The final answer that a worked solution marks, for every kind: in \boxed{} or after '####'."""
    marked = last_boxed(solution) if MARK not in solution else last_marked(solution)
    if marked is None:
        raise TaskError(
            f'{place}: the solution {solution[-80:]!r} marks no final answer: put it into \\boxed{{}} or after ####, '
            "or give it as 'answer'"
        )
    return marked
