"""Work on lanes that share cores: while several are busy, each gets on more slowly."""

from __future__ import annotations

from collections.abc import Mapping

from areal_jax.control.clocks.lanes import Interval


class SharedCores:
    """What is left of the work under way, in nanoseconds at full speed.

    Args:
      contention: how many times longer work takes while two or more lanes are busy; 1 = nothing is shared.
    """

    def __init__(self, contention: float):
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
        rate = self._rate()
        return {interval: self._settled_ns + max(0, round(left / rate)) for interval, left in self._left_ns.items()}

    def _settle(self, now_ns: int) -> None:
        done = (now_ns - self._settled_ns) * self._rate()
        self._left_ns = {interval: left - done for interval, left in self._left_ns.items()}
        self._settled_ns = now_ns

    def _rate(self) -> float:
        return 1 / self.contention if len({interval.lane for interval in self._left_ns}) > 1 else 1.0
