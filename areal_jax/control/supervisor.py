"""Starts every coroutine of the run, keeps them in start order and ends the run at the first exception."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from areal_jax.protocols import Clock


class Supervisor:
    """The only place that starts coroutines; `run` returns when its main coroutine does, or raises the first error."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in start order
        self._ended = clock.event('end of the main coroutine')
        self._error: BaseException | None = None

    def start(self, name: str, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._note_end)
        return task

    async def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """The result of `main`; the other coroutines are cancelled when it ends, newest first."""
        task = self.start('program', main)
        task.add_done_callback(lambda _: self._ended.set())
        await self._clock.wait(self._ended)
        for other in reversed(self._tasks):
            other.cancel()
        if self._error is not None:
            raise self._error
        return task.result()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = error
            self._ended.set()
