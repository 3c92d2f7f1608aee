"""Intervals of the lanes: when each was occupied with what, and for how many seconds of the window.

Made from the events run_start and run_done.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from areal_jax.events.schema import Event, RunDoneEvent, RunStartEvent
from areal_jax.lanes import EVALUATION_REWARD, EVALUATION_WORK
from areal_jax.report.event_log import Window

ROUNDING = 1e-6  # seconds by which rounding may make an interval end after the next one starts
_KNOWN = frozenset(('seq', 'time', 'lane', 'kind', 'run', 'work', 'amount'))  # fields that are no detail of the work


class LaneInterval(NamedTuple):
    """One occupation of a lane."""

    lane: str
    work: str  # 'decode', 'prefill', 'train', 'publish', ...
    start: float  # clock seconds, when the lane took up the work
    end: float
    amount: float
    done_seq: int  # sequence number of the run_done
    given: Mapping[str, object]  # the run_start

    @property
    def detail(self) -> dict[str, object]:
        """Further fields of the run_start."""
        return {name: value for name, value in self.given.items() if name not in _KNOWN}


def lane_intervals(events: Iterable[Event]) -> list[LaneInterval]:
    """Every finished occupation of a lane, by end; work that was cut off by the end of the log is left out."""
    starts: dict[int, RunStartEvent] = {}  # by run; in a log of version 1 numbers come again: the last start counts
    intervals = []
    for event in events:
        if event['kind'] == 'run_start':
            starts[event['run']] = event
        elif event['kind'] == 'run_done':
            intervals.append(_interval(event, starts.pop(event['run'], None)))
    return intervals


def _interval(done: RunDoneEvent, start: RunStartEvent | None) -> LaneInterval:
    began = done['started']
    amount = float(done['amount'] * done.get('joined', 1))
    lane, end = done['lane'] or '', began + done['seconds']
    return LaneInterval(lane, done['work'], began, end, amount, done['seq'], start or {})


def event_intervals(events: Sequence[Event], kind: str) -> list[tuple[Event, LaneInterval]]:
    """Returns each event of a kind of dispatch with the occupation of the engine's lane that did it.

    An engine logs each dispatch of a kind just before its occupation of the lane starts, or each just after it is done:
    a log shows which by what comes first. A dispatch that was cut off is left out.
    """
    first = next((one for one in events if one['kind'] == kind or _starts(one, kind)), None)
    is_before = first is not None and first['kind'] == kind
    side = 'run_start' if is_before else 'run_done'
    found = {
        one.given.get('seq') if is_before else one.done_seq: one for one in lane_intervals(events) if one.work == kind
    }
    pairs: list[tuple[Event, LaneInterval]] = []
    waiting: dict[str, Event] = {}  # by lane: the dispatch whose occupation comes next
    for event in events if is_before else reversed(events):
        lane = event['lane'] or ''
        if event['kind'] == kind:
            waiting[lane] = event
        elif event['kind'] == side and event.get('work') == kind and lane in waiting:
            dispatch = waiting.pop(lane)
            if event['seq'] in found:
                pairs.append((dispatch, found[event['seq']]))
    return pairs if is_before else pairs[::-1]


def _starts(event: Event, work: str) -> bool:
    return event['kind'] == 'run_start' and event['work'] == work


def of_training(intervals: Iterable[LaneInterval]) -> list[LaneInterval]:
    """Without intervals of evaluation beside training, which overlap the others under the virtual clock."""
    return [i for i in intervals if i.work not in EVALUATION_WORK and i.lane != EVALUATION_REWARD]


def lane_seconds(intervals: Iterable[LaneInterval], within: Window) -> dict[str, float]:
    """Seconds of work inside the window per lane, divided by the most that a lane did at once (its used width)."""
    by_lane = group_by_lane(intervals)
    return {lane: _covered(found, within) / _peak(found) for lane, found in by_lane.items()}


def busy_share(intervals: Iterable[LaneInterval], lane: str, within: Window) -> float | None:
    """Share of the window in which the lane is occupied, by one piece of work or several; None for an empty window."""
    if not within.seconds:
        return None
    occupied, reached = 0.0, float('-inf')
    for interval in sorted((one for one in intervals if one.lane == lane), key=lambda i: i.start):
        if interval.end > reached:
            occupied += within.overlap(max(interval.start, reached), interval.end)
            reached = interval.end
    return occupied / within.seconds


def group_by_lane(intervals: Iterable[LaneInterval]) -> dict[str, list[LaneInterval]]:
    """The intervals of each lane, in their order."""
    lanes: dict[str, list[LaneInterval]] = collections.defaultdict(list)
    for interval in intervals:
        lanes[interval.lane].append(interval)
    return dict(lanes)


def _covered(intervals: Iterable[LaneInterval], within: Window) -> float:
    return sum(within.overlap(interval.start, interval.end) for interval in intervals)


def _peak(intervals: Iterable[LaneInterval]) -> int:
    """The largest number of intervals at one moment, at least 1; overlaps within ROUNDING do not count."""
    long = [(i.start, i.end - ROUNDING) for i in intervals if i.end - i.start > ROUNDING]
    running = most = 0
    for _, change in sorted([(start, 1) for start, _ in long] + [(end, -1) for _, end in long]):
        running += change
        most = max(most, running)
    return max(1, most)
