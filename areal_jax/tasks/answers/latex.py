r"""What a final answer of mathematics is without algebra: a number, a number in another base, words, or an expression.

Numbers, numbers in another base and words are compared by this form alone, and expressions of equal form are equal. The
form of an expression leaves out what changes the look and not the meaning: blanks, \left and \right, fonts, dollar,
percent and degree signs, a leading 'x =', a full stop. It knows no algebra: '1+x' is not 'x+1'. The percent sign is a
unit: '25\%' is 25, and not 1/4.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, NamedTuple

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.answers.extraction import FONT, join_groups, to_ascii, unwrap
from areal_jax.tasks.answers.number_reader import MOST_DIGITS, read_marked

Kind = Literal['number', 'based', 'words', 'expression']

_LONGEST = 10_000  # characters that are read: bounds the time
_REMOVED = re.compile(
    r'\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lrm]?|quad|qquad)(?![A-Za-z])'
    r'|(?<!\\)\\(?:[,!;: ]|[()\[\]])|\\?[$%]|\^\s*\{?\s*(?:\\circ|°)\s*\}?|°|~'
)
_BLANKS = re.compile(r'(?<![0-9])\s+|\s+(?![0-9])')  # '1 2' is not 12
_FONT = re.compile(rf'\\(?:{FONT})\s*\{{([^{{}}]*)\}}')
_SHORT_FRACTION = re.compile(r'\\[dtc]frac(?![A-Za-z])')
_BARE_ARGUMENT = re.compile(r'\\(frac|sqrt)([0-9A-Za-z])(?:([0-9A-Za-z]))?')
_SCRIPT = re.compile(r'([_^])\{([0-9A-Za-z])\}')
_VARIABLE = re.compile(r'([A-Za-z])(?:_\{?\w+\}?)?\s*=(?!.*=)')
_POWER = re.compile(r'(-?)([0-9]{1,20})\^(?:\{([-+]?[0-9]{1,6})\}|([0-9]))')
_BASED = re.compile(r'(-?)\(?([0-9][0-9A-F]*)\)?_(?:\{([0-9]{1,2})\}|([0-9]))')
_LETTER_BEHIND = re.compile(r'[0-9})]\s*(?![eE][-+]?[0-9]|x\s*10\s*[\^*])[A-Za-z](?![A-Za-z])')
_TEXT = re.compile(r'\\(?:text|textrm|mathrm|mbox)\s*\{[^{}]*\}')
_WORDS = re.compile(r"[A-Za-z][A-Za-z '’.,-]*")


class Form(NamedTuple):
    """A final answer without what changes its look alone."""

    kind: Kind
    text: str  # a number as a fraction in lowest terms
    variable: str = ''  # before '='


def read_form(text: str) -> Form:
    r"""The form of a final answer; '\$1{,}234.50' is the number '2469/2'."""
    text = unwrap(text[:_LONGEST])
    if not text.isascii():
        text = to_ascii(text)
    assigned = _VARIABLE.match(text)
    variable = assigned[1] if assigned else ''
    if '=' in text and not assigned:
        return Form('expression', _reduce(text))
    if (number := _read_number(text)) is not None:
        return Form('number', str(number), variable)
    reduced = _reduce(text)
    if (power := _read_power(reduced)) is not None:
        return Form('number', str(power), variable)
    if based := _BASED.fullmatch(reduced):
        return Form('based', f'{based[1]}{based[2].lstrip("0") or "0"}_{based[3] or based[4]}', variable)
    if (spoken := _read_words(text)) is not None:
        return Form('words', spoken)
    return Form('expression', reduced, variable)


def normalise(text: str) -> str:
    """The text of the form, which votes compare."""
    return read_form(text).text


def compare(gold: Form, answer: Form) -> bool | None:
    """Whether they are equal; None where algebra must tell."""
    if gold.variable and answer.variable and gold.variable.lower() != answer.variable.lower():
        return False if gold.kind == answer.kind == 'number' else None
    if gold.kind == answer.kind == 'words':
        return gold.text.casefold() == answer.text.casefold()
    if gold.text == answer.text:
        return True
    closed = ('number', 'based', 'words')  # forms that equal no other
    if gold.kind in closed and answer.kind in closed:
        return False
    return False if 'based' in (gold.kind, answer.kind) or 'words' in (gold.kind, answer.kind) else None


def _read_number(text: str) -> Fraction | None:
    """A letter behind the numeral is a variable, also where it could be a unit, but for '5 \\text{ m}'."""
    if _LETTER_BEHIND.search(_TEXT.sub('', text)):
        return None
    numeral = read_marked(text)
    return None if numeral is None else numeral.value


def _read_power(reduced: str) -> Fraction | None:
    """10^{-19}: a power of integers, where it has not too many digits."""
    if not (match := _POWER.fullmatch(reduced)):
        return None
    base, exponent = int(match[2]), int(match[3] or match[4])
    if len(match[2]) * abs(exponent) > MOST_DIGITS or (not base and exponent <= 0):
        return None
    value = Fraction(base) ** exponent
    return -value if match[1] else value


def _read_words(text: str) -> str | None:
    """The text with single blanks, where it is words and nothing else."""
    text = unwrap(_FONT.sub(r'\1', text)).removesuffix('.')
    if not _WORDS.fullmatch(text):
        return None
    runs = re.findall('[A-Za-z]+', text)
    if not all(number_reader.is_word(run) or len(run) == 1 for run in runs) or not any(len(run) > 1 for run in runs):
        return None
    return ' '.join(text.split())


def _reduce(text: str) -> str:
    text = _FONT.sub(r'\1', join_groups(text))
    text = _SHORT_FRACTION.sub(r'\\frac', text)
    text = _BLANKS.sub('', _REMOVED.sub(' ', text)).strip()
    text = _BARE_ARGUMENT.sub(_with_braces, text).removesuffix('.')
    text = _SCRIPT.sub(r'\1\2', text)
    return text[2:] if re.match('[A-Za-z]=', text) and text.count('=') == 1 else text


def _with_braces(match: re.Match[str]) -> str:
    name, first, second = match.groups()
    if name == 'sqrt':
        return rf'\sqrt{{{first}}}{second or ""}'
    return rf'\frac{{{first}}}{{{second}}}' if second else match[0]
