"""Signals as something that a single thread waits for, together with a file and a deadline."""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeups:
    """STOPS and the ends of children; a context manager, for the main thread.

    A signal that is ignored when the program starts stays ignored (nohup).
    """

    def __enter__(self) -> Wakeups:
        self._receiver, self._sender = os.pipe()
        os.set_blocking(self._receiver, False)
        os.set_blocking(self._sender, False)
        heeded = [number for number in (*STOPS, signal.SIGCHLD) if signal.getsignal(number) is not signal.SIG_IGN]
        # a handler must be set, or Python does not write to the descriptor
        self._before = {number: signal.signal(number, _ignore) for number in heeded}
        self._descriptor_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._descriptor_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._receiver)
        os.close(self._sender)

    def wait(self, timeout_s: float | None, file: int | None = None) -> tuple[list[signal.Signals], bool]:
        """(the signals of STOPS that came, whether `file` can be read); ([], False) also when a child has ended."""
        watched = [self._receiver] if file is None else [self._receiver, file]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        numbers = os.read(self._receiver, 64) if self._receiver in ready else b''
        return [signal.Signals(number) for number in numbers if number in STOPS], file in ready


def _ignore(number: int, frame: object) -> None:
    """Does nothing: `wait` returns the signal."""
