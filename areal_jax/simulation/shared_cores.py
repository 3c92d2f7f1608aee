"""Work on lanes that share cores: while several are busy, each gets on more slowly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from areal_jax.control.clocks.loop import Interval
from areal_jax.lanes import LEARNER


@dataclasses.dataclass(frozen=True)
class Contention:
    """How many times longer work takes while two or more lanes are busy; 1 = its cores are its own."""

    learner: float = 1.0
    engines: float = 1.0

    @property
    def shares(self) -> bool:
        """Whether anything is shared."""
        return max(self.learner, self.engines) > 1


NO_CONTENTION = Contention()


class SharedCores:
    """What is left of the work under way, in nanoseconds at full speed."""

    def __init__(self, contention: Contention):
        self.contention = contention
        self._left_ns: dict[Interval, float] = {}
        self._settled_ns = 0

    def begin(self, interval: Interval, work_ns: int, now_ns: int) -> None:
        """The interval begins, with so much work."""
        self._settle(now_ns)
        self._left_ns[interval] = work_ns

    def end(self, interval: Interval, now_ns: int) -> bool:
        """The interval is over; False where it is none of these."""
        self._settle(now_ns)
        return self._left_ns.pop(interval, None) is not None

    def ends_ns(self) -> Mapping[Interval, int]:
        """When each will end, if nothing begins or ends before."""
        return {
            interval: self._settled_ns + max(0, round(left * self._slowdown(interval)))
            for interval, left in self._left_ns.items()
        }

    def _settle(self, now_ns: int) -> None:
        passed = now_ns - self._settled_ns
        self._left_ns = {
            interval: left - passed / self._slowdown(interval) for interval, left in self._left_ns.items()
        }  # fmt: skip
        self._settled_ns = now_ns

    def _slowdown(self, interval: Interval) -> float:
        if len({other.lane for other in self._left_ns}) < 2:
            return 1.0
        return self.contention.learner if interval.lane == LEARNER else self.contention.engines
