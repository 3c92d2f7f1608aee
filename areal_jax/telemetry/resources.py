"""Memory and processor time of the process and its workers, measured while the run runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil

INTERVAL_S = 0.5

Quantity = TypeVar('Quantity', int, float)


class ResourceSampler:
    """A daemon thread that remembers the largest sum of resident memory over the process tree.

    Pages that processes share count once for each of them, so the sum is an upper bound. Use as a context manager, or
    call `start` and `stop`.
    """

    def __init__(self, interval_s: float = INTERVAL_S):
        self._interval_s = interval_s
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name='resources', daemon=True)

    def __enter__(self) -> ResourceSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._peak_bytes = max(self._peak_bytes, resident_bytes())
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread."""
        self._stopped.set()
        self._thread.join()
        self._peak_bytes = max(self._peak_bytes, resident_bytes())

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def cpu_seconds(self) -> float:
        """Processor seconds (user and system) of the tree so far; a difference of two calls measures a window."""
        return cpu_seconds()

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._peak_bytes = max(self._peak_bytes, resident_bytes())


def resident_bytes(pid: int | None = None) -> int:
    """Sum of resident memory over a process (None: this one) and its descendants."""
    return sum(_each(lambda process: int(process.memory_info().rss), pid))


def cpu_seconds(pid: int | None = None) -> float:
    """Processor seconds over a process (None: this one), its living descendants and (not on macOS) those that have
    ended."""

    def spent(process: psutil.Process) -> float:
        times = process.cpu_times()
        ended = getattr(times, 'children_user', 0.0) + getattr(times, 'children_system', 0.0)
        return float(times.user + times.system + ended)

    return sum(_each(spent, pid))


def _each(measure: Callable[[psutil.Process], Quantity], pid: int | None) -> Iterator[Quantity]:
    """The measure of every process of the tree that is still there."""
    import psutil

    this = psutil.Process(pid)
    yield measure(this)
    for process in this.children(recursive=True):
        try:
            yield measure(process)
        except psutil.Error:  # it has ended, or belongs to another user
            continue
