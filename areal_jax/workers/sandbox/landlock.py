"""Landlock: what a process and its children can do with files, ports and signals, by rules that nothing takes back.

The numbers are those of linux/landlock.h; they are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import stat
from collections.abc import Mapping

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CLOSE_RANGE = 436
_VERSION = 1  # flag of _CREATE_RULESET that asks for the ABI
_PATH_BENEATH = 1
_NETWORK = 0b11  # bind and connect of TCP; ABI 4
_SCOPES = 0b11  # abstract unix sockets and signals outside; ABI 6
_SIZES = {1: 8, 4: 16, 6: 24}  # bytes of the ruleset by the first ABI that has so many


class Access(enum.IntFlag):
    """To files and folders."""

    EXECUTE = enum.auto()
    WRITE_FILE = enum.auto()
    READ_FILE = enum.auto()
    READ_DIR = enum.auto()
    REMOVE_DIR = enum.auto()
    REMOVE_FILE = enum.auto()
    MAKE_CHAR = enum.auto()
    MAKE_DIR = enum.auto()
    MAKE_REG = enum.auto()
    MAKE_SOCK = enum.auto()
    MAKE_FIFO = enum.auto()
    MAKE_BLOCK = enum.auto()
    MAKE_SYM = enum.auto()
    REFER = enum.auto()  # ABI 2
    TRUNCATE = enum.auto()  # ABI 3
    IOCTL_DEV = enum.auto()  # ABI 5


READ = Access.READ_FILE | Access.READ_DIR
RUN = READ | Access.EXECUTE
# no device, no socket, nothing to execute
CHANGE = ~(Access.EXECUTE | Access.MAKE_CHAR | Access.MAKE_BLOCK | Access.MAKE_SOCK | Access.IOCTL_DEV)
_OF_FILES = Access.EXECUTE | Access.WRITE_FILE | Access.READ_FILE | Access.TRUNCATE | Access.IOCTL_DEV
_SINCE = {Access.REFER: 2, Access.TRUNCATE: 3, Access.IOCTL_DEV: 5}


class _Ruleset(ctypes.Structure):
    _fields_ = (('files', ctypes.c_uint64), ('network', ctypes.c_uint64), ('scopes', ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (('allowed', ctypes.c_uint64), ('descriptor', ctypes.c_int32))


def find_abi() -> int:
    """The version of Landlock in this kernel; 0 = there is none, or it is switched off."""
    return max(0, load_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def build_ruleset(rules: Mapping[str, Access], abi: int) -> int:
    """A descriptor of the rules, for `enter` in this process and in its forks.

    Paths that do not exist are left out. Raises OSError.
    """
    handled = sum(access for access in Access if _SINCE.get(access, 1) <= abi)
    ruleset = _Ruleset(handled, _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = max(size for first, size in _SIZES.items() if first <= abi)
    descriptor = _call(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    try:
        for path, access in rules.items():
            _allow(descriptor, path, access & handled)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def enter(ruleset: int) -> None:
    """From now on this thread and what it starts have the accesses of build_ruleset alone.

    Needs PR_SET_NO_NEW_PRIVS. Raises OSError.
    """
    _call(_RESTRICT_SELF, ruleset, 0)


def close_range(first: int, last: int) -> None:
    """Closes the descriptors of a range, open or not; that of os needs a newer libc. Raises OSError."""
    _call(_CLOSE_RANGE, first, last, 0)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = _PathRule(access if is_folder else access & _OF_FILES, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result: int = load_libc().syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@functools.cache
def load_libc() -> ctypes.CDLL:
    """The C library; a process that forks many confined ones loads it once."""
    return ctypes.CDLL(None, use_errno=True)
