"""One end of a connection between two processes of a run. Used by leader.py and follower.py.

The main thread may be waiting in a collective that the other process will never join, and a collective cannot be
cancelled. A thread of each peer therefore reads the connection all the time and reports a lost process at once.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar, cast, get_args

from areal_jax.distributed.messages import CLOSE, Command, Message
from areal_jax.errors import ExitCode, LostPeerError

OnLost = Callable[[str], None]  # gets one sentence that names the process
_M = TypeVar('_M', bound=Message)


class CommandError(LostPeerError):
    """A follower that failed where process 0 did not, or could not be reached; names the process and the command."""


def end_process(reason: str) -> None:
    """Ends this process at once: its main thread may be waiting in a collective that cannot be cancelled."""
    print(f'error: {reason}', file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


class Peer:
    """The process at the other end of a connection."""

    def __init__(self, connection: Connection, name: str, on_lost: OnLost):
        self.name, self._connection, self._on_lost = name, connection, on_lost
        self._received: dict[type, queue.Queue[Message]] = {kind: queue.Queue() for kind in get_args(Message)}
        self._closing, self._sending = False, threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self._report_lost()

    def take(self, kind: type[_M], timeout_s: float | None) -> _M:
        """The next message of this kind; raises queue.Empty when none came in time."""
        return cast(_M, self._received[kind].get(timeout=timeout_s))

    def close(self) -> None:
        self._closing = True
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError, TypeError):  # TypeError: this side closed the connection during the read
                self._report_lost()
                return
            self._received[type(message)].put(message)
            if message == Command(CLOSE):
                self._closing = True
                return

    def _report_lost(self) -> None:
        if not self._closing:
            self._on_lost(f'{self.name} is gone')
