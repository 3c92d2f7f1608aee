"""The problems of the task `code`: from a file of JSON lines, generated, or from HumanEval.

A problem has question, answer (its reference solution, or ''), entry_point ('' = a program), prompt (code that an
answer may continue), setup, test, tests, hidden_tests, time_limit_s, memory_limit_mb, check_s (wall seconds of a
check), partial_credit, family and place.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from areal_jax.config.agent_fields import HUMAN_EVAL, find_check_budget, find_least_deadline
from areal_jax.errors import UserError, suggest
from areal_jax.files import JsonObject
from areal_jax.installation import describe_install
from areal_jax.tasks.code import function_families
from areal_jax.tasks.code.judge import CheckTime, Judge, find_code
from areal_jax.tasks.scoring.score_call import MachineFaultError, Score
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.tasks.user_lines import OF_CODE, LineKeys, read_objects, require_text
from areal_jax.text.chat_template import Messages
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason
from areal_jax.workers.sandbox.confined_children import ServerLostError

_ASKED = ('question', 'prompt')
_REFERENCE = ('solution', 'canonical_solution')
_KNOWN = (
    *_ASKED, *_REFERENCE, 'entry_point', 'setup', 'test', 'tests', 'hidden_tests', 'time_limit_s', 'memory_limit_mb',
    'family', 'task_id',
)  # fmt: skip
_COMPLETE = 'Complete this Python function. Answer with the whole function in a fenced block.\n\n```python\n{}\n```'
_MOST_S, _MOST_MB = 300, 2**16


def read_problems(path: str, columns: Mapping[str, str] = MappingProxyType({})) -> list[Problem]:
    """Reads each distinct problem of a file or data set (see `read_objects`). Raises TaskError with file and line."""
    problems: dict[str, Problem] = {}
    keys = LineKeys(path, _KNOWN, OF_CODE, _REFERENCE)
    for place, row in read_objects(path, columns=columns):
        for name in sorted(set(row) - set(_KNOWN)):
            if near := suggest(name, _KNOWN):
                raise TaskError(f'{place}: the field {name!r} is not known{near}')
        keys.require(row, place)
        problem = complete_problem(row, place)
        first = problems.setdefault(problem['question'], problem)
        if first is not problem and {**first, 'place': ''} != {**problem, 'place': ''}:
            raise TaskError(f'{place}: the question of {first["place"]} with other tests; keep one of the two')
    keys.tell()
    return list(problems.values())


def list_human_eval() -> list[Problem]:
    """Lists the 164 problems of the package human-eval. Raises UserError if it is not installed."""
    try:
        from human_eval.data import read_problems as read_package
    except ImportError as error:
        raise UserError(f"task.path='humaneval' needs the package human-eval: {describe_install('tasks')}") from error
    rows = read_package().values()
    return [complete_problem(row, row['task_id']) for row in rows]


def append_tests(problem: Problem) -> str:
    """The question followed by the visible tests, as asserts."""
    return '\n'.join([problem['question'], *(_show(test, problem['entry_point']) for test in problem['tests'])])


def _show(test: Any, entry_point: str) -> str:
    if isinstance(test, str):
        return test
    if isinstance(test, dict):
        return f'input {test["input"]!r} gives {test["output"]!r}'
    return f'assert {entry_point}({", ".join(map(repr, test[0]))}) == {test[1]!r}'


def complete_problem(row: JsonObject, place: str) -> Problem:
    """Completes a problem that a user wrote, except limits that it leaves out. Raises TaskError."""
    entry_point = _read_text(row, 'entry_point', place)
    if entry_point and not entry_point.isidentifier():
        raise TaskError(f'{place}: entry_point={entry_point!r} must be the name of a function')
    prompt = row.get('prompt', '') if 'question' in row or entry_point else ''
    asked = row.get('question') or (_COMPLETE.format(str(prompt).rstrip()) if prompt else row.get('prompt'))
    reference = next((row[name] for name in _REFERENCE if name in row), '')
    problem: Problem = {
        'question': require_text(asked, 'question', place),
        'answer': _read_reference(reference, place),
        'entry_point': entry_point,
        'prompt': str(prompt),
        # tests can use the imports and functions of the prompt, whose last one gets a body
        'setup': _read_text(row, 'setup', place) or (f'{prompt}    pass\n' if prompt else ''),
        'test': _read_text(row, 'test', place),
        'tests': list(_read_tests(row, 'tests', entry_point, place)),
        'hidden_tests': list(_read_tests(row, 'hidden_tests', entry_point, place)),
        'family': str(row.get('family', '')),
        'place': place,
    }
    for name, most in (('time_limit_s', _MOST_S), ('memory_limit_mb', _MOST_MB)):
        if name in row:
            problem[name] = _read_limit(row[name], name, most, place)
    if bool(problem['test']) == bool(problem['tests']):
        raise TaskError(
            f"{place}: give either 'test', code with check(candidate), or 'tests', a list with something in it"
        )
    if problem['test'] and not entry_point:
        raise TaskError(f"{place}: 'test' calls a function: name it in entry_point")
    return problem


def require_time(problem: Problem, deadline_s: float) -> None:
    """Raises TaskError if the time limit of the problem is longer than the deadline of a check allows."""
    checks = 1 + bool(problem['hidden_tests'])
    least_s = find_least_deadline(problem['time_limit_s'], checks)
    if least_s > deadline_s:
        raise TaskError(
            f'{problem["place"]}: time_limit_s={problem["time_limit_s"]:g} allows checks that '
            f'task.verifier_deadline_s={deadline_s:g} would end; lower the one, or raise the other to '
            f'{least_s:g} or more'
        )


def _read_reference(given: object, place: str) -> str:
    if not isinstance(given, str):
        raise TaskError(f'{place}: solution={str(given)[:60]!r} must be code, as a text')
    return given


def _read_text(row: JsonObject, name: str, place: str) -> str:
    value = row.get(name, '')
    return require_text(value, name, place, may_be_blank=True)


def _read_limit(value: object, name: str, most: int, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise TaskError(f'{place}: {name}={value!r} must be a number above 0, at most {most}')
    return float(value)


def _read_tests(row: JsonObject, name: str, entry_point: str, place: str) -> Iterator[object]:
    tests = row.get(name, [])
    if not isinstance(tests, list):
        raise TaskError(f'{place}: {name} must be a list, and is {json.dumps(tests)[:60]}')
    for number, test in enumerate(tests):
        if entry_point and _tests_function(test):
            yield test
        elif not entry_point and isinstance(test, dict) and set(test) == {'input', 'output'}:
            yield {key: require_text(test[key], f'{name}[{number}].{key}', place, may_be_blank=True) for key in test}
        else:
            wanted = '[[ARGUMENT, ...], RESULT] or an assert' if entry_point else '{"input": TEXT, "output": TEXT}'
            hint = '' if entry_point else ' of a program; a function is named in entry_point'
            raise TaskError(f'{place}: {name}[{number}]={json.dumps(test)[:60]} must be {wanted}{hint}')


def _tests_function(test: object) -> bool:
    if isinstance(test, str):
        return bool(test.strip())
    return isinstance(test, list) and len(test) == 2 and isinstance(test[0], list)


_judge: Judge | None = None  # of this process, which scores one answer at a time


def build(
    tokenizer: Tokenizer, path: str, datasets: Sequence[str], system_prompt: str, held_out_fraction: float,
    time_limit_s: float, memory_limit_mb: int, verifier_deadline_s: float, show_tests: bool, partial_credit: bool,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> ListedTask:  # fmt: skip
    """The problems of a file, of HumanEval (all held out), or of generated families.

    Args:
      path: '' = generated problems; 'humaneval'; else a file or data set.
      datasets: families of generated problems; () = all except families that are held out whole.
      verifier_deadline_s: the whole check of an answer ends before it.
      show_tests: whether the visible tests follow the question.

    Raises TaskError.
    """
    if datasets and path:
        raise TaskError(
            f'task.datasets={tuple(datasets)} names families of generated problems, and task.path={path!r} '
            "has none: use task.path='', or task.datasets=()"
        )
    listed, check_s = _list_problems(path, datasets, columns), find_check_budget(verifier_deadline_s)
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    for problem in listed:
        limits = {'time_limit_s': time_limit_s, 'memory_limit_mb': memory_limit_mb}
        complete = {**limits, **problem, 'partial_credit': partial_credit, 'check_s': check_s}
        whole = path == HUMAN_EVAL or function_families.is_held_out_family(problem['family'])
        is_held_out = whole or hash_fraction(problem['question']) < held_out_fraction
        sides['held_out' if is_held_out else 'train'].append(complete)

    def messages(problem: Problem) -> Messages:
        asked = append_tests(problem) if show_tests else problem['question']
        return chat_messages(asked, system_prompt)

    return ListedTask('code', score, sides, messages, tokenizer, str.strip)


def _list_problems(path: str, datasets: Sequence[str], columns: Mapping[str, str]) -> list[Problem]:
    if path == HUMAN_EVAL:
        return list_human_eval()
    if path:
        return read_problems(path, columns)
    known = function_families.list_families()
    for name in datasets:
        if name not in known:
            raise TaskError(f'task.datasets names the family {name!r}, which is not known{suggest(name, known)}')
    families = datasets or [name for name in known if not function_families.is_held_out_family(name)]
    rows = [row for row in function_families.list_problems() if row['family'] in families]
    return [complete_problem(row, f'family {row["family"]}') for row in rows]


def start_sandbox(level: str, readable: Sequence[str] = ()) -> None:
    """Starts the server of the confined children, before the first answer. Raises ServerLostError."""
    global _judge
    _judge = Judge(level, readable)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> Score:
    """1 if all tests pass, else 0, or with partial credit the share of the tests that pass.

    An answer that passes but fails a hidden test keeps its reward, with the label 'visible_only'. Raises
    MachineFaultError if the answer could not be judged.
    """
    code = find_code(answer_text, problem['entry_point'], problem['prompt'])
    if not code:
        return Score(0.0, 'no_code')
    if _judge is None:
        raise MachineFaultError('no sandbox has been started in this process')
    whole = CheckTime(problem['check_s'])
    try:
        found = _judge.check(problem, code, problem['tests'], is_partial=problem['partial_credit'], whole=whole)
        reward = 1.0 if found.label == 'ok' else found.share * bool(problem['partial_credit'])
        if found.label == 'ok' and problem['hidden_tests']:
            hidden = _judge.check(problem, code, problem['hidden_tests'], whole=whole)
            seconds = {'cpu_s': found.cpu_s + hidden.cpu_s, 'wall_s': found.wall_s + hidden.wall_s}
            shown = 'ok' if hidden.label == 'ok' else 'visible_only'
            found = dataclasses.replace(found, label=shown, reason=hidden.reason, **seconds)
    except ServerLostError as error:
        raise MachineFaultError(str(error)) from error
    return Score(reward, found.label, reason=found.reason, cpu_s=found.cpu_s, wall_s=found.wall_s)
