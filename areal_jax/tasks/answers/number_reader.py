r"""Reads the numeral of a marked answer, of a gold or at the end of a text, as an exact fraction.

A numeral may have a sign, a currency, thousands separators (1,234, 1{,}234, 1\,234), decimals after a point, an
exponent (1.5e3, 3 \times 10^5), and may be a fraction (3/4, \frac{3}{4}, ½) or a mixed number (1 1/2). A comma is never
a decimal point. Units and the percent sign change no value: 50% is 50.

A marked answer is read as a whole: after the numeral there may be words, units, a percent or degree sign, and before it
words or 'x ='. With operators, functions, brackets or other letters it is an expression, and no numeral.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from areal_jax.tasks.answers.extraction import marked_answers, mask_fractions, plain, unwrap, without_thoughts

_UNIT_LIST = """
    cm mm km nm um dm ft in inch inches foot feet yd mi mile miles sq cu ml dl cl mg kg lb lbs oz gal pt qt ha
    ms sec secs min mins hr hrs yr yrs am pm mph kmh kph kmph rpm fps deg rad
    kj kw mw mv khz mhz ghz hz pa kpa mpa mol cal kcal ohm ev db kb mb gb tb bits
    usd eur gbp jpy inr rs cents cent dollars dollar euros euro pounds rupees pct percent
    st nd rd th
"""
_FUNCTION_LIST = """
    sin cos tan cot csc arcsin arccos arctan sinh cosh tanh log ln lg exp pi sqrt cbrt frac det mod modulo max sup inf
    lim gcd lcm arg deg dim ker rank tr infinity alpha beta gamma delta theta lambda mu phi psi omega sigma tau rho
    choose factorial squared cubed
"""
# A numeral after one of these belongs to the same value: '3 or 5', '2 by 4', '5 hours and 30 minutes'.
_CONNECTOR_LIST = 'and or to plus minus times by over x divided versus vs nor through'
# A remark begins with one of these: '5 of the 7', '18 at $2 each'.
_BREAK_LIST = """
    of out for in at per with because since as so which where when while if that therefore thus hence from on after
    before until than left total each every altogether is are was were the i we he she it they this there
"""
_SHORT_LIST = 'a i an am as at be by do go he if in is it me my no of on or so to up us we'

_UNITS = frozenset(_UNIT_LIST.split())
_LETTER_UNITS = frozenset('mgshlLNJWVAKCF')  # other letters are variables
_SCALES = {'hundred': 100, 'thousand': 1000, 'million': 10**6, 'billion': 10**9, 'trillion': 10**12}
_FUNCTIONS = frozenset(_FUNCTION_LIST.split())
_CONNECTORS = frozenset(_CONNECTOR_LIST.split())
_BREAKS = frozenset(_BREAK_LIST.split())
_SHORT = frozenset(_SHORT_LIST.split())
_VARIABLES = re.compile('[abcdexz]{1,4}|[wxyz]+|[uvw]+|[pqrs]+|[ijk]+|[klmn]+')  # products of them: 'abc', 'xyz'
_VOWELS = frozenset('aeiouyAEIOUY')


def scale_of(word: str) -> int | None:
    """1000000 for 'million' and 'millions'; None for another word."""
    return _SCALES.get(word.lower().removesuffix('s'))


def is_word(letters: str) -> bool:
    """Whether the letters are a word of a language, no product of variables and no function: 'eggs', not 'abc'."""
    lower = letters.lower()
    if lower in _SHORT:
        return True
    if lower in _FUNCTIONS or _VARIABLES.fullmatch(lower):
        return False
    return len(letters) > 2 and not _VOWELS.isdisjoint(letters)


def is_unit(letters: str) -> bool:
    return letters in _LETTER_UNITS if len(letters) == 1 else letters.lower() in _UNITS


def connects(word: str) -> bool:
    """Whether a numeral after this word belongs to the value before it."""
    return word.lower() in _CONNECTORS


def ends_value(word: str) -> bool:
    """Whether this word begins a remark about the value before it."""
    return word.lower() in _BREAKS


MOST_DIGITS = 4000  # of numerator or denominator: int() and str() take no more than 4300
_LONGEST = 10_000  # characters of a marked answer that are read
_WINDOW = 48  # characters before the last digit of a text, in which its last numeral nearly always begins
_BEHIND = 16  # characters after it, which may make it the base of a power
_WORD_ENDS = frozenset('abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?')

# The bound on the groups keeps the search linear in the text.
_DIGITS = r'(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}+(?![0-9])|[0-9]++)'
_DECIMAL = rf'(?:{_DIGITS}(?:\.[0-9]++)?|(?<![\w.])\.[0-9]++)'
_TIMES_TEN = r'\s*[*x]\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?[0-9]++)\s*\}?'
_CURRENCY = '$€£¥₹₩₽₺₴₦₫'
_NUMBER = re.compile(
    r'(?<![0-9A-Za-z_^])(?<!\^\{)(?<!\^-)(?<!\^\{-)(?<![0-9]\*\*)'  # neither inside a word or number, nor an exponent
    rf'(?:(?<![\w.)\]}}])([-+]))?[{_CURRENCY}]?'  # a minus right after a digit, letter, point or bracket is an operator
    rf'(?>([0-9]++)[ ]+([0-9]++)[ ]*/[ ]*([0-9]++)|({_DECIMAL})[ ]*/[ ]*({_DECIMAL})|'
    rf'({_DECIMAL})(?:[eE]([-+]?[0-9]++)|{_TIMES_TEN})?)'
    r'(?!\s*(?:\^|\*\*\s*[0-9]|_\s*\{?\s*[0-9]))'  # the base of a power and the digits in another base are no numeral
)
_HAS_DIGIT = re.compile(r'[\d¼-¾⅐-⅞↉]')
_UP_TO_LAST_DIGIT = re.compile(r'.*[\d¼-¾⅐-⅞↉]', re.DOTALL)
_BLANK_GROUPS = re.compile(r'(?<![0-9.,/])([0-9]{1,3}(?: [0-9]{3})+)(?![0-9]| *[0-9/])')
_SIGN = re.compile(r'^([-+])\s+(?=[0-9.$])')
_EQUALS = re.compile(r'=|≈|(?<=[A-Za-z\s])(?:is|equals)(?![A-Za-z])|(?<=[A-Za-z]):(?=\s)')
_LIST = re.compile(r'[,;](?![0-9]{3}(?![0-9]))|\b(?:and|or)\b')
_BEFORE = re.compile(r'[A-Za-z]+|[.,:;\'"’()~\-—\s$€£¥₹#]')
_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z]+(?:['’-][A-Za-z]+)*)|(?P<number>[0-9.]*[0-9])|(?P<power>\^\s*\{?\s*-?[0-9]+\s*\}?)"
    r"|(?P<unit>[%°€£¥₹$¢])|(?P<stop>[.!?](?=\s|$)|[\n—])|(?P<pause>[,;:](?=\s|$))|(?P<quote>[\"'”’*_`])|(?P<other>.))",
    re.DOTALL,
)


class Numeral(NamedTuple):
    """A value that was read, and its notation."""

    value: Fraction
    is_fraction: bool  # with a fraction bar: 3/4, 1 1/2, ½


def read_answer(text: str) -> Numeral | None:
    """The numeral that an answer comes to; None without any, and if the marked answer is another expression.

    In a text without a mark it is the last numeral.
    """
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
        return _read_digits(text)
    text = without_thoughts(text)
    end = 0
    for marked in marked_answers(text):
        numeral = read_marked(marked.text)
        if numeral is not None or marked.is_alone or _HAS_DIGIT.search(marked.text):
            return numeral
        end = max(end, marked.end)  # '#### Summary' is a heading
    return read_last(text[end:])


def read_integer(text: str) -> str | None:
    """The integer that an answer comes to, '-?[0-9]+'; None without any."""
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
        return text.lstrip('0') or '0'
    return spell_integer(read_answer(text))


def integer_or_text(text: str) -> str:
    """The integer that an answer comes to; the text itself without an integer."""
    return read_integer(text) or text


def spell_integer(numeral: Numeral | None) -> str | None:
    """Spells an integer as '-?[0-9]+'; None for no numeral, and for a numeral that is no integer."""
    return str(numeral.value.numerator) if numeral is not None and numeral.value.denominator == 1 else None


def is_no_integer(text: str) -> bool:
    """Whether an answer comes to no numeral, or to a fraction like 3/4; '6.5' is a wrong integer."""
    numeral = read_answer(text)
    return numeral is None or (numeral.is_fraction and numeral.value.denominator > 1)


def read_gold(text: str) -> Numeral | None:
    """The numeral of a gold: a marked one, or its last line, which must be a numeral as a whole and hold no other."""
    marked = None
    for marked in marked_answers(text):
        if (numeral := read_marked(marked.text)) is not None:
            return numeral
    if marked is not None:
        return None
    numeral = read_marked(text.strip().rpartition('\n')[2])
    return numeral if numeral is not None and numeral == read_last(text) else None


def read_marked(text: str) -> Numeral | None:
    """The numeral that a marked answer is, with words and units around it; None for another expression."""
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
        return _read_digits(text)
    if len(text) > _LONGEST or not _HAS_DIGIT.search(text):
        return None
    text = plain(unwrap(text)).replace('$', '').strip(' \t"“”\'')
    *before, last = _EQUALS.split(text)
    numeral = _read_with_suffix(text)
    if numeral is not None or not before:
        return numeral if numeral is not None else _read_behind_words(text)
    if any(_LIST.search(part) for part in before):  # 'x = 3, y = 4'
        return None
    return _read_with_suffix(last) or _read_behind_words(last)


def read_last(text: str) -> Numeral | None:
    """The last numeral of a text without a mark; None without any, and if it has too many digits."""
    if not (found := _UP_TO_LAST_DIGIT.match(text)):
        return None
    start = max(0, found.end() - _WINDOW)
    while start and not (text[start - 1] in ' \n' and text[start - 2] in _WORD_ENDS):
        start -= 1
    for part in (text[start : found.end() + _BEHIND], text):
        last = None
        for last in _NUMBER.finditer(_SIGN.sub(r'\1', mask_fractions(plain(part)).lstrip())):  # noqa: B007
            pass
        if last is not None:
            return _read_match(last)
    return None


@functools.lru_cache(1024)  # most golds of a file are few short numbers
def _read_digits(digits: str) -> Numeral:
    return Numeral(Fraction(int(digits)), False)


def _read_with_suffix(text: str) -> Numeral | None:
    r"""The numeral at the start of a text, if the rest does not change its value, but for 'million' and the like."""
    text = _SIGN.sub(r'\1', text.strip(' \t*_`'))
    if (groups := _BLANK_GROUPS.match(text.lstrip('+-'))) is not None:
        text = text.replace(groups[1], groups[1].replace(' ', ''), 1)  # '12 345', as LaTeX shows it
    text = text.removeprefix('+') if text.startswith('+-') else text
    # '-€5' and '€-5' are -5; '5€' keeps its sign after the numeral
    match = _NUMBER.match(re.sub(rf'^([-+]?)\s*[{_CURRENCY}]\s*', r'\1', text))
    if match is None:
        return None
    numeral, rest = _read_match(match), match.string[match.end() :]
    if numeral is None or not rest:
        return numeral
    if not _changes_nothing(rest.removeprefix('.') if not numeral.is_fraction and '.' not in match[0] else rest):
        return None
    first = re.match(r'\s*([A-Za-z]+)', rest)
    scale = scale_of(first[1]) if first else None
    return numeral if scale is None else numeral._replace(value=numeral.value * scale)


def _read_behind_words(text: str) -> Numeral | None:
    """The first numeral after words, as in 'about 40%' and 'she has 5 apples'."""
    if not (digit := re.search(r'[0-9]|(?<![\w.])\.[0-9]', text)):
        return None
    start = digit.start()
    while start and text[start - 1] in f'-+{_CURRENCY}':
        start -= 1
    before = text[:start]
    if _BEFORE.sub('', before) or text[start - 1 : start].isalnum() or '(' in before:
        return None
    letters = re.findall('[A-Za-z]+', before)
    if not all(is_word(run) or is_unit(run) for run in letters):
        return None
    return _read_with_suffix(text[start:]) if letters else None


def _changes_nothing(rest: str) -> bool:
    """Whether the text after a numeral is words, units, a percent or degree sign, and no part of an expression."""
    seen: list[str] = []  # the words so far
    for token in _TOKEN.finditer(rest):
        kind, text, after = token.lastgroup, token[0].strip(), rest[token.end() :]
        is_attached = token.start() == 0 and not token[0][:1].isspace()
        if kind == 'stop':  # the end of the sentence; '5!' is a factorial
            return not (text == '!' and is_attached)
        if kind == 'pause':
            return _is_remark(after) and (text != ':' or bool(seen))
        if kind == 'word':
            if not seen and not _may_follow(text, is_attached):
                return False
            if ends_value(text) and (seen or not connects(text)):
                return True
            seen.append(text)
        elif kind == 'number':
            return len(seen) > 1 and not connects(seen[-1])
        elif kind == 'power' and not (seen and is_unit(seen[-1])):  # cm^2
            return False
        elif kind == 'other' and text:
            joins = (text in '/*·.' or (text == '-' and not seen)) and _names_unit(after)  # '5 km/h', '5-inch'
            if not joins:
                return text == '(' and not is_attached and (bool(seen) or _is_said_in_brackets(after))
    return True


def _may_follow(text: str, is_attached: bool) -> bool:
    """Whether the first letters after a numeral are a unit or a word, not variables or a function."""
    first, *others = re.split(r"['’-]", text)
    if is_unit(first):
        return True
    if len(first) < (3 if is_attached else 2):
        return False
    return is_word(first) and all(is_word(part) or len(part) < 2 for part in others)


def _is_said_in_brackets(rest: str) -> bool:
    """Whether an open bracket holds words: '5 (five)', and not '5 (mod 7)'."""
    inside = re.match(r'([A-Za-z ,-]+)\)', rest)
    return inside is not None and all(is_word(run) for run in re.findall('[A-Za-z]+', inside[1]))


def _is_remark(rest: str) -> bool:
    """Whether a comma is followed by a remark in words, not by more values."""
    if not rest.strip():
        return True
    first = re.match(r'\s*([A-Za-z]+)\s*(=|-?[0-9$])?', rest)
    if first is None or not is_word(first[1]):
        return False
    return not (first[2] and (connects(first[1]) or len(first[1]) == 1))  # ', and 3', ', x = 3'


def _names_unit(rest: str) -> bool:
    letters = re.match(r'\s*([A-Za-z]+)', rest)
    return letters is not None and (is_unit(letters[1]) or is_word(letters[1]))


def _read_match(match: re.Match[str]) -> Numeral | None:
    """The numeral of a match; None for a division by zero and for a number of too many digits."""
    sign, whole, over, under, numerator, denominator, decimal, *exponents = match.groups()
    exponent = next((e for e in exponents if e), '0')
    if len(match[0]) + (abs(int(exponent)) if len(exponent) < 6 else MOST_DIGITS) > MOST_DIGITS:
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
    return Numeral(-value if sign == '-' else value, bool(whole or numerator))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(',', ''))
