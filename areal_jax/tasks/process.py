"""One worker as the event loop sees it: a request out, its reply back, and a kill that always works."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_jax.tasks.descendants import MARK, Process, end_processes, list_descendants, list_marked
from areal_jax.tasks.worker import ENDED, SCORER_DIED, USAGE

_CHUNK_BYTES = 2**16  # read at once
_LONGEST_REPLY_BYTES = 2**16
_KILL_S = 2.0  # a process that outlives SIGKILL by so long is stuck in the kernel

_log = logging.getLogger(__name__)


class WorkerDiedError(RuntimeError):
    """The worker ended, was killed, or said something that is not the reply to the request."""


class WorkerProcess:
    """A running `areal_jax.tasks.worker`, in a session of its own: the terminal's Ctrl-C does not reach it.

    One request at a time. The coroutines may be cancelled at any point; after that only `kill` is allowed, since a
    reply may be on its way.
    """

    def __init__(self, scorer: str, memory_mb: int = 0):
        """Starts the process and returns at once; it is not ready yet. See scorer_process.limit_memory."""
        self.scorer = scorer
        self._mark = secrets.token_hex(8)
        self.is_ready = False
        self.is_killed = False
        self._received = b''
        self._readiness: asyncio.Future[None] | None = None  # of a pipe that a coroutine waits for
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'areal_jax.tasks.worker', scorer, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_worker_environment() | {MARK: self._mark},
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

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a JSON-able request and wait for its reply, {'reward'} or {'error'}.

        Raises WorkerDiedError, also for a reply to another request, for more than one and for one that nobody asked
        for: after these no later reply can be trusted. The id cannot be guessed by a process that an earlier answer
        left behind.
        """
        self._require_silence()
        number = secrets.token_hex(8)
        await self._send(json.dumps({**request, 'id': number}).encode() + b'\n')
        reply = _parse(await self._receive_line(), ('reward', 'error'))
        if reply.get('id') != number:
            raise WorkerDiedError(f'the worker for {self.scorer!r} replied to another request')
        if self._received:
            raise WorkerDiedError(f'the worker for {self.scorer!r} replied more than once')
        return reply

    def kill(self) -> None:
        """Have the worker end at once, with every process of its scorer; returns without waiting.

        Whoever waits for a reply gets WorkerDiedError.
        """
        if self.is_killed:
            return
        self.is_killed = True
        if self._readiness is not None:
            readiness = self._unwatch()
            if not readiness.done():
                readiness.set_exception(WorkerDiedError(f'the worker for {self.scorer!r} was killed'))
        # No SIGKILL: it would keep the worker from killing the scorer's processes, which only it can find for sure.
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.send_signal(signal.SIGCONT)  # its scorer may have stopped it

    def is_gone(self) -> bool:
        """Whether a killed worker and what it started have left the process table; waits only if it failed to end."""
        if not self.is_killed or self._process.poll() is None:
            return False
        if self._process.returncode not in (ENDED, SCORER_DIED, USAGE):  # its scorer killed it
            self._end_what_is_left()
        return True

    def close(self, within_s: float = _KILL_S) -> None:
        """Kill, and block until worker and scorer are gone, for `within_s` and a few seconds at most."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        if self.is_gone():
            return
        self._end_what_is_left()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            _log.warning('process %d, a worker for %s, outlives SIGKILL', self._process.pid, self.scorer)

    def _end_what_is_left(self) -> None:
        def find() -> list[Process]:
            below = list_descendants(self._process.pid) if self._process.poll() is None else []
            return [*below, *list_marked(self._mark)]

        if not end_processes(find, _KILL_S):
            pids = [process.pid for process in find()]
            _log.warning('processes %s, started by %s, outlive SIGKILL', pids, self.scorer)
        if self._process.poll() is None:
            self._process.kill()

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
            if len(self._received) > _LONGEST_REPLY_BYTES:
                raise WorkerDiedError(f'the worker for {self.scorer!r} sends a reply without end')
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

    def _require_silence(self) -> None:
        self._require_alive()
        self._read()
        if self._received:
            _parse(self._take_line(), ())

    def _read(self) -> None:
        try:
            chunk = os.read(self._out, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            raise WorkerDiedError(f'the worker for {self.scorer!r} has ended')
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
        if isinstance(reply, dict) and 'crash' in reply:
            raise WorkerDiedError(f'the worker has ended; its traceback, if any, is on stderr: {reply["crash"]}')
        if isinstance(reply, dict) and any(key in reply for key in keys):
            return reply
    raise WorkerDiedError(f'expected {" or ".join(keys) or "nothing"} from a worker, got {line[:80]!r}')


def _worker_environment() -> dict[str, str]:
    # The worker imports this very package, wherever the parent found it, and n workers are to use n cores.
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(entry for entry in (root, os.environ.get('PYTHONPATH', '')) if entry)
    return {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
