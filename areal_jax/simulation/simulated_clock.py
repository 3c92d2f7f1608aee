"""The clock of a simulation: the virtual clock with joined dispatches, lanes that share cores, and a busy host.

Quiet dispatches of an engine, between which nothing is decided, become one jump. A jump is planned until the first of
its answers ends or the blocks run out. If the engine is woken by a request, by weights or by a pause, the jump is cut
at the next dispatch boundary. So admissions, swaps and ends happen at the same nanosecond as without jumps.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import signal
from collections.abc import Callable, Mapping
from typing import cast

from areal_jax import protocols
from areal_jax.control.clocks.loop import Block, Event, Interval, Lane, Ready
from areal_jax.control.clocks.virtual import NANOSECONDS, Price, VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.lanes import LEARNER, is_engine_lane, pinned_wake_name, wake_name
from areal_jax.simulation.count_backend import Jump


@dataclasses.dataclass(frozen=True)
class Contention:
    """The factor by which work takes longer while two or more lanes are busy; 1 = the lane shares no cores."""

    learner: float = 1.0
    engines: float = 1.0

    @property
    def shares(self) -> bool:
        """Whether any lane shares cores."""
        return max(self.learner, self.engines) > 1


NO_CONTENTION = Contention()


class SharedCores:
    """The remaining work of the intervals under way, in nanoseconds at full speed."""

    def __init__(self, contention: Contention):
        self.contention = contention
        self._left_ns: dict[Interval, float] = {}
        self._settled_ns = 0

    def begin(self, interval: Interval, work_ns: int, now_ns: int) -> None:
        """Begins an interval with `work_ns` of work."""
        self._settle(now_ns)
        self._left_ns[interval] = work_ns

    def end(self, interval: Interval, now_ns: int) -> bool:
        """Ends an interval; False if it is not under way here."""
        self._settle(now_ns)
        return self._left_ns.pop(interval, None) is not None

    def ends_ns(self) -> Mapping[Interval, int]:
        """The end of each interval if nothing begins or ends before."""
        return {
            interval: self._settled_ns + max(0, round(left * self._slowdown(interval)))
            for interval, left in self._left_ns.items()
        }

    def _settle(self, now_ns: int) -> None:
        passed = now_ns - self._settled_ns
        self._left_ns = {interval: left - passed / self._slowdown(interval) for interval, left in self._left_ns.items()}
        self._settled_ns = now_ns

    def _slowdown(self, interval: Interval) -> float:
        if len({other.lane for other in self._left_ns}) < 2:
            return 1.0
        return self.contention.learner if interval.lane == LEARNER else self.contention.engines


_LANES = 1 << 48  # above any number of a request: at equal times the lane decides, then the order of requests
_Entry = Interval | tuple[signal.Signals, protocols.Event] | Callable[[], None]  # of the clock's heap
HostPrice = Mapping[str, float]  # seconds of the host's loop for a completion, by the kind of its work


@dataclasses.dataclass(eq=False)
class _Plan:
    """The planned end of an interval: `ends[count - 1]`, in ns of the clock."""

    order: int
    ends: list[int]
    count: int

    @property
    def end(self) -> int:
        return self.ends[self.count - 1]


class SimulatedClock(VirtualClock):
    """See the module.

    At equal times completions of engines come last, in the order of the engines, whatever was requested first, because
    joined dispatches make fewer requests.

    Args:
      host: seconds that a completion costs the host's loop, which handles one at a time; {} = nothing.
      contention: of lanes of engines and learner that share cores. With a host or contention, no dispatches are joined.
    """

    def __init__(
        self,
        lanes: Mapping[str, int],
        log: EventLog,
        prices: Mapping[str, Price],
        start_s: float = 0.0,
        *,
        host: HostPrice | None = None,
        contention: Contention = NO_CONTENTION,
    ):
        self._host, self._cores = dict(host or {}), SharedCores(contention)
        self._joins = not self._host and not contention.shares
        self._plans: dict[Interval, _Plan] = {}
        self._jumps: dict[str, Interval] = {}  # under way, by lane
        engines = sorted(filter(is_engine_lane, lanes), key=lambda lane: (len(lane), lane))
        self._by_wake = {wake(lane): lane for wake in (wake_name, pinned_wake_name) for lane in engines}
        self._ranks = {lane: 1 + index for index, lane in enumerate(engines)}
        self._released: tuple[int, int] = (-1, -1)  # the last key that was released
        self._joined = 1  # dispatches of the completion that is being released
        super().__init__(lanes, log, prices, start_s)

    def event(self, name: str) -> Event:
        lane = self._by_wake.get(name)
        return super().event(name) if lane is None else _WakeEvent(name, lambda: self._cut(lane))

    def _lane_of(self, interval: Interval) -> Lane:
        return self.lanes[interval.lane]  # evaluation during training takes time of its engines

    def _begin(self, interval: Interval) -> None:
        if interval.is_call:
            super()._begin(interval)
            return
        try:
            interval.result = interval.fn()
        except Exception as error:
            interval.error = error
        order = self._ranks.get(interval.lane, 0) * _LANES + next(self._order)
        ends = self._plan_ends(interval)
        self._plans[interval] = _Plan(order, ends, len(ends))
        if _find_jump(interval):
            self._jumps[interval.lane] = interval
        if self._cores.contention.shares and (is_engine_lane(interval.lane) or interval.lane == LEARNER):
            self._cores.begin(interval, ends[0] - self._now_ns, self._now_ns)
            self._reschedule()
        else:
            _push(self._heap, self._plans[interval], interval)

    def _plan_ends(self, interval: Interval) -> list[int]:
        """The ends of the dispatches that the interval joins; for other work, the end of the interval."""
        jump, work = _find_jump(interval), interval.work
        if jump is None or not self._joins:
            interval.seconds = self.price_s(interval.lane, work)
            return [self._now_ns + round(interval.seconds * NANOSECONDS)]
        count = max(1, min(jump.dispatches, int(work.size['quiet'])))
        seconds = [self.price_s(interval.lane, work)]
        size = dict(work.size)
        further = dataclasses.replace(work, size=size)
        for _ in range(1, count):
            size['positions'] += work.amount * size['rows']  # each row also sees its new tokens
            seconds.append(self.price_s(interval.lane, further))
        return list(itertools.accumulate((round(one * NANOSECONDS) for one in seconds), initial=self._now_ns))[1:]

    def _cut(self, lane: str) -> None:
        """Ends the jump of the lane with the dispatch that is under way."""
        interval = self._jumps.get(lane)
        if interval is None:
            return
        plan = self._plans[interval]
        count = 1 + bisect.bisect_right(plan.ends, self._released, key=lambda end: (end, plan.order))
        if count < plan.count:
            plan.count = count
            _push(self._heap, self._plans[interval], interval)

    def _finish(self, interval: Interval) -> None:
        plan = self._plans.pop(interval, None)
        self._joined = plan.count if plan else 1
        if plan is not None and (jump := _find_jump(interval)):
            state, _, contexts = cast(tuple[object, object, object], interval.result)
            interval.result = state, jump.finish(plan.count), contexts
            interval.seconds = (plan.end - round(interval.started_s * NANOSECONDS)) / NANOSECONDS
            del self._jumps[interval.lane]
        if self._cores.end(interval, self._now_ns):
            interval.seconds = self.now() - interval.started_s
            self._reschedule()
        super()._finish(interval)

    def _write_completion(
        self, kind: str, lane: str | None = None, interval: Interval | None = None, **fields: object
    ) -> None:
        joined = {'joined': self._joined} if interval and self._joined > 1 else {}
        super()._write_completion(kind, lane, interval, **fields, **joined)

    def _reschedule(self) -> None:
        """Pushes the new ends of all work that shares cores."""
        for interval, end in self._cores.ends_ns().items():
            self._plans[interval].ends = [end]
            _push(self._heap, self._plans[interval], interval)

    # The next completion.

    def _release_next(self, block: Block) -> Ready:
        if self._held is not None:  # the last released call
            return super()._release_next(block)
        while self._heap and _is_outdated(self._plans, *self._heap[0]):
            heapq.heappop(self._heap)
        first = self._next_deadline()
        keys = [(int(when), int(order)) for when, order, _ in (*self._heap[:1], *((first,) if first else ()))]
        if keys:
            key = min(keys)
            self._released = max(self._released, key)
            entry = self._heap[0][2] if self._heap and self._heap[0][:2] == key else None
            if isinstance(entry, Interval) and (cost_s := self._host.get(entry.work.kind)):
                self._now_ns = max(self._now_ns, key[0]) + round(cost_s * NANOSECONDS)
        return super()._release_next(block)


class _WakeEvent(Event):
    """An event that calls `on_set` when it is set."""

    def __init__(self, name: str, on_set: Callable[[], None]):
        super().__init__(name)
        self._on_set = on_set

    def set(self) -> None:
        self._on_set()
        super().set()


def _push(heap: list[tuple[int, int, _Entry]], plan: _Plan, interval: Interval) -> None:
    heapq.heappush(heap, (plan.end, plan.order, interval))


def _is_outdated(plans: Mapping[Interval, _Plan], when: int, order: int, entry: object) -> bool:
    """Whether the interval of an entry has ended, or now ends at another time."""
    if not isinstance(entry, Interval) or entry.is_call:
        return False
    plan = plans.get(entry)
    return plan is None or plan.end != when


def _find_jump(interval: Interval) -> Jump | None:
    result = interval.result
    return result[1] if isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], Jump) else None
