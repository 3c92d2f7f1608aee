"""Locks on single bytes of a file that belong to one opening of it; the kernel releases them when its process dies.

fcntl(2), "Open file description locks": unlike those of lockf they keep apart two openings in one process, and closing
another descriptor of the file releases nothing. Linux only.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct('hhqqi4x')  # struct flock of 64-bit Linux: type, whence, start, length, pid


def are_supported() -> bool:
    return hasattr(fcntl, 'F_OFD_SETLK')


def try_lock(descriptor: int, position: int) -> bool:
    """Locks the byte at `position`, which may be behind the end of the file; False where another opening has it."""
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
        # the kernel names any one lock of the range, in practice the lowest: look on both sides of it
        if first > position:
            found.update(find_locked(descriptor, position, first - position))
        position = last
    return sorted(found)
