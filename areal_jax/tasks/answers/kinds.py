r"""The kinds of `task.answer` that compare numbers or texts; mathematics.py has the kind 'math'.

'integer'     whole numbers: '6.00' and '6/2' are 6. A decimal like 6.5 is a wrong answer, and a fraction like 3/4 is an
              answer that cannot be read
'number'      rational numbers, compared exactly
'exact'       the gold character for character, without marks around the whole answer
'normalised'  final answers are the same up to case, blanks, quotes and an article, see `normalise`

number_reader.py says how numbers are read. All score 0 if the answer did not end by itself.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.answers.extraction import final_text, unwrap
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem, Scorer
    from areal_jax.types import FinishReason

_AROUND = ' "\'“”„‘’«»`*_'
_AT_THE_END = _AROUND + '.,;:!?'
_ARTICLE = re.compile(r'(?:a|an|the) (?=\S)')
_LONGEST = 10_000  # characters that are compared: bounds the time for a text without line ends


@dataclasses.dataclass(frozen=True)
class AnswerKind:
    """A kind of answers: reads gold answers, scores answers, and compares answers with each other."""

    read_gold: Callable[[str], str | None]  # from a gold text to problem['answer'] for `score`; None: not a gold
    reads: str  # what a gold must hold, for error messages
    score: Scorer  # a function of a module, which worker processes import
    final_answer: Callable[[str], str]  # see Task.final_answer


def read_integer_gold(text: str) -> str | None:
    """The integer of a gold answer, '-?[0-9]+'; None for a text that has no integer."""
    return number_reader.spell_integer(number_reader.read_gold(text))


def score_integer(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer's integer equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = number_reader.read_integer(answer_text)
    if answer is None:
        return UNPARSED if number_reader.is_no_integer(answer_text) else 0.0
    return float(answer == problem['answer'])


def read_number_gold(text: str) -> str | None:
    """The number of a gold answer in its normal form, '-7/2' or '36'; None for a text that is no number."""
    numeral = number_reader.read_gold(text)
    return None if numeral is None else str(numeral.value)


def final_number(text: str) -> str:
    """The number that an answer comes to, in its normal form; the text itself if it has no number."""
    numeral = number_reader.read_answer(text)
    return text if numeral is None else str(numeral.value)


def score_number(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer's number equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    numeral = number_reader.read_answer(answer_text)
    return UNPARSED if numeral is None else float(str(numeral.value) == problem['answer'])


def read_exact_gold(text: str) -> str | None:
    """The final answer of a gold text; None for a text of blanks, and if another final answer is read in it."""
    gold = final_text(text)
    return gold if gold is not None and final_text(gold) == gold else None


def final_exact(text: str) -> str:
    """The final answer of a text as it is written; '' for a text of blanks."""
    return final_text(text) or ''


def score_exact(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the final answer is the problem's, else 0.

    The full stop of 'The answer is U.S.' may end the sentence or the answer.
    """
    if finish_reason != 'stop':
        return 0.0
    answer, gold = final_text(answer_text), problem['answer']
    if answer is None:
        return UNPARSED
    return float(answer == gold or (f'{answer}.' == gold and answer_text.rstrip().endswith(gold)))


def normalise(text: str) -> str:
    r"""The normal form of a text, which may be ''.

      1 NFKC: characters of equal meaning become one (full-width letters, ligatures, superscripts); '−' becomes '-'
      2 lower case, by Unicode's case folding: 'STRASSE' and 'Straße' are equal
      3 runs of blanks become one blank
      4 quotes, Markdown's * _ ` and LaTeX's $ \text{} are removed around the text, and . , ; : ! ? at its end
      5 brackets around the whole text are removed: '(b)' is 'b'
      6 a leading article (a, an, the) is removed, if something follows it
      7 steps 4 to 6 are repeated until nothing changes

    Nothing inside the text is removed: '1,234' is not '1234' (use the kind 'number'), and '-5' is not '5'.
    """
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


def read_normalised_gold(text: str) -> str | None:
    """The normal form of a gold's final answer; None if it is empty, or if it has another final answer."""
    gold = final_normalised(text)
    return gold if gold and final_normalised(gold) == gold else None


def final_normalised(text: str) -> str:
    """The normal form of a text's final answer; '' if nothing is left of it."""
    return normalise(final_text(text) or '')


def score_normalised(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the normal form of the final answer is the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = final_normalised(answer_text)
    return float(answer == problem['answer']) if answer else UNPARSED


INTEGER = AnswerKind(read_integer_gold, 'an integer', score_integer, number_reader.integer_or_text)
NUMBER = AnswerKind(read_number_gold, 'a number', score_number, final_number)
EXACT = AnswerKind(read_exact_gold, 'a final answer', score_exact, final_exact)
NORMALISED = AnswerKind(
    read_normalised_gold, 'a final answer with a letter or digit', score_normalised, final_normalised
)
