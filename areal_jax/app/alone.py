"""Lane seconds measured alone: what generation and training would take if the other left the cores to it."""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.events import LEARNER, is_engine_lane
from areal_jax.report.lanes import LaneInterval
from areal_jax.report.window import Window


def alone_seconds(intervals: Sequence[LaneInterval], within: Window, updates: int) -> dict[str, float | None]:
    """Seconds an update of 'generate' and 'train', at the prices of the intervals in which the other lane was idle.

    The cost per unit (token, step) of each kind of work is its median over intervals during which the other side was
    idle. The result is that cost times the work done in the window, per update; None where a kind never ran alone.
    """
    engines = [i for i in intervals if is_engine_lane(i.lane)]
    learner = [i for i in intervals if i.lane == LEARNER]
    return {
        'generate': _at_own_price(engines, learner, within, updates),
        'train': _at_own_price(learner, engines, within, updates),
    }


def _at_own_price(
    own: Sequence[LaneInterval], other: Sequence[LaneInterval], within: Window, updates: int
) -> float | None:
    total = 0.0
    for kind in sorted({i.work for i in own}):
        of_kind = [i for i in own if i.work == kind and i.amount > 0]
        alone = sorted((i.end - i.start) / i.amount for i in of_kind if not _overlaps(i, other))
        if not alone and of_kind:
            return None
        amount = sum(i.amount for i in of_kind if within.contains(i.end))
        total += amount * alone[len(alone) // 2] if alone else 0.0
    return total / updates if own and updates else None


def _overlaps(interval: LaneInterval, others: Sequence[LaneInterval]) -> bool:
    return any(o.start < interval.end and interval.start < o.end for o in others)
