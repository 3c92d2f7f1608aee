"""What requests ask for and answers bring, counted since the start for /metrics; on the HTTP loop alone."""

from __future__ import annotations

import collections
from collections.abc import Iterable

from areal_jax.rollout.http.wire.answer_reader import Reading
from areal_jax.rollout.http.wire.exchange import Call


class Counts:
    """Of one server. Labels are names of fields that the parsers know, so there are few."""

    def __init__(self) -> None:
        self.calls = self.unparsed = self.hidden = 0
        self.ignored: collections.Counter[str] = collections.Counter()
        self.wishes: collections.Counter[str] = collections.Counter()
        self.missed: collections.Counter[str] = collections.Counter()

    def note_call(self, call: Call) -> None:
        """A request is taken."""
        self.note_ignored(call.ignored)
        self.wishes.update(wish.field for wish in call.wishes)

    def note_ignored(self, fields: Iterable[str]) -> None:
        """Fields of a request that have no influence, also of one that asks for no answer."""
        self.ignored.update(fields)

    def note_reading(self, reading: Reading) -> None:
        """A part of an answer was read."""
        self.calls += len(reading.calls)
        self.unparsed += reading.unparsed
        self.hidden += reading.hidden

    def note_misses(self, fields: Iterable[str]) -> None:
        """The answers to a request are complete and miss the wishes of these fields."""
        self.missed.update(fields)
