r"""The kind 'number': answers are rational numbers, compared exactly.

A number may have a sign (also '−'), a currency sign, thousands separators (1,234 or LaTeX's 1{,}234), decimals, an
exponent (1.5e3, 3 \times 10^5), and may be a fraction (3/4, \frac{3}{4}, ½) or a mixed number (1 1/2). Units are
ignored, and so is the percent sign: 50% is 50.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from areal_jax.tasks.answers.extraction import marked_answers
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason

READS = 'a number'  # what a gold must hold, for error messages
_MOST_DIGITS = 4000  # of numerator or denominator: int() and str() take no more than 4300

# The bound on the groups keeps the search linear in the text.
_DIGITS = r'(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}+(?![0-9])|[0-9]++)'
_DECIMAL = rf'(?:{_DIGITS}(?:\.[0-9]++)?|(?<![\w.])\.[0-9]++)'
_TIMES_TEN = r'\s*(?:\\times|\\cdot|[×·*x])\s*10\s*\^\s*\{?\s*([-+]?[0-9]++)\s*\}?'
_NUMBER = re.compile(
    r'(?<![0-9A-Za-z_^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?<![0-9]\*\*)'  # neither inside a word or number, nor an exponent
    r'(?:(?<![\w.)\]}])([-+]))?[$€£¥]?'  # a minus right after a digit, letter, point or bracket is an operator
    rf'(?>([0-9]++)[ ]+([0-9]++)[ ]*/[ ]*([0-9]++)|({_DECIMAL})[ ]*/[ ]*({_DECIMAL})|'
    rf'({_DECIMAL})(?:[eE]([-+]?[0-9]++)|{_TIMES_TEN})?)'
    r'(?!\s*(?:\^(?!\s*\{?\s*\\circ)|\*\*\s*[0-9])|[⁰¹²³⁴-⁹])'  # the base of a power is no number
)
_FRACTION = re.compile(r'(-?)\\[dtc]?frac\s*(?:\{\s*([-+]?[0-9.,]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9.,]+)\s*\}|([0-9]))')
_VULGAR = re.compile('(-?)([¼-¾⅐-⅞↉])')
_LATEX_SEPARATOR = re.compile(r'(?<=[0-9,])(?:\{,\}\s?|\\[,!;: ]|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))')
_CHARACTERS = str.maketrans({'−': '-', '﹣': '-', '－': '-', '⁄': '/'})
_EQUALS = re.compile(r'=|≈|\\approx\b')


def read_gold(text: str) -> str | None:
    """The number of a gold answer in its normal form; None without any."""
    return _normal_form(read_answer(text))


def final_answer(text: str) -> str:
    """The number that an answer comes to, '-7/2' or '36'; the text itself if there is none."""
    return _normal_form(read_answer(text)) or text


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its number equals the problem's, else 0."""
    if finish_reason != 'stop':
        return 0.0
    answer = read_answer(answer_text)
    return UNPARSED if answer is None else float(_normal_form(answer) == problem['answer'])


def read_answer(text: str) -> Fraction | None:
    """The number of the first of the marked answers that has one, else the last number of the text; None without any.

    In a marked answer it is the first number after the last '=': '5 cm^2' is 5, '3 * 4 = 12 apples' is 12.
    """
    for marked in marked_answers(text):
        plain = _plain(marked)
        *_, result = _EQUALS.split(plain)
        for part in (result, plain):
            if (number := next(numbers_in(part), None)) is not None:
                return number
    matches = reversed(list(_NUMBER.finditer(_plain(text))))
    return next((value for match in matches if (value := _value(match)) is not None), None)


def read_whole(text: str) -> Fraction | None:
    """The number that the text is, but for a currency, percent or degree sign and a full stop; None for other text."""
    plain = re.sub(r'\\?[$%]|\^\s*\{?\s*\\circ\s*\}?|°', '', _plain(text)).strip().removesuffix('.').strip()
    match = _NUMBER.fullmatch(plain)
    return _value(match) if match else None


def numbers_in(text: str) -> Iterator[Fraction]:
    """The numbers of a text without LaTeX, in order."""
    for match in _NUMBER.finditer(text):
        if (value := _value(match)) is not None:
            yield value


def _plain(text: str) -> str:
    """The text with fractions and separators of LaTeX and Unicode as plain characters: a/b, 1234, -."""
    text = text.translate(_CHARACTERS)
    text = _LATEX_SEPARATOR.sub('', text)
    # The blank before a fraction makes '1\frac12' the mixed number '1 1/2'.
    text = _VULGAR.sub(lambda m: f' {m[1]}' + unicodedata.normalize('NFKC', m[2]).replace('\u2044', '/'), text)
    text = _FRACTION.sub(lambda m: f' {m[1]}{m[2] or m[3]}/{m[4] or m[5]}', text)
    return re.sub(r'^\s*-\s+(?=[0-9.$])', '-', text)


def _value(match: re.Match[str]) -> Fraction | None:
    """None for a division by zero and for a number of too many digits."""
    sign, whole, over, under, numerator, denominator, decimal, *exponents = match.groups()
    exponent = next((e for e in exponents if e), '0')
    if len(match[0]) + (abs(int(exponent)) if len(exponent) < 6 else _MOST_DIGITS) > _MOST_DIGITS:
        return None
    try:
        if whole:
            value = int(whole) + Fraction(int(over), int(under))
        elif numerator:
            value = _decimal(numerator) / _decimal(denominator)
        else:
            value = _decimal(decimal) * Fraction(10) ** int(exponent)
    except ZeroDivisionError:
        return None
    return -value if sign == '-' else value


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(',', ''))


def _normal_form(number: Fraction | None) -> str | None:
    return None if number is None else str(number)
