"""One worker process: a request out, its reply back, and a kill that always works.

The coroutines run on the I/O loop of the clock, everything else on the host's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple

from areal_jax.files import JsonObject, decode_json
from areal_jax.installation import build_python_path
from areal_jax.workers.descendants import MARK, Process, end_processes, list_descendants, list_marked
from areal_jax.workers.sandbox.confinement import wrap_command

ENDED, SCORER_DIED, USAGE, LEFT_BEHIND = range(4)  # LEFT_BEHIND: some process could not be killed

_SIGNALS = {number.value: number.name for number in signal.Signals}


def name_signal(number: int) -> str:
    """The name of a signal, e.g. 'SIGKILL'; 'signal 40' for one of the many without a name."""
    return _SIGNALS.get(number, f'signal {number}')


# The pipes to a worker process: lines out and in on an event loop, and a close that is safe from any thread.
#
# If a descriptor is closed while a loop still watches it, or just before a coroutine reads it, its number may already
# belong to a file of another worker. So while a coroutine uses the pipes, only the thread of its loop closes them.


_CHUNK_BYTES = 2**16  # read at once
_LONGEST_LINE_BYTES = 2**16


class WorkerDiedError(RuntimeError):
    """Raised if the worker ended, was killed, or sent a message that is not the reply to the request."""


class WorkerPipes:
    """Stdin and stdout of a worker, both non-blocking. One coroutine at a time, inside `in_use`."""

    def __init__(self, name: str, stdin: IO[bytes], stdout: IO[bytes]):
        self.name = name  # of the worker, for errors
        self.received = b''
        self.is_closed = False
        self._files = (stdin, stdout)
        self._in, self._out = stdin.fileno(), stdout.fileno()
        self._lock = threading.Lock()  # held while a use of the pipes begins or ends, and while a close is decided
        self._loop: asyncio.AbstractEventLoop | None = None  # of the coroutine that uses the pipes
        self._readiness: asyncio.Future[None] | None = None  # of a pipe that the coroutine waits for
        for descriptor in (self._in, self._out):
            os.set_blocking(descriptor, False)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Surrounds all of a coroutine's work with the pipes. Raises WorkerDiedError if they are closed."""
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
        """Closes both pipes, from any thread; a coroutine that uses them gets WorkerDiedError. Does not wait."""
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
        """Writes all of `data`. Raises WorkerDiedError."""
        while data:
            self.require_open()
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                await self._until(asyncio.get_running_loop().add_writer, self._in)
            except BrokenPipeError as error:
                raise WorkerDiedError(f'the worker for {self.name!r} has ended') from error

    async def receive_line(self) -> bytes:
        """Returns the next line, without its end. Raises WorkerDiedError."""
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
        """Blocks until a line is there; for use outside event loops.

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
        """Reads what has arrived, without waiting. Raises WorkerDiedError at the end of the pipe."""
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


REPLIES = ('reward', 'error', 'fault')  # one of them is in each reply
_KILL_S = 2.0  # a process that is alive this long after SIGKILL is stuck in the kernel

_log = logging.getLogger(__name__)


class WorkerProcess:
    """A running `areal_jax.tasks.scoring.worker`, in a new session: the terminal's Ctrl-C does not reach it.

    One request at a time. The coroutines may be cancelled at any point; after that only `kill` is allowed, since a
    reply may be on its way.
    """

    def __init__(self, scorer: str, memory_mb: int, sandbox: str = 'none', readable: Sequence[str] = ()):
        """Starts the process and returns at once; it is not ready yet. See worker.serve.

        Raises OSError, and SandboxError if the level `sandbox` does not work here.
        """
        self.scorer = scorer
        self.mark = secrets.token_hex(8)  # of all its processes: the variable MARK of their environment
        self.is_ready = False
        command = [sys.executable, '-m', 'areal_jax.tasks.scoring.worker', scorer, str(memory_mb), sandbox, *readable]
        self._process = subprocess.Popen(
            wrap_command(sandbox, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=worker_environment() | {MARK: self.mark},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = WorkerPipes(scorer, self._process.stdin, self._process.stdout)

    @property
    def pid(self) -> int:
        """The pid of the worker, or of bubblewrap around it; its scorer runs in a child."""
        return self._process.pid

    @property
    def is_killed(self) -> bool:
        return self._pipes.is_closed

    def wait_until_ready(self, end_s: float) -> None:
        """Blocks until the ready line is there; for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        self._accept_ready(self._pipes.wait_for_line(end_s))

    async def become_ready(self) -> None:
        """Waits for the ready line. Raises WorkerDiedError."""
        with self._pipes.in_use():
            self._accept_ready(await self._pipes.receive_line())

    async def ask(self, request: JsonObject) -> JsonObject:
        """Sends a JSON-able request and waits for its reply, {'reward'}, {'error'} or {'fault'}.

        Raises WorkerDiedError, also for a reply to another request, for a second reply, and for a reply without a
        request: after these no later reply can be trusted. The id cannot be guessed by a process that an earlier
        answer left behind.
        """
        with self._pipes.in_use():
            self._require_silence()
            number = secrets.token_hex(8)
            await self._pipes.send(json.dumps({**request, 'id': number}).encode() + b'\n')
            reply = _parse(await self._pipes.receive_line(), REPLIES)
            if reply.get('id') != number:
                raise WorkerDiedError(f'the worker for {self.scorer!r} replied to another request')
            if self._pipes.received:
                raise WorkerDiedError(f'the worker for {self.scorer!r} replied more than once')
            del reply['id']
            return reply

    def ask_at_once(self, request: JsonObject, end_s: float) -> JsonObject:
        """`ask` for use outside event loops: blocks until the reply is there.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        number = secrets.token_hex(8)
        self._pipes.send_at_once(json.dumps({**request, 'id': number}).encode() + b'\n', end_s)
        return _parse(self._pipes.wait_for_line(end_s), REPLIES)

    def kill(self) -> None:
        """Ends the worker and every process of its scorer; callable from any thread, does not wait.

        A coroutine that waits for a reply gets WorkerDiedError.
        """
        if self.is_killed:
            return
        # Closed pipes end the worker. SIGKILL would keep it from killing the scorer's processes, and only the worker is
        # sure to find all of them.
        self._pipes.close()
        self._process.send_signal(signal.SIGCONT)  # its scorer may have stopped it

    def is_gone(self) -> bool:
        """Whether a killed worker and all its processes have ended; blocks only if its scorer killed the worker."""
        if not self.is_killed or self._process.poll() is None:
            return False
        if self._process.returncode not in (ENDED, SCORER_DIED, USAGE):  # its scorer killed it
            self._end_what_is_left()
        return True

    def close(self, within_s: float = _KILL_S) -> None:
        """Kills, and blocks until worker and scorer are gone, for `within_s` and a few seconds at most."""
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
            return [*below, *list_marked(self.mark)]

        if not end_processes(find, _KILL_S):
            pids = [process.pid for process in find()]
            _log.warning('processes %s, started by %s, outlive SIGKILL', pids, self.scorer)
        if self._process.poll() is None:
            self._process.kill()

    def _require_silence(self) -> None:
        self._pipes.read()
        if self._pipes.received:
            _parse(self._pipes.take_line(), ())

    def _accept_ready(self, line: bytes) -> None:
        _parse(line, ('ready',))
        self.is_ready = True


def _parse(line: bytes, keys: tuple[str, ...]) -> JsonObject:
    with contextlib.suppress(ValueError):
        reply = decode_json(line)
        if isinstance(reply, dict) and 'crash' in reply:
            raise WorkerDiedError(f'the worker has ended; its traceback, if any, is on stderr: {reply["crash"]}')
        if isinstance(reply, dict) and any(key in reply for key in keys):
            return reply
    raise WorkerDiedError(f'expected {" or ".join(keys) or "nothing"} from a worker, got {line[:80]!r}')


def worker_environment() -> dict[str, str]:
    """The environment of a process that runs a module of this package."""
    # The worker must import the same copy of this package. One thread each, so that n workers use n cores.
    return {**os.environ, 'PYTHONPATH': build_python_path(), 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


# Runs a module of this package in separate processes over lines of input, for work before a run begins.
#
# Used if the work may never end (answers/gold_answers.py), or must not depend on this process (gym_items.py).


_MOST_PROCESSES = 8


class Finished(NamedTuple):
    """The result of one process."""

    exit_code: int  # negative: the signal that ended it
    lines: list[str]  # of its output


def count_processes(items: int, per_process: int) -> int:
    """One process per `per_process` items, rounded up; at most one per core, and _MOST_PROCESSES. 0 for no items."""
    return min(os.cpu_count() or 1, _MOST_PROCESSES, -(-items // per_process))


def run_processes(module: str, inputs: Sequence[Sequence[str]]) -> list[Finished]:
    """Runs `python -m module` once for each list of lines, all at the same time, and waits for them.

    All such processes hash strings alike (PYTHONHASHSEED=0), so that the order of a set repeats.
    """
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile('w+')) for _ in inputs]
        processes = []
        for lines, output in zip(inputs, outputs, strict=True):
            process = _start(module, lines, output)
            stack.callback(process.wait)
            stack.callback(process.kill)  # does nothing to a process that has ended
            processes.append(process)
        exit_codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
        return [Finished(code, output.read().splitlines()) for code, output in zip(exit_codes, outputs, strict=True)]


def _start(module: str, lines: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile('w+') as stdin:
        stdin.writelines(f'{line}\n' for line in lines)
        stdin.seek(0)
        environment = worker_environment() | {'PYTHONHASHSEED': '0'}
        return subprocess.Popen([sys.executable, '-m', module], stdin=stdin, stdout=output, env=environment)
