"""A worker process that scores answers.

    python -m areal_jax.tasks.scoring.worker SCORER [MEMORY_MB [SANDBOX [FILE...]]]

Started by workers/worker_process.py, with which it exchanges lines of JSON over stdin and stdout. A worker is two
processes. This one runs no code of the scorer: it relays the lines, limits what the scorer prints, and at its end kills
every process that the scorer started. Its child (tasks/scoring/scorer_process.py) runs the scorer in a new session, and
describes the format of the lines; this process adds {"crash": "reason"} when the child has ended.

When stdin closes, the worker finishes the requests that it has received. When stdout closes too, or the parent dies, it
ends at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from areal_jax.tasks.scoring.scorer_process import serve
from areal_jax.workers.descendants import adopt_orphans, die_with_parent, end_descendants
from areal_jax.workers.sandbox.confinement import CONFINING
from areal_jax.workers.worker_process import ENDED, LEFT_BEHIND, SCORER_DIED, USAGE, name_signal

_GRACE_S = 30.0  # for the requests already received once stdin has closed, while stdout is open
_EXIT_S = 0.2  # between the closing of a process's pipes and its end
_KILL_S = 3.0  # a process that is alive this long after SIGKILL is stuck in the kernel
_CHUNK_BYTES = 2**16  # read at once
_SHOWN_BYTES = 2000  # of what a scorer prints during one answer
_SHOWN_WHILE_LOADING_BYTES = 20_000  # room for the traceback of an import
_DRAIN_READS = 64  # per reply: a process of the scorer may print without end


def main(arguments: list[str]) -> int:
    """Relays requests and replies until stdin closes or the scorer's process ends."""
    if not arguments or not {*arguments[2:3]} <= {'none', *CONFINING}:
        print('usage: python -m areal_jax.tasks.scoring.worker SCORER [MEMORY_MB [SANDBOX [FILE...]]]', file=sys.stderr)
        return USAGE
    adopt_orphans()
    memory_mb, level = int(arguments[1]) if len(arguments) > 1 else 0, (arguments[2:] or ['none'])[0]
    return _Worker(arguments[0], memory_mb, level, arguments[3:]).run()


class _Output:
    """The output of the scorer: its beginning is shown on stderr under a heading, the rest is only counted."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self.is_open = True
        self.begin('while loading', _SHOWN_WHILE_LOADING_BYTES)

    def begin(self, label: str, room: int = _SHOWN_BYTES) -> None:
        self._label, self._room = label, room
        self._head, self._n_bytes = b'', 0

    def read(self) -> bool:
        """Reads one chunk; False if no chunk is ready."""
        try:
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._head += chunk[: self._room - len(self._head)]
        self._n_bytes += len(chunk)
        self.is_open = bool(chunk)
        return self.is_open

    def end(self, next_label: str) -> None:
        """Shows the output so far; later output gets another heading."""
        for _ in range(_DRAIN_READS):
            if not self.read():
                break
        if self._n_bytes:
            text = f'the scorer printed {self._label}:\n{self._head.decode(errors="replace").rstrip()}\n'
            if more := self._n_bytes - len(self._head):
                text += f'[{more} bytes more are not shown]\n'
            with contextlib.suppress(OSError):
                os.write(2, text.encode())
        self.begin(next_label)


class _Worker:
    """The relay between the parent (stdin, stdout) and the scorer's process."""

    def __init__(self, scorer: str, memory_mb: int, level: str, readable: Sequence[str]):
        self._child_ended = _notice_ended_children()
        self._pid, self._requests, self._replies, output = _start_scorer(
            scorer, memory_mb, level, readable, self._child_ended
        )
        self._output = _Output(output)
        self._output_descriptor = output
        for descriptor in (0, 1, self._requests, self._replies, output):
            os.set_blocking(descriptor, False)
        self._incoming = bytearray()  # the line that stdin has not ended yet
        self._to_scorer, self._to_parent = bytearray(), bytearray()
        self._grace_end_s: float | None = None  # set once stdin has closed
        self._parent_is_gone = False
        self._death = ''  # of the scorer's process, in words
        self._exit_code: int | None = None  # of the scorer's process

    def run(self) -> int:
        """Relays until one side ends, then kills remaining processes; returns the exit code."""
        while not (self._parent_is_gone or self._death or self._time_left_s() == 0):
            self._relay()
        if self._death and self._grace_end_s is None:
            self._to_parent += json.dumps({'crash': self._death}).encode() + b'\n'
        self._write(1, self._to_parent)
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)
        all_ended = end_descendants(self._reap, _KILL_S)
        self._output.end('')
        if not all_ended:
            return LEFT_BEHIND
        return ENDED if self._parent_is_gone or self._exit_code == 0 else SCORER_DIED

    def _relay(self) -> None:
        poll = select.poll()
        if self._grace_end_s is None and not self._to_scorer:
            poll.register(0, select.POLLIN)
        poll.register(1, select.POLLOUT if self._to_parent else 0)  # POLLERR, POLLHUP are always reported
        if self._to_scorer:
            poll.register(self._requests, select.POLLOUT)
        if not self._to_parent:
            poll.register(self._replies, select.POLLIN)
        if self._output.is_open:
            poll.register(self._output_descriptor, select.POLLIN)
        poll.register(self._child_ended, select.POLLIN)
        left_s = self._time_left_s()
        ready = dict(poll.poll(None if left_s is None else left_s * 1000))
        if ready.get(1, 0) & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            self._parent_is_gone = True
            return
        if self._output_descriptor in ready:
            self._output.read()
        if 0 in ready:
            self._read_requests()
        if self._to_scorer:
            self._write(self._requests, self._to_scorer)
        if self._replies in ready:
            self._read_replies()
        if self._to_parent:
            self._write(1, self._to_parent)
        if self._child_ended in ready:
            os.read(self._child_ended, _CHUNK_BYTES)
            self._reap()
        if self._grace_end_s is not None and not self._to_scorer and self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def _read_requests(self) -> None:
        chunk = os.read(0, _CHUNK_BYTES)
        if not chunk:
            self._grace_end_s = time.monotonic() + _GRACE_S
            return
        self._incoming += chunk
        if b'\n' in chunk:
            whole, _, rest = bytes(self._incoming).rpartition(b'\n')
            self._incoming = bytearray(rest)
            self._to_scorer += whole + b'\n'
            self._output.end(_label(whole))

    def _read_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._replies, _CHUNK_BYTES)
            if chunk:
                self._output.end('between two answers')
                self._to_parent += chunk
            else:
                self._find_out_why_closed()

    def _find_out_why_closed(self) -> None:
        end_s = time.monotonic() + _EXIT_S
        while not self._death and time.monotonic() < end_s:
            self._reap()
            time.sleep(0.002)
        self._death = self._death or 'the scorer closed the pipe on which its worker answers'

    def _reap(self) -> bool:
        """Reaps every child that has ended, the scorer's process and adopted orphans; False if no child is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    self._exit_code = os.waitstatus_to_exitcode(ended[1])
                    self._death = self._death or _describe_end(self._exit_code)
                    self._read_last_replies()
        except ChildProcessError:
            return False
        return True

    def _read_last_replies(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._to_parent += os.read(self._replies, _CHUNK_BYTES)

    def _write(self, descriptor: int, data: bytearray) -> None:
        try:
            del data[: os.write(descriptor, data)]
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            data.clear()
            self._parent_is_gone = self._parent_is_gone or descriptor == 1

    def _time_left_s(self) -> float | None:
        return None if self._grace_end_s is None else max(0.0, self._grace_end_s - time.monotonic())


def _start_scorer(
    scorer: str, memory_mb: int, level: str, readable: Sequence[str], noticed: int
) -> tuple[int, int, int, int]:
    """Forks the scorer's process; returns (pid, pipe of requests, pipe of replies, pipe of its output).

    `noticed` is the descriptor of `_notice_ended_children`, which only the parent keeps.
    """
    own_pid = os.getpid()
    requests, to_scorer = os.pipe()
    from_scorer, replies = os.pipe()
    from_output, output = os.pipe()
    pid = os.fork()
    if pid:
        for descriptor in (requests, replies, output):
            os.close(descriptor)
        return pid, to_scorer, from_scorer, from_output
    status = 1
    try:
        notices = (noticed, signal.set_wakeup_fd(-1))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        os.setsid()
        # The socket to the parent is stdin and stdout so far; neither the scorer nor its children may hold it.
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        for descriptor in (null, output, to_scorer, from_scorer, from_output, *notices):
            os.close(descriptor)
        if os.getppid() == own_pid:
            serve(scorer, memory_mb, requests, replies, level, readable)
            status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(status)  # skips the clean-up of the interpreter, which would wait for threads of the scorer


def _notice_ended_children() -> int:
    """Returns a descriptor that becomes readable when a child ends."""
    noticed, wake_up = os.pipe()
    for descriptor in (noticed, wake_up):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_up, warn_on_full_buffer=False)
    return noticed


def _label(requests: bytes) -> str:
    """The heading of the output of the last of these requests: 'for draw 5'."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        request = json.loads(requests.rpartition(b'\n')[2])
        return f'for draw {request["draw"]}'
    return 'for an answer'


def _describe_end(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the scorer's process ended with exit code {exit_code}"
    by_kernel = ' (by the kernel, where memory ran out)' if exit_code == -signal.SIGKILL else ''
    return f"the scorer's process was killed by {name_signal(-exit_code)}{by_kernel}"


if __name__ == '__main__':
    os._exit(main(sys.argv[1:]))
