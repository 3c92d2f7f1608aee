"""The seconds that generation and training would take if each had the cores to itself.

Measured on intervals of the lanes during which the other side was idle.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.event_log import LaneInterval, Window, of_training


def alone_seconds(intervals: Sequence[LaneInterval], within: Window, updates: int) -> dict[str, float | None]:
    """Seconds an update of 'generate' (the busiest engine) and 'train'.

    The cost per unit (token, step) of each kind of work is its median over the intervals during which all other engines
    and the learner were idle, and at most the median of all intervals. The result is that cost times the work done in
    the window, per update; None for a lane with a kind of work that never ran alone.
    """
    # calls to a server overlap, and what they cost it is not known here
    engines = [i for i in intervals if is_engine_lane(i.lane) and i.work != 'generate']
    learner = [i for i in intervals if i.lane == LEARNER]
    own = _own_costs(engines, learner), _own_costs(learner, engines)
    engines = of_training(engines)
    generate = [
        _seconds([i for i in engines if i.lane == lane], own[0], within, updates)
        for lane in sorted({i.lane for i in engines})
    ]
    known = [seconds for seconds in generate if seconds is not None]
    return {
        'generate': max(known) if known and len(known) == len(generate) else None,
        'train': _seconds(learner, own[1], within, updates),
    }


def _own_costs(own: Sequence[LaneInterval], other: Sequence[LaneInterval]) -> dict[str, float]:
    """Seconds per unit, by kind of work; without the kinds that never ran alone.

    At most the median of all intervals of the kind: what else runs can only take time. So a checkpoint's snapshot,
    which alone runs while engines are idle, does not become the price of every publication's.
    """
    alone: dict[str, list[float]] = {}
    everywhere: dict[str, list[float]] = {}
    everything = _ByStart([*own, *other])
    for one in own:
        if one.amount > 0:
            cost = (one.end - one.start) / one.amount
            everywhere.setdefault(one.work, []).append(cost)
            if not everything.overlap_beside(one):
                alone.setdefault(one.work, []).append(cost)
    return {kind: min(_middle(found), _middle(everywhere[kind])) for kind, found in alone.items()}


def _middle(costs: list[float]) -> float:
    return sorted(costs)[len(costs) // 2]


def _seconds(lane: Sequence[LaneInterval], costs: dict[str, float], within: Window, updates: int) -> float | None:
    total = 0.0
    for kind in sorted({i.work for i in lane if i.amount > 0}):
        if kind not in costs:
            return None
        total += costs[kind] * sum(i.amount for i in lane if i.work == kind and within.contains(i.end))
    return total / updates if lane and updates else None


class _ByStart:
    """Intervals in the order of their starts, each with the latest end up to it, of any lane and of any other lane."""

    def __init__(self, intervals: Sequence[LaneInterval]):
        ordered = sorted(intervals, key=lambda interval: interval.start)
        self._starts = [interval.start for interval in ordered]
        self._latest: list[tuple[float, str, float]] = []  # latest end, its lane, latest end of another lane
        end, lane, of_another = -math.inf, '', -math.inf
        for one in ordered:
            if one.lane == lane:
                end = max(end, one.end)
            elif one.end > end:
                end, lane, of_another = one.end, one.lane, end
            else:
                of_another = max(of_another, one.end)
            self._latest.append((end, lane, of_another))

    def overlap_beside(self, interval: LaneInterval) -> bool:
        """Whether an interval of another lane overlaps it."""
        begun = bisect.bisect_left(self._starts, interval.end)
        if not begun:
            return False
        end, lane, of_another = self._latest[begun - 1]
        return interval.start < (of_another if lane == interval.lane else end)
