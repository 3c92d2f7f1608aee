"""Ranges of ages, for metrics by age: 0, 1, 2, 3-4, 5-8, 9-16, ..., so that their number stays small at any age."""

from __future__ import annotations

import numpy as np


def age_ranges(ages: np.ndarray) -> np.ndarray:
    """int64, of the shape of `ages`: the number of the range of each age >= 0, from 0."""
    return np.where(ages < 1, 0, 1 + np.ceil(np.log2(np.maximum(ages, 1)))).astype(np.int64)


def range_label(number: int) -> str:
    """'0', '1', '2', '3-4', '5-8', ... of the range with this number."""
    if number < 3:
        return str(number)
    return f'{2 ** (number - 2) + 1}-{2 ** (number - 1)}'


def first_age(label: str) -> int:
    """The lowest age of a range, by which ranges are sorted; 0 for any other text."""
    first = label.split('-')[0]
    return int(first) if first.isdecimal() else 0
