"""The pipes to a worker process: lines out and in on an event loop, and a close that is safe from any thread.

If a descriptor is closed while a loop still watches it, or just before a coroutine reads it, its number may already
belong to a file of another worker. So while a coroutine uses the pipes, only the thread of its loop closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

_CHUNK_BYTES = 2**16  # read at once
_LONGEST_LINE_BYTES = 2**16


class WorkerDiedError(RuntimeError):
    """The worker ended, was killed, or said something that is not the reply to the request."""


class WorkerPipes:
    """Stdin and stdout of a worker, both non-blocking. One coroutine at a time, inside `in_use`."""

    def __init__(self, name: str, stdin: IO[bytes], stdout: IO[bytes]):
        self.name = name  # of the worker, for errors
        self.received = b''
        self.is_closed = False
        self._files = (stdin, stdout)
        self._in, self._out = stdin.fileno(), stdout.fileno()
        self._lock = threading.Lock()  # held by who begins or ends to use the pipes, and by who decides to close them
        self._loop: asyncio.AbstractEventLoop | None = None  # of the coroutine that uses the pipes
        self._readiness: asyncio.Future[None] | None = None  # of a pipe that the coroutine waits for
        for descriptor in (self._in, self._out):
            os.set_blocking(descriptor, False)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For a coroutine, around everything it does with the pipes. Raises WorkerDiedError when they are closed."""
        with self._lock:
            self.require_open()
            self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                self._loop = None
                if self.is_closed:
                    self._close_files()

    def close(self) -> None:
        """Close both pipes, from any thread; a coroutine that uses them gets WorkerDiedError. Returns at once."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if self._loop is None or self._loop is _running_loop():
                self._close_files()
            else:
                with contextlib.suppress(RuntimeError):  # that loop has closed without ending its coroutine
                    self._loop.call_soon_threadsafe(self._close_files)

    async def send(self, data: bytes) -> None:
        """Write all of `data`. Raises WorkerDiedError."""
        while data:
            self.require_open()
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                await self._until(asyncio.get_running_loop().add_writer, self._in)
            except BrokenPipeError as error:
                raise WorkerDiedError(f'the worker for {self.name!r} has ended') from error

    async def receive_line(self) -> bytes:
        """The next line, without its end. Raises WorkerDiedError."""
        while b'\n' not in self.received[: _LONGEST_LINE_BYTES + 1]:
            if len(self.received) > _LONGEST_LINE_BYTES:
                raise WorkerDiedError(f'the worker for {self.name!r} sends a reply without end')
            await self._until(asyncio.get_running_loop().add_reader, self._out)
            self.read()
        return self.take_line()

    def send_at_once(self, data: bytes, end_s: float) -> None:
        """`send` for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        poll = select.poll()
        poll.register(self._in, select.POLLOUT)
        while data:
            self.require_open()
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise TimeoutError(f'the worker for {self.name!r} took no request in time')
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise WorkerDiedError(f'the worker for {self.name!r} has ended') from error

    def wait_for_line(self, end_s: float) -> bytes:
        """Block until a line is there; for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while b'\n' not in self.received:
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise TimeoutError(f'the worker for {self.name!r} was not ready in time')
            self.read()
        return self.take_line()

    def read(self) -> None:
        """Take what has arrived, without waiting. Raises WorkerDiedError at the end of the pipe."""
        self.require_open()
        try:
            chunk = os.read(self._out, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise WorkerDiedError(f'the worker for {self.name!r} has ended')
        self.received += chunk

    def take_line(self) -> bytes:
        line, _, self.received = self.received.partition(b'\n')
        return line

    def require_open(self) -> None:
        if self.is_closed:
            raise WorkerDiedError(f'the worker for {self.name!r} was killed')

    async def _until(self, watch: Callable[..., object], descriptor: int) -> None:
        self._readiness = asyncio.get_running_loop().create_future()
        watch(descriptor, _settle, self._readiness)
        try:
            await self._readiness
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        if self._readiness is not None:
            self._readiness.get_loop().remove_reader(self._out)
            self._readiness.get_loop().remove_writer(self._in)
            self._readiness = None

    def _close_files(self) -> None:
        readiness = self._readiness
        self._unwatch()  # before the numbers of the descriptors are free
        for file in self._files:
            file.close()
        if readiness is not None and not readiness.done():
            readiness.set_exception(WorkerDiedError(f'the worker for {self.name!r} was killed'))


def _settle(readiness: asyncio.Future[None]) -> None:
    if not readiness.done():
        readiness.set_result(None)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
