"""Descriptors of this process: each connection takes one, and a process without a free one can do nothing at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource

_MOST = 65536  # a limit above it is not asked for: some programs close all descriptors below their limit one by one
_RESERVED = 112  # for files of weights, pipes of templates, and connections between accept and close
_LEAST = 16  # connections, however few descriptors there are
_OPEN = pathlib.Path('/proc/self/fd')
_OPEN_GUESS = 64  # where the system does not say


def raise_limit() -> None:
    """Raises the soft limit of descriptors as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system that gives less than it says: the soft limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def count_connections(wanted: int) -> int:
    """As many of the wanted connections as the limit of descriptors leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    taken = len(os.listdir(_OPEN)) if _OPEN.is_dir() else _OPEN_GUESS
    return min(wanted, max(_LEAST, soft - taken - _RESERVED))
