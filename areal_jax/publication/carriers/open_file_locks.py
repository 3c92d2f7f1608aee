"""Locks single bytes of a file for one opening of the file; the kernel releases them when the process dies.

fcntl(2), "Open file description locks": unlike lockf's locks, they keep two openings in one process apart, and closing
another descriptor of the file releases nothing. Linux only.

Run as a program, `python -I -S FILE PATH POSITION`, it removes a file when the byte is released. It imports nothing
of this package, so it starts in a few milliseconds and needs little memory during a whole run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import sys

_FLOCK = struct.Struct('hhqqi4x')  # struct flock of 64-bit Linux: type, whence, start, length, pid


def are_supported() -> bool:
    return hasattr(fcntl, 'F_OFD_SETLK')


def try_lock(descriptor: int, position: int) -> bool:
    """Locks the byte at `position`, which may be past the end of the file; False if another opening has locked it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES
        return False
    return True


def unlock(descriptor: int, position: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, position, 1, 0))


def find_locked(descriptor: int, start: int, count: int) -> list[int]:
    """The bytes of [start, start + count) that other openings have locked, ascending."""
    found, position, end = set[int](), start, start + count
    while position < end:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, end - position, 0)
        kind, _, first, length, _ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            break
        last = first + length if length else end
        found.update(range(max(first, position), min(last, end)))
        # the kernel names any one lock of the range, in practice the lowest: search on both sides of it
        if first > position:
            found.update(find_locked(descriptor, position, first - position))
        position = last
    return sorted(found)


def remove_when_released(path: str, position: int) -> None:
    """Starts a process in a new session that waits until the owner of the lock ends, then removes the file.

    Returns at once. The process ignores SIGINT, SIGTERM and SIGHUP, so it lives as long as the owner of the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fork():
        return
    os.setsid()
    for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sent, signal.SIG_IGN)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0))
    with contextlib.suppress(FileNotFoundError):  # the owner has removed it
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            os.unlink(path)


if __name__ == '__main__':
    remove_when_released(sys.argv[1], int(sys.argv[2]))
