r"""Expressions of mathematics by the package math-verify: what a text is as an expression, and whether two are equal.

It runs in worker processes alone: the package may compute without end ('9^{9^{9^9}}'), and its own timeouts are signals
of the main thread that cannot stop C code. They are off here: the kill of the worker at task.verifier_deadline_s is the
timeout. Decimals become fractions, because the package compares them at six digits behind the point.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import types
from fractions import Fraction
from typing import Any

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.answers.extraction import join_groups, spell_periodic, to_ascii, unwrap
from areal_jax.tasks.answers.number_reader import MOST_DIGITS

PACKAGE = 'math_verify'
_LONGEST = 2000  # characters of an expression; of a text without a marked answer the last ones are searched for one
_TOLERANCE = 1e-9  # relative: two constants that differ by more are different, however small they are
_SYMBOLS = str.maketrans({
    'π': r'\pi ', '∞': r'\infty ', '√': r'\sqrt', '≤': r'\le ', '≥': r'\ge ', '≠': r'\ne ', '∪': r'\cup ',
    '∩': r'\cap ', '∈': r'\in ', '∅': r'\emptyset ', '±': r'\pm ', 'θ': r'\theta ', 'α': r'\alpha ', 'β': r'\beta ',
    'ℝ': r'\mathbb{R}', 'ℤ': r'\mathbb{Z}', '⟨': '(', '⟩': ')', '‖': '|',
})  # fmt: skip
_SPELLINGS = (
    (re.compile(r'\*\*'), '^'),
    (re.compile('<='), r'\\le '),
    (re.compile('>='), r'\\ge '),
    (re.compile('!='), r'\\ne '),
    (re.compile(r'\\[lr]angle(?![A-Za-z])'), lambda match: '(' if match[0] == r'\langle' else ')'),
    (re.compile(r'(?<![A-Za-z\\])(pi|theta|sin|cos|tan|cot|sec|csc|log|ln|infty)(?![A-Za-z{])'), r'\\\1 '),
    (re.compile(r'\\?sqrt\s*\(([^()]*)\)'), r'\\sqrt{\1}'),
    (re.compile(r'(?<![0-9.])([0-9]+) +([0-9]+)/([0-9]+)'), r'\1\\frac{\2}{\3}'),  # else 3 1/2 is 3 times 1/2
)
_LAST_TEXT = re.compile(r'(?<![=<>+\-*/^_&{(,])\s*\\(?:text|mathrm|mbox)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?$')
_LAST_WORD = re.compile(r'(?<=[\s])(?<!\\)([A-Za-z]+)(?:\^\{?[0-9]\}?)?$')
_COMMAND = re.compile(r'\\(?:begin|end|text|mathrm|mbox|operatorname|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+')
_PROSE = re.compile(r'(?<![A-Za-z])([A-Za-z]{2,})\s+(?=[A-Za-z]{2,})|([A-Za-z]{5,})')
_PERCENT = re.compile(
    r'\s*(?:\\?%|(?<![A-Za-z])(?:percent(?:age)?|pct)(?![A-Za-z])|\\text\s*\{\s*percent\s*\})'
)  # a unit
_CLOCK = re.compile(r'[0-9]\s*:\s*0[0-9]|[0-9]\s*:.*[ap]\.?\s?m', re.IGNORECASE)  # is no ratio
_DIGIT_SCRIPT = re.compile(r'[0-9)]\s*_')
_SCIENTIFIC = re.compile(r'(?<![0-9A-Za-z.])([0-9]+)(?:\.([0-9]+))?[eE]([-+]?[0-9]{1,2})(?![0-9A-Za-z])')


def is_installed() -> bool:
    """Whether the package can be imported; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None


def parse_expression(text: str) -> list[Any]:
    """[the expression that the whole of a marked answer is]; [] for anything else: no part of it stands for it."""
    if _CLOCK.search(text):
        return []
    text = _clean(text)
    if not text or len(text) > _LONGEST or _DIGIT_SCRIPT.search(text) or _has_words(text):
        return []
    for part in (text, text.rpartition('=')[2] if text.count('=') > 1 and ',' not in text else ''):
        if part:
            try:
                return [_with_fractions(_parse_latex(part))]
            except Exception:
                continue
    return []


def parse_number(value: Fraction) -> list[Any]:
    """[the number as an expression]."""
    import sympy

    return [sympy.Rational(value.numerator, value.denominator)]


def parse_prose(text: str) -> list[Any]:
    """What math-verify finds in the last characters of a text without a marked answer; [] for nothing."""
    text = text[-_LONGEST:]
    if not text.isascii():
        text = re.sub(r'\^\{([-+]?[0-9]+)\}', r'^(\1)', to_ascii(text))
    text = _PERCENT.sub('', join_groups(spell_periodic(text))).replace('$-$', '-')
    found = _package().parse(_SCIENTIFIC.sub(_spell_out, text), parsing_timeout=None)
    return [_with_fractions(element) for element in found if not isinstance(element, str)]


def are_equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two parsed answers are equal as mathematics. Raises what sympy raises while it compares."""
    if _is_sum_and_value(gold[0], answer[0]) or _is_sum_and_value(answer[0], gold[0]):
        return False
    equal = bool(_package().verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    return equal and not _differ_as_constants(gold[0], answer[0])


def is_too_large(parsed: list[Any]) -> bool:
    """Whether a parsed answer is a constant of so many digits that it cannot be compared with a number."""
    import sympy

    [expression] = parsed
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return False
    try:
        size = abs(expression.evalf(5))
    except OverflowError:
        return True
    most = sympy.Float(f'1e{MOST_DIGITS}')
    return size.is_Float and size != 0 and not 1 / most < size < most


def _is_sum_and_value(equation: Any, value: Any) -> bool:
    """Whether one is an equation as x + y = 5, of which math-verify would compare the right side with the other."""
    import sympy

    if not isinstance(equation, sympy.Eq) or not isinstance(value, sympy.Expr):
        return False
    return isinstance(equation.lhs, sympy.Add) and bool(equation.lhs.free_symbols)


def _clean(text: str) -> str:
    text = unwrap(text).translate(_SYMBOLS)
    if not text.isascii():
        text = to_ascii(text)
    text = _PERCENT.sub('', join_groups(spell_periodic(text)))
    text = re.sub(r'\\?\$', ' ', text).strip().removesuffix('.').strip()
    for pattern, spelled in _SPELLINGS:
        text = pattern.sub(spelled, text)
    for _ in range(3):  # 'square meters', \text{ cm}^2
        shorter = _LAST_TEXT.sub('', text).strip() or text
        word = _LAST_WORD.search(shorter)
        if word and (_is_long_word(word[1]) or (len(word[1]) > 1 and number_reader.is_unit(word[1]))):
            shorter = shorter[: word.start()].strip() or shorter
        if shorter == text:
            break
        text = shorter
    return text


def _is_long_word(letters: str) -> bool:
    return len(letters) > 3 and number_reader.is_word(letters)


def _has_words(text: str) -> bool:
    """Whether there is language in an expression, whose letters would be read as a product."""
    found = _PROSE.finditer(_COMMAND.sub(' ', text))
    return any(
        number_reader.is_word(run) and not number_reader.connects(run)
        for match in found
        if (run := match[1] or match[2])
    )


@functools.cache
def _package() -> types.ModuleType:
    import math_verify

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns that its timeouts are off
    return math_verify


def _parse_latex(text: str) -> Any:
    """Raises what the parser raises for a text that is not wholly an expression."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # Its own removal of units would take the t of 3t for one.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed='none')
    text = normalize_latex(text, config)
    is_real = not should_treat_as_complex(text)
    return latex2sympy(text, is_real=is_real, convert_degrees=False, normalization_config=None)


def _with_fractions(expression: Any) -> Any:
    """The expression with its decimals as fractions, but for those of too large an exponent."""
    import sympy

    if not hasattr(expression, 'atoms'):
        return expression
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float) if _is_bounded(number)}
    return expression.xreplace(exact) if exact else expression


def _is_bounded(number: Any) -> bool:
    exponent = str(number).lower().partition('e')[2]
    return abs(int(exponent or 0)) < MOST_DIGITS


def _spell_out(match: re.Match[str]) -> str:
    """'1.5e3' as '1500', which math-verify would read as 1.5."""
    whole, decimals, exponent = match[1], match[2] or '', int(match[3])
    point, digits = len(whole) + exponent, whole + decimals
    if point <= 0:
        return f'0.{"0" * -point}{digits}'
    digits = digits.ljust(point, '0')
    return digits[:point] + (f'.{digits[point:]}' if digits[point:] else '')


def _differ_as_constants(gold: Any, answer: Any) -> bool:
    """Whether both are constants of which the package has compared 15 digits behind the point, not the first 9."""
    import sympy

    if gold == answer:
        return False
    if not all(isinstance(side, sympy.Expr) and not side.free_symbols and side != 0 for side in (gold, answer)):
        return False
    try:
        left, right = (complex(side.evalf(20, chop=False)) for side in (gold, answer))
    except (TypeError, ValueError, OverflowError):
        return False
    return abs(left - right) > _TOLERANCE * max(abs(left), abs(right))
