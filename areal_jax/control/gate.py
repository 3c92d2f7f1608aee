"""The staleness gate: may one more group start now? Equation 3 of arXiv 2505.24298, counted in groups.

gate.py and the controller use it; it knows counts only, no clock and no group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypedDict

# why no group may start: a field of the config, or what the controller is doing
Bound = Literal['steps', 'eta', 'max_running_groups', 'buffer_capacity', 'slots', 'schedule', 'checkpoint', 'stop']


class StalenessGate:
    """Counts admitted groups against the published policy version.

    A group may start only if floor((N - 1) / B) <= version + eta, where N counts the admitted groups and the new one. A
    group that is dropped before its batch is formed is subtracted. A group that is filtered inside a batch stays
    counted: the update used its place.

    Args:
      groups_per_update: B >= 1.
      eta: versions, >= 0; with inf only the bounds on memory remain.
      max_running: most groups that are admitted and unfinished; inf = as many as the slots need (gate.py).
      buffer_capacity: most finished groups; each admitted group has a place in the buffer reserved.
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
        """Groups that Eq. 3 still lets in: N <= (version + eta + 1) * B."""
        if math.isinf(self.eta):
            return math.inf
        return math.floor(self.version + self.eta + 1) * self.groups_per_update - self.admitted

    def closed_by(self) -> Bound | None:
        """The bound that keeps admission closed; None where it is open. If several do, the first in this order."""
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
        """A running group finished."""
        self.running -= 1
        self.buffered += 1

    def consume(self, groups: int) -> None:
        """A batch was formed of `groups` buffered groups."""
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
    """Clock seconds in which admission was closed, by the bound that closed it; each change costs constant time.

    With a weight they are seconds of something: idle decoding slots times seconds.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # since the last `take`
        self._bound: Bound | None = None
        self._weight = 1
        self._since_s = 0.0

    def note(self, bound: Bound | None, now_s: float, weight: int = 1) -> None:
        """From now on admission is closed by `bound`, and a second counts `weight`; None = it is open."""
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
        """Ends the interval under way here, so that a resumed run adds the same terms in the same order."""
        self.note(self._bound, now_s, self._weight)
        seconds = dict(self._seconds)
        return {'seconds': seconds, 'bound': self._bound, 'weight': self._weight, 'since_s': self._since_s}

    def restore(self, state: HeldState) -> None:
        self._seconds, self._bound, self._since_s = dict(state['seconds']), state['bound'], state['since_s']
        self._weight = state['weight']
