"""The caller's side of the process that renders a chat template."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time
import weakref

from areal_jax.files import JsonObject

Reply = dict[str, str]  # a text, or an error, of one conversation

_RENDERER = pathlib.Path(__file__).with_name('template_renderer.py')
_BLOCK_BYTES = 2**16  # read or written at once
_LOOK_S = 1.0  # between two checks whether the process lives, in case its end of a pipe is open elsewhere too
_LARGEST_KEPT = 2**22  # bytes of a request: after a larger one the process ends, to free its memory


class TemplateWorker:
    """A process that renders one template. The first call starts it, and the first call after its end restarts it.

    For several threads, one call at a time. It ends with `close`, when this object is collected, and with the process
    that started it; the forks of that process must each make their own worker.
    """

    def __init__(self, source: str):
        self.owner = os.getpid()
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None

    def render(self, request: JsonObject) -> tuple[list[Reply], str]:
        """Returns (the reply to each conversation up to the first that fails, how the process ended, '' if it did not).

        `request`: see template_renderer.py; `source` is added.
        """
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process, request = self._start(), {**request, 'source': self._source}
            line = json.dumps(request).encode() + b'\n'
            end_s = time.monotonic() + request['wall_seconds']
            try:
                written = _exchange(process, line, end_s)
            except BaseException:  # the next call would get the reply
                self.close()
                raise
            replies = [json.loads(line) for line in written.split(b'\n')[:-1] if line]  # a last part was cut off
            ended = '' if written.endswith(b'\n\n') else _describe_end(process, request, end_s)
            if ended or len(line) > _LARGEST_KEPT:
                self.close()
            return replies, ended

    def close(self) -> None:
        """Ends the process, if there is one; another call starts a new one."""
        self._process = None
        if self._end is not None:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        command = [sys.executable, '-P', str(_RENDERER), str(os.getpid())]  # -P: its folder hides no library
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # parts of a long request are written as the process reads them
        self._process, self._end = process, weakref.finalize(self, _end_process, process, self.owner)
        return process


def _exchange(process: subprocess.Popen[bytes], request: bytes, end_s: float) -> bytes:
    """Returns the output of the process up to an empty line; less if the process or the time ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    to_process, from_process = process.stdin.fileno(), process.stdout.fileno()
    poller = select.poll()
    poller.register(to_process, select.POLLOUT)
    poller.register(from_process, select.POLLIN)
    unsent, written = memoryview(request), bytearray()
    while not written.endswith(b'\n\n') and (left_s := end_s - time.monotonic()) > 0:
        ready = dict(poller.poll(1e3 * min(left_s, _LOOK_S)))
        if not ready and process.poll() is not None:
            break
        if to_process in ready:
            unsent = unsent[_write(to_process, unsent[:_BLOCK_BYTES]) :]
            if not unsent:
                poller.unregister(to_process)
        if from_process in ready:
            block = os.read(from_process, _BLOCK_BYTES)
            if not block:
                break
            written += block
    return bytes(written)


def _write(descriptor: int, block: memoryview) -> int:
    try:
        return os.write(descriptor, block)
    except BlockingIOError:
        return 0
    except BrokenPipeError:  # the process has ended, and its earlier output is read
        return len(block)


def _describe_end(process: subprocess.Popen[bytes], request: JsonObject, end_s: float) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LOOK_S if time.monotonic() < end_s else 0.0)
    if process.returncode is None or process.returncode == -signal.SIGALRM:
        return f'it takes more than {request["wall_seconds"]} s'
    if process.returncode == -signal.SIGPROF:
        return f'it takes more than {request["cpu_seconds"]} s of CPU time'
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    last_line = (process.stderr.read() or b'').decode(errors='replace').strip().rpartition('\n')[2]
    return f'the process that renders it ended with status {process.returncode}: {last_line[:300]}'


def _end_process(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # it belongs to another process, which waits for it
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
