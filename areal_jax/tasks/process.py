"""One worker process as the event loop sees it: a line out, a line back, and a kill that always works."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

_CHUNK_BYTES = 2**16  # read at once
_REAP_S = 10.0  # a process that outlives SIGKILL by so long is stuck in the kernel


class WorkerDiedError(RuntimeError):
    """The worker process ended, was killed, or said something that is no reply."""


class WorkerProcess:
    """A running `areal_jax.tasks.worker`, alone in a session so that one signal reaches all its descendants.

    One question at a time. The coroutines may be cancelled at any point; after that only `kill` is allowed, since a
    reply may be on its way.
    """

    def __init__(self, scorer: str):
        """Starts the process and returns at once; it is not ready yet."""
        self.scorer = scorer
        self.is_ready = False
        self.is_killed = False
        self._received = b''
        self._readiness: asyncio.Future[None] | None = None  # of a pipe that a coroutine waits for
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'areal_jax.tasks.worker', scorer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_worker_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def wait_until_ready(self, end_s: float) -> None:
        """Block until the ready line is there, to be used before the event loop runs.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while b'\n' not in self._received:
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise TimeoutError(f'the worker for {self.scorer!r} was not ready in time')
            self._read()
        self._accept_ready(self._take_line())

    async def become_ready(self) -> None:
        """Wait for the ready line. Raises WorkerDiedError."""
        self._accept_ready(await self._receive_line())

    async def ask(self, request: bytes) -> Mapping[str, Any]:
        """Send one line, without its end, and wait for the reply, {'reward'} or {'error'}. Raises WorkerDiedError."""
        await self._send(request + b'\n')
        return _parse(await self._receive_line(), ('reward', 'error'))

    def kill(self) -> None:
        """SIGKILL to the whole session, without waiting; whoever waits for a reply gets WorkerDiedError."""
        if self.is_killed:
            return
        self.is_killed = True
        if self._readiness is not None:
            readiness = self._unwatch()
            if not readiness.done():
                readiness.set_exception(WorkerDiedError(f'the worker for {self.scorer!r} was killed'))
        # Nothing has waited for the process yet, so even if it is dead its number is still its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def is_gone(self) -> bool:
        """Whether a killed process has left the process table; never blocks."""
        return self.is_killed and self._process.poll() is not None

    def close(self) -> None:
        """Kill, and block until the process is gone."""
        self.kill()
        self._process.wait(_REAP_S)

    async def _send(self, data: bytes) -> None:
        while data:
            self._require_alive()
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                await self._until(asyncio.get_running_loop().add_writer, self._in)
            except BrokenPipeError as error:
                raise WorkerDiedError(f'the worker for {self.scorer!r} has ended') from error

    async def _receive_line(self) -> bytes:
        while b'\n' not in self._received:
            self._require_alive()
            await self._until(asyncio.get_running_loop().add_reader, self._out)
            self._require_alive()
            self._read()
        return self._take_line()

    async def _until(self, watch: Callable[..., Any], descriptor: int) -> None:
        self._readiness = asyncio.get_running_loop().create_future()
        watch(descriptor, _settle, self._readiness)
        try:
            await self._readiness
        finally:
            if self._readiness is not None:
                self._unwatch()

    def _unwatch(self) -> asyncio.Future[None]:
        # Before the descriptors are closed, or their numbers would be watched in the name of the next process.
        assert self._readiness is not None
        readiness, self._readiness = self._readiness, None
        readiness.get_loop().remove_reader(self._out)
        readiness.get_loop().remove_writer(self._in)
        return readiness

    def _require_alive(self) -> None:
        if self.is_killed:
            raise WorkerDiedError(f'the worker for {self.scorer!r} was killed')

    def _read(self) -> None:
        try:
            chunk = os.read(self._out, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise WorkerDiedError(f'the worker for {self.scorer!r} has ended; its traceback, if any, is on stderr')
        self._received += chunk

    def _take_line(self) -> bytes:
        line, _, self._received = self._received.partition(b'\n')
        return line

    def _accept_ready(self, line: bytes) -> None:
        _parse(line, ('ready',))
        self.is_ready = True


def _settle(readiness: asyncio.Future[None]) -> None:
    if not readiness.done():
        readiness.set_result(None)


def _parse(line: bytes, keys: tuple[str, ...]) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        reply = json.loads(line)
        if isinstance(reply, dict) and any(key in reply for key in keys):
            return reply
    raise WorkerDiedError(f'expected a line with one of {keys} from a worker, got {line[:80]!r}')


def _worker_environment() -> dict[str, str]:
    # The worker imports this very package, wherever the parent found it, and n workers are to use n cores.
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(entry for entry in (root, os.environ.get('PYTHONPATH', '')) if entry)
    return {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
