"""Where other threads put items for the program: each enters in its turn among the completions of the clock.

`LoopClock.inbox` makes one. A server's thread of HTTP puts its requests here.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from areal_jax import protocols

Item = TypeVar('Item')


class Inbox(Generic[Item]):
    """First in, first out; any number of threads put, one coroutine takes."""

    def __init__(
        self,
        arrived: protocols.Event,
        post: Callable[[Callable[[], None]], None],
        wait: Callable[[protocols.Event], Awaitable[bool]],
    ):
        """`post` runs a function on the host's loop in its turn, `wait` waits for the event through the clock."""
        self._arrived, self._post, self._wait = arrived, post, wait
        self._items: collections.deque[Item] = collections.deque()  # those whose turn has come

    def put(self, item: Item) -> None:
        """From any thread, also before the program runs; nothing happens after it has ended."""
        self._post(functools.partial(self._receive, item))

    async def take(self) -> Item:
        """The oldest item; waits for one."""
        while not self._items:
            self._arrived.clear()
            await self._wait(self._arrived)
        return self._items.popleft()

    def _receive(self, item: Item) -> None:
        self._items.append(item)
        self._arrived.set()
