"""Finds the processes that a program started, through Linux's /proc, and ends them.

worker.py and worker_process.py use it for scorers, launch/ for servers and trainers.

A process that left its session (setsid) or whose parent has ended (a daemon) is still found: the worker is the
subreaper of its descendants, and each carries the worker's mark in its environment. Without /proc nothing
is found here. Callers therefore kill the scorer's process group first, which reaches every process that stayed in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from areal_jax.errors import UserError
from areal_jax.installation import find_clone


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """The interpreter of an environment, and how to get it.

    Args:
      needed_by: the field with the value that needs it, for messages: "rollout.server='sglang'".
      title: the name of the package that it has, for messages.
      variable: the environment variable that names the interpreter.
      made: the path of the interpreter in a clone, used if `variable` is not set.
      script: the script that makes the interpreter at `made`.
    """

    needed_by: str
    title: str
    variable: str
    made: str
    script: str

    def find(self, beside: pathlib.Path | None = None, options: str = '') -> str:
        """Returns its path; raises UserError if it does not exist, or is in the folder to be avoided.

        Args:
          options: of the script, for the message.
        """
        clone, named = find_clone(), os.environ.get(self.variable)
        python = named or (None if clone is None else str(clone / self.made))
        if python is not None and pathlib.Path(python).is_file() and pathlib.Path(python).parent != beside:
            return python
        found = '' if python is None else f', and {python} is none'
        fix = self.describe_fix(options)
        raise UserError(f'{self.needed_by} needs an interpreter that has {self.title}{found}: {fix}')

    def describe_fix(self, options: str = '') -> str:
        """Returns how to get another one."""
        if find_clone() is None:
            return f'install {self.title} into an environment of its own, and name its interpreter in {self.variable}'
        return f'make one with `bash {self.script}{options}`, or name one in {self.variable}'


MARK = 'AREAL_JAX_WORKER'  # environment variable: which worker a process descends from
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PAUSE_S = 0.005  # between two checks


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends (Linux only)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(sent: signal.Signals = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal when the thread that forked it ends (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, sent)


@dataclasses.dataclass(frozen=True)
class Process:
    """An entry of the process table."""

    pid: int
    parent: int
    group: int
    is_alive: bool  # False: a zombie, which keeps its numbers until its parent waits for it


def list_descendants(root: int) -> list[Process]:
    """Lists all descendants of the process `root`, including zombies."""
    children: dict[int, list[Process]] = {}
    for process in _list_processes():
        children.setdefault(process.parent, []).append(process)
    found, unvisited = [], [root]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += [process.pid for process in below]
    return found


def list_marked(mark: str, variable: str = MARK) -> list[Process]:
    """Lists living processes that were started with variable=mark in their environment, and their forks."""
    entry = f'{variable}={mark}'.encode()
    return [process for process in _list_processes() if entry in read_proc(process.pid, 'environ').split(b'\0')]


def end_descendants(reap: Callable[[], bool], within_s: float) -> bool:
    """Sends SIGKILL to every descendant of this process until it has no child; False if time runs out.

    Orphans become children of this process (`adopt_orphans`), so once there is no child there is no descendant. The
    group of a zombie is killed too, because processes in a chain may fork and exit at once: the living one is not found
    in time. A chain that also leaves its process group at every step may escape.

    Args:
      reap: waits for the children that have ended; False when there are no others.
    """
    end_s = time.monotonic() + within_s
    while True:
        kill_processes(list_descendants(os.getpid()))
        if not reap():
            return True
        if time.monotonic() > end_s:
            return False
        time.sleep(_PAUSE_S)


def kill_processes(processes: Iterable[Process]) -> None:
    """Sends SIGKILL to the processes and to their groups, except the group of the caller."""
    own_group = os.getpgrp()
    for process in processes:
        with contextlib.suppress(OSError):
            if process.group != own_group:
                os.killpg(process.group, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


def end_processes(find: Callable[[], list[Process]], within_s: float) -> bool:
    """Kills the processes that `find` returns, repeatedly until all have ended; False if time runs out."""
    end_s = time.monotonic() + within_s
    while alive := [process for process in find() if process.is_alive]:
        kill_processes(alive)
        if time.monotonic() > end_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _prctl(option: int, value: int) -> None:
    if sys.platform == 'linux':
        _load_libc().prctl(option, value, 0, 0, 0)


@functools.cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _list_processes() -> Iterator[Process]:
    try:
        pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]
    except OSError:
        return
    for pid in pids:
        state, *numbers = read_proc(pid, 'stat').rpartition(b')')[2].split()[:3] or [b'']
        if numbers:
            yield Process(pid, int(numbers[0]), int(numbers[1]), is_alive=state not in (b'Z', b'X'))


def read_proc(pid: int, name: str) -> bytes:
    """Returns a file of /proc/PID; empty if the process has ended, or belongs to another user."""
    try:
        with open(f'/proc/{pid}/{name}', 'rb') as file:
            return file.read()
    except OSError:
        return b''
