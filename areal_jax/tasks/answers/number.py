"""The kind 'number': answers are rational numbers, compared exactly; number_reader.py says how they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'a number'  # what a gold must hold, for error messages


def read_gold(text: str) -> str | None:
    """The number of a gold answer in its normal form, '-7/2' or '36'; None for a text that is no number."""
    numeral = number_reader.read_gold(text)
    return None if numeral is None else str(numeral.value)


def final_answer(text: str) -> str:
    """The number that an answer comes to, in its normal form; the text itself if it has no number."""
    numeral = number_reader.read_answer(text)
    return text if numeral is None else str(numeral.value)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its number equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    numeral = number_reader.read_answer(answer_text)
    return UNPARSED if numeral is None else float(str(numeral.value) == problem['answer'])
