"""The kind 'exact': the final answer is the gold character for character, without marks around the whole of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.tasks.answers.extraction import final_text
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'a final answer'  # what a gold must hold, for error messages


def read_gold(text: str) -> str | None:
    """The final answer of a gold text; None for a text of blanks, and if another final answer is read in it."""
    gold = final_text(text)
    return gold if gold is not None and final_text(gold) == gold else None


def final_answer(text: str) -> str:
    """The final answer of a text as it is written; '' for a text of blanks."""
    return final_text(text) or ''


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its final answer is the problem's, else 0.

    The full stop of 'The answer is U.S.' may end the sentence or the answer.
    """
    if finish_reason != 'stop':
        return 0.0
    answer, gold = final_text(answer_text), problem['answer']
    if answer is None:
        return UNPARSED
    return float(answer == gold or (f'{answer}.' == gold and answer_text.rstrip().endswith(gold)))
