r"""The kind 'math': final answers are equal as mathematics, by the package math-verify.

`score` runs in a worker process alone: the package may compute without end ('9^{9^{9^9}}'), and its own timeouts are
signals of the main thread that cannot stop C code. They are off here: the kill of the worker at
task.verifier_deadline_s is the timeout. gold_answers.py parses the gold answers of a file when it is loaded. Votes and
the audit compare text only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import types
from typing import TYPE_CHECKING, Any

from areal_jax.tasks.answers import latex, number
from areal_jax.tasks.answers.extraction import final_text, last_boxed, marked_answers
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

PACKAGE = 'math_verify'
READS = 'mathematics'  # what a gold must hold, for error messages
_TAIL = 2000  # characters of a text without a marked answer that are searched for one
_GOLDS_KEPT = 4096  # parsed gold answers that a worker remembers
_MIXED = re.compile(r'(?<![0-9.])([0-9]+) +([0-9]+)/([0-9]+)')
_TEXT_COMMAND = re.compile(r'\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}')
_WORD = re.compile(r'(?<![A-Za-z\\])[A-Za-z]{2,}')
_FUNCTIONS = {'sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'log', 'ln', 'exp', 'pi', 'sqrt', 'det', 'mod'}


def is_installed() -> bool:
    """Whether the package can be imported; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def read_gold(text: str) -> str | None:
    """The marked answer of a gold text, or the text itself, as it is written; None for a text of blanks."""
    return next(marked_answers(text), None) or text.strip() or None


def final_answer(text: str) -> str:
    """The final answer in the normal form of latex.py: no algebra. Of prose it is the number, where there is one."""
    boxed = last_boxed(text)
    if boxed is not None:
        return latex.normalise(boxed)
    marked = next(marked_answers(text), None)
    if marked is not None and not _has_words(marked):
        return latex.normalise(marked)
    found = number.read_answer(marked or text)
    return latex.normalise(final_text(text) or '') if found is None else str(found)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its final answer equals the problem's as mathematics, else 0.

    Raises what sympy raises while it compares: such an answer has no reward, it is not counted as wrong.
    """
    if finish_reason != 'stop':
        return 0.0
    answer = parse_answer(answer_text)
    return float(_are_equal(_parse_gold_once(problem['answer']), answer)) if is_parsed(answer) else UNPARSED


def warm_up() -> None:
    """Import the package and make its parsers, for which the first answer would otherwise wait."""
    score({'answer': r'\frac{1}{2}'}, r'\boxed{0.5}', 'stop')


def parse_answer(text: str) -> list[Any]:
    """What math-verify makes of the marked answer, or of the last characters of a text without one; [] for nothing."""
    boxed = last_boxed(text)
    if boxed is not None:
        return _parse_latex(boxed)
    marked = next(marked_answers(text), None)
    return _parse_prose(text[-_TAIL:]) if marked is None else _parse_marked(marked)


def parse_gold(gold: str) -> list[Any]:
    """The same for what `read_gold` gives."""
    return _parse_marked(gold)


def is_parsed(found: list[Any]) -> bool:
    """Whether there is an expression among what math-verify has found, not only the text of one."""
    return any(not isinstance(element, str) for element in found)


def compare_texts(gold: str, text: str) -> bool | None:
    """A comparison without math-verify, for the audit: of normal forms, and as numbers where both are.

    None where the normal forms differ and are not both numbers: they may still be equal as mathematics.
    """
    ours, theirs = latex.normalise(gold), final_answer(text)
    if ours == theirs:
        return True
    return False if latex.is_number(ours) and latex.is_number(theirs) else None


@functools.lru_cache(_GOLDS_KEPT)
def _parse_gold_once(gold: str) -> list[Any]:
    return parse_gold(gold)


def _parse_marked(text: str) -> list[Any]:
    """As LaTeX, or first as prose where it has words: '5 apples' is 5, and not 5*a*p*p*l*e*s."""
    if '$' in text or _has_words(text):
        found = _parse_prose(text)
        if is_parsed(found):
            return found
    return _parse_latex(text)


def _has_words(text: str) -> bool:
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(_TEXT_COMMAND.sub(' ', text)))


def _parse_latex(text: str) -> list[Any]:
    return _parse_prose(rf'\boxed{{{_MIXED.sub(_as_mixed, text)}}}')


def _as_mixed(match: re.Match[str]) -> str:
    r"""'3 1/2' as '3\frac{1}{2}', which math-verify would read as 3 * 1/2."""
    return rf'{match[1]}\frac{{{match[2]}}}{{{match[3]}}}'


def _parse_prose(text: str) -> list[Any]:
    return _package().parse(text, parsing_timeout=None)


def _are_equal(gold: list[Any], answer: list[Any]) -> bool:
    return bool(_package().verify(gold, answer, timeout_seconds=None, raise_on_error=True))


@functools.cache
def _package() -> types.ModuleType:
    import math_verify

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify
