"""The kind 'math': final answers are equal as mathematics.

Numbers are compared exactly, words as words, and equal forms are equal. The package math-verify compares all other
expressions, so `score` runs only in a worker process. gold_answers.py compares the gold answers of a file with
themselves when it is loaded. Votes and the audit use no algebra.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import types
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from areal_jax.tasks.answers import number_reader
from areal_jax.tasks.answers.extraction import (
    FONT,
    final_text,
    join_groups,
    last_marked,
    spell_periodic,
    to_ascii,
    unwrap,
    without_thoughts,
)
from areal_jax.tasks.answers.number_reader import MOST_DIGITS, read_marked
from areal_jax.tasks.scoring.score_call import UNPARSED

if TYPE_CHECKING:
    from areal_jax.tasks.task import Problem
    from areal_jax.types import FinishReason


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
    """A final answer without details that change only its look."""

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
    """The text of the form, for comparisons of votes."""
    return read_form(text).text


def compare(gold: Form, answer: Form) -> bool | None:
    """Whether two forms are equal; None if algebra must decide."""
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
    """Reads a number. A letter after the numeral is a variable, even if it may be a unit, except in '5 \\text{ m}'."""
    if _LETTER_BEHIND.search(_TEXT.sub('', text)):
        return None
    numeral = read_marked(text)
    return None if numeral is None else numeral.value


def _read_power(reduced: str) -> Fraction | None:
    """Reads a power of integers, 10^{-19}; None if it has too many digits."""
    if not (match := _POWER.fullmatch(reduced)):
        return None
    base, exponent = int(match[2]), int(match[3] or match[4])
    if len(match[2]) * abs(exponent) > MOST_DIGITS or (not base and exponent <= 0):
        return None
    value = Fraction(base) ** exponent
    return -value if match[1] else value


def _read_words(text: str) -> str | None:
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


# Expressions of mathematics by the package math-verify: parses a text as an expression, and compares two of them.
#
# It runs only in worker processes: the package may compute without end ('9^{9^{9^9}}'), and its own timeouts are
# signals of the main thread that cannot stop C code. They are off here: the kill of the worker at
# task.verifier_deadline_s is the timeout. Decimals become fractions, because the package compares them at six digits
# after the point.


PACKAGE = 'math_verify'
_EXPRESSIONS_LONGEST = (
    2000  # characters of an expression; in a text without a marked answer, the last ones are searched for one
)
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
    """[the expression of a whole marked answer]; [] without one: an expression in a part of it does not count."""
    if _CLOCK.search(text):
        return []
    text = _clean(text)
    if not text or len(text) > _EXPRESSIONS_LONGEST or _DIGIT_SCRIPT.search(text) or _has_words(text):
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
    """Lists the expressions that math-verify finds in the last characters of a text without a marked answer."""
    text = text[-_EXPRESSIONS_LONGEST:]
    if not text.isascii():
        text = re.sub(r'\^\{([-+]?[0-9]+)\}', r'^(\1)', to_ascii(text))
    text = _PERCENT.sub('', join_groups(spell_periodic(text))).replace('$-$', '-')
    found = _package().parse(_SCIENTIFIC.sub(_spell_out, text), parsing_timeout=None)
    return [_with_fractions(element) for element in found if not isinstance(element, str)]


def are_equal(gold: list[Any], answer: list[Any]) -> bool:
    """Whether two parsed answers are equal as mathematics. Raises errors of sympy's comparison."""
    if _is_sum_and_value(gold[0], answer[0]) or _is_sum_and_value(answer[0], gold[0]):
        return False
    equal = bool(_package().verify(gold, answer, timeout_seconds=None, raise_on_error=True))
    return equal and not _differ_as_constants(gold[0], answer[0])


def is_too_large(parsed: list[Any]) -> bool:
    """Whether a parsed answer is a constant with too many digits to be compared with a number."""
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
    """Whether they are an equation like x + y = 5 and a value, which math-verify would compare with its right side."""
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
    """Whether an expression contains language, whose letters would be read as a product."""
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
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from math_verify.grader import should_treat_as_complex

    # The package's own removal of units would remove the t of 3t.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed='none')
    text = normalize_latex(text, config)
    is_real = not should_treat_as_complex(text)
    return latex2sympy(text, is_real=is_real, convert_degrees=False, normalization_config=None)


def _with_fractions(expression: Any) -> Any:
    import sympy

    if not hasattr(expression, 'atoms'):
        return expression
    exact = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float) if _is_bounded(number)}
    return expression.xreplace(exact) if exact else expression


def _is_bounded(number: Any) -> bool:
    exponent = str(number).lower().partition('e')[2]
    return abs(int(exponent or 0)) < MOST_DIGITS


def _spell_out(match: re.Match[str]) -> str:
    """Spells '1.5e3' as '1500': math-verify would read 1.5."""
    whole, decimals, exponent = match[1], match[2] or '', int(match[3])
    point, digits = len(whole) + exponent, whole + decimals
    if point <= 0:
        return f'0.{"0" * -point}{digits}'
    digits = digits.ljust(point, '0')
    return digits[:point] + (f'.{digits[point:]}' if digits[point:] else '')


def _differ_as_constants(gold: Any, answer: Any) -> bool:
    """Whether two constants differ in their first 9 digits: the package compares 15 digits after the point instead."""
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


_GOLDS_KEPT = 4096  # gold answers that a worker remembers as read and parsed


def read_gold(text: str) -> str | None:
    """The marked answer of a gold text, or the text itself, as it is written; None for a text of blanks."""
    return last_marked(text) or text.strip() or None


def final_answer(text: str) -> str:
    """The final answer in its form, without algebra. In prose it is the last number, if there is one."""
    text = without_thoughts(text)
    marked = last_marked(text)
    if marked is not None:
        return normalise(marked)
    found = number_reader.read_last(text)
    return normalise(final_text(text) or '') if found is None else str(found.value)


def score(problem: Problem, answer_text: str, finish_reason: FinishReason) -> float:
    """1 if the answer ended by itself and its final answer equals the problem's as mathematics, else 0.

    Raises errors of sympy's comparison: such an answer has no reward, it is not counted as wrong.
    """
    if finish_reason != 'stop':
        return 0.0
    answer_text = without_thoughts(answer_text)
    marked = last_marked(answer_text)
    if marked is None:
        answer = parse_prose(answer_text)
    else:
        form = read_form(marked)
        if (equal := compare(_read_form_once(problem['answer']), form)) is not None:
            return float(equal)
        answer = parse(marked, form)
    return float(are_equal(_parse_gold_once(problem['answer']), answer)) if answer else UNPARSED


def warm_up() -> None:
    """Imports the package and makes its parsers, so that the first answer does not wait for them."""
    score({'answer': r'\frac{x}{2}'}, r'\boxed{0.5x}', 'stop')


def parse(text: str, form: Form | None = None) -> list[Any]:
    """[the expression of a final answer]; [] for a text without an expression."""
    form = read_form(text) if form is None else form
    return parse_number(Fraction(form.text)) if form.kind == 'number' else parse_expression(text)


def find_gold_fault(gold: str) -> str:
    """The reason why nothing can be compared with a gold answer; '' if it equals itself."""
    parsed = parse(gold)
    if not parsed:
        return 'cannot be parsed by math-verify'
    try:
        if is_too_large(parsed):
            return 'is a number of too many digits'
        return '' if are_equal(parsed, parsed) else 'does not equal itself'
    except Exception as error:
        return f'cannot be compared with itself ({type(error).__name__}: {str(error)[:80]})'


def compare_texts(gold: str, text: str) -> bool | None:
    """Compares without math-verify, for the audit: forms, or the last number of a text without a mark.

    None if algebra must decide.
    """
    marked = last_marked(without_thoughts(text))
    return compare(_read_form_once(gold), read_form(final_answer(text) if marked is None else marked))


@functools.lru_cache(_GOLDS_KEPT)
def _read_form_once(gold: str) -> Form:
    return read_form(gold)


@functools.lru_cache(_GOLDS_KEPT)
def _parse_gold_once(gold: str) -> list[Any]:
    return parse(gold)
