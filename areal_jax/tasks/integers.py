"""Reads the final integer out of an answer's text."""

from __future__ import annotations

import re

# A minus right after a digit, a letter, a point or a bracket is an operator; elsewhere it is a sign.
_NUMBER = re.compile(r'((?<![\w.)])-)?([0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(\.[0-9]+)?')


def has_number(text: str) -> bool:
    """Whether there is any number in the text, an integer or not."""
    return _NUMBER.search(text) is not None


def last_integer(text: str) -> str | None:
    """The last number of the text in its shortest form, '-?[0-9]+'; None if there is none or it has a fraction.

    '1,234' is 1234, '6.00' is 6, '-0' is 0. If the last number has a fraction, an earlier integer is
    not used instead: the last number is the answer. The result is a string, because int() limits the number of digits.
    """
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits, fraction = numbers[-1]
    if fraction.strip('.0'):
        return None
    digits = digits.replace(',', '').lstrip('0')
    return sign + digits if digits else '0'
