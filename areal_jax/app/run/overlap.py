"""The seconds that generation and training would take if each had the cores to itself.

Measured on intervals of the lanes during which the other side was idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.lane_intervals import LaneInterval, of_training
from areal_jax.report.window import Window


def alone_seconds(intervals: Sequence[LaneInterval], within: Window, updates: int) -> dict[str, float | None]:
    """Seconds an update of 'generate' (the busiest engine) and 'train'.

    The cost per unit (token, step) of each kind of work is its median over the intervals during which all other engines
    and the learner were idle. The result is that cost times the work done in the window, per update; None for a lane
    with a kind of work that never ran alone.
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
    """Seconds per unit, by kind of work; without the kinds that never ran alone."""
    costs: dict[str, list[float]] = {}
    beside = {lane: [*other, *(i for i in own if i.lane != lane)] for lane in {i.lane for i in own}}
    for one in own:
        if one.amount > 0 and not _overlaps(one, beside[one.lane]):
            costs.setdefault(one.work, []).append((one.end - one.start) / one.amount)
    return {kind: sorted(found)[len(found) // 2] for kind, found in costs.items()}


def _seconds(lane: Sequence[LaneInterval], costs: dict[str, float], within: Window, updates: int) -> float | None:
    total = 0.0
    for kind in sorted({i.work for i in lane if i.amount > 0}):
        if kind not in costs:
            return None
        total += costs[kind] * sum(i.amount for i in lane if i.work == kind and within.contains(i.end))
    return total / updates if lane and updates else None


def _overlaps(interval: LaneInterval, others: Sequence[LaneInterval]) -> bool:
    return any(o.start < interval.end and interval.start < o.end for o in others)
