"""The ledger of draws: the state of every draw, and whether each only moved forward."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Literal

from areal_jax.events.schema import Event

State = Literal['pending', 'running', 'buffered', 'trained', 'dropped']
_ENTERED_BY: dict[str, State] = {
    'draw': 'pending', 'admit': 'running', 'buffer': 'buffered', 'consume': 'trained', 'drop': 'dropped',
}  # fmt: skip
_COMES_FROM: dict[State, tuple[State | None, ...]] = {
    'pending': (None,),
    'running': ('pending',),
    'buffered': ('running',),
    'trained': ('buffered',),
    'dropped': ('pending', 'running', 'buffered'),
}


class DrawLedger:
    """The state of every draw, event by event; a move that the loop does not allow is kept as a violation."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.reasons: dict[int, str] = {}  # of the dropped
        self.violations: list[str] = []
        self._counts: collections.Counter[State] = collections.Counter()

    def apply(self, event: Event) -> None:
        if event['kind'] == 'consume':
            for draw in event['draws']:
                self._move(draw, event)
        elif event['kind'] in ('draw', 'admit', 'buffer', 'drop'):
            self._move(event['draw'], event)
        if event['kind'] == 'drop':
            self.reasons[event['draw']] = event['reason']

    def count(self, state: State) -> int:
        return self._counts[state]

    def _move(self, draw: int, event: Event) -> None:
        before, state = self.states.get(draw), _ENTERED_BY[event['kind']]
        if before not in _COMES_FROM[state]:
            self.violations.append(
                f'event {event["seq"]} ({event["kind"]}): draw {draw} goes from {before or "unknown"} to {state}'
            )
        if before is not None:
            self._counts[before] -= 1
        self._counts[state] += 1
        self.states[draw] = state


def ledger(events: Iterable[Event]) -> DrawLedger:
    """The ledger after all events."""
    found = DrawLedger()
    for event in events:
        found.apply(event)
    return found


def conservation(events: Iterable[Event]) -> list[str]:
    """Violations of the rule that each draw is in exactly one state and only moves forward; empty if it holds."""
    return ledger(events).violations
