"""The I/O loop of a clock: an ordinary asyncio event loop in a separate thread.

Any asyncio library works here unchanged, including its timers, even while the host's loop or a lane is busy. The
thread starts with the first call. All calls share the loop, so they can share connections, locks and queues of
asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import selectors
import threading
from collections.abc import Awaitable, Callable

_CANCELLATION_S = 0.2  # for a call to end after its deadline has cancelled it; then its caller is told anyway
_HOLD_UP_S = 0.05  # a deadline that fires later than this was held up, and a received reply may be too
END_S = 2.0  # for all tasks of the loop to end when it closes; they are cancelled every _RETRY_S
_RETRY_S = 0.1
TRANSPORTS_S = 1.0  # for connections that the tasks closed at their end: unsent data goes out first
JOIN_S = 5.0  # for the whole thread

_log = logging.getLogger(__name__)


class IoCall:
    """One call on the I/O loop: `fn` is called and awaited there.

    `result`, `error` and `is_late` are valid once `has_ended` is set; then `on_end` is called on the I/O thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        fn: Callable[[], Awaitable[object]],
        deadline_s: float,
        on_end: Callable[[], None],
    ):
        self.name = name
        self.result: object = None
        self.error: BaseException | None = None
        self.is_late = False  # the deadline came first
        self.has_ended = False
        self._loop, self._fn, self._deadline_s, self._on_end = loop, fn, deadline_s, on_end
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._was_held_up = False
        self._was_cancelled = False
        loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Cancels the coroutine if it has not ended; returns at once; callable from any thread."""
        if not self.has_ended:
            with contextlib.suppress(RuntimeError):  # the loop has ended its coroutines and closed
                self._loop.call_soon_threadsafe(self._cancel)

    # On the I/O thread.

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run(), name=self.name)
        self._task.add_done_callback(self._note_end)
        self._due_s = self._loop.time() + self._deadline_s
        self._timer = self._loop.call_at(self._due_s, self._expire)

    async def _run(self) -> None:
        try:
            awaitable = self._fn()
            if asyncio.isfuture(awaitable) and awaitable.get_loop() is not self._loop:
                raise RuntimeError(
                    f'{self.name} awaits a future of another event loop; create it on the I/O loop, inside the '
                    'function that is passed to clock.call'
                )
            self.result = await awaitable
        except BaseException as error:  # also SystemExit, which would end the I/O loop: the caller raises it
            self.error = error

    def _cancel(self) -> None:
        assert self._task is not None
        self._was_cancelled = True
        self._task.cancel()

    def _expire(self) -> None:
        assert self._task is not None
        if self._task.done():
            return
        if self._loop.time() - self._due_s > _HOLD_UP_S and not self._was_held_up:
            self._was_held_up = True  # first handle what arrived while the loop was held up
            self._timer = self._loop.call_later(_HOLD_UP_S, self._expire)
            return
        self.is_late = True
        self._task.cancel()
        self._timer = self._loop.call_later(_CANCELLATION_S, self._report_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        assert self._timer is not None
        self._timer.cancel()
        if self.has_ended:  # its caller was told at the deadline
            return
        if task.cancelled():  # before its first step
            self.error = asyncio.CancelledError()
        if isinstance(self.error, asyncio.CancelledError) and not (self.is_late or self._was_cancelled):
            cause, self.error = self.error, RuntimeError(f'{self.name} was cancelled, not by its caller')
            self.error.__cause__ = cause
        self._report_end()

    def _report_end(self) -> None:
        self.has_ended = True
        self._on_end()


class IoLoop:
    """The loop and its thread; `start` and `close` belong to one thread, the host's."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = asyncio.Event()

    def start(
        self, name: str, fn: Callable[[], Awaitable[object]], deadline_s: float, on_end: Callable[[], None]
    ) -> IoCall:
        """Starts one call; its errors contain `name`. See IoCall."""
        if self._loop is None:
            selector = selectors.DefaultSelector()
            self._loop = asyncio.SelectorEventLoop(selector)
            self._thread = threading.Thread(target=self._serve, args=(self._loop, selector), name='io', daemon=True)
            self._thread.start()
        return IoCall(self._loop, name, fn, deadline_s, on_end)

    def close(self) -> None:
        """Cancels every task of the loop, waits until all have ended (at most a few seconds), and ends the thread."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            _log.warning('the I/O thread did not end within %g s: a coroutine blocks it', JOIN_S)

    def _serve(self, loop: asyncio.AbstractEventLoop, selector: selectors.BaseSelector) -> None:
        main = loop.create_task(self._until_closed(selector), name='I/O loop')
        try:
            while not main.done():
                try:
                    loop.run_until_complete(main)
                except (KeyboardInterrupt, SystemExit):  # of a task that is not a call; asyncio lets these two through
                    _log.exception('a task on the I/O loop raised; the loop goes on')
        finally:
            loop.close()

    async def _until_closed(self, selector: selectors.BaseSelector) -> None:
        await self._closing.wait()
        await _end_tasks()
        await _end_transports(selector)
        await asyncio.get_running_loop().shutdown_default_executor()


async def _end_tasks() -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + END_S
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        if loop.time() > end_s:
            names = ', '.join(sorted(task.get_name() for task in tasks))
            _log.warning('tasks on the I/O loop ignore that they are cancelled: %s', names)
            break
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_RETRY_S)
    await loop.shutdown_asyncgens()


async def _end_transports(selector: selectors.BaseSelector) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)  # a closed transport releases its socket in the next iteration
    end_s = loop.time() + TRANSPORTS_S
    while (n_open := len(selector.get_map()) - 1) and loop.time() < end_s:  # one entry is the loop's own wake-up
        await asyncio.sleep(0.005)
    if n_open:
        _log.warning('%d connections or pipes were left open on the I/O loop: their owner did not close them', n_open)
