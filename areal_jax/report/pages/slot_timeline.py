"""The slots of a run over time: which request was decoded in which slot with which weights, as the chart of a page."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import numpy as np

from areal_jax.events.schema import DecodeEvent, Event, PrefillEvent
from areal_jax.report.event_log import event_intervals, outside_evaluation
from areal_jax.report.pages.blocks import Chart, Key
from areal_jax.report.pages.colors import SHADES, VERMILION, shade_at
from areal_jax.report.timeline import slot_spans

MOST_INTERVALS = 50_000  # in the page: some megabytes
_KINDS_IN_LEGEND = (  # of intervals, publications and marks: label, colour, look
    ('swap', 'pause for new weights (swap)', '#E69F00', 'box'),
    ('prefill', 'prefill', '#8A8F98', 'box'),
    ('rebuild', 'prefill that rebuilds answers', VERMILION, 'box'),
    ('publish', 'weights published', '#000000', 'dashed'),
    ('interrupt', 'request interrupted', VERMILION, 'diamond'),
    ('preempt', 'request preempted', '#B5578F', 'cross'),
)
KEYS = {kind: Key(label, color, look, label) for kind, label, color, look in _KINDS_IN_LEGEND}
_MOST_AT_ONCE = 3000  # intervals in view at full zoom-out; more take seconds a step without a GPU
_VERSIONS = 8  # versions of a long run in the first view

Slot = tuple[str, int]  # engine, slot; slots for evaluation during training belong to 'ENGINE, evaluation'
_KINDS: tuple[tuple[Literal['decode', 'evaluation_decode'], str, str], ...] = (
    ('decode', 'prefill', ''),
    ('evaluation_decode', 'evaluation_prefill', ', evaluation'),
)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A request in a slot, or the pause of an engine."""

    slot: Slot  # (engine, -1) for a pause
    work: Literal['decode', 'prefill', 'rebuild', 'swap']
    start: float  # clock seconds
    end: float
    request: str  # '' for a swap
    version: int  # of the weights; for a prefill, of the weights of the decoding that follows
    detail: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """An instant of a request in a slot."""

    slot: Slot
    what: Literal['interrupt', 'preempt']
    time: float
    request: str
    detail: str


@dataclasses.dataclass(frozen=True)
class SlotTimeline:
    slots: Sequence[Slot]  # ascending
    intervals: Sequence[Interval]  # by start
    marks: Sequence[Mark]
    publications: Sequence[tuple[float, int]]  # clock seconds, version
    left_out: int  # number of earlier intervals beyond `most`


def build_slot_timeline(events: Sequence[Event], most: int) -> SlotTimeline:
    """The slots in training and in evaluations during it; of a long run only the last `most` intervals."""
    training = list(outside_evaluation(events))
    intervals = sorted([*_decoding(training), *_prefills(training)], key=lambda interval: interval.start)
    left_out = max(0, len(intervals) - most)
    shown = intervals[left_out:]
    start = shown[0].start if shown else 0.0
    slots = sorted({interval.slot for interval in shown})
    engines = {engine for engine, _ in slots}
    pauses = [pause for pause in _pauses(training) if pause.slot[0] in engines and pause.end >= start]
    return SlotTimeline(
        slots=slots,
        intervals=sorted([*shown, *pauses], key=lambda interval: interval.start),
        marks=[mark for mark in _marks(training) if mark.time >= start and mark.slot in slots],
        publications=[(e['time'], e['version']) for e in training if e['kind'] == 'publish' and e['time'] >= start],
        left_out=left_out,
    )


def _decoding(events: Sequence[Event]) -> Iterator[Interval]:
    for kind, _, suffix in _KINDS:
        for span in slot_spans(events, kind):
            detail = f'{span.dispatches} dispatch{"" if span.dispatches == 1 else "es"}'
            slot = (span.engine + suffix, span.slot)
            yield Interval(slot, 'decode', span.start, span.end, span.request, span.version, detail)


def _prefills(events: Sequence[Event]) -> Iterator[Interval]:
    for decode, prefill, suffix in _KINDS:
        slots = _next_slots(events, decode, prefill)
        for found, interval in event_intervals(events, prefill):
            event = cast(PrefillEvent, found)
            if not event['bucket']:  # all tokens of the requests were kept in the cache
                continue
            rebuilt = event.get('rebuilt', 0)
            detail = f'{event["tokens"]} tokens of {len(event["requests"])} requests, {rebuilt} of them rebuilt'
            work: Literal['prefill', 'rebuild'] = 'rebuild' if rebuilt else 'prefill'
            for request, (slot, version) in slots[event['seq']].items():
                place = (event['engine'] + suffix, slot)
                yield Interval(place, work, interval.start, interval.end, request, version, detail)


def _next_slots(events: Sequence[Event], decode: str, prefill: str) -> dict[int, dict[str, tuple[int, int]]]:
    """For each prefill, by seq: slot and version of the next decoding of each of its requests that has one."""
    upcoming: dict[str, dict[str, tuple[int, int]]] = collections.defaultdict(dict)  # by engine
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for event in reversed(events):
        if event['kind'] == decode:
            dispatch = cast(DecodeEvent, event)
            for slot, request in enumerate(dispatch['slots']):
                if request is not None:
                    upcoming[dispatch['engine']][request] = (slot, dispatch['version'])
        elif event['kind'] == prefill:
            prefilled = cast(PrefillEvent, event)
            known = upcoming[prefilled['engine']]
            found[event['seq']] = {name: known[name] for name in prefilled['requests'] if name in known}
    return found


def _pauses(events: Sequence[Event]) -> Iterator[Interval]:
    """Yields the engines' pauses for new weights. Version 0 is left out: it is loaded before anything runs."""
    for event in events:
        if event['kind'] == 'load' and event['version'] > 0 and event['pause_seconds'] > 0:
            start = event['time'] - event['pause_seconds']
            yield Interval((event['engine'], -1), 'swap', start, event['time'], '', event['version'], 'engine pauses')


def _marks(events: Sequence[Event]) -> Iterator[Mark]:
    last: dict[str, Slot] = {}  # by request
    for event in events:
        if event['kind'] == 'decode':
            last.update({r: (event['engine'], slot) for slot, r in enumerate(event['slots']) if r is not None})
        elif event['kind'] == 'interrupt':
            detail = f'version {event["from_version"]} to {event["to_version"]}'
            for request in event['requests']:
                if request in last:
                    yield Mark(last[request], 'interrupt', event['time'], request, detail)
        elif event['kind'] == 'preempt' and event['request'] in last:
            detail = f'{event["tokens"]} tokens to compute again'
            yield Mark(last[event['request']], 'preempt', event['time'], event['request'], detail)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotChart(Chart):
    """The slots of a run, which are drawn as a strip above a timeline."""

    timeline: SlotTimeline

    @property
    def keys(self) -> list[Key]:
        """The kinds of intervals and marks that the timeline has."""
        known: set[str] = {interval.work for interval in self.timeline.intervals}
        known |= {mark.what for mark in self.timeline.marks}
        known |= {'publish'} if self.timeline.publications else set()
        return [key for kind, key in KEYS.items() if kind in known]


def build_slot_chart(timeline: SlotTimeline) -> SlotChart:
    """Returns the chart with how to read it and the number of intervals left out."""
    size, slots = len(timeline.intervals), len(timeline.slots)
    left = f' The {timeline.left_out} earlier intervals of the run are left out; `timeline.json` has them.'
    return SlotChart(
        title='Requests in the decoding slots',
        unit='coloured by policy version',
        alt=f'A timeline of {slots} slots with {size} intervals; timeline.json has them.',
        caption=(
            'Each row is a slot (engine/slot), each bar a request that is decoded in it, coloured by the policy '
            'version from the first of the run (dark) to the last (light). The strip above has the whole run in the '
            'same colours; drag the box on it, or the edges of the box. The wheel zooms in time, dragging moves; the '
            'tools above zoom a box or the rows, and go back. '
            f'{size} intervals, {len(timeline.marks)} marks.{left if timeline.left_out else ""}'
        ),
        timeline=timeline,
    )


def version_colors(timeline: SlotTimeline) -> Mapping[int, str]:
    """The color ('#rrggbb') of each version from the first to the last that was decoded with, on one scale."""
    versions = {interval.version for interval in timeline.intervals if interval.work == 'decode'}
    first, last = min(versions, default=0), max(versions, default=0)
    steps = max(len(SHADES) - 1, last - first)
    return {version: shade_at((version - first) / steps) for version in range(first, last + 1)}


def first_view(timeline: SlotTimeline) -> tuple[float, float]:
    """Clock seconds of the first view: all, or some versions in the middle of a long run."""
    start, end = find_ends(timeline)
    times = [time for time, _ in timeline.publications if start < time < end]
    if len(times) < 2 * _VERSIONS:
        return start, end
    first = (len(times) - _VERSIONS) // 2
    return times[first], min(times[first + _VERSIONS - 1], times[first] + widest_view(timeline))


def widest_view(timeline: SlotTimeline) -> float:
    """The width in clock seconds at which a quarter of the possible views hold more than _MOST_AT_ONCE intervals."""
    start, end = find_ends(timeline)
    starts = np.array([interval.start for interval in timeline.intervals])  # ascending
    if len(starts) <= _MOST_AT_ONCE:
        return end - start
    return float(np.quantile(starts[_MOST_AT_ONCE:] - starts[:-_MOST_AT_ONCE], 0.25)) or end - start


def find_ends(timeline: SlotTimeline) -> tuple[float, float]:
    """Returns the clock seconds of the first start and of the last end."""
    start = min(interval.start for interval in timeline.intervals)
    return start, max(max(interval.end for interval in timeline.intervals), start + 1e-6)
