"""A published number beside a simulated one, and which lanes were idle in the simulation."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks.simulation.simulated import Measured


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One published row. `simulated` is None where it was not simulated, and `note` then says why."""

    row: str
    unit: str
    published: float | None
    simulated: float | None
    bar: float | None = None  # of the error; None = shown, not judged
    lanes: str = ''  # idle shares in the simulation
    note: str = ''
    seeds: int = 0

    @property
    def error(self) -> float | None:
        """Of the simulated number, as a share of the published one."""
        if self.published is None or self.simulated is None:
            return None
        return self.simulated / self.published - 1

    @property
    def is_met(self) -> bool | None:
        if self.bar is None or self.published is None:
            return None
        return self.error is not None and abs(self.error) <= self.bar

    def as_row(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), 'error': self.error, 'met': self.is_met}

    def describe(self) -> str:
        if self.error is None:
            of = '' if self.simulated is None else f'{number(self.simulated)} {self.unit}; '
            known = '' if self.published is None else f'published {number(self.published)} {self.unit}; '
            return f'{self.row}: {known}{of or "not simulated: "}{self.note}'
        judged = {None: '', True: ' (met)', False: ' (MISSED)'}[self.is_met]
        text = (
            f'{self.row}: {number(self.simulated or 0)} {self.unit}, published {number(self.published or 0)}, error '
            f'{self.error:+.0%}{judged}'
        )
        return '; '.join(part for part in (text, self.lanes, self.note) if part)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one part of the table found."""

    part: str
    bar: str
    value: dict[str, object]
    met: bool | None
    rows: Sequence[Comparison]

    def misses_first(self) -> list[Comparison]:
        """Missed rows by size of the error, then those met, those that are not judged, and those not simulated."""
        order = {False: 0, True: 1, None: 2}
        return sorted(self.rows, key=lambda row: (row.error is None, order[row.is_met], -abs(row.error or 0)))

    def describe(self) -> str:
        lines = [f'{self.part}: {self.bar}: {self.value}', *(f'  {row.describe()}' for row in self.misses_first())]
        return '\n'.join(lines)


def lanes(found: Measured) -> str:
    return (
        f'engines idle {found.engines_idle:.0%}, {found.rebuilding:.0%} in prefill, slots {found.occupancy:.0%} used, '
        f'learner idle {found.learner_idle:.0%}'
    )


def number(value: float) -> str:
    return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'


def median_error(rows: Sequence[Comparison]) -> float | None:
    errors = [abs(row.error) for row in rows if row.error is not None]
    return statistics.median(errors) if errors else None


def largest_error(rows: Sequence[Comparison]) -> float | None:
    return max((abs(row.error) for row in rows if row.error is not None), default=None)
