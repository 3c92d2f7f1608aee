"""The heartbeat of a process, on a thread that does nothing else: whatever else it does, it says that it is alive."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable

from areal_jax.registry.entries import Entry, FencedError, Registration

PERIOD_S = 1.0  # between two heartbeats

OnFenced = Callable[[FencedError], None]


class Heartbeat:
    """A context manager: inside, the process is registered and its heartbeat goes on.

    Args:
      entry: see Registration.
      on_fenced: called once, on the thread, where another process takes the name; then the heartbeat ends. May be
        replaced by another function.
    """

    def __init__(self, workdir: pathlib.Path, entry: Entry, on_fenced: OnFenced):
        self.workdir, self.registration = workdir, Registration(workdir, entry)
        self.on_fenced = on_fenced
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name='heartbeat', daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.registration.close()

    @property
    def entry(self) -> Entry:
        return self.registration.entry

    def note_leaving(self) -> None:
        """Nothing new is taken."""
        self.update(is_leaving=True)

    def update(self, **changes: object) -> None:
        """Replaces fields of the entry."""
        with self._lock:
            self.registration.update(**changes)

    def _beat(self) -> None:
        while not self._end.wait(PERIOD_S):
            try:
                with (
                    contextlib.suppress(OSError),
                    self._lock,
                ):  # a file system away for a while
                    self.registration.beat()
            except FencedError as error:
                self.on_fenced(error)
                return
