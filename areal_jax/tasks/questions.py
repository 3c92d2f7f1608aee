"""A task from a list of questions: what the `build` of an own task file returns. docs/your_task.md shows one.

def build(tokenizer, digits=2):
    return question_task(tokenizer, [{'question': '1+2=', 'answer': '3'}, ...], score)
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable

from areal_jax.tasks.task import ListedTask, Problem, Scorer, Split, TaskError, hash_fraction, require_json
from areal_jax.text.tokenizer import Tokenizer, chat_messages


def question_task(
    tokenizer: Tokenizer,
    problems: Iterable[Problem],
    score: Scorer,
    *,
    name: str = '',
    held_out_fraction: float = 0.25,
    system_prompt: str = '',
) -> ListedTask:
    """The distinct questions of `problems`, about `held_out_fraction` of them held out by a hash of the question.

    The side of a question depends on its text alone: it does not change when other questions are added.

    Args:
      problems: dicts that JSON can carry. `question` is the prompt's text; supervised training imitates `answer`, or
        the conversation `messages` with its `tools`, if they are there. `score` gets the whole dict.
      score: score(problem, answer_text, finish_reason) -> reward, at the top level of its file: worker processes load
        it from there.
      name: of the task, in messages and events; '' = the name of the file that has `score`.

    Raises TaskError for a problem that is no such dict.
    """
    name = name or _name_of(score)
    sides: dict[Split, list[Problem]] = {'train': [], 'held_out': []}
    seen: set[str] = set()
    for index, problem in enumerate(problems):
        require_json(problem, f'task {name!r}: problems[{index}]')
        question = problem.get('question') if isinstance(problem, dict) else None
        if not isinstance(question, str) or not question:
            raise TaskError(
                f"task {name!r}: problems[{index}]={str(problem)[:80]} must be a dict with a text 'question'"
            )
        if question not in seen:
            seen.add(question)
            sides['held_out' if hash_fraction(question) < held_out_fraction else 'train'].append(problem)
    if not seen:
        raise TaskError(f'task {name!r} lists no problem')
    return ListedTask(name, score, sides, lambda problem: chat_messages(problem['question'], system_prompt), tokenizer)


def _name_of(score: Scorer) -> str:
    file = getattr(sys.modules.get(score.__module__), '__file__', None)
    return pathlib.Path(file).stem if file else score.__module__
