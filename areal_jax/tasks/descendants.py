"""Processes that a scorer started, wherever they have gone: found through Linux's /proc, and ended.

A process that left its session (setsid) or whose parent has ended (a daemon) is still found: the worker is the
subreaper of its descendants, and each carries the worker's mark in its environment. On systems without /proc nothing
is found here; callers kill the scorer's process group first, which reaches whatever did not leave it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

MARK = 'AREAL_JAX_WORKER'  # environment variable: which worker a process descends from
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PAUSE_S = 0.005  # between two looks


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def list_descendants(root: int) -> list[int]:
    """Living processes below `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    dead = set()
    for pid in _list_processes():
        fields = _read_proc(pid, 'stat').rpartition(b')')[2].split()
        if fields:
            children.setdefault(int(fields[1]), []).append(pid)
            if fields[0] in (b'Z', b'X'):
                dead.add(pid)
    found, unvisited = [], [root]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += [pid for pid in below if pid not in dead]
        unvisited += below
    return found


def list_marked(mark: str) -> list[int]:
    """Living processes that were started with MARK=mark in their environment, and their forks."""
    entry = f'{MARK}={mark}'.encode()
    return [pid for pid in _list_processes() if entry in _read_proc(pid, 'environ').split(b'\0')]


def end_processes(find: Callable[[], list[int]], within_s: float) -> bool:
    """SIGKILL to whatever `find` returns and to its process groups, until it returns nothing; False if time runs out.

    Groups as well as processes: a chain of processes, each of which forks and exits, is faster than any look at
    /proc, but it stays in its group. A chain that also leaves its group at every step may get away.
    """
    end_s = time.monotonic() + within_s
    while pids := find():
        for pid in pids:
            with contextlib.suppress(OSError):
                group = os.getpgid(pid)
                if group != os.getpgrp():
                    os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _list_processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir('/proc') if name.isdigit()]
    except OSError:
        return []


def _read_proc(pid: int, name: str) -> bytes:
    try:
        with open(f'/proc/{pid}/{name}', 'rb') as file:
            return file.read()
    except OSError:  # it has ended, or belongs to somebody else
        return b''
