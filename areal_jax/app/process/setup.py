"""Settings of a whole process, which commands make; areal_jax.train and programs of a user keep their own."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping

import absl.logging

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # names of mallopt(3) options, from malloc.h
_MMAP_BYTES = 1 << 20  # larger blocks are mapped, and returned to the system when they are freed
_TRIM_BYTES = 1 << 26  # free memory that a heap keeps at its end: compilers free and allocate in turns
SHARE = 0.01  # of the time, at most, for full collections
_FULL = 2  # the generation that holds every object
_NEVER = 2**31 - 1


def set_up_process() -> None:
    """Call it before jax is imported: how memory is freed, and how often all objects are searched for garbage."""
    return_freed_memory()
    space_full_collections()


def silence_libraries() -> None:
    """Shows only errors of XLA's C++ code and of matplotlib, and nothing that is logged through absl.

    Call it before jax is imported. Orbax logs every exception that it raises through absl, with a traceback.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # read once, when jaxlib is loaded
    absl.logging.set_verbosity(absl.logging.FATAL)
    logging.getLogger('matplotlib').setLevel(logging.ERROR)  # it warns while it builds its cache of fonts
    _drop_late_futures()


def _drop_late_futures() -> None:
    """Drops the message 'Event loop is closed'.

    When reading one array of a damaged checkpoint fails, orbax closes its event loop, to which other
    reads still report.
    """
    hook = sys.unraisablehook

    def print_others(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != 'Event loop is closed':
            hook(unraisable)

    sys.unraisablehook = print_others


def return_freed_memory() -> bool:
    """Call it before jax is imported; True where the C library is glibc and took the settings.

    By default, glibc raises its mmap threshold (up to 32 MB) each time that a larger block is freed. Weights,
    gradients and checkpoint copies of a few MB are then allocated on heaps that never shrink. A fixed threshold of 1 MB
    returns them to the system. Measured on SmolLM2-135M: peak memory 8.6 -> 6.8 GB.
    """
    if platform.libc_ver()[0] != 'glibc':
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _MMAP_BYTES), (_TRIM_THRESHOLD, _TRIM_BYTES), (_ARENA_MAX, 2))
    taken = [mallopt(option, value) for option, value in settings]
    return all(taken)


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
