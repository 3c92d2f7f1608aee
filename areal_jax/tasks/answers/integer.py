"""The kind 'integer': answers are whole numbers; number_reader.py says how they are read.

'6.00' and '6/2' are 6. A decimal like 6.5 is a wrong answer, and a fraction like 3/4 is an answer that cannot be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'an integer'  # what a gold must hold, for error messages
final_answer = number_reader.integer_or_text


def read_gold(text: str) -> str | None:
    """The integer of a gold answer, '-?[0-9]+'; None for a text that has no integer."""
    return number_reader.spell_integer(number_reader.read_gold(text))


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its integer equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = number_reader.read_integer(answer_text)
    if answer is None:
        return UNPARSED if number_reader.is_no_integer(answer_text) else 0.0
    return float(answer == problem['answer'])
