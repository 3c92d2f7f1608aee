"""The measured window: the clock seconds over which rates and lane seconds of a run are taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from areal_jax.events.schema import Event


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


def evaluation_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Clock seconds between `evaluate` start and done; an evaluation that was cut off lasts to the end of the log."""
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
