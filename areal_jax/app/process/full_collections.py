"""Limits full garbage collections to 1% of the run time.

The commands call it; areal_jax.train and a program of its own keep Python's setting.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

SHARE = 0.01  # of the time, at most, for full collections
_FULL = 2  # the generation that holds every object
_NEVER = 2**31 - 1


class FullCollections:
    """Puts off each full collection until the last one's duration is at most SHARE of the time since it ended.

    A full collection holds up every thread for a time that grows with all objects of the process: 1.6 s with 102,400
    open requests. Python starts one whenever a quarter of the objects is new. In a run most of them are open requests,
    which come and go without circles, so that with 4,096 engines the collections took a third of the loop's CPU
    (docs/log/). Objects that only a circle keeps are found later than before, but within 100 durations of a
    collection: 6 s in a process with jax. Collections of new objects, which take milliseconds, stay as they are.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._thresholds = gc.get_threshold()
        self._began_s = self._due_s = now()
        self._waiting = False

    def note(self, phase: str, info: Mapping[str, int]) -> None:
        """For gc.callbacks: `phase` is 'start' or 'stop' of a collection."""
        if phase == 'start':
            self._began_s = self._now()
        elif info['generation'] == _FULL:
            ended_s = self._now()
            self._due_s = ended_s + (ended_s - self._began_s) / SHARE
            self._set(waiting=True)
        elif self._waiting and self._now() >= self._due_s:
            self._set(waiting=False)

    def _set(self, waiting: bool) -> None:
        self._waiting = waiting
        new, middle, full = self._thresholds
        gc.set_threshold(new, middle, _NEVER if waiting else full)


def space_full_collections() -> None:
    """For the rest of this process."""
    gc.callbacks.append(FullCollections().note)
