"""Signals as something that a single thread waits for, together with a file and a deadline."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import TracebackType

from areal_jax.app.interrupt import SIGNALS, written_signals


class Wakeups:
    """SIGNALS and the ends of children; a context manager, for the main thread.

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
        """(those of SIGNALS that came, whether `file` can be read); ([], False) also when a child has ended."""
        watched = [self._receiver] if file is None else [self._receiver, file]
        ready, _, _ = select.select(watched, [], [], timeout_s)
        numbers = os.read(self._receiver, 64) if self._receiver in ready else b''
        return [signal.Signals(number) for number in numbers if number in SIGNALS], file in ready
