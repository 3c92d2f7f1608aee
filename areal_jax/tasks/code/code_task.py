"""The task `code`: functions and programs in Python, judged by tests in a sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from areal_jax.config.agent_fields import HUMAN_EVAL, find_check_budget
from areal_jax.errors import suggest
from areal_jax.tasks.code import code_problems, function_families
from areal_jax.tasks.code.judge import Judge
from areal_jax.tasks.code.program_run import CheckTime, find_code
from areal_jax.tasks.scoring.score_call import MachineFaultError, Score
from areal_jax.tasks.task import ListedTask, Problem, Split, TaskError, hash_fraction
from areal_jax.text.chat_template import Messages
from areal_jax.text.tokenizer import Tokenizer, chat_messages
from areal_jax.types import FinishReason
from areal_jax.workers.sandbox.confined_children import ServerLostError

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
        asked = code_problems.show_tests(problem) if show_tests else problem['question']
        return chat_messages(asked, system_prompt)

    return ListedTask('code', score, sides, messages, tokenizer, str.strip)


def _list_problems(path: str, datasets: Sequence[str], columns: Mapping[str, str]) -> list[Problem]:
    if path == HUMAN_EVAL:
        return code_problems.list_human_eval()
    if path:
        return code_problems.read_problems(path, columns)
    known = function_families.list_families()
    for name in datasets:
        if name not in known:
            raise TaskError(f'task.datasets names the family {name!r}, which is not known{suggest(name, known)}')
    families = datasets or [name for name in known if not function_families.is_held_out_family(name)]
    rows = [row for row in function_families.list_problems() if row['family'] in families]
    return [code_problems.complete_problem(row, f'family {row["family"]}') for row in rows]


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
