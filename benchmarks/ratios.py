"""Ratios of sides that were asked in turns, and whether they reach a bar. numpy only."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Run = Mapping[str, Any]  # one call of a side (sides.py); checks['tokens'] says how many tokens it was
CLOCKS = ('cpu_s', 'wall_s')


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a ratio must reach."""

    value: float
    at_least: bool  # the ratio is a speed-up that must reach the value; else a cost that must not exceed it

    def holds(self, ratio: Ratio) -> bool:
        """Whether the median meets the bar, and the quartile comes within a tenth of it."""
        if self.at_least:
            return ratio.median >= self.value and ratio.quartile > 0.9 * self.value
        return ratio.median <= self.value and ratio.quartile < 1.1 * self.value


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Over the turns: the median, and the quartile on the side on which the bar would be missed."""

    median: float
    quartile: float


def seconds_a_token(run: Run, clock: str) -> float:
    """Of a call, or of the part of it that the side measured itself (checks['part_cpu_s'], checks['part_wall_s'])."""
    checks = run['checks']
    return float(checks.get(f'part_{clock}', run[clock]) / checks['tokens'])


def ratio(ours: Sequence[Run], theirs: Sequence[Run], clock: str, bar: Bar) -> Ratio:
    """Speed of ours over theirs where the bar is a speed-up, else cost of ours over theirs, turn by turn."""
    costs = [(seconds_a_token(a, clock), seconds_a_token(b, clock)) for a, b in zip(ours, theirs, strict=True)]
    ratios = [b / a if bar.at_least else a / b for a, b in costs]
    return Ratio(statistics.median(ratios), float(np.percentile(ratios, 25 if bar.at_least else 75)))


def strongest(peers: Mapping[str, Sequence[Run]], clock: str) -> str:
    """The peer with the lowest median cost of a token."""
    return min(peers, key=lambda name: statistics.median(seconds_a_token(run, clock) for run in peers[name]))


def compare(ours: Sequence[Run], peers: Mapping[str, Sequence[Run]], bar: Bar, judged: Sequence[str]) -> dict[str, Any]:
    """Fields of a row of the report; the bar is met when it holds in every judged clock."""
    fields: dict[str, Any] = {}
    met = []
    for clock in CLOCKS:
        short, peer = clock.removesuffix('_s'), strongest(peers, clock)
        found = ratio(ours, peers[peer], clock, bar)
        fields |= {f'ratio_{short}': found.median, f'quartile_{short}': found.quartile, f'against_{short}': peer}
        if clock in judged:
            met.append(bar.holds(found))
    return fields | {'met': all(met)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, of turns."""
    if len(values) < 2:
        return {'median': values[0]}
    lower, middle, upper = statistics.quantiles(values, n=4, method='inclusive')
    return {'median': middle, 'lower': lower, 'upper': upper}
