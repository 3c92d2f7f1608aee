"""Requests to stop a run: what a run expects of them, and signals as such requests, for every long-running command.

run_thread.py has the requests of a program that calls the library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from areal_jax.app.process.ending import RESUME
from areal_jax.errors import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Request = Callable[[signal.Signals], None]


@contextlib.contextmanager
def written_signals(descriptor: int, numbers: Sequence[signal.Signals]) -> Iterator[frozenset[signal.Signals]]:
    """Inside, each of these signals only writes its number, a byte, to the descriptor, which must not block.

    Gives those that do: a signal that is ignored stays ignored (nohup). For the main thread.
    """
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    # a handler must be set, or Python does not write to the descriptor
    before = {number: signal.signal(number, _ignore) for number in heeded}
    descriptor_before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    try:
        yield frozenset(before)
    finally:
        signal.set_wakeup_fd(descriptor_before)
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequests(Protocol):
    """How a run learns that it shall stop."""

    ends_process: bool  # the process ends with the run: threads that still work need not be waited for

    def check(self) -> None:
        """To be called between the parts of a start; raises KeyboardInterrupt where a stop was asked for."""
        ...

    def deferred(
        self, request: Request, then: str, abandon: Callable[[], None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the first request calls `request`, and a further one ends the run at once; both on another thread.

        Args:
          then: what the user is told will happen: 'finishing the update under way, then saving'.
          abandon: ends what is inside with KeyboardInterrupt; used where the process goes on after the run.
        """
        ...


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP while a command runs; a context manager, for the main thread.

    A signal ends the process at once with ExitCode.STOPPED, except inside `deferred`: there the first one is passed on
    and the second one ends the process. A thread receives them, because Python runs its own handlers on the main
    thread only, and that may be inside XLA's compiler for minutes. A signal that is ignored when the command starts
    stays ignored (nohup). Implements StopRequests.

    Args:
      again: what the user is told of how to go on after a signal that ends the process at once.
    """

    ends_process = True

    def __init__(self, again: str = RESUME) -> None:
        self.again = again
        self._request: Request | None = None
        self._then = ''
        self._lock = threading.Lock()

    def __enter__(self) -> Interrupts:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._signals = contextlib.ExitStack()
        self._heeded = self._signals.enter_context(written_signals(self._sender.fileno(), SIGNALS))
        self._thread = threading.Thread(target=self._receive, name='signals', daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        self._sender.close()
        self._thread.join()
        self._receiver.close()

    def check(self) -> None:
        """Nothing: a signal outside `deferred` has ended the process."""

    @contextlib.contextmanager
    def deferred(self, request: Request, then: str, abandon: Callable[[], None] | None = None) -> Iterator[None]:
        """See StopRequests. The second signal ends the process, so `abandon` is not called."""
        with self._lock:
            self._request, self._then = request, then
        try:
            yield
        finally:
            with self._lock:
                self._request = None

    def _receive(self) -> None:
        while numbers := self._receiver.recv(64):
            for number in numbers:
                if number in self._heeded:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        with self._lock:
            request, self._request = self._request, None
            if request is not None:
                _say(f'{number.name}: {self._then}; once more to quit at once')
                request(number)
                return
        _say(f'{number.name}: stopped at once; {self.again}')
        os._exit(ExitCode.STOPPED)


class Wakeups:
    """SIGNALS and the ends of children, for which the main thread waits; a context manager.

    A signal that is ignored when the program starts stays ignored (nohup).
    """

    def __enter__(self) -> Wakeups:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        self._signals = contextlib.ExitStack()
        self._signals.enter_context(written_signals(self._sender, (*SIGNALS, signal.SIGCHLD)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        os.close(self._receiver)
        os.close(self._sender)

    def wait(self, timeout_s: float | None, file: int | None = None) -> tuple[list[signal.Signals], bool]:
        """(the SIGNALS that arrived, whether `file` can be read); ([], False) also when a child has ended."""
        watched = [self._receiver] if file is None else [self._receiver, file]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        numbers = os.read(self._receiver, 64) if self._receiver in ready else b''
        return [signal.Signals(number) for number in numbers if number in SIGNALS], file in ready


def ignore_signals() -> None:
    """For follower processes: process 0 tells them when to end."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _ignore(number: int, frame: object) -> None:
    """Does nothing: the reader of the descriptor handles the signal."""


def _leave_terminal() -> None:
    """Redirects output from the closed terminal to /dev/null, because writing to the terminal would raise OSError."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed when the process was started
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty():
                os.dup2(null, stream.fileno())
    os.close(null)


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(sentence, flush=True)
