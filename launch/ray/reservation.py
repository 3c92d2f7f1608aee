"""Reserves the bundles of a group on a thread: Ray blocks while it looks for a slice of TPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

PAUSE_S = 2.0  # after an attempt that found no room
Found = TypeVar('Found')


class Reservation(threading.Thread, Generic[Found]):
    """Tries until there is room, or until it is let go.

    Args:
      attempt: returns what it has reserved, or None where there is no room yet; takes seconds at most, as a thread that
        is inside Ray cannot be stopped.
      remove: gives what was reserved back.
    """

    def __init__(self, attempt: Callable[[], Found | None], remove: Callable[[Found], None]):
        super().__init__(daemon=True)
        self._attempt, self._remove = attempt, remove
        self._lock, self._is_let_go = threading.Lock(), threading.Event()
        self._found: Found | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """On the thread."""
        while not self._is_let_go.is_set():
            try:
                found = self._attempt()
            except BaseException as error:  # raised again where somebody asks
                self._error = error
                return
            if found is not None:
                self._keep(found)
                return
            self._is_let_go.wait(PAUSE_S)

    def find(self) -> Found | None:
        """What is reserved; None: nothing yet. Raises what an attempt raised."""
        if self._error is not None:
            raise self._error
        return self._found

    def let_go(self) -> None:
        """Gives back what is reserved; what an attempt that is under way finds is given back when it returns."""
        with self._lock:
            self._is_let_go.set()
            found, self._found = self._found, None
        if found is not None:
            self._remove(found)

    def _keep(self, found: Found) -> None:
        with self._lock:
            if not self._is_let_go.is_set():
                self._found = found
                return
        self._remove(found)


def await_let_go(within_s: float) -> None:
    """Returns when no attempt is under way any more, or after `within_s`."""
    end_s = time.monotonic() + within_s
    for thread in threading.enumerate():
        if isinstance(thread, Reservation):
            thread.join(max(0.0, end_s - time.monotonic()))
