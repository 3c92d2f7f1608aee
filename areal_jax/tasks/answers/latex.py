r"""A normal form of mathematics in LaTeX by text alone: what votes and the audit compare.

It removes what changes the look and not the meaning: blanks, \left and \right, fonts, dollar, percent and degree signs,
a leading 'x =', a full stop. It knows no algebra: '1+x' is not 'x+1'. A text that is a number becomes that number.
"""

from __future__ import annotations

import re

from areal_jax.tasks.answers.number import read_whole

_LONGEST = 10_000  # characters that are read: bounds the time
_REMOVED = re.compile(
    r'\\(?:left|right|displaystyle|textstyle|limits|big|Big|bigg|Bigg|quad|qquad)(?![A-Za-z])|\\[,!;: ]|\\[()\[\]]'
    r'|\\?[$%]|\^\s*\{?\s*\\circ\s*\}?|°|~|\s'
)
_FONT = re.compile(r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}')
_SHORT_FRACTION = re.compile(r'\\[dtc]frac(?![A-Za-z])')
_BARE_ARGUMENT = re.compile(r'\\(frac|sqrt)([0-9A-Za-z])(?:([0-9A-Za-z]))?')
_VARIABLE = re.compile(r'[A-Za-z]=')


def normalise(text: str) -> str:
    r"""The normal form; a number as a fraction in lowest terms: '\$1{,}234.50' is '2469/2'."""
    text = text[:_LONGEST].strip()
    number = read_whole(text)
    if number is None:
        text = _reduce(text)
        number = read_whole(text)
    return text if number is None else str(number)


def is_number(normal_form: str) -> bool:
    """Whether a normal form is a number."""
    return re.fullmatch(r'-?[0-9]+(?:/[0-9]+)?', normal_form) is not None


def _reduce(text: str) -> str:
    text = _FONT.sub(r'\1', text)
    text = _SHORT_FRACTION.sub(r'\\frac', text.replace('−', '-'))
    text = _REMOVED.sub('', text)
    text = _BARE_ARGUMENT.sub(_with_braces, text).removesuffix('.')
    return text[2:] if _VARIABLE.match(text) and text.count('=') == 1 else text


def _with_braces(match: re.Match[str]) -> str:
    name, first, second = match.groups()
    if name == 'sqrt':
        return rf'\sqrt{{{first}}}{second or ""}'
    return rf'\frac{{{first}}}{{{second}}}' if second else match[0]
