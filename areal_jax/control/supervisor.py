"""Starts every coroutine of the run, keeps them in start order and ends the run at the first exception.

Controller, pool, engines and evaluator start their coroutines here.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Coroutine
from typing import TypeVar

from areal_jax.protocols import Clock

Result = TypeVar('Result')


class Supervisor:
    """The only place that starts coroutines; `run` returns when its main coroutine does, or raises the first error."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._numbers = itertools.count()
        self._tasks: dict[int, asyncio.Task[object]] = {}  # by start number, hence in start order
        self._ended = clock.event('end of the main coroutine')
        self._error: BaseException | None = None

    def start(self, name: str, coro: Coroutine[object, object, Result]) -> asyncio.Task[Result]:
        task: asyncio.Task[Result] = asyncio.get_running_loop().create_task(coro, name=name)
        number = next(self._numbers)
        self._tasks[number] = task
        task.add_done_callback(functools.partial(self._note_end, number))
        return task

    async def run(self, main: Coroutine[object, object, Result]) -> Result:
        """Returns the result of `main`; the other coroutines are cancelled when it ends, newest first."""
        task = self.start('program', main)
        task.add_done_callback(lambda _: self._ended.set())
        await self._clock.wait(self._ended)
        for other in reversed(list(self._tasks.values())):
            other.cancel()
        if self._error is not None:
            raise self._error
        return task.result()

    def _note_end(self, number: int, task: asyncio.Task[object]) -> None:
        del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = error
            self._ended.set()
