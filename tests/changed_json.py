"""A JSON value with one of its places changed into what a reader does not expect: for tests of readers."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator

MISSING = object()
DEEP: object = json.loads('[' * 400 + ']' * 400)
WRONG = (
    MISSING, None, True, False, -1, 0, 1.5, 1e308, math.nan, math.inf, 10**300, -(10**30), 2**63, '', 'x', '7' * 5000,
    '\ud800', '\0', [], {}, [[]], [[[]], {}], [None], [True, 'x'], [[1e308, 10**300, None]], {'a': None}, DEEP,
)  # fmt: skip


def places(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path to each value in a JSON value, itself included; of a long list, of its first and last entries."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, list):
        kept = range(len(value)) if len(value) < 4 else (0, 1, len(value) - 1)
        for index in kept:
            yield from places(value[index], (*path, index))


def change(value: object, path: tuple[str | int, ...], wrong: object) -> object:
    """A copy with `wrong` in one place; MISSING leaves the place out, at the top it gives null."""
    if not path:
        return None if wrong is MISSING else wrong
    first, *rest = path
    if isinstance(value, list):
        copy: list[object] = list(value)
        if rest or wrong is not MISSING:
            copy[int(first)] = change(value[int(first)], tuple(rest), wrong)
        else:
            del copy[int(first)]
        return copy
    assert isinstance(value, dict)
    if not rest and wrong is MISSING:
        return {name: inner for name, inner in value.items() if name != first}
    return value | {first: change(value[str(first)], tuple(rest), wrong)}


def changed(value: object, most: int | None = None, seed: int = 0) -> Iterator[object]:
    """The value with each of WRONG in each place; `most` of them, drawn, where it is given."""
    found = list(itertools.product(places(value), WRONG))
    if most is not None and most < len(found):
        found = random.Random(seed).sample(found, most)
    for path, wrong in found:
        yield change(value, path, wrong)


def broken_texts(text: str) -> Iterator[str]:
    """What a server writes that is no JSON, or JSON that no parser of Python takes."""
    yield from ('', text[: len(text) // 2], text + '}', f'[{"9" * 5000}]', '[' * 100_000, '{"a":' * 100_000, '\0')
