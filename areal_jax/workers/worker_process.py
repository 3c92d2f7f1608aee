"""One worker process: a request out, its reply back, and a kill that always works.

The coroutines run on the I/O loop of the clock, everything else on the host's thread. The pipes are in
workers/worker_process.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

from areal_jax.files import JsonObject, decode_json
from areal_jax.installation import build_python_path
from areal_jax.workers.descendants import MARK, Process, end_processes, list_descendants, list_marked
from areal_jax.workers.sandbox.levels import wrap_command
from areal_jax.workers.worker_process import ENDED, SCORER_DIED, USAGE, WorkerDiedError, WorkerPipes

REPLIES = ('reward', 'error', 'fault')  # one of them is in each reply
_KILL_S = 2.0  # a process that survives SIGKILL for so long is stuck in the kernel

_log = logging.getLogger(__name__)


class WorkerProcess:
    """A running `areal_jax.tasks.scoring.worker`, in a session of its own: the terminal's Ctrl-C does not reach it.

    One request at a time. The coroutines may be cancelled at any point; after that only `kill` is allowed, since a
    reply may be on its way.
    """

    def __init__(self, scorer: str, memory_mb: int, sandbox: str = 'none', readable: Sequence[str] = ()):
        """Starts the process and returns at once; it is not ready yet. See scorer_process.serve.

        Raises OSError, and SandboxError where the level `sandbox` does not start here.
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
        """Of the worker, or of bubblewrap around it; its scorer runs in a child."""
        return self._process.pid

    @property
    def is_killed(self) -> bool:
        return self._pipes.is_closed

    def wait_until_ready(self, end_s: float) -> None:
        """Block until the ready line is there; for use outside event loops.

        `end_s` is a time.monotonic(). Raises TimeoutError, WorkerDiedError.
        """
        self._accept_ready(self._pipes.wait_for_line(end_s))

    async def become_ready(self) -> None:
        """Wait for the ready line. Raises WorkerDiedError."""
        with self._pipes.in_use():
            self._accept_ready(await self._pipes.receive_line())

    async def ask(self, request: JsonObject) -> JsonObject:
        """Send a JSON-able request and wait for its reply, {'reward'}, {'error'} or {'fault'}.

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
        """Have the worker end at once, with every process of its scorer; from any thread, returns without waiting.

        A coroutine that waits for a reply gets WorkerDiedError.
        """
        if self.is_killed:
            return
        # Closed pipes end the worker. SIGKILL would keep it from killing the scorer's processes, and only the worker is
        # sure to find all of them.
        self._pipes.close()
        self._process.send_signal(signal.SIGCONT)  # its scorer may have stopped it

    def is_gone(self) -> bool:
        """Whether a killed worker and all it started have ended; blocks only if its scorer killed the worker."""
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
