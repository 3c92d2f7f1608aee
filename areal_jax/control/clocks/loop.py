"""What all clocks share: lanes, named waits, and completions that enter one at a time when the loop is idle.

asyncio asks its selector to block only when no callback is ready. That call is the clock's: it releases one completion
and returns, so the program sees one completion, runs until nothing is ready, and only then sees the next. No asyncio
timer exists (equal timers are not first-in-first-out), so the order of completions is all that decides the program.
"""

from __future__ import annotations

import abc
import asyncio
import collections
import dataclasses
import heapq
import itertools
import selectors
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from areal_jax import protocols
from areal_jax.control.events import EventLog
from areal_jax.errors import UserError
from areal_jax.types import Work


class DeadlockError(RuntimeError):
    """Coroutines wait and nothing can wake them; the message names the waits."""


class StallError(UserError, RuntimeError):
    """Nothing has completed for longer than run.stall_timeout_s; the message names waits and busy lanes."""


class CallDeadlineError(UserError, RuntimeError):
    """A call under the virtual clock hit its wall-time deadline: the run cannot stay deterministic."""


class Event:
    """A named flag; setting it wakes its waiters in the order in which they came."""

    def __init__(self, name: str):
        self.name = name
        self.waiters: list[asyncio.Future[bool]] = []
        self._set = False

    def set(self) -> None:
        self._set = True
        waiters, self.waiters = self.waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(True)

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set


@dataclasses.dataclass(eq=False)
class Interval:
    """One occupation of a lane: a run (`fn`) or a call (`coro`)."""

    lane: str
    work: Work
    number: int
    future: asyncio.Future[Any]
    fn: Callable[[], Any] | None = None
    coro: Awaitable[Any] | None = None
    deadline_s: float | None = None  # calls: wall seconds
    task: asyncio.Task[Any] | None = None
    started_s: float = 0.0
    seconds: float = 0.0
    result: Any = None
    error: BaseException | None = None


@dataclasses.dataclass(eq=False)
class Deadline:
    """The end of a wait."""

    event: protocols.Event
    future: asyncio.Future[bool]


class _Lane:
    def __init__(self, width: int):
        self.width = width
        self.busy: list[Interval] = []
        self.queue: collections.deque[Interval] = collections.deque()


class LoopClock(abc.ABC):
    """Base of the clocks: subclasses say how an interval begins and what the next completion is."""

    def __init__(self, lanes: Mapping[str, int], log: EventLog):
        self.lanes = {name: _Lane(width) for name, width in lanes.items()}
        self.log = log
        self._order = itertools.count()
        self._deadlines: list[tuple[float, int, Deadline]] = []
        self._waiting: dict[asyncio.Future[bool], str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early_signals: list[tuple[signal.Signals, protocols.Event]] = []
        self._signal_lock = threading.Lock()
        log.start(self.now)

    # What the program calls.

    @abc.abstractmethod
    def now(self) -> float:
        """Clock seconds: the time of the last completion released."""

    def event(self, name: str) -> Event:
        return Event(name)

    async def run(self, lane: str, fn: Callable[[], Any], work: Work) -> Any:
        """Blocking work on the lane; returns what `fn` returns, raises what it raises."""
        interval = Interval(lane, work, self.log.take_run_number(), self._new_future(), fn=fn)
        self._request(interval)
        return await interval.future

    async def call(self, lane: str, coro: Awaitable[Any], work: Work, deadline_s: float) -> Any:
        """I/O on the loop in the lane's turn; raises TimeoutError that names the call at its wall-time deadline."""
        number = self.log.take_run_number()
        interval = Interval(lane, work, number, self._new_future(), coro=coro, deadline_s=deadline_s)
        self._request(interval)
        try:
            return await interval.future
        finally:
            if interval.task is None and isinstance(coro, Coroutine):
                coro.close()  # cancelled before its turn: it will not be awaited

    async def wait(self, event: protocols.Event, timeout_s: float | None = None) -> bool:
        """True when the event is (or becomes) set, False at the deadline."""
        if event.is_set():
            return True
        future: asyncio.Future[bool] = self._new_future()
        event.waiters.append(future)
        self._waiting[future] = f'{event.name!r} awaited by {_task_name()}'
        if timeout_s is not None:
            entry = Deadline(event, future)
            heapq.heappush(self._deadlines, (self._deadline_key(timeout_s), next(self._order), entry))
        try:
            return await future
        finally:
            del self._waiting[future]
            if future in event.waiters:
                event.waiters.remove(future)

    def post_signal(self, number: signal.Signals, event: protocols.Event) -> None:
        """Sets the event, in its turn among the completions; from any thread, also before the program runs.

        Nothing happens after the program has ended.
        """
        with self._signal_lock:
            if self._loop is None:
                self._early_signals.append((number, event))
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._post_signal, number, event)

    def execute(self, program: Coroutine[Any, Any, Any]) -> Any:
        """Run the program on an event loop of this clock; returns its result."""
        loop = asyncio.SelectorEventLoop(_IdleSelector(self._release_next))
        with self._signal_lock:
            self._loop = loop
            for number, event in self._early_signals:
                loop.call_soon(self._post_signal, number, event)
        try:
            return loop.run_until_complete(loop.create_task(program, name='main'))
        finally:
            self._shut_down(loop)

    # What subclasses define.

    @abc.abstractmethod
    def _begin(self, interval: Interval) -> None: ...

    @abc.abstractmethod
    def _deadline_key(self, timeout_s: float) -> float: ...

    @abc.abstractmethod
    def _release_next(self, block: Callable[[float | None], list[Any]]) -> list[Any]: ...

    @abc.abstractmethod
    def _post_signal(self, number: signal.Signals, event: protocols.Event) -> None: ...

    @abc.abstractmethod
    def _close(self) -> None:
        """Free threads and the like."""

    # Lanes.

    def _request(self, interval: Interval) -> None:
        if interval.lane not in self.lanes:
            raise ValueError(f'lane {interval.lane!r} was not declared; lanes: {sorted(self.lanes)}')
        self.lanes[interval.lane].queue.append(interval)
        self._start(self.lanes[interval.lane])

    def _start(self, lane: _Lane) -> None:
        while lane.queue and len(lane.busy) < lane.width:
            interval = lane.queue.popleft()
            if interval.future.cancelled():
                continue
            lane.busy.append(interval)
            interval.started_s = self.now()
            work = interval.work
            self.log.write(
                'run_start', interval.lane, run=interval.number, work=work.kind, amount=work.amount, **work.detail
            )
            if interval.coro is not None:
                interval.task = asyncio.ensure_future(interval.coro)
            self._begin(interval)

    def _finish(self, interval: Interval) -> None:
        """Release a completed interval to the program and let the lane go on."""
        lane = self.lanes[interval.lane]
        lane.busy.remove(interval)
        self.log.write(
            'run_done', interval.lane, run=interval.number, work=interval.work.kind, amount=interval.work.amount,
            started=interval.started_s, seconds=interval.seconds,
        )  # fmt: skip
        if not interval.future.done():
            if isinstance(interval.error, StopIteration):  # a future cannot carry it (PEP 479)
                error = RuntimeError(f'work {interval.work.kind!r} on lane {interval.lane!r} raised StopIteration')
                error.__cause__ = interval.error
                interval.future.set_exception(error)
            elif interval.error is not None:
                interval.future.set_exception(interval.error)
            else:
                interval.future.set_result(interval.result)
        self._start(lane)

    def _take_task_result(self, interval: Interval) -> None:
        assert interval.task is not None
        if interval.task.cancelled():
            interval.error = asyncio.CancelledError()
        elif (error := interval.task.exception()) is not None:
            interval.error = error
        else:
            interval.result = interval.task.result()

    def _expire(self, deadline: Deadline) -> None:
        if not deadline.future.done():
            self.log.write('deadline', wait=deadline.event.name)
            deadline.future.set_result(False)

    def _drop_dead_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][2].future.done():
            heapq.heappop(self._deadlines)

    def _timeout_error(self, interval: Interval) -> TimeoutError:
        return TimeoutError(
            f'call {interval.work.kind!r} on lane {interval.lane!r} exceeded its deadline of {interval.deadline_s} s'
        )

    def describe_waits(self) -> str:
        """Every wait and every busy lane, by name."""
        busy = [f'lane {i.lane!r} busy with {i.work.kind!r}' for lane in self.lanes.values() for i in lane.busy]
        return '; '.join([*self._waiting.values(), *busy]) or 'nothing is waiting'

    def _new_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def _shut_down(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except (DeadlockError, StallError):
            pass  # a coroutine waits in its clean-up: nothing will come
        finally:
            self._close()
            with self._signal_lock:
                loop.close()


class _IdleSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Hands the moment in which the loop has nothing ready to the clock."""

    def __init__(self, release_next: Callable[[Callable[[float | None], list[Any]]], list[Any]]):
        super().__init__()
        self._release_next = release_next

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self._release_next(super().select)


def _task_name() -> str:
    task = asyncio.current_task()
    return task.get_name() if task else 'no task'
