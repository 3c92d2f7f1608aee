r"""The kind 'normalised': final answers are the same up to case, blanks, quotes and an article.

The normal form of a text:

  1 NFKC: characters of equal meaning become one (full-width letters, ligatures, superscripts); '−' becomes '-'
  2 lower case, by Unicode's case folding: 'STRASSE' and 'Straße' are equal
  3 runs of blanks become one blank
  4 quotes, Markdown's * _ ` and LaTeX's $ \text{} are removed around the text, and . , ; : ! ? at its end
  5 brackets around the whole text are removed: '(b)' is 'b'
  6 a leading article (a, an, the) is removed, if something follows it
  7 steps 4 to 6 are repeated until nothing changes

Nothing inside the text is removed: '1,234' is not '1234' (use the kind 'number'), and '-5' is not '5'.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from areal_jax.tasks.answers.extraction import final_text, unwrap
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'a final answer with a letter or digit'  # what a gold must hold, for error messages
_AROUND = ' "\'“”„‘’«»`*_'
_AT_THE_END = _AROUND + '.,;:!?'
_ARTICLE = re.compile(r'(?:a|an|the) (?=\S)')
_LONGEST = 10_000  # characters that are compared: bounds the time for a text without line ends


def normalise(text: str) -> str:
    """The normal form that the docstring of this module describes; may be ''."""
    text = unicodedata.normalize('NFKC', text[:_LONGEST]).replace('\u2212', '-').casefold()
    text = ' '.join(text.split())
    while True:
        stripped = unwrap(text).lstrip(_AROUND).rstrip(_AT_THE_END)
        if stripped.startswith('(') and stripped.find(')') == len(stripped) - 1:
            stripped = stripped[1:-1]
        stripped = _ARTICLE.sub('', stripped, count=1) if _ARTICLE.match(stripped) else stripped
        if stripped == text:
            return text
        text = stripped


def read_gold(text: str) -> str | None:
    """The normal form of a gold's final answer; None if it is empty, or if it has another final answer."""
    gold = final_answer(text)
    return gold if gold and final_answer(gold) == gold else None


def final_answer(text: str) -> str:
    """The normal form of a text's final answer; '' if nothing is left of it."""
    return normalise(final_text(text) or '')


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and the normal form of its final answer is the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = final_answer(answer_text)
    return float(answer == problem['answer']) if answer else UNPARSED
