r"""The kind 'math': final answers are equal as mathematics.

Numbers are compared exactly, words as words, and equal forms are equal (mathematics.py); of all other expressions the package
math-verify tells (mathematics.py), so `score` runs in a worker process alone. gold_answers.py compares the gold answers
of a file with themselves when it is loaded. Votes and the audit use no algebra.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from areal_jax.tasks.answers import mathematics, number_reader
from areal_jax.tasks.answers.extraction import final_text, last_marked, without_thoughts
from areal_jax.tasks.answers.mathematics import Form
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'mathematics'  # what a gold must hold, for error messages
_GOLDS_KEPT = 4096  # gold answers that a worker remembers as read and parsed


def read_gold(text: str) -> str | None:
    """The marked answer of a gold text, or the text itself, as it is written; None for a text of blanks."""
    return last_marked(text) or text.strip() or None


def final_answer(text: str) -> str:
    """The final answer in its form of mathematics.py: no algebra. Of prose it is the number, where there is one."""
    text = without_thoughts(text)
    marked = last_marked(text)
    if marked is not None:
        return mathematics.normalise(marked)
    found = number_reader.read_last(text)
    return mathematics.normalise(final_text(text) or '') if found is None else str(found.value)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its final answer equals the problem's as mathematics, else 0.

    Raises what sympy raises while it compares: such an answer has no reward, it is not counted as wrong.
    """
    if finish_reason != 'stop':
        return 0.0
    answer_text = without_thoughts(answer_text)
    marked = last_marked(answer_text)
    if marked is None:
        answer = mathematics.parse_prose(answer_text)
    else:
        form = mathematics.read_form(marked)
        if (equal := mathematics.compare(_read_form_once(problem['answer']), form)) is not None:
            return float(equal)
        answer = parse(marked, form)
    return float(mathematics.are_equal(_parse_gold_once(problem['answer']), answer)) if answer else UNPARSED


def warm_up() -> None:
    """Import the package and make its parsers, for which the first answer would otherwise wait."""
    score({'answer': r'\frac{x}{2}'}, r'\boxed{0.5x}', 'stop')


def parse(text: str, form: Form | None = None) -> list[Any]:
    """[the expression of a final answer]; [] for a text that is none."""
    form = mathematics.read_form(text) if form is None else form
    return (
        mathematics.parse_number(Fraction(form.text)) if form.kind == 'number' else mathematics.parse_expression(text)
    )


def find_gold_fault(gold: str) -> str:
    """Why nothing can be compared with a gold answer; '' where it equals itself."""
    parsed = parse(gold)
    if not parsed:
        return 'cannot be parsed by math-verify'
    try:
        if mathematics.is_too_large(parsed):
            return 'is a number of too many digits'
        return '' if mathematics.are_equal(parsed, parsed) else 'does not equal itself'
    except Exception as error:
        return f'cannot be compared with itself ({type(error).__name__}: {str(error)[:80]})'


def compare_texts(gold: str, text: str) -> bool | None:
    """A comparison without math-verify, for the audit: of forms, and of the last number of a text without a mark.

    None where algebra must tell.
    """
    marked = last_marked(without_thoughts(text))
    return mathematics.compare(
        _read_form_once(gold), mathematics.read_form(final_answer(text) if marked is None else marked)
    )


@functools.lru_cache(_GOLDS_KEPT)
def _read_form_once(gold: str) -> Form:
    return mathematics.read_form(gold)


@functools.lru_cache(_GOLDS_KEPT)
def _parse_gold_once(gold: str) -> list[Any]:
    return parse(gold)
