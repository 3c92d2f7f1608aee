"""A process that parses large bodies, so that the HTTP loop and the interpreter of the server stay free meanwhile.

Threads do not help: a JSON parser holds the interpreter until it is done. The process is started by the first large
body, kept, and started again if it has died; it has a low priority, because large bodies are not urgent. Run as
`python -m areal_jax.rollout.http.server.body_parser`, it reads requests from stdin: the sizes of two parts (8 bytes
each), then the parts, a pickled function and a body. It writes the size of a pickled reply, then the reply.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from areal_jax.errors import UserError
from areal_jax.rollout.http.server.limits import PLACE_S
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.workers.worker_process import worker_environment

_SIZES, _SIZE = struct.Struct('<QQ'), struct.Struct('<Q')
_BLOCK_BYTES = 1 << 20  # written at once
_LOOK_S = 0.5  # between two checks that the process is alive
_NICE = 5  # gets a quarter of a core that is otherwise busy
_UNAVAILABLE = 503
Result = TypeVar('Result')


class ParserDiedError(Exception):
    """The process has ended, or has missed the deadline."""


class BodyParser:
    """The server's handle of the process; callable from several threads, parses one body at a time."""

    def __init__(self, deadline_s: float = PLACE_S):
        self._lock, self._deadline_s = threading.Lock(), deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None if it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def parse(self, function: Callable[[bytes], Result], content: bytes | bytearray) -> Result:
        """Returns `function(content)`, computed in the process; blocks. `function` must be picklable.

        A process that has died is replaced, and the body parsed again, once: it may have been ended from outside.

        Raises RequestError if the function raises it or another UserError, or if no process parses the body in time.
        """
        request = pickle.dumps(function)
        with self._lock:
            for _ in range(2):
                try:
                    is_result, value = pickle.loads(self._exchange(request, content))
                except ParserDiedError as error:
                    fault = error
                    self.close()
                    continue
                if is_result:
                    return value  # type: ignore[no-any-return]
                raise RequestError(*value)
        raise RequestError('body', f'the body can not be parsed here ({fault}): send less at once', _UNAVAILABLE)

    def close(self) -> None:
        """Ends the process; a later body starts another one."""
        self._process = None
        if self._end is not None:
            self._end()

    def _exchange(self, function: bytes, content: bytes | bytearray) -> bytes:
        end_s = time.monotonic() + self._deadline_s
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        link = _Link(process, end_s)
        for part in (_SIZES.pack(len(function), len(content)), function, content):
            link.write(part)
        (size,) = _SIZE.unpack(link.read(_SIZE.size))
        return bytes(link.read(size))

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        command = [sys.executable, '-m', 'areal_jax.rollout.http.server.body_parser']
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=worker_environment(),
            start_new_session=True,  # the terminal's Ctrl-C is for the server
        )  # fmt: skip
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._end = process, weakref.finalize(self, _end_process, process)
        return process


class _Link:
    """The pipes of the process until a deadline; `read` and `write` raise ParserDiedError."""

    def __init__(self, process: subprocess.Popen[bytes], end_s: float):
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._end_s = process, end_s
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()

    def write(self, content: bytes | bytearray) -> None:
        rest = memoryview(content)
        while rest:
            self._wait(self._in, select.POLLOUT)
            try:
                rest = rest[os.write(self._in, rest[:_BLOCK_BYTES]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise ParserDiedError('the process that parses has ended') from error

    def read(self, size: int) -> bytearray:
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            self._wait(self._out, select.POLLIN)
            taken = os.readv(self._out, [rest])
            if not taken:
                raise ParserDiedError('the process that parses has ended')
            rest = rest[taken:]
        return content

    def _wait(self, descriptor: int, event: int) -> None:
        poller = select.poll()
        poller.register(descriptor, event)
        while (left_s := self._end_s - time.monotonic()) > 0:
            if poller.poll(1e3 * min(left_s, _LOOK_S)):
                return
            if self._process.poll() is not None:
                raise ParserDiedError('the process that parses has ended')
        raise ParserDiedError('it takes too long')


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


# The process.


def main() -> None:
    """Parses the parent's requests until stdin is closed, by the parent or, if that dies, by the kernel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    while len(sizes := requests.read(_SIZES.size)) == _SIZES.size:
        function_bytes, body_bytes = _SIZES.unpack(sizes)
        _answer(requests.read(function_bytes), requests.read(body_bytes), replies)


def _answer(function: bytes, content: bytes, replies: BinaryIO) -> None:
    reply: tuple[bool, object]
    try:
        reply = True, pickle.loads(function)(content)
    except RequestError as error:
        reply = False, (error.field, str(error), error.status)
    except UserError as error:
        reply = False, ('', str(error))
    written = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
    replies.write(_SIZE.pack(len(written)))
    replies.write(written)
    replies.flush()


if __name__ == '__main__':
    main()
