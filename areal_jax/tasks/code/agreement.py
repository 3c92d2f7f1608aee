"""Compares the output or result of an answer with the expected one: as contests judge, with a tolerance for decimals.

A decimal agrees within TOLERANCE of the expected one, relative or absolute. The absolute tolerance is at most half a
unit of the last digit of the expected decimal as it is written: 0 is not 1.6e-19. Whole numbers and texts are exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

TOLERANCE = 1e-6
_DECIMAL = re.compile(r'[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?', re.ASCII)
_NUMERAL = re.compile(r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?', re.ASCII)
_LONGEST = 400  # characters of a number: 1.8e308 has 309 digits before its point


def outputs_agree(printed: str, expected: str) -> bool:
    """Whether each line is as expected, ignoring blanks at its end and empty lines at the end of the output.

    In an expected line with a decimal, blanks do not count, and decimals are compared with the tolerance.
    """
    lines, others = _list_lines(printed), _list_lines(expected)
    return lines == others or (len(lines) == len(others) and all(map(_lines_agree, lines, others)))


def values_agree(found: object, expected: object) -> bool:
    """Whether a value of plain types (pair_protocol.py) equals one that was written as JSON.

    Values that are equal in Python agree: True and 1, 2.0 and 2. JSON has no tuples, and only texts as keys. So a tuple
    agrees with a list, and a key that is a number, a bool or None with the text that JSON makes of it. The tolerance is
    for an expected float and a number that is no bool; NaN agrees with NaN.
    """
    return found == expected or _parts_agree(found, expected)


def _list_lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split('\n')]


def _lines_agree(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    tokens, others = printed.split(), expected.split()
    has_decimal = len(tokens) == len(others) and any(map(_is_decimal, others))
    return has_decimal and all(map(_tokens_agree, tokens, others))


def _tokens_agree(token: str, expected: str) -> bool:
    if token == expected:
        return True
    is_number = _is_decimal(expected) and len(token) <= _LONGEST and _NUMERAL.fullmatch(token) is not None
    return is_number and _is_near(float(token), expected)


def _is_decimal(token: str) -> bool:
    return len(token) <= _LONGEST and _DECIMAL.fullmatch(token) is not None


def _is_near(found: float, written: str) -> bool:
    """Whether a number is near a number that is written as a decimal."""
    expected = float(written)
    mantissa, _, exponent = written.lower().partition('e')
    digits = len(mantissa.partition('.')[2])
    power = max(-_LONGEST, min(_LONGEST, int(exponent or 0))) - digits  # of the unit of the last digit
    absolute = min(TOLERANCE, 0.5 * 10.0 ** min(0, power))
    tolerance = max(TOLERANCE * abs(expected), absolute)
    return expected - tolerance <= found <= expected + tolerance  # exact for an int of any size; False at an infinity


def _parts_agree(found: object, expected: object) -> bool:
    if isinstance(expected, float):
        if not isinstance(found, int | float) or isinstance(found, bool):
            return False
        return _is_near(found, repr(expected)) if expected == expected else found != found
    if isinstance(expected, list):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return False
        return all(map(values_agree, found, expected))
    if isinstance(expected, dict):
        return isinstance(found, dict) and _mappings_agree(found, expected)
    return False


def _mappings_agree(found: Mapping[object, object], expected: Mapping[str, object]) -> bool:
    by_text = {_write_key(key): value for key, value in found.items()}
    is_alike = len(by_text) == len(found) and by_text.keys() == expected.keys()
    return is_alike and all(values_agree(by_text[key], value) for key, value in expected.items())


def _write_key(key: object) -> object:
    """The key as JSON writes it; a key that JSON cannot have stays unchanged."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key
