"""The event log as a Chrome trace (timeline.json), which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NotRequired, TypedDict, cast

from areal_jax import files
from areal_jax.events.schema import DecodeEvent, EvaluationDecodeEvent, Event
from areal_jax.lanes import lane_group
from areal_jax.report.aggregates import DrawLedger
from areal_jax.report.event_log import LaneInterval, event_intervals, lane_intervals
from areal_jax.telemetry.metrics import plain

DecodeKind = Literal['decode', 'evaluation_decode']


@dataclasses.dataclass(frozen=True)
class SlotSpan:
    """Consecutive dispatches that decoded one request in one slot under one policy version."""

    engine: str
    slot: int
    request: str
    version: int
    start: float  # clock seconds
    end: float
    dispatches: int


def slot_spans(events: Sequence[Event], kind: DecodeKind = 'decode') -> list[SlotSpan]:
    """Spans of all slots by engine, slot and time; a request that lost its slot in between begins a new span."""
    open_spans: dict[tuple[str, int], _OpenSpan] = {}
    spans: list[SlotSpan] = []
    for event, interval in decode_intervals(events, kind):
        for slot, request in enumerate(event['slots']):
            key = (event['engine'], slot)
            span = open_spans.get(key)
            if span and span.request == request and span.version == event['version']:
                span.end = interval.end
                span.dispatches += 1
                continue
            if span:
                spans.append(open_spans.pop(key).close(*key))
            if request is not None:
                open_spans[key] = _OpenSpan(request, event['version'], interval.start, interval.end)
    spans += [span.close(*key) for key, span in open_spans.items()]
    return sorted(spans, key=lambda span: (span.engine, span.slot, span.start))


@dataclasses.dataclass
class _OpenSpan:
    """A span that the next dispatch may extend."""

    request: str
    version: int
    start: float
    end: float
    dispatches: int = 1

    def close(self, engine: str, slot: int) -> SlotSpan:
        return SlotSpan(engine, slot, self.request, self.version, self.start, self.end, self.dispatches)


def decode_intervals(
    events: Sequence[Event], kind: DecodeKind = 'decode'
) -> list[tuple[DecodeEvent | EvaluationDecodeEvent, LaneInterval]]:
    """Each decode event with the interval of the engine's lane that did the work."""
    return cast(list[tuple[DecodeEvent | EvaluationDecodeEvent, LaneInterval]], event_intervals(events, kind))


FILE = 'timeline.json'
_INSTANTS = (
    *('interrupt', 'publish', 'load', 'drop', 'save', 'restore', 'evaluate', 'signal', 'join', 'leave', 'error'),
    *('evaluation_start', 'evaluation_done', 'evaluation_skip', 'evaluation_lost'),
)


class TraceEntry(TypedDict):
    """An event of the trace format; which fields it has depends on `ph`."""

    name: str
    ph: str  # 'M' metadata, 'X' an interval, 'i' an instant, 'C' a counter
    pid: int
    tid: int
    ts: NotRequired[float]  # microseconds
    dur: NotRequired[float]  # microseconds
    cat: NotRequired[str]
    s: NotRequired[str]  # how far an instant is drawn: 'g' over the whole trace, 't' over its thread
    args: Mapping[str, object]


class Trace(TypedDict):
    displayTimeUnit: str
    traceEvents: list[TraceEntry]


def build_timeline(events: Sequence[Event], of: str = '') -> Trace:
    """The trace: a process per kind of lane with a thread per lane, a process per engine with a thread per slot.

    Times are microseconds. Work that overlaps on one lane is drawn on several threads. Interruptions, publications,
    loads and similar events are instants in a separate process; buffer size and version are counters. `of` precedes
    the names of processes.
    """
    tracks = _Tracks(of)
    entries = [
        *(_work_entry(interval, tracks.lane(interval)) for interval in _by_start(lane_intervals(events))),
        *(_span_entry(span, tracks.slot(span, 'slot')) for span in slot_spans(events)),
        *(_span_entry(span, tracks.slot(span, 'evaluation slot')) for span in slot_spans(events, 'evaluation_decode')),
    ]
    for event in events:
        if event['kind'] in _INSTANTS:
            entries.append(_instant_entry(event, tracks.thread('events', event['lane'] or event['kind'])))
    entries += _counters(events, tracks.process('counters'))
    entries.sort(key=lambda entry: entry.get('ts', 0.0))
    return {'displayTimeUnit': 'ms', 'traceEvents': [*tracks.metadata, *entries]}


def write_timeline(events: Sequence[Event], workdir: pathlib.Path | str, of: str = '') -> pathlib.Path:
    """Write WORKDIR/timeline.json; returns its path. See build_timeline."""
    path = pathlib.Path(workdir) / FILE
    trace = build_timeline(events, of)
    encode = json.JSONEncoder(separators=(',', ':'), allow_nan=False).encode
    entries = ',\n'.join(encode(plain(entry)) for entry in trace['traceEvents'])  # a second tree would take its memory
    files.write_text(path, f'{{"displayTimeUnit":"{trace["displayTimeUnit"]}","traceEvents":[{entries}]}}')
    return path


class _Tracks:
    """Numbers processes and threads in the order in which they are first needed, and keeps their names as metadata."""

    def __init__(self, of: str) -> None:
        self.metadata: list[TraceEntry] = []
        self._of = of  # before the name of each process
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, str], int] = {}
        self._free_from: dict[tuple[str, int], float] = {}  # end of the last work on a row of a lane

    def process(self, name: str) -> int:
        if name not in self._processes:
            self._processes[name] = len(self._processes) + 1
            self._describe('process_name', self._processes[name], 0, self._of + name)
        return self._processes[name]

    def thread(self, process: str, name: str) -> tuple[int, int]:
        key = (self.process(process), name)
        if key not in self._threads:
            self._threads[key] = len(self._threads) + 1
            self._describe('thread_name', key[0], self._threads[key], name)
        return key[0], self._threads[key]

    def lane(self, interval: LaneInterval) -> tuple[int, int]:
        """The thread for one interval of a lane: its first free row. Call it in order of the intervals' starts."""
        row = 0
        while self._free_from.get((interval.lane, row), interval.start) > interval.start + 1e-6:
            row += 1
        self._free_from[interval.lane, row] = interval.end
        kind = lane_group(interval.lane)
        return self.thread(f'lanes: {kind}', interval.lane if row == 0 else f'{interval.lane} +{row}')

    def slot(self, span: SlotSpan, name: str) -> tuple[int, int]:
        return self.thread(f'slots: {span.engine}', f'{name} {span.slot:03}')

    def _describe(self, kind: str, process: int, thread: int, name: str) -> None:
        self.metadata.append({'name': kind, 'ph': 'M', 'pid': process, 'tid': thread, 'args': {'name': name}})


def _by_start(intervals: Iterable[LaneInterval]) -> list[LaneInterval]:
    return sorted(intervals, key=lambda interval: interval.start)


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _work_entry(interval: LaneInterval, track: tuple[int, int]) -> TraceEntry:
    return {
        'name': interval.work, 'cat': 'lane', 'ph': 'X', 'pid': track[0], 'tid': track[1],
        'ts': _microseconds(interval.start), 'dur': _microseconds(interval.end - interval.start),
        'args': {'amount': interval.amount, **interval.detail},
    }  # fmt: skip


def _span_entry(span: SlotSpan, track: tuple[int, int]) -> TraceEntry:
    return {
        'name': f'{span.request} v{span.version}', 'cat': 'slot', 'ph': 'X', 'pid': track[0], 'tid': track[1],
        'ts': _microseconds(span.start), 'dur': _microseconds(span.end - span.start),
        'args': {'request': span.request, 'version': span.version, 'dispatches': span.dispatches},
    }  # fmt: skip


def _instant_entry(event: Event, track: tuple[int, int]) -> TraceEntry:
    arguments = {name: value for name, value in event.items() if name not in ('time', 'lane', 'kind')}
    return {
        'name': event['kind'], 'cat': 'event', 'ph': 'i', 's': 'g' if event['kind'] == 'publish' else 't',
        'pid': track[0], 'tid': track[1], 'ts': _microseconds(event['time']), 'args': arguments,
    }  # fmt: skip


def _counters(events: Iterable[Event], process: int) -> list[TraceEntry]:
    """Samples of buffer size and version, one after every event that changes them."""
    ledger, last = DrawLedger(), {'buffered groups': 0, 'version': 0}
    entries: list[TraceEntry] = []
    for event in events:
        ledger.apply(event)
        values = {'buffered groups': ledger.count('buffered')}
        values['version'] = event['version'] if event['kind'] == 'publish' else last['version']
        for name, value in values.items():
            if value != last[name]:
                ts = _microseconds(event['time'])
                entries.append({'name': name, 'ph': 'C', 'pid': process, 'tid': 0, 'ts': ts, 'args': {name: value}})
        last = values
    return entries
