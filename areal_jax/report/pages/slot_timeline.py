"""What happened in the slots of the engines, for the timeline of report.html.

Work of an engine as a whole (the pause for new weights) is drawn over all of its slots; a prefill is drawn in the slot
in which its request is decoded next, an interruption or a preemption in the slot in which it was decoded last.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from areal_jax.events.schema import DecodeEvent, Event, PrefillEvent
from areal_jax.report.event_log import event_intervals, outside_evaluation
from areal_jax.report.timeline import slot_spans

Slot = tuple[str, int]  # engine, slot; the slots for evaluation beside training belong to 'ENGINE, evaluation'
_KINDS: tuple[tuple[Literal['decode', 'evaluation_decode'], str, str], ...] = (
    ('decode', 'prefill', ''),
    ('evaluation_decode', 'evaluation_prefill', ', evaluation'),
)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A request in a slot, or the pause of an engine."""

    slot: Slot  # of a pause: (engine, -1)
    work: Literal['decode', 'prefill', 'rebuild', 'swap']
    start: float  # clock seconds
    end: float
    request: str  # of a swap ''
    version: int  # of the weights; for a prefill: of the decoding that follows
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
    left_out: int  # earlier intervals, where there are more than were asked for


def build_slot_timeline(events: Sequence[Event], most: int) -> SlotTimeline:
    """Training and the evaluations beside it; of a long run the last `most` intervals."""
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
    """By the number of each prefill: of its requests that are decoded later, the slot and the version then."""
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
    """Version 0 is loaded before anything runs."""
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
