"""Admission: starts groups as soon as the staleness gate, the bounds on memory, a checkpoint and a stop allow it.

The controller runs it; lock_step.py admits by a schedule on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from areal_jax.control.gate import Bound, HeldTimes, SlotDemand, StalenessGate
from areal_jax.protocols import Clock, Event


class Admission:
    """Starts groups while nothing holds admission closed, and measures how long each bound does."""

    def __init__(
        self,
        clock: Clock,
        gate: StalenessGate,
        demand: SlotDemand,
        stop_requested: Event,
        start_group: Callable[[], None],
    ):
        """`start_group` draws a prompt and starts its episodes."""
        self._clock, self._gate, self._stop_requested, self._start_group = clock, gate, stop_requested, start_group
        self.demand = demand
        self.is_by_need = math.isinf(gate.max_running)
        self._closed = False  # by a checkpoint or a stop
        self._changed = clock.event('admission (staleness, memory or checkpoint)')
        self._bound: Bound | None = None
        self.held = HeldTimes()
        self.idle = HeldTimes()  # seconds of idle slots

    @property
    def is_closed(self) -> bool:
        """Whether a checkpoint or a stop keeps admission closed."""
        return self._closed

    def close(self) -> None:
        """No group starts until `open`."""
        self._closed = True

    def open(self) -> None:
        """Takes effect at the next `note_change`."""
        self._closed = False

    def note_change(self) -> None:
        """Something happened after which a group may be allowed to start."""
        self._changed.set()

    def note_room(self) -> None:
        """A request has ended, or an engine came or went."""
        self._note_idle()
        if self.is_by_need:
            self._changed.set()

    def closed_by(self) -> Bound | None:
        """What keeps the next group from starting; None where it may start."""
        if self._closed:
            return 'stop' if self._stop_requested.is_set() else 'checkpoint'
        bound = self._gate.closed_by()
        if bound is None and self.is_by_need and self.demand.open_answers() >= self.demand.wanted_answers():
            return 'slots'
        return bound

    def note_bound(self, bound: Bound | None) -> None:
        """From this instant on admission is held closed by `bound`."""
        self._bound = bound
        self.held.note(bound, self._clock.now())
        self._note_idle()

    async def wait(self, bound: Bound) -> None:
        """Returns at the next change; the time until then is put down to `bound`."""
        self.note_bound(bound)
        self._changed.clear()
        await self._clock.wait(self._changed)

    def start_group(self) -> None:
        self._start_group()

    def _note_idle(self) -> None:
        self.idle.note(self._bound, self._clock.now(), self.demand.idle_slots())

    async def run(self) -> None:
        """Starts groups for ever."""
        while True:
            while bound := self.closed_by():
                await self.wait(bound)
            self._start_group()
