"""The reader of the event log: every line is checked against the schema of areal_jax/events/schema.py."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import cast

from areal_jax import files
from areal_jax.events.schema import Event, find_fault, require_known_version
from areal_jax.telemetry.metrics import parse_json_lines


def load_events(path: pathlib.Path | str) -> list[Event]:
    """`parse_events` of an events.jsonl; no file is an empty list."""
    path = pathlib.Path(path)
    return parse_events(path.read_bytes(), str(path)) if path.exists() else []


def parse_events(content: bytes, name: str) -> list[Event]:
    """The events in the bytes of an event log; a torn last line is left out.

    A log without the event `log` has version 1. Raises FileError, which begins with `name` and the line, for a line
    that is no event of the schema, and for a log that a later program wrote.
    """
    events = parse_json_lines(content, name, _SharedTexts().share)
    for number, event in enumerate(events, start=1):
        require_known_version(event, f'{name}: line {number}')
        if fault := find_fault(event):
            raise files.FileError(f'{name}: line {number} {fault}: it was edited or is of another program; remove it')
    return cast(list[Event], events)


class _SharedTexts:
    """Equal texts of all events become one: names of fields, of lanes, of the requests in slots."""

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
