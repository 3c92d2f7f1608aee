"""The reader of the event log: every line is checked against the schema of areal_jax/events/schema.py."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypedDict, cast

from areal_jax import files
from areal_jax.events.schema import Event, RunDoneEvent, RunStartEvent, find_fault, require_known_version
from areal_jax.lanes import EVALUATION_REWARD, EVALUATION_WORK
from areal_jax.report.pages.blocks import Table
from areal_jax.telemetry.metrics import parse_json_lines
from areal_jax.telemetry.progress import format_bytes, format_number


@dataclasses.dataclass(frozen=True)
class Window:
    """Clock seconds that count: from the first admission to the last publication, without evaluation."""

    spans: tuple[tuple[float, float], ...]  # disjoint, ascending, each of positive length

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans)

    def overlap(self, start: float, end: float) -> float:
        """Seconds of the interval from `start` to `end` that are inside the window."""
        return sum(max(0.0, min(end, high) - max(start, low)) for low, high in self.spans)

    def contains(self, time: float) -> bool:
        return any(low <= time <= high for low, high in self.spans)


def window(events: Sequence[Event]) -> Window:
    """First admission to last publication of a trained version, without evaluation; empty if either is missing."""
    admitted = [event['time'] for event in events if event['kind'] == 'admit']
    published = [event['time'] for event in events if event['kind'] == 'publish' and event['version'] > 0]
    if not admitted or not published:
        return Window(())
    spans = [(admitted[0], published[-1])]
    for low, high in evaluation_spans(events):
        pieces = (piece for a, b in spans for piece in ((a, min(b, low)), (max(a, high), b)))
        spans = [(a, b) for a, b in pieces if b > a]
    return Window(tuple((a, b) for a, b in spans if b > a))


def evaluation_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Clock seconds from each `evaluate` start to its done; a cut-off evaluation lasts to the end of the log."""
    spans: list[tuple[float, float]] = []
    start: float | None = None
    last = 0.0
    for event in events:
        last = event['time']
        if event['kind'] == 'evaluate' and event['mode'] == 'start':
            start = event['time']
        elif event['kind'] == 'evaluate' and start is not None:
            spans.append((start, event['time']))
            start = None
    return spans if start is None else [*spans, (start, last)]


# Intervals of the lanes: when each lane was occupied, by which work, and for how many seconds of the window.
#
# Made from the events run_start and run_done.


ROUNDING = 1e-6  # seconds by which rounding may make an interval end after the next one starts
_KNOWN = frozenset(('seq', 'time', 'lane', 'kind', 'run', 'work', 'amount'))  # fields that are not details of the work


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
    starts: dict[int, RunStartEvent] = {}  # by run; a log of version 1 reuses run numbers: the last start counts
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
    """Returns each event of a kind of dispatch with the interval of the engine's lane that did the work.

    An engine logs each dispatch of a kind either just before its run_start or just after its run_done; the first such
    event in the log shows which. A dispatch that was cut off is left out.
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
    """Leaves out the evaluation during training, whose intervals overlap the others under the virtual clock."""
    return [i for i in intervals if i.work not in EVALUATION_WORK and i.lane != EVALUATION_REWARD]


def lane_seconds(intervals: Iterable[LaneInterval], within: Window) -> dict[str, float]:
    """Seconds of work in the window per lane, divided by the largest number of pieces that the lane did at once."""
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


# The cost of each version's way to the engines: bytes, the share of weights that changed, seconds, pauses.


_SEND, _STAGE = 'publish', 'load'  # kinds of work


class PublicationRow(TypedDict):
    """A version on its way to the engines; None if the channel or the log does not say."""

    version: int
    channel: str | None
    record: str | None  # 'whole' or 'delta'
    bytes: int | None  # as sent
    changed: float | None  # share of the elements with other bits than in the version before
    send_seconds: float | None  # on the learner's side, from the copy until engines can fetch it
    stage_seconds: float | None  # of the slowest engine, while it decodes
    pause_seconds: float | None  # the longest of an engine


def publication_rows(events: Sequence[Event]) -> list[PublicationRow]:
    """One row per version above 0, ascending; if a resumed run published a version twice, the last publication."""
    seconds: dict[tuple[str, int], float] = collections.defaultdict(float)
    for interval in lane_intervals(events):
        if interval.work in (_SEND, _STAGE) and 'version' in interval.detail:
            key = interval.work, cast(int, interval.detail['version'])
            seconds[key] = max(seconds[key], interval.end - interval.start)
    rows: dict[int, PublicationRow] = {}
    for event in events:
        if event['kind'] == 'publish' and event['version'] > 0:
            version = event['version']
            rows[version] = {
                'version': version,
                'channel': event.get('channel'),
                'record': event.get('record'),
                'bytes': event.get('bytes'),
                'changed': event.get('changed'),
                'send_seconds': seconds.get((_SEND, version)),
                'stage_seconds': seconds.get((_STAGE, version)),
                'pause_seconds': None,
            }
        elif event['kind'] == 'load' and event['version'] in rows:
            row = rows[event['version']]
            row['pause_seconds'] = max(row['pause_seconds'] or 0.0, event['pause_seconds'])
    return [rows[version] for version in sorted(rows)]


def tabulate_publications(rows: Sequence[PublicationRow]) -> Table:
    """Returns the page's table: one row per channel and kind of record; none for a channel that reports no bytes."""
    found: dict[str, list[PublicationRow]] = collections.defaultdict(list)
    for row in rows:
        if row['bytes'] is not None:
            found[f'{row["channel"]}, {row["record"]}'].append(row)
    lines = [
        (
            name,
            str(len(some)),
            f'{format_bytes(int(median(row["bytes"] or 0 for row in some)))}, median',
            _median([row['changed'] for row in some]),
            *(_median_max([row[key] for row in some]) for key in ('send_seconds', 'stage_seconds', 'pause_seconds')),
        )
        for name, some in sorted(found.items())
    ]
    seconds = ('s to send, median / max', 's to stage, median / max', 'pause of an engine (s), median / max')
    return Table(('version sent as', 'versions', 'bytes', 'changed', *seconds), lines)


def _median(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f'{100 * median(known):.2g}%, median' if known else 'unknown'


def _median_max(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f'{format_number(median(known))} / {format_number(max(known))}' if known else 'not measured'


def load_events(path: pathlib.Path | str) -> list[Event]:
    """Applies `parse_events` to an events.jsonl; [] if there is no such file."""
    path = pathlib.Path(path)
    return parse_events(path.read_bytes(), str(path)) if path.exists() else []


def parse_events(content: bytes, name: str) -> list[Event]:
    """The events in the bytes of an event log; a torn last line is left out.

    A log without the event `log` has version 1. Raises FileError, which begins with `name` and the line, for a line
    that is not an event of the schema, and for a log that a later program wrote.
    """
    events = parse_json_lines(content, name, _SharedTexts().share)
    for number, event in enumerate(events, start=1):
        require_known_version(event, f'{name}: line {number}')
        if fault := find_fault(event):
            raise files.FileError(f'{name}: line {number} {fault}: it was edited or is of another program; remove it')
    return cast(list[Event], events)


class _SharedTexts:
    """Interns equal strings of all events: names of fields, of lanes, of the requests in slots."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def share(self, event: dict[str, object]) -> dict[str, object]:
        known = self._known
        shared: dict[str, object] = {}
        for name, value in event.items():
            if isinstance(value, str):
                value = known.setdefault(value, value)
            elif isinstance(value, list):
                value = [known.setdefault(entry, entry) if isinstance(entry, str) else entry for entry in value]
            shared[known.setdefault(name, name)] = value
        return shared


def outside_evaluation(events: Iterable[Event]) -> Iterator[Event]:
    """The events of training, not between `evaluate` start and done, in the order of the log."""
    evaluating = False
    for event in events:
        if event['kind'] == 'evaluate':
            evaluating = event['mode'] == 'start'
        elif not evaluating:
            yield event
