"""The virtual clock: work runs inline, and time, an integer in nanoseconds, advances only at completions.

Selected by run.clock=virtual; most tests use it. The part common to all clocks is in loop.py.
"""

from __future__ import annotations

import heapq
import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from areal_jax.control.clocks.loop import (
    Block,
    CallDeadlineError,
    Deadline,
    DeadlockError,
    Interval,
    Lane,
    LoopClock,
    Ready,
)
from areal_jax.control.event_writer import EventLog, Recording
from areal_jax.events.schema import DeadlineEvent, RunDoneEvent, SignalEvent
from areal_jax.protocols import Event
from areal_jax.types import Work

NANOSECONDS = 1_000_000_000
Price = float | Callable[[str, Work], float]  # seconds per unit of the amount, or (lane, work) -> seconds
BLOCKED_S = 5.0  # a call is given up this long after its deadline: the I/O loop, with its timer, is blocked


class VirtualClock(LoopClock):
    """Deterministic: the interleaving is a function of the program and of the prices of its work.

    `prices` maps a kind of work to seconds per unit of its amount, or to a function of lane and work. A `call` really
    runs; time stops at its modelled end until its result has arrived. Work in the background takes its modelled time
    and does not delay the work in the foreground of its lane.
    """

    def __init__(self, lanes: Mapping[str, int], log: EventLog, prices: Mapping[str, Price], start_s: float = 0.0):
        self._now_ns = round(start_s * NANOSECONDS)
        self.prices = dict(prices)
        self._heap: list[tuple[int, int, Interval | tuple[signal.Signals, Event] | Callable[[], None]]] = []
        self._background: dict[str, Lane] = {}  # by lane: the queue of its background work
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
        """Does nothing: work runs inline."""


# The replay clock: work runs inline, and completions are released in the order of a log of the real clock.
#
# The part common to all clocks is in loop.py.


_TAKEN = ('reply', 'failure', 'check')  # fields that only the log has
Failure = Callable[[str], Exception]  # message -> exception


class EndOfLogError(DeadlockError):
    """Coroutines wait, and the replayed start has no further completion: it was stopped or killed there."""


class ReplayClock(LoopClock):
    """Releases the completions of one start of a run at the times in its log, and checks every event.

    Work is done at the beginning of its interval. A call is not made: its outcome comes from the log. The program
    ends with ReplayError at the first event that differs, and with EndOfLogError if it still waits at the end of the
    log.

    Args:
      recording: the events of the start; every event that the program writes is checked against it.
      failures: exceptions that calls raised, by the name of their type.
    """

    def __init__(
        self,
        lanes: Mapping[str, int],
        log: EventLog,
        recording: Recording,
        *,
        start_s: float = 0.0,
        failures: Mapping[str, Failure],
    ):
        self._recording, self._failures = recording, failures
        self._now = start_s
        self._by_number: dict[int, Interval] = {}  # intervals under way
        self._released: RunDoneEvent | DeadlineEvent | SignalEvent | None = None  # the completion released last
        self.stop_requested: Event | None = None  # set by a signal in the log
        log.listeners.insert(0, recording.check)
        super().__init__(lanes, log)

    def now(self) -> float:
        return self._now

    def _begin(self, interval: Interval) -> None:
        self._by_number[interval.number] = interval
        if interval.is_call:
            return
        try:
            interval.result = interval.fn()
        except Exception as error:  # raised in the coroutine that asked for the work, at the time in the log
            interval.error = error

    def _take_outcome(self, interval: Interval) -> None:
        event = self._released
        assert event is not None
        assert event['kind'] == 'run_done'
        if 'reply' in event:
            interval.result = json.loads(event['reply'])
        elif 'failure' in event:
            interval.error = self._failure(interval, event['failure'])
        else:
            raise self._recording.refuse(event['seq'], "no reply of 'run_done'", f'needs one: {interval.describe()}')

    def _failure(self, interval: Interval, name: str) -> Exception:
        if name == 'TimeoutError':
            return interval.describe_lateness()
        return self._failures.get(name, RuntimeError)(f'{interval.describe()} failed with {name} in the run')

    def _write_completion(
        self, kind: str, lane: str | None = None, interval: Interval | None = None, **fields: object
    ) -> None:
        released = self._released
        assert released is not None
        taken = {name: value for name, value in released.items() if name in _TAKEN}
        self.log.write(kind, lane, **fields, **taken)

    def _note_end_of_call(self, interval: Interval) -> None:
        """Is never called: no call is made."""

    def _deadline_key(self, timeout_s: float) -> float:
        return self._now + timeout_s

    def _post_signal(self, number: signal.Signals, event: Event) -> None:
        raise RuntimeError('a replay takes the signals of its log and no other')

    def _post_arrival(self, receive: Callable[[], None]) -> None:
        raise RuntimeError('a replay takes nothing from other threads')

    def _release_next(self, block: Block) -> Ready:
        seq = self.log.next_seq
        event = None if self._recording.fault else self._recording.next_completion(seq)
        if event is None:
            raise EndOfLogError(f'the log has no further completion: {self.describe_waits()}')
        self._now = event['time']
        if event['kind'] == 'run_done':
            interval = self._by_number.pop(event['run'], None)
            if interval is None:
                self._refuse_unknown(seq, f'run={event["run"]} of {event["kind"]!r}', 'has no such run under way')
            self._released = event
            interval.started_s, interval.seconds = event['started'], event['seconds']
            self._finish(interval)
        elif event['kind'] == 'deadline':
            deadline = self._take_deadline(event['wait'])
            if deadline is None:
                self._refuse_unknown(seq, f'wait={event["wait"]!r} of {event["kind"]!r}', 'has no such wait')
            self._released = event
            self._expire(deadline)
        elif event['kind'] == 'signal':
            if self.stop_requested is None:
                self._refuse_unknown(seq, f'{event["kind"]!r}', 'takes no signals')
            self._released = event
            self._write_completion('signal', name=event['name'])
            self.stop_requested.set()
        return []

    def _take_deadline(self, name: str) -> Deadline | None:
        """The first deadline of an open wait with this name."""
        for _, _, deadline in sorted(self._deadlines, key=lambda entry: entry[:2]):
            if not deadline.future.done() and deadline.event.name == name:
                return deadline
        return None

    def _refuse_unknown(self, seq: int, recorded: str, replayed: str) -> NoReturn:
        raise self._recording.refuse(seq, recorded, replayed)

    def _close(self) -> None:
        """Nothing to free: work runs inline."""
