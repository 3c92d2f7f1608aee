"""A command whose disk fails at a chosen moment: python -m checks.chaos.full_disk SETTINGS MODULE [ARGUMENT ...].

SETTINGS is a JSON object: `below`: the directory whose disk it is; `after`: how many calls that write there succeed,
-1 = all; `error`: name of the errno that the others raise; `report`: file that gets the number of calls so far.
Calls are those of Python: opens for writing, writes, mkdir, fsync and, on a read-only disk, renames and removals.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import pathlib
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from checks.processes import python

CALLS = 'calls'  # the report of on_failing_disk
_ALWAYS, _READ_ONLY = ('mkdir',), ('rename', 'replace', 'unlink', 'rmdir', 'symlink', 'link', 'truncate')


def on_failing_disk(
    below: pathlib.Path, after: int, error: str, directory: pathlib.Path, command: Sequence[str]
) -> list[str]:
    """A command of a module and its arguments on such a disk; the calls are counted in DIRECTORY/calls."""
    settings = {'below': str(below), 'after': after, 'error': error, 'report': str(directory / CALLS)}
    return python('-m', 'checks.chaos.full_disk', json.dumps(settings), *command)


class FailingDisk:
    """Counts the calls that write below a directory and lets those after the first `after` fail."""

    def __init__(self, below: str, after: int, error: str, report: str):
        self._below, self._after, self._errno = os.path.realpath(below), after, getattr(errno, error)
        self._report, self._calls = os.open(report, os.O_WRONLY | os.O_CREAT, 0o644), 0

    def spend(self, path: Any) -> None:
        """One call; raises OSError when it is one of those that fail."""
        self._calls += 1
        os.pwrite(self._report, str(self._calls).encode(), 0)  # at once: a process may end without exit handlers
        if 0 <= self._after < self._calls:
            raise OSError(self._errno, os.strerror(self._errno), os.fspath(path) if path is not None else None)

    def holds(self, path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        whole = os.path.realpath(os.path.dirname(os.path.abspath(os.fsdecode(path))))
        return whole == self._below or whole.startswith(self._below + os.sep) or os.path.realpath(path) == self._below

    @property
    def is_read_only(self) -> bool:
        return self._errno == errno.EROFS


_real_open = io.open
_disk: FailingDisk


class _File(io.FileIO):
    def write(self, data: Any) -> int:
        _disk.spend(None)  # as in the kernel: the error of a write names no file
        return super().write(data)


def _open(
    file: Any,
    mode: str = 'r',
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[str, int], int] | None = None,
) -> Any:
    if not set(mode) & set('wax+') or not _disk.holds(file):
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    _disk.spend(file)
    raw = _File(file, mode.replace('b', '').replace('t', ''), closefd, opener)
    if buffering == 0:
        return raw
    buffer: Any = io.BufferedRandom(raw) if '+' in mode else io.BufferedWriter(raw)
    if 'b' in mode:
        return buffer
    return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)


def _guard(name: str) -> None:
    real = getattr(os, name)

    def guarded(path: Any, *arguments: Any, **named: Any) -> Any:
        if _disk.holds(path):
            _disk.spend(path)
        return real(path, *arguments, **named)

    setattr(os, name, guarded)


def _guard_sync() -> None:
    real = os.fsync

    def fsync(fd: Any) -> None:
        if _disk.holds(os.readlink(f'/proc/self/fd/{fd}')) and not _disk.is_read_only:
            _disk.spend(None)
        real(fd)

    os.fsync = fsync


def main(arguments: list[str]) -> None:
    global _disk
    _disk = FailingDisk(**json.loads(arguments[0]))
    builtins.open = io.open = _open  # type: ignore[assignment]
    for name in (*_ALWAYS, *(_READ_ONLY if _disk.is_read_only else ())):
        _guard(name)
    _guard_sync()
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name='__main__', alter_sys=True)


if __name__ == '__main__':
    main(sys.argv[1:])
