"""Beside the loop: reads the event log: intervals of the lanes, the measured window, the state of every draw."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from areal_jax.telemetry.json_lines import read_json_lines, require_fields

Event = Mapping[str, Any]
FILE = 'events.jsonl'
_NUMBER = (int, float)
_OF_EVERY_EVENT: Mapping[str, type | tuple[type, ...]] = {'seq': int, 'time': _NUMBER, 'kind': str}
_OF_KIND: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {  # fields that reports read
    'run_start': {'lane': str, 'run': int},
    'run_done': {'lane': str, 'run': int, 'work': str, 'seconds': _NUMBER},
    'evaluate': {'mode': str},
    'draw': {'draw': int},
    'admit': {'draw': int},
    'buffer': {'draw': int},
    'consume': {'draws': list},
    'drop': {'draw': int, 'reason': str},
    'decode': {'engine': str, 'slots': list, 'tokens': int, 'version': int},
    'interrupt': {'requests': list, 'to_version': int},
    'publish': {'version': int},
    'load': {'version': int, 'pause_seconds': _NUMBER},
}
ROUNDING = 1e-6  # seconds; start + length of one interval may pass the start of the next by rounding


@dataclasses.dataclass(frozen=True)
class LaneInterval:
    """One occupation of a lane. Source: run_done, whose run_start adds the detail."""

    lane: str
    work: str  # 'decode', 'prefill', 'train', 'publish', ...
    start: float  # clock seconds, when the lane took up the work
    end: float
    amount: float
    done_seq: int  # sequence number of the run_done
    detail: Mapping[str, Any]  # further fields of the run_start


@dataclasses.dataclass(frozen=True)
class Window:
    """Clock seconds that count: from the first admission to the last publication, without evaluation."""

    spans: tuple[tuple[float, float], ...]  # disjoint, ascending, each of positive length

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def overlap(self, start: float, end: float) -> float:
        """Seconds of an interval that lie inside."""
        return sum(max(0.0, min(end, high) - max(start, low)) for low, high in self.spans)

    def contains(self, time: float) -> bool:
        return any(low <= time <= high for low, high in self.spans)


def load_events(path: pathlib.Path | str) -> list[dict[str, Any]]:
    """The events of an events.jsonl; a torn last line is left out, no file is an empty list.

    Raises LogError for a line that is no JSON object or lacks a field that is read here.
    """
    path = pathlib.Path(path)
    events = read_json_lines(path)
    for number, event in enumerate(events, start=1):
        require_fields(path, number, event, _OF_EVERY_EVENT)
        require_fields(path, number, event, _OF_KIND.get(event['kind'], {}))
    return events


def lane_intervals(events: Iterable[Event]) -> list[LaneInterval]:
    """Every finished occupation of a lane, by end; work that was cut off by the end of the log is left out."""
    starts: dict[tuple[str, int], Event] = {}  # run numbers begin again in a resumed run: the last start counts
    intervals = []
    for event in events:
        if event['kind'] == 'run_start':
            starts[event['lane'], event['run']] = event
        elif event['kind'] == 'run_done':
            start = starts.pop((event['lane'], event['run']), {})
            began = event.get('started', event['time'] - event['seconds'])
            known = {'seq', 'time', 'lane', 'kind', 'run', 'work', 'amount'}
            detail = {name: value for name, value in start.items() if name not in known}
            intervals.append(
                LaneInterval(
                    event['lane'],
                    event['work'],
                    began,
                    began + event['seconds'],
                    float(event.get('amount', start.get('amount', 0.0))),
                    event['seq'],
                    detail,
                )
            )
    return intervals


def evaluation_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Clock seconds between `evaluate` start and done; an evaluation that was cut off lasts to the end of the log."""
    spans, start, last = [], None, 0.0
    for event in events:
        last = event['time']
        if event['kind'] == 'evaluate' and event['mode'] == 'start':
            start = event['time']
        elif event['kind'] == 'evaluate' and event['mode'] == 'done' and start is not None:
            spans.append((start, event['time']))
            start = None
    return spans if start is None else [*spans, (start, last)]


def outside_evaluation(events: Iterable[Event]) -> Iterator[Event]:
    """The events of training: those not between `evaluate` start and done, in the order of the log."""
    evaluating = False
    for event in events:
        if event['kind'] == 'evaluate':
            evaluating = event['mode'] == 'start'
        elif not evaluating:
            yield event


def window(events: Sequence[Event]) -> Window:
    """First admission to last publication of a trained version, evaluation cut out; empty where one is missing."""
    admitted = [event['time'] for event in events if event['kind'] == 'admit']
    published = [event['time'] for event in events if event['kind'] == 'publish' and event['version'] > 0]
    if not admitted or not published:
        return Window(())
    spans = [(admitted[0], published[-1])]
    for low, high in evaluation_spans(events):
        pieces = (piece for a, b in spans for piece in ((a, min(b, low)), (max(a, high), b)))
        spans = [(a, b) for a, b in pieces if b > a]
    return Window(tuple((a, b) for a, b in spans if b > a))


def lane_seconds(intervals: Iterable[LaneInterval], within: Window) -> dict[str, float]:
    """Seconds of work inside the window per lane, divided by the most that a lane did at once (its used width)."""
    by_lane = _by_lane(intervals)
    return {lane: _covered(found, within) / _peak(found) for lane, found in by_lane.items()}


def busy_share(intervals: Iterable[LaneInterval], lane: str, within: Window) -> float | None:
    """Share of the window in which the lane is occupied, by one piece of work or several; None for an empty window."""
    if not within.seconds:
        return None
    occupied, reached = 0.0, float('-inf')
    for interval in sorted(_by_lane(intervals).get(lane, []), key=lambda i: i.start):
        if interval.end > reached:
            occupied += within.overlap(max(interval.start, reached), interval.end)
            reached = interval.end
    return occupied / within.seconds


STATES = ('pending', 'running', 'buffered', 'trained', 'dropped')
_ENTERED_BY = {'draw': 'pending', 'admit': 'running', 'buffer': 'buffered', 'consume': 'trained', 'drop': 'dropped'}
_COMES_FROM: dict[str, tuple[str | None, ...]] = {
    'pending': (None,),
    'running': ('pending',),
    'buffered': ('running',),
    'trained': ('buffered',),
    'dropped': ('pending', 'running', 'buffered'),
}


class DrawLedger:
    """The state of every draw, event by event; a move that the loop does not allow is kept as a violation."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.reasons: dict[int, str] = {}  # of the dropped
        self.violations: list[str] = []
        self._counts: collections.Counter[str] = collections.Counter()

    def apply(self, event: Event) -> None:
        state = _ENTERED_BY.get(event['kind'])
        if state is None:
            return
        for draw in event['draws'] if event['kind'] == 'consume' else [event['draw']]:
            self._move(draw, state, event)

    def count(self, state: str) -> int:
        return self._counts[state]

    def _move(self, draw: int, state: str, event: Event) -> None:
        before = self.states.get(draw)
        if before not in _COMES_FROM[state]:
            self.violations.append(
                f'event {event["seq"]} ({event["kind"]}): draw {draw} goes from {before or "unknown"} to {state}'
            )
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        self.states[draw] = state
        if state == 'dropped':
            self.reasons[draw] = event['reason']


def ledger(events: Iterable[Event]) -> DrawLedger:
    """The ledger after all events."""
    found = DrawLedger()
    for event in events:
        found.apply(event)
    return found


def conservation(events: Iterable[Event]) -> list[str]:
    """Violations of the rule that each draw is in exactly one of STATES and only moves forward; empty if it holds."""
    return ledger(events).violations


def _by_lane(intervals: Iterable[LaneInterval]) -> dict[str, list[LaneInterval]]:
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
