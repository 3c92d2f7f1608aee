"""Lanes: the resources whose use a clock serializes, and the intervals of work on them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from areal_jax.control.clocks.io import IoCall
from areal_jax.types import Work


@dataclasses.dataclass(eq=False)
class Interval:
    """One use of a lane: blocking work, or a call (I/O), which has a deadline."""

    lane: str
    work: Work
    number: int  # of the request, for the event log
    fn: Callable[[], Any]  # work: returns the result; a call: returns an awaitable of it
    future: asyncio.Future[Any]  # what the coroutine that asked for it awaits
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
        """Copy result or error of a call that has ended."""
        assert self.call is not None
        self.result, self.error = self.call.result, self.call.error
        if self.call.is_late:
            self.error = self.describe_lateness()

    def describe_lateness(self) -> TimeoutError:
        """The error of a call that hit its deadline."""
        return TimeoutError(f'{self.describe()} exceeded its deadline of {self.deadline_s} s')

    def deliver(self) -> None:
        """Give result or error to the coroutine that waits, unless it was cancelled."""
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
        """The next interval to begin; None while all places are taken or nothing is queued."""
        while self.queue and self.n_busy < self.width:
            interval = self.queue.popleft()
            if not interval.future.cancelled():
                self.n_busy += 1
                return interval
        return None
