"""The kind 'exact': the final answer is the gold character for character."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.tasks.answers.extraction import final_text
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'a final answer'  # what a gold must hold, for error messages


def read_gold(text: str) -> str | None:
    """The final answer of a gold text; None for a text of blanks."""
    return final_text(text)


def final_answer(text: str) -> str:
    """The final answer of a text as it is written; '' for a text of blanks."""
    return final_text(text) or ''


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its final answer is the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = final_text(answer_text)
    return UNPARSED if answer is None else float(answer == problem['answer'])
