"""The real clock: threads for each lane; completions, deadlines, signals and arrivals enter through one FIFO.

Selected by run.clock=real. The part common to all clocks is in loop.py.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping

from areal_jax.control.clocks.loop import Block, Deadline, DeadlockError, Interval, LoopClock, Ready, StallError
from areal_jax.control.event_writer import EventLog, check_of
from areal_jax.errors import name_type
from areal_jax.lanes import is_upkeep_lane
from areal_jax.protocols import Event

END_OF_WORK_S = 20.0  # longest wait of the program's end for work under way: a lane may hang
_END_OF_STALLED_WORK_S = 0.2
_Posted = Interval | Deadline | tuple[signal.Signals, Event] | Callable[[], None]


class RealClock(LoopClock):
    """Wall time, in seconds since the start plus `start_s`; one completion is released when nothing is ready."""

    def __init__(
        self,
        lanes: Mapping[str, int],
        log: EventLog,
        stall_timeout_s: float,
        start_s: float = 0.0,
        end_of_work_s: float = END_OF_WORK_S,
    ):
        self._origin = time.monotonic() - start_s
        self._now = start_s
        self.stall_timeout_s = stall_timeout_s
        self._fifo: collections.deque[tuple[float, _Posted]] = collections.deque()
        self._queues: dict[str, queue.SimpleQueue[Interval | None]] = {}
        self._last_progress = time.monotonic()  # time of the last completion that counts for a stall
        self._threads: list[threading.Thread] = []
        self._end_of_work_s = end_of_work_s
        self.max_lag_s = 0.0  # longest time from a completion to its release: the loop's lag
        self.longest_lag_work = ''
        super().__init__(lanes, log)

    def now(self) -> float:
        return self._now

    def restart(self) -> None:
        """Continues from the current time: the seconds since the clock was made (building, compiling) do not count."""
        self._origin = time.monotonic() - self._now
        self._last_progress = time.monotonic()
        self.max_lag_s, self.longest_lag_work = 0.0, ''

    def _begin(self, interval: Interval) -> None:
        interval.started_s = time.monotonic() - self._origin
        if interval.is_call:
            self._start_call(interval)
            return
        if interval.lane not in self._queues:
            self._queues[interval.lane] = queue.SimpleQueue()
            for index in range(self.lanes[interval.lane].width):
                name = f'{interval.lane}#{index}'
                thread = threading.Thread(
                    target=self._work, args=(self._queues[interval.lane],), name=name, daemon=True
                )
                thread.start()
                self._threads.append(thread)
        self._queues[interval.lane].put(interval)

    def _work(self, intervals: queue.SimpleQueue[Interval | None]) -> None:
        while (interval := intervals.get()) is not None:
            interval.started_s = time.monotonic() - self._origin
            try:
                interval.result = interval.fn()
            except BaseException as error:  # raised in the coroutine that asked for the work
                interval.error = error
            self._post(interval)
            self._wake()
            del interval  # else it would keep weights or a checkpoint alive until the next interval

    def _note_end_of_call(self, interval: Interval) -> None:
        self._post(interval)
        self._wake()

    def _post(self, item: _Posted) -> None:
        if isinstance(item, Interval):
            item.seconds = time.monotonic() - self._origin - item.started_s
        self._fifo.append((time.monotonic(), item))

    def _deadline_key(self, timeout_s: float) -> float:
        return time.monotonic() + timeout_s

    def _post_signal(self, number: signal.Signals, event: Event) -> None:
        self._post((number, event))

    def _post_arrival(self, receive: Callable[[], None]) -> None:
        self._post(receive)
        if self._loop is not None:  # else the loop finds the item when it begins
            self._wake()

    def _release_next(self, block: Block) -> Ready:
        self._post_expired()
        if self._fifo:
            self._release(*self._fifo.popleft())
            return []
        deadline = self._next_deadline()
        is_idle = self._may_idle and not self._busy
        if deadline is None and not self._busy and not self._takes_arrivals:
            raise DeadlockError(f'nothing can wake the program: {self.describe_waits()}')
        ends = [] if is_idle else [self._last_progress + self.stall_timeout_s]
        if deadline is not None:
            ends.append(deadline[0])
        ready = block(max(0.0, min(ends) - time.monotonic()) if ends else None)
        silent_s = time.monotonic() - self._last_progress
        if not ready and not self._fifo and not is_idle and silent_s >= self.stall_timeout_s:
            self._end_of_work_s = _END_OF_STALLED_WORK_S
            raise StallError(
                f'no completion for {self.stall_timeout_s} s (run.stall_timeout_s): {self.describe_waits()}'
            )
        return ready

    def _post_expired(self) -> None:
        now = time.monotonic()
        while (first := self._next_deadline()) is not None and first[0] <= now:
            self._post(heapq.heappop(self._deadlines)[2])

    def _release(self, posted: float, item: _Posted) -> None:
        now = time.monotonic()
        self._now = now - self._origin
        if _is_progress(item):
            self._last_progress = now
        if now - posted > self.max_lag_s:
            self.max_lag_s = now - posted
            self.longest_lag_work = item.work.kind if isinstance(item, Interval) else 'deadline, signal or arrival'
        if isinstance(item, Interval):
            self._finish(item)
        elif isinstance(item, Deadline):
            self._expire(item)
        elif callable(item):
            item()
        else:
            self._write_completion('signal', name=item[0].name)
            item[1].set()

    def _write_completion(
        self, kind: str, lane: str | None = None, interval: Interval | None = None, **fields: object
    ) -> None:
        """Logs a completion with the data for a replay: the outcome of a recorded call, and a checksum of the event."""
        if interval is not None and interval.work.recorded:
            error = interval.error
            outcome = {'reply': json.dumps(interval.result)} if error is None else {'failure': name_type(type(error))}
            fields |= outcome
        event = {'seq': self.log.next_seq, 'time': self._now, 'lane': lane, 'kind': kind, **fields}
        self.log.write(kind, lane, **fields, check=check_of(event))

    def _close(self) -> None:
        for name, intervals in self._queues.items():
            with contextlib.suppress(queue.Empty):
                while True:
                    intervals.get_nowait()  # its coroutine was cancelled
            for _ in range(self.lanes[name].width):
                intervals.put(None)
        end = time.monotonic() + self._end_of_work_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


def _is_progress(item: _Posted) -> bool:
    if isinstance(item, Interval):
        return not is_upkeep_lane(item.lane)
    return not isinstance(item, Deadline)
