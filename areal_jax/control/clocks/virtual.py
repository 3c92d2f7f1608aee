"""The virtual clock: work runs inline, and time, an integer in nanoseconds, advances only at completions.

Selected by run.clock=virtual; most tests use it. What it shares with the other clocks is in loop.py.
"""

from __future__ import annotations

import heapq
import signal
import threading
import time
from collections.abc import Callable, Mapping

from areal_jax.control.clocks.loop import Block, CallDeadlineError, DeadlockError, Interval, Lane, LoopClock, Ready
from areal_jax.control.event_writer import EventLog
from areal_jax.protocols import Event
from areal_jax.types import Work

NANOSECONDS = 1_000_000_000
Price = float | Callable[[str, Work], float]  # seconds per unit of the amount, or of the work on a lane
BLOCKED_S = 5.0  # beyond its deadline a call is given up from here: something blocks the I/O loop's own timer


class VirtualClock(LoopClock):
    """Deterministic: the interleaving is a function of the program and of the prices of its work.

    `prices` maps a kind of work to seconds per unit of its amount, or to a function of lane and work. A `call` runs for
    real and holds time back at its modelled end until its result is there. Work in the background takes its modelled
    time and delays no other work of its lane: what runs in the foreground goes on as if it were not there.
    """

    def __init__(self, lanes: Mapping[str, int], log: EventLog, prices: Mapping[str, Price], start_s: float = 0.0):
        self._now_ns = round(start_s * NANOSECONDS)
        self.prices = dict(prices)
        self._heap: list[tuple[int, int, Interval | tuple[signal.Signals, Event] | Callable[[], None]]] = []
        self._background: dict[str, Lane] = {}  # by the lane beside which it runs
        self._thread = threading.get_ident()  # the program's thread
        self._held: Interval | None = None  # a call past its modelled end
        self._held_until_s = 0.0  # wall time
        super().__init__(lanes, log)

    def now(self) -> float:
        return self._now_ns / NANOSECONDS

    def price_s(self, lane: str, work: Work) -> float:
        """Modelled seconds of the work on the lane."""
        if work.kind not in self.prices:
            raise ValueError(f'work {work.kind!r} has no price under the virtual clock; priced: {sorted(self.prices)}')
        price = self.prices[work.kind]
        return price(lane, work) if callable(price) else price * work.amount

    def _lane_of(self, interval: Interval) -> Lane:
        if interval.work.in_background:
            return self._background.setdefault(interval.lane, Lane(1))
        return super()._lane_of(interval)

    def _begin(self, interval: Interval) -> None:
        interval.seconds = self.price_s(interval.lane, interval.work)
        if interval.is_call:
            self._start_call(interval)
        else:
            try:
                interval.result = interval.fn()
            except Exception as error:
                interval.error = error
        end = self._now_ns + round(interval.seconds * NANOSECONDS)
        heapq.heappush(self._heap, (end, next(self._order), interval))

    def _note_end_of_call(self, interval: Interval) -> None:
        self._wake()

    def _deadline_key(self, timeout_s: float) -> float:
        return self._now_ns + round(timeout_s * NANOSECONDS)

    def _post_signal(self, number: signal.Signals, event: Event) -> None:
        heapq.heappush(self._heap, (self._now_ns, next(self._order), (number, event)))

    def _post_arrival(self, receive: Callable[[], None]) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError('under the virtual clock nothing may come from another thread: use run.clock=real')
        heapq.heappush(self._heap, (self._now_ns, next(self._order), receive))

    def _release_next(self, block: Block) -> Ready:
        if self._held is not None:
            return self._release_held(self._held, block)
        first = self._next_deadline()
        if first is not None and (not self._heap or first[:2] < self._heap[0][:2]):
            when, _, deadline = heapq.heappop(self._deadlines)
            self._now_ns = int(when)
            self._expire(deadline)
            return []
        if not self._heap:
            raise DeadlockError(f'nothing can wake the program: {self.describe_waits()}')
        when, _, entry = heapq.heappop(self._heap)
        self._now_ns = max(self._now_ns, when)
        if isinstance(entry, tuple):
            self.log.write('signal', name=entry[0].name)
            entry[1].set()
        elif not isinstance(entry, Interval):
            entry()
        elif entry.is_call:
            assert entry.deadline_s is not None
            self._held, self._held_until_s = entry, time.monotonic() + entry.deadline_s + BLOCKED_S
            return self._release_held(entry, block)
        else:
            self._finish(entry)
        return []

    def _release_held(self, interval: Interval, block: Block) -> Ready:
        assert interval.call is not None
        left_s = self._held_until_s - time.monotonic()
        if not interval.call.has_ended and left_s > 0:
            return block(left_s)
        self._held = None
        if not interval.future.done() and (interval.call.is_late or not interval.call.has_ended):
            raise CallDeadlineError(
                f'{interval.describe()} hit its wall-time deadline under the virtual clock; what comes after would '
                'depend on the machine. Raise the deadline or use run.clock=real'
            )
        self._finish(interval)
        return []

    def _close(self) -> None:
        """Nothing to free: work runs inline."""
