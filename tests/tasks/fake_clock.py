"""A clock for tests: asyncio's own timers, no lanes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from areal_jax.types import Work


class FakeEvent(asyncio.Event):
    def __init__(self, name: str):
        super().__init__()
        self.name = name


class FakeClock:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Work]] = []

    def now(self) -> float:
        return time.monotonic()

    def event(self, name: str) -> FakeEvent:
        return FakeEvent(name)

    async def run(self, lane: str, fn: Callable[[], Any], work: Work) -> Any:
        return fn()

    async def wait(self, event: Any, timeout_s: float | None = None) -> bool:
        assert timeout_s is None, 'waits between coroutines have no deadline'
        await event.wait()
        return True

    async def call(self, lane: str, fn: Callable[[], Awaitable[Any]], work: Work, deadline_s: float) -> Any:
        self.calls.append((lane, work))
        return await asyncio.wait_for(fn(), deadline_s)
