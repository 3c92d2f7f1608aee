"""The common part of all clocks: lanes, named waits, calls, and completions, released one at a time to an idle loop.

asyncio asks its selector to block only when no callback is ready. At that moment the clock releases one completion and
returns, so the program handles one completion, runs until nothing is ready, and only then gets the next. This loop, the
host's, has no asyncio timers (equal timers are not first in, first out), so only the order of completions determines
the program's actions. I/O runs on a separate loop (io.py), and its outcome enters as a completion like any other.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import contextlib
import dataclasses
import functools
import heapq
import itertools
import selectors
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic, NoReturn, TypeVar

from areal_jax import protocols
from areal_jax.control.clocks.io import IoCall, IoLoop
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import UserError
from areal_jax.types import Work


@dataclasses.dataclass(eq=False)
class Interval:
    """One use of a lane: blocking work, or a call (I/O), which has a deadline."""

    lane: str
    work: Work
    number: int  # of the request, for the event log
    fn: Callable[[], Any]  # work: returns the result; a call: returns an awaitable of it
    future: asyncio.Future[Any]  # awaited by the coroutine that asked for the interval
    deadline_s: float | None = None  # of a call, in wall seconds from its start; None: blocking work
    call: IoCall | None = None  # set when a call starts
    started_s: float = 0.0  # clock seconds
    seconds: float = 0.0
    result: object = None
    error: BaseException | None = None

    @property
    def is_call(self) -> bool:
        return self.deadline_s is not None

    def describe(self) -> str:
        return f'{"call" if self.is_call else "work"} {self.work.kind!r} on lane {self.lane!r}'

    def take_outcome(self) -> None:
        """Copies result or error of a call that has ended."""
        assert self.call is not None
        self.result, self.error = self.call.result, self.call.error
        if self.call.is_late:
            self.error = self.describe_lateness()

    def describe_lateness(self) -> TimeoutError:
        """The error of a call that hit its deadline."""
        return TimeoutError(f'{self.describe()} exceeded its deadline of {self.deadline_s} s')

    def deliver(self) -> None:
        """Gives result or error to the waiting coroutine, unless it was cancelled."""
        if self.future.done():
            return
        if isinstance(self.error, StopIteration):  # a future cannot carry it (PEP 479)
            error = RuntimeError(f'{self.describe()} raised StopIteration')
            error.__cause__ = self.error
            self.future.set_exception(error)
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Lane:
    """Serves up to `width` intervals at once, in order of request."""

    def __init__(self, width: int):
        self.width = width
        self.n_busy = 0
        self.queue: collections.deque[Interval] = collections.deque()

    def next_interval(self) -> Interval | None:
        """Takes the next interval to begin; None while the lane is full or nothing is queued."""
        while self.queue and self.n_busy < self.width:
            interval = self.queue.popleft()
            if not interval.future.cancelled():
                self.n_busy += 1
                return interval
        return None


# Inboxes: other threads put items for the program, and each item enters in its turn among the clock's completions.
#
# `LoopClock.inbox` makes one. A server's HTTP thread puts its requests here.


Item = TypeVar('Item')


class Inbox(Generic[Item]):
    """A FIFO queue: any number of threads put, one coroutine takes."""

    def __init__(
        self,
        arrived: protocols.Event,
        post: Callable[[Callable[[], None]], None],
        wait: Callable[[protocols.Event], Awaitable[bool]],
    ):
        """`post` runs a function on the host's loop in its turn; `wait` waits for the event through the clock."""
        self._arrived, self._post, self._wait = arrived, post, wait
        self._items: collections.deque[Item] = collections.deque()  # items whose turn has come

    def put(self, item: Item) -> None:
        """Puts an item, from any thread, also before the program runs; does nothing after it has ended."""
        self._post(functools.partial(self._receive, item))

    async def take(self) -> Item:
        """Takes the oldest item; waits if there is no item."""
        while not self._items:
            self._arrived.clear()
            await self._wait(self._arrived)
        return self._items.popleft()

    def _receive(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()


_Result = TypeVar('_Result')
Ready = list[tuple[selectors.SelectorKey, int]]  # what a selector returns
Block = Callable[[float | None], Ready]  # waits for the loop's wake-up, at most the given wall seconds


class DeadlockError(RuntimeError):
    """Coroutines wait and nothing can wake them; the message names the waits."""


class StallError(UserError, RuntimeError):
    """Nothing has completed for longer than run.stall_timeout_s; the message names waits and busy lanes.

    Probes of servers (lanes.is_upkeep_lane) and deadlines of waits do not count as completions: they never stop.
    """


class CallDeadlineError(UserError, RuntimeError):
    """A call under the virtual clock hit its wall-time deadline, so the run would no longer be deterministic."""


class Event:
    """A named flag; setting it wakes its waiters in the order in which they came."""

    def __init__(self, name: str):
        self.name = name
        self.waiters: dict[asyncio.Future[bool], None] = {}  # ordered; a dict, so that a waiter leaves in O(1)
        self._set = False

    def set(self) -> None:
        self._set = True
        waiters, self.waiters = self.waiters, {}
        for future in waiters:
            if not future.done():
                future.set_result(True)

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set


@dataclasses.dataclass(eq=False)
class Deadline:
    """The deadline of a wait."""

    event: protocols.Event
    future: asyncio.Future[bool]


class LoopClock(abc.ABC):
    """Base of the clocks: subclasses define how an interval begins and which completion is next.

    The time to begin an interval and to release a completion does not depend on the number of waiting coroutines.
    """

    def __init__(self, lanes: Mapping[str, int], log: EventLog):
        self.lanes = {name: Lane(width) for name, width in lanes.items()}
        self.log = log
        self._io = IoLoop()
        self._order = itertools.count()
        self._busy: dict[Interval, None] = {}  # intervals under way, on all lanes
        self._deadlines: list[tuple[float, int, Deadline]] = []
        self._waiting: dict[asyncio.Future[bool], tuple[str, asyncio.Task[Any] | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early_signals: list[tuple[signal.Signals, protocols.Event]] = []
        self._is_abandoned = False
        self._takes_arrivals = False  # an inbox was made: the program may be woken from outside
        self._may_idle = False  # the program may be idle for ever, without a StallError
        self._signal_lock = threading.Lock()
        log.start(self.now)

    # Called by the program.

    @abc.abstractmethod
    def now(self) -> float:
        """Clock seconds: the time of the last completion released."""

    def event(self, name: str) -> Event:
        return Event(name)

    def inbox(self, name: str, *, may_idle: bool = False) -> Inbox[Any]:
        """Makes an inbox, in which other threads put items for the program.

        If `may_idle`, the real clock from then on takes a program that waits without busy lanes as idle, not stalled:
        a server may wait for requests, but a run that waits for a server's reply may stall.
        Under the virtual clock only the program itself may put items: the times of other threads are not repeatable.
        """
        self._takes_arrivals, self._may_idle = True, self._may_idle or may_idle
        return Inbox(Event(name), self._post_arrival, self.wait)

    async def run(self, lane: str, fn: Callable[[], _Result], work: Work) -> _Result:
        """Does blocking work on the lane; returns or raises as `fn` does."""
        interval = Interval(lane, work, self.log.take_run_number(), fn, self._new_future())
        self._request(interval)
        return await interval.future

    async def call(self, lane: str, fn: Callable[[], Awaitable[_Result]], work: Work, deadline_s: float) -> _Result:
        """Does I/O in the lane's turn: `fn` is called on the I/O loop and its result is awaited there.

        Cancelling the caller cancels the I/O. A stream is one call for each item: `functools.partial(anext, items)`.
        Raises the I/O's exceptions, and TimeoutError that names the call `deadline_s` wall seconds after its start.
        """
        interval = Interval(lane, work, self.log.take_run_number(), fn, self._new_future(), deadline_s)
        self._request(interval)
        try:
            return await interval.future
        finally:
            if interval.call is not None:
                interval.call.cancel()

    async def wait(self, event: protocols.Event, timeout_s: float | None = None) -> bool:
        """Waits for the event; returns True when it is set, False at the deadline."""
        if event.is_set():
            return True
        future: asyncio.Future[bool] = self._new_future()
        event.waiters[future] = None
        self._waiting[future] = event.name, asyncio.current_task()
        if timeout_s is not None:
            entry = Deadline(event, future)
            heapq.heappush(self._deadlines, (self._deadline_key(timeout_s), next(self._order), entry))
        try:
            return await future
        finally:
            del self._waiting[future]
            event.waiters.pop(future, None)

    def post_signal(self, number: signal.Signals, event: protocols.Event) -> None:
        """Sets the event in its turn among the completions; callable from any thread, also before the program runs.

        Does nothing after the program has ended.
        """
        with self._signal_lock:
            if self._loop is None:
                self._early_signals.append((number, event))
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._post_signal, number, event)

    def abandon(self) -> None:
        """Ends the program at once: `execute` raises KeyboardInterrupt. From any thread, also before the program runs.

        Waits for work under way, as at any other end. Does nothing after the program has ended.
        """
        with self._signal_lock:
            self._is_abandoned = True
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_raise_interrupt)

    def execute(self, program: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs the program on an event loop of this clock; returns its result."""
        loop = _HostLoop(_IdleSelector(self._release_next))
        with self._signal_lock:
            self._loop = loop
            for number, event in self._early_signals:
                loop.call_soon(self._post_signal, number, event)
            if self._is_abandoned:
                loop.call_soon(_raise_interrupt)
        try:
            return loop.run_until_complete(loop.create_task(program, name='main'))
        finally:
            self._shut_down(loop)

    def declare(self, lane: str, width: int) -> None:
        """Adds a lane for a server that has joined; does nothing if the lane exists."""
        self.lanes.setdefault(lane, Lane(width))

    # Defined by subclasses.

    @abc.abstractmethod
    def _begin(self, interval: Interval) -> None: ...

    @abc.abstractmethod
    def _note_end_of_call(self, interval: Interval) -> None:
        """Called on the I/O thread when a call has ended."""

    @abc.abstractmethod
    def _deadline_key(self, timeout_s: float) -> float: ...

    @abc.abstractmethod
    def _release_next(self, block: Block) -> Ready: ...

    @abc.abstractmethod
    def _post_signal(self, number: signal.Signals, event: protocols.Event) -> None: ...

    @abc.abstractmethod
    def _post_arrival(self, receive: Callable[[], None]) -> None:
        """Calls `receive` on the host's loop, in its turn among the completions."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Ends threads and frees other resources."""

    # Lanes.

    def _request(self, interval: Interval) -> None:
        if interval.lane not in self.lanes:
            raise ValueError(f'lane {interval.lane!r} was not declared; lanes: {sorted(self.lanes)}')
        lane = self._lane_of(interval)
        lane.queue.append(interval)
        self._start(lane)

    def _lane_of(self, interval: Interval) -> Lane:
        """The lane that serves the interval."""
        return self.lanes[interval.lane]

    def _start(self, lane: Lane) -> None:
        while (interval := lane.next_interval()) is not None:
            self._busy[interval] = None
            interval.started_s = self.now()
            work = interval.work
            self.log.write(
                'run_start', interval.lane, run=interval.number, work=work.kind, amount=work.amount, **work.detail
            )
            self._begin(interval)

    def _start_call(self, interval: Interval) -> None:
        assert interval.deadline_s is not None
        interval.call = self._io.start(
            interval.describe(), interval.fn, interval.deadline_s, lambda: self._note_end_of_call(interval)
        )

    def _finish(self, interval: Interval) -> None:
        """Releases a completed interval to the program and starts the lane's next intervals."""
        lane = self._lane_of(interval)
        lane.n_busy -= 1
        del self._busy[interval]
        if interval.is_call:
            self._take_outcome(interval)
            interval.call = None  # breaks a reference cycle, which would wait for the garbage collector
        self._write_completion(
            'run_done', interval.lane, interval, run=interval.number, work=interval.work.kind,
            amount=interval.work.amount, started=interval.started_s, seconds=interval.seconds,
        )  # fmt: skip
        interval.deliver()
        self._start(lane)

    def _take_outcome(self, interval: Interval) -> None:
        interval.take_outcome()

    def _write_completion(
        self, kind: str, lane: str | None = None, interval: Interval | None = None, **fields: object
    ) -> None:
        """Logs the release of a completion, which is an interval, a deadline or a signal."""
        self.log.write(kind, lane, **fields)

    def _expire(self, deadline: Deadline) -> None:
        if not deadline.future.done():
            self._write_completion('deadline', wait=deadline.event.name)
            deadline.future.set_result(False)

    def _next_deadline(self) -> tuple[float, int, Deadline] | None:
        """The first deadline whose wait is not over, as (time, order, deadline); it stays in the heap."""
        while self._deadlines and self._deadlines[0][2].future.done():
            heapq.heappop(self._deadlines)  # once per wait, so O(log n) per wait
        return self._deadlines[0] if self._deadlines else None

    def _wake(self) -> None:
        """Makes the host's loop return from its selector; callable from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(_do_nothing)

    def describe_waits(self) -> str:
        """Every wait and every busy lane, by name."""
        waits = [f'{event!r} awaited by {_task_name(task)}' for event, task in self._waiting.values()]
        busy = [f'lane {interval.lane!r} busy with {interval.work.kind!r}' for interval in self._busy]
        return '; '.join([*waits, *busy]) or 'nothing is waiting'

    def _new_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def _shut_down(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except (DeadlockError, StallError, CallDeadlineError):
            pass  # a coroutine waits in its clean-up for something that will not come
        finally:
            self._io.close()
            self._close()
            with self._signal_lock:
                loop.close()


class _HostLoop(asyncio.SelectorEventLoop):
    def call_at(self, *args: object, **keywords: object) -> NoReturn:
        """Raises RuntimeError: a timer would never fire, since only completions of the clock wake this loop."""
        raise RuntimeError("the host's loop has no timers: wait with clock.wait, and do I/O inside clock.call")


class _IdleSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Calls the clock whenever the loop has no ready callback."""

    def __init__(self, release_next: Callable[[Block], Ready]):
        super().__init__()
        self._release_next = release_next

    def select(self, timeout: float | None = None) -> Ready:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self._release_next(super().select)


def _task_name(task: asyncio.Task[Any] | None) -> str:
    return task.get_name() if task else 'no task'


def _do_nothing() -> None:
    """The callback of a wake-up."""


def _raise_interrupt() -> NoReturn:
    """Ends the calling loop: asyncio lets KeyboardInterrupt through."""
    raise KeyboardInterrupt
