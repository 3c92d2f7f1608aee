"""Combinations of which the quick tests take a diagonal: every value of every axis, but not each with each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest


def diagonal(*axes: Iterable[object]) -> list[object]:
    """Gives all combinations for `pytest.mark.parametrize`; all but those of the diagonal are slow.

    The values of the longest axis (of the first of them) meet those of the others in turn. A tuple among the values
    stands for several parameters.
    """
    values = [list(axis) for axis in axes]
    longest = max(values, key=len)
    quick = set()
    for place in range(len(longest)):
        rest, taken = place, []
        for axis in values:
            if axis is longest:
                taken.append(place)
            else:
                rest, own = divmod(rest, len(axis))
                taken.append(own)
        quick.add(tuple(taken))
    combined = []
    for places in itertools.product(*(range(len(axis)) for axis in values)):
        chosen = [axis[place] for axis, place in zip(values, places, strict=True)]
        flat = [part for value in chosen for part in (value if isinstance(value, tuple) else (value,))]
        combined.append(pytest.param(*flat, marks=[] if places in quick else [pytest.mark.slow]))
    return combined
