"""A bounded queue between two coroutines, built on the clock's wait; the edges of the loop are such queues."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

from areal_jax.protocols import Clock

Item = TypeVar('Item')


class BoundedQueue(Generic[Item]):
    """First in, first out; `put` waits while the queue holds `capacity` items."""

    def __init__(self, clock: Clock, edge: str, capacity: int):
        if capacity < 1:
            raise ValueError(f'queue {edge!r} needs capacity >= 1, got {capacity}')
        self._clock, self._capacity = clock, capacity
        self._items: collections.deque[Item] = collections.deque()
        self._filled = clock.event(f'{edge} (queue empty)')
        self._freed = clock.event(f'{edge} (queue full)')

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Item) -> None:
        while len(self._items) >= self._capacity:
            self._freed.clear()
            await self._clock.wait(self._freed)
        self._items.append(item)
        self._filled.set()

    async def get(self) -> Item:
        while not self._items:
            self._filled.clear()
            await self._clock.wait(self._filled)
        item = self._items.popleft()
        self._freed.set()
        return item
