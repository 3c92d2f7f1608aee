"""The staleness gate decides whether one more group may start: Equation 3 of arXiv 2505.24298, counted in groups.

StalenessGate holds only counts, no clock and no groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypedDict

from areal_jax.protocols import Clock, Event, Pool


class SlotDemand:
    """Compares the slots of the serving engines with the requests that are open or about to be.

    Args:
      slots: slots of one engine.
      not_begun: answers of admitted groups whose first request has not reached the pool yet.
    """

    def __init__(self, pool: Pool, not_begun: Callable[[], int], *, slots: int, group_size: int):
        self._pool, self._not_begun, self._slots, self._group_size = pool, not_begun, slots, group_size

    def open_answers(self) -> int:
        """Training requests that decode or wait, including requests of groups that were just admitted."""
        return self._pool.open_requests() + self._not_begun()

    def wanted_answers(self) -> int:
        """The number of open answers at which no slot runs dry: one group waits at each engine."""
        return self._pool.serving_engines() * (self._slots + self._group_size)

    def idle_slots(self) -> int:
        """The number of slots without an open answer."""
        return max(0, self._pool.serving_engines() * self._slots - self.open_answers())


# why no group may start: a config field, or the controller's activity
Bound = Literal['steps', 'eta', 'max_running_groups', 'buffer_capacity', 'slots', 'schedule', 'checkpoint', 'stop']


class StalenessGate:
    """Counts admitted groups against the published policy version.

    A group may start only if floor((N - 1) / B) <= version + eta, where N counts the admitted groups and the new one. A
    group that is dropped before its batch is formed is subtracted. A group that is filtered inside a batch stays
    counted: the update used its place.

    Args:
      groups_per_update: B >= 1.
      eta: versions, >= 0; with inf only the bounds on memory remain.
      max_running: bound on admitted, unfinished groups; inf = as many as the slots need.
      buffer_capacity: bound on finished groups; each admitted group has a reserved place in the buffer.
      max_admitted: groups that the run can train in total.
    """

    def __init__(
        self, *, groups_per_update: int, eta: float, max_running: float, buffer_capacity: int, max_admitted: int
    ):
        self.groups_per_update = groups_per_update
        self.eta = eta
        self.max_running = max_running
        self.buffer_capacity = buffer_capacity
        self.max_admitted = max_admitted
        self.version = 0  # updates published
        self.admitted = 0  # N
        self.running = 0  # admitted, unfinished
        self.buffered = 0  # finished, not in a batch yet

    def stale_capacity(self) -> float:
        """The number of groups that Eq. 3 still admits: N <= (version + eta + 1) * B."""
        if math.isinf(self.eta):
            return math.inf
        return math.floor(self.version + self.eta + 1) * self.groups_per_update - self.admitted

    def closed_by(self) -> Bound | None:
        """The first bound, in the order below, that keeps admission closed; None if it is open."""
        if self.admitted >= self.max_admitted:
            return 'steps'
        if self.stale_capacity() <= 0:
            return 'eta'
        if self.running >= self.max_running:
            return 'max_running_groups'
        if self.running + self.buffered >= self.buffer_capacity:
            return 'buffer_capacity'
        return None

    def is_open(self) -> bool:
        return self.closed_by() is None

    def admit(self) -> None:
        if not self.is_open():
            raise RuntimeError(f'admission is closed: {self}')
        self.admitted += 1
        self.running += 1

    def buffer(self) -> None:
        """Notes that a running group finished."""
        self.running -= 1
        self.buffered += 1

    def consume(self, groups: int) -> None:
        """Notes that a batch took `groups` buffered groups."""
        self.buffered -= groups

    def drop_running(self) -> None:
        self.running -= 1
        self.admitted -= 1

    def drop_buffered(self) -> None:
        self.buffered -= 1
        self.admitted -= 1

    def publish(self, version: int) -> None:
        if version <= self.version:
            raise RuntimeError(f'published version {version} is not above {self.version}')
        self.version = version

    def state(self) -> dict[str, int]:
        return {'version': self.version, 'admitted': self.admitted, 'running': self.running, 'buffered': self.buffered}

    def restore(self, state: Mapping[str, int]) -> None:
        self.version, self.admitted = state['version'], state['admitted']
        self.running, self.buffered = state['running'], state['buffered']

    def __repr__(self) -> str:
        return (
            f'StalenessGate(version={self.version}, eta={self.eta}, groups_per_update={self.groups_per_update}, '
            f'admitted={self.admitted}, running={self.running}/{self.max_running}, '
            f'buffered={self.buffered}/{self.buffer_capacity})'
        )


class HeldState(TypedDict):
    """HeldTimes at one instant, JSON-able."""

    seconds: dict[str, float]  # by bound
    bound: Bound | None
    weight: int
    since_s: float


class HeldTimes:
    """Clock seconds of closed admission, by the bound that closed it; each change takes constant time.

    With a weight, seconds are multiplied by it: for example, slot-seconds of idle decoding slots.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # since the last `take`
        self._bound: Bound | None = None
        self._weight = 1
        self._since_s = 0.0

    def note(self, bound: Bound | None, now_s: float, weight: int = 1) -> None:
        """Notes that admission is closed by `bound` from now on, and a second counts `weight`; None = it is open."""
        if self._bound is not None and self._weight and now_s > self._since_s:
            before = self._seconds.get(self._bound, 0.0)
            self._seconds[self._bound] = before + self._weight * now_s - self._weight * self._since_s
        self._bound, self._weight, self._since_s = bound, weight, now_s

    def take(self, now_s: float) -> dict[str, float]:
        """Seconds by bound since the last call; a bound that never closed admission is absent."""
        self.note(self._bound, now_s, self._weight)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def state(self, now_s: float) -> HeldState:
        """Returns the state. Ends the open interval, so that a resumed run adds the same terms in the same order."""
        self.note(self._bound, now_s, self._weight)
        seconds = dict(self._seconds)
        return {'seconds': seconds, 'bound': self._bound, 'weight': self._weight, 'since_s': self._since_s}

    def restore(self, state: HeldState) -> None:
        self._seconds, self._bound, self._since_s = dict(state['seconds']), state['bound'], state['since_s']
        self._weight = state['weight']


# Admission: starts groups as soon as the staleness gate, the bounds on memory, a checkpoint and a stop allow it.
#
# The controller runs it; lock_step.py uses it to admit by a schedule.


class Admission:
    """Starts groups while admission is open, and measures how long each bound keeps it closed."""

    def __init__(
        self,
        clock: Clock,
        gate: StalenessGate,
        demand: SlotDemand,
        stop_requested: Event,
        start_group: Callable[[], None],
    ):
        """`start_group` draws a prompt and starts its episodes."""
        self._clock, self._gate, self._stop_requested, self.start_group = clock, gate, stop_requested, start_group
        self.demand = demand
        self.is_by_need = math.isinf(gate.max_running)
        self.is_closed = False  # by a checkpoint or a stop
        self._changed = clock.event('admission (staleness, memory or checkpoint)')
        self._bound: Bound | None = None
        self.held = HeldTimes()
        self.idle = HeldTimes()  # seconds of idle slots

    def close(self) -> None:
        """Keeps groups from starting until `open`."""
        self.is_closed = True

    def open(self) -> None:
        """Allows groups again, from the next `note_change` on."""
        self.is_closed = False

    def note_change(self) -> None:
        """Notes an event after which a group may be allowed to start."""
        self._changed.set()

    def note_room(self) -> None:
        """Notes that a request has ended, or an engine has joined or left."""
        self._note_idle()
        if self.is_by_need:
            self._changed.set()

    def closed_by(self) -> Bound | None:
        """The bound that keeps the next group from starting; None if it may start."""
        if self.is_closed:
            return 'stop' if self._stop_requested.is_set() else 'checkpoint'
        bound = self._gate.closed_by()
        if bound is None and self.is_by_need and self.demand.open_answers() >= self.demand.wanted_answers():
            return 'slots'
        return bound

    def note_bound(self, bound: Bound | None) -> None:
        """Notes that `bound` holds admission closed from now on; None = it is open."""
        self._bound = bound
        self.held.note(bound, self._clock.now())
        self._note_idle()

    async def wait(self, bound: Bound) -> None:
        """Returns at the next change; the time until then counts for `bound`."""
        self.note_bound(bound)
        self._changed.clear()
        await self._clock.wait(self._changed)

    def _note_idle(self) -> None:
        self.idle.note(self._bound, self._clock.now(), self.demand.idle_slots())

    async def run(self) -> None:
        """Starts groups for ever."""
        while True:
            while bound := self.closed_by():
                await self.wait(bound)
            self.start_group()
