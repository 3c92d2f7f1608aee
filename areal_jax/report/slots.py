"""Spans of the slots: which request a slot of an engine decoded when, and with which policy version.

Made from the events `decode` (or `evaluation_decode`, of the slots for evaluation beside training) and the intervals of
the engines' lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, cast

from areal_jax.events.schema import DecodeEvent, EvaluationDecodeEvent, Event
from areal_jax.report.event_log import LaneInterval, event_intervals

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
    """Spans of all slots by engine, slot and time; a request without a slot in between makes a new span."""
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
    """One that may go on with the next dispatch."""

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
    """Each decode event with the occupation of the engine's lane that did it."""
    return cast(list[tuple[DecodeEvent | EvaluationDecodeEvent, LaneInterval]], event_intervals(events, kind))
