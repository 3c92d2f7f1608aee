"""The spans in which each engine was in the pool: from `join` to `leave`. Made from the events of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from areal_jax.events.schema import Event
from areal_jax.report.event_log import Window

Presence = Mapping[str, Sequence[tuple[float, float]]]  # spans in clock seconds by engine, ascending


def find_presence(events: Sequence[Event]) -> Presence:
    """The spans of each engine that joined; the last span of an engine that is still in the pool ends at infinity.

    An engine that a restarted program does not take in again was in the pool until the restart.
    """
    since: dict[str, float] = {}
    lapsed: dict[str, float] = {}  # by engine of the previous start that has not joined again: the time of the restart
    spans: dict[str, list[tuple[float, float]]] = {}

    def end(engine: str, time: float) -> None:
        spans.setdefault(engine, []).append((since.pop(engine), lapsed.pop(engine, time)))

    for event in events:
        if event['kind'] == 'log':
            lapsed = dict.fromkeys(since, event['time'])
        elif event['kind'] == 'join':
            lapsed.pop(event['engine'], None)
            since.setdefault(event['engine'], event['time'])
        elif event['kind'] == 'leave' and event['engine'] in since:
            end(event['engine'], event['time'])
        elif event['kind'] == 'restore':
            for engine in [*lapsed]:
                end(engine, event['time'])
    for engine in [*since]:
        end(engine, math.inf)
    return spans


def restrict(within: Window, presence: Presence, engine: str) -> Window:
    """The part of the window in which the engine was in the pool; all of it if the log does not name the engine."""
    spans = presence.get(engine)
    if spans is None or covers(within, spans):
        return within
    pieces = ((max(low, start), min(high, end)) for low, high in within.spans for start, end in spans)
    return Window(tuple((low, high) for low, high in pieces if high > low))


def covers(within: Window, spans: Sequence[tuple[float, float]]) -> bool:
    """Whether one of the spans covers the whole window."""
    low, high = (within.spans[0][0], within.spans[-1][1]) if within.spans else (0.0, 0.0)
    return any(start <= low and high <= end for start, end in spans)
