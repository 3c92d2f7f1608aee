"""Which runs of letters behind a numeral are words, units or names of functions.

'36 eggs' and '5 cm' are numerals with something behind them that changes no value; '3x', '25 sin' and '5 abc' are
expressions.
"""

from __future__ import annotations

import re

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
# A numeral behind one of these belongs to the same value: '3 or 5', '2 by 4', '5 hours and 30 minutes'.
_CONNECTOR_LIST = 'and or to plus minus times by over x divided versus vs nor through'
# The remark begins here: '5 of the 7', '18 at $2 each'.
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


def is_function(word: str) -> bool:
    """Whether the letters name a function, a constant or an operator."""
    return word.lower() in _FUNCTIONS


def is_word(letters: str) -> bool:
    """Whether the letters are a word of a language, not a product of variables and no function: 'eggs', not 'abc'."""
    lower = letters.lower()
    if lower in _SHORT:
        return True
    if lower in _FUNCTIONS or _VARIABLES.fullmatch(lower):
        return False
    return len(letters) > 2 and not _VOWELS.isdisjoint(letters)


def is_unit(letters: str) -> bool:
    """Whether the letters are a unit of the lists above."""
    return letters in _LETTER_UNITS if len(letters) == 1 else letters.lower() in _UNITS


def connects(word: str) -> bool:
    """Whether a numeral behind this word belongs to the value before it."""
    return word.lower() in _CONNECTORS


def ends_value(word: str) -> bool:
    """Whether what begins with this word is a remark about the value before it."""
    return word.lower() in _BREAKS
