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
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
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


# The connection to a worker process: lines out and in, with an event loop or without, and a close from any thread.
#
# If a descriptor is closed while a loop still watches it, or just before a coroutine reads it, its number may already
# belong to a file of another worker. So a close only ends a connection in use, which ends the wait for a line, and the
# user of the connection closes the descriptor.


_CHUNK_BYTES = 2**16  # read at once
_LONGEST_LINE_BYTES = 2**16
_SHORTEST_WAIT_S = 1e-3  # 0 would not wait, and raise another error


class WorkerDiedError(RuntimeError):
    """Raised if the worker ended, was killed, or sent a message that is not the reply to the request."""


class WorkerConnection:
    """The socket that is stdin and stdout of a worker. One coroutine or thread at a time, inside `in_use`."""

    def __init__(self, name: str, connection: socket.socket):
        self.name = name  # of the worker, for errors
        self.received = b''
        self.is_closed = False
        self._socket = connection
        self._socket.setblocking(False)
        self._lock = threading.Lock()  # held while a use begins or ends, and while a close is decided
        self._is_used = False

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Surrounds all work with the connection. Raises WorkerDiedError if it is closed or the worker has ended."""
        with self._lock:
            self._require_open()
            self._is_used = True
        try:
            yield
        except ConnectionError as error:
            raise self._death() from error
        finally:
            with self._lock:
                self._is_used = False
                if self.is_closed:
                    self._socket.close()

    def close(self) -> None:
        """Ends the connection, from any thread; its user gets WorkerDiedError. Does not wait."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            with contextlib.suppress(OSError):  # the worker has ended
                self._socket.shutdown(socket.SHUT_RDWR)
            if not self._is_used:
                self._socket.close()

    async def send(self, data: bytes) -> None:
        """Writes all of `data`."""
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive_line(self) -> bytes:
        """Returns the next line, without its end. Raises WorkerDiedError."""
        while b'\n' not in self.received[: _LONGEST_LINE_BYTES + 1]:
            if len(self.received) > _LONGEST_LINE_BYTES:
                raise WorkerDiedError(f'the worker for {self.name!r} sends a reply without end')
            self._add(await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK_BYTES))
        return self.take_line()

    def send_at_once(self, data: bytes, end_s: float) -> None:
        """`send` for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError.
        """
        with self._blocking(end_s, 'took no request in time'):
            self._socket.sendall(data)

    def wait_for_line(self, end_s: float) -> bytes:
        """Blocks until a line is there; for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        while b'\n' not in self.received:
            with self._blocking(end_s, 'was not ready in time'):
                self._add(self._socket.recv(_CHUNK_BYTES))
        return self.take_line()

    def read(self) -> None:
        """Reads what has arrived, without waiting. Raises WorkerDiedError at the end of the connection."""
        with contextlib.suppress(BlockingIOError):
            self._add(self._socket.recv(_CHUNK_BYTES))

    def take_line(self) -> bytes:
        line, _, self.received = self.received.partition(b'\n')
        return line

    def _add(self, chunk: bytes) -> None:
        self._require_open()
        if not chunk:
            raise self._death()
        self.received += chunk

    @contextlib.contextmanager
    def _blocking(self, end_s: float, late: str) -> Iterator[None]:
        """Lets the socket wait until `end_s`; then raises TimeoutError, which says that the worker is `late`."""
        self._socket.settimeout(max(_SHORTEST_WAIT_S, end_s - time.monotonic()))
        try:
            yield
        except TimeoutError as error:
            raise TimeoutError(f'the worker for {self.name!r} {late}') from error
        finally:
            self._socket.setblocking(False)

    def _require_open(self) -> None:
        if self.is_closed:
            raise self._death()

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f'the worker for {self.name!r} {"was killed" if self.is_closed else "has ended"}')


REPLIES = ('reward', 'error', 'fault')  # one of them is in each reply
_KILL_S = 2.0  # a process that is alive this long after SIGKILL is stuck in the kernel

_log = logging.getLogger(__name__)


class WorkerProcess:
    """A running `areal_jax.tasks.scoring.worker`, in a new session: the terminal's Ctrl-C does not reach it.

    One request at a time. The coroutines may be cancelled at any point; after that only `kill` is allowed, since a
    reply may be on its way.
    """

    def __init__(self, scorer: str, memory_mb: int, sandbox: str = 'none', readable: Sequence[str] = ()):
        """Starts the process and returns at once; it is not ready yet. See scorer_process.serve.

        Raises OSError, and SandboxError if the level `sandbox` does not work here.
        """
        self.scorer = scorer
        self.mark = secrets.token_hex(8)  # of all its processes: the variable MARK of their environment
        self.is_ready = False
        command = [sys.executable, '-m', 'areal_jax.tasks.scoring.worker', scorer, str(memory_mb), sandbox, *readable]
        ours, theirs = socket.socketpair()
        self._connection = WorkerConnection(scorer, ours)
        with theirs:
            self._process = subprocess.Popen(
                wrap_command(sandbox, command),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env=worker_environment() | {MARK: self.mark},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The pid of the worker, or of bubblewrap around it; its scorer runs in a child."""
        return self._process.pid

    @property
    def is_killed(self) -> bool:
        return self._connection.is_closed

    def wait_until_ready(self, end_s: float) -> None:
        """Blocks until the ready line is there; for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        with self._connection.in_use():
            self._accept_ready(self._connection.wait_for_line(end_s))

    async def become_ready(self) -> None:
        """Waits for the ready line. Raises WorkerDiedError."""
        with self._connection.in_use():
            self._accept_ready(await self._connection.receive_line())

    async def ask(self, request: JsonObject) -> JsonObject:
        """Sends a JSON-able request and waits for its reply, {'reward'}, {'error'} or {'fault'}.

        Raises WorkerDiedError, also for a reply to another request, for a second reply, and for a reply without a
        request: after these no later reply can be trusted. The id cannot be guessed by a process that an earlier
        answer left behind.
        """
        with self._connection.in_use():
            self._require_silence()
            number = secrets.token_hex(8)
            await self._connection.send(json.dumps({**request, 'id': number}).encode() + b'\n')
            reply = _parse(await self._connection.receive_line(), REPLIES)
            if reply.get('id') != number:
                raise WorkerDiedError(f'the worker for {self.scorer!r} replied to another request')
            if self._connection.received:
                raise WorkerDiedError(f'the worker for {self.scorer!r} replied more than once')
            del reply['id']
            return reply

    def ask_at_once(self, request: JsonObject, end_s: float) -> JsonObject:
        """`ask` for use outside event loops: blocks until the reply is there.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        number = secrets.token_hex(8)
        with self._connection.in_use():
            self._connection.send_at_once(json.dumps({**request, 'id': number}).encode() + b'\n', end_s)
            return _parse(self._connection.wait_for_line(end_s), REPLIES)

    def kill(self) -> None:
        """Ends the worker and every process of its scorer; callable from any thread, does not wait.

        A coroutine that waits for a reply gets WorkerDiedError.
        """
        if self.is_killed:
            return
        # A closed connection ends the worker. SIGKILL would keep it from killing the scorer's processes, and only the
        # worker is sure to find all of them.
        self._connection.close()
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
        self._connection.read()
        if self._connection.received:
            _parse(self._connection.take_line(), ())

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
