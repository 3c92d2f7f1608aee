"""The lengths of prompts, worked out from an event log, which does not hold them.

generation_rules.py asks for them. A row that decodes c tokens after a prompt of P and an answer of g tokens sees
c (P + g) + c (c - 1) / 2 positions, and a dispatch logs the sum over its rows: one linear equation in the P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import TypeAlias

Key: TypeAlias = tuple[bool, int]  # whether it is a problem of an evaluation, draw
_Check: TypeAlias = Callable[[Mapping[Key, int]], str]
_MOST_SUMS = 20_000  # of `can_sum`; above it, the rule is not checked


class PromptLengths:
    """Solves the equations of the dispatches by elimination, as they come."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}
        self._rows: dict[Key, tuple[dict[Key, Fraction], Fraction]] = {}  # by pivot, whose coefficient is 1
        self._waiting: list[tuple[frozenset[Key], _Check]] = []
        self._has_news = False  # for these

    def learn(self, counts: Mapping[Key, int], total: int) -> bool:
        """The sum of `counts` times the lengths is `total`; False where that contradicts what was learned before."""
        rest, left = total, {}
        for key, count in counts.items():
            if key in self.known:
                rest -= count * self.known[key]
            elif count:
                left[key] = count
        if not left:
            return rest == 0
        coefficients, right = {key: Fraction(count) for key, count in left.items()}, Fraction(rest)
        for pivot in list(coefficients):
            if pivot in self._rows:
                coefficients, right = _subtract(coefficients, right, coefficients[pivot], *self._rows[pivot])
        if not coefficients:
            return right == 0
        pivot = next(iter(coefficients))
        scale = coefficients[pivot]
        new = {key: value / scale for key, value in coefficients.items()}, right / scale
        for other, (row, value) in list(self._rows.items()):
            if pivot in row:
                self._rows[other] = _subtract(row, value, row[pivot], *new)
        self._rows[pivot] = new
        return self._take_solved()

    def _take_solved(self) -> bool:
        solved = {pivot: right for pivot, (row, right) in self._rows.items() if len(row) == 1}
        for pivot, length in solved.items():
            del self._rows[pivot]
            if length.denominator != 1 or length < 1:
                return False
            self.known[pivot] = int(length)
            self._has_news = True
        return True

    def check(self, keys: Iterable[Key], check: _Check) -> str:
        """What `check` finds in the lengths of `keys`: now, or in `apply_waiting` once they are known."""
        missing = frozenset(key for key in keys if key not in self.known)
        if not missing:
            return check(self.known)
        self._waiting.append((missing, check))
        return ''

    def apply_waiting(self) -> Iterator[str]:
        """What the checks find whose lengths are known by now."""
        if not self._has_news:
            return
        waiting, self._waiting, self._has_news = self._waiting, [], False
        for missing, check in waiting:
            if all(key in self.known for key in missing):
                yield check(self.known)
            else:
                self._waiting.append((missing, check))


def can_sum(total: int, parts: Iterable[tuple[int, int]]) -> bool:
    """Whether `total` is the sum of (size, most) parts, each taken 0 to `most` times; True where that is too long."""
    sums = {0}
    for size, most in parts:
        sums = {one + size * times for one in sums for times in range(most + 1) if one + size * times <= total}
        if len(sums) > _MOST_SUMS:
            return True
    return total in sums


def can_end(tokens: int, positions: int, lengths: Iterable[int], steps: int) -> bool:
    """Whether rows of these `lengths` may each decode 1 to `steps` tokens, of so many tokens and positions in all."""
    sums = {(0, 0)}
    for length in lengths:
        sums = {
            (n + count, seen + count * length + count * (count - 1) // 2)
            for n, seen in sums
            for count in range(1, steps + 1)
        }
        if len(sums) > _MOST_SUMS:
            return True
    return (tokens, positions) in sums


def _subtract(
    row: Mapping[Key, Fraction], right: Fraction, times: Fraction, other: Mapping[Key, Fraction], other_right: Fraction
) -> tuple[dict[Key, Fraction], Fraction]:
    """The row less `times` another one."""
    new = {key: row.get(key, Fraction(0)) - times * other.get(key, Fraction(0)) for key in {**row, **other}}
    return {key: value for key, value in new.items() if value}, right - times * other_right
