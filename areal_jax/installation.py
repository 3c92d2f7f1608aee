"""Paths and pip commands for the place that this package runs from: a clone of its repository or an installation.

A clone has the folders configs/ and launch/ next to the package. An installation has them inside, as
areal_jax.configs and areal_jax.launch.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shlex
import sys

PACKAGE = 'package:'  # begins the name of a file that comes with this package: 'package:configs/tiny_cpu.py'
BESIDE = ('configs', 'launch')  # folders next to the package in a clone, inside it in an installation
FOLDER = pathlib.Path(__file__).resolve().parent  # of the package


def find_clone() -> pathlib.Path | None:
    """The root of the clone that this package runs from; None if it is installed."""
    root = FOLDER.parent
    return root if (root / 'setup.py').is_file() and not (FOLDER / BESIDE[0]).is_dir() else None


def locate_file(name: str) -> pathlib.Path:
    """The absolute path of 'package:configs/tiny_cpu.py'; the file need not exist."""
    root = FOLDER if (clone := find_clone()) is None else clone
    return root / name.removeprefix(PACKAGE)


def list_configs() -> list[str]:
    """The names of the config files that come with the package, sorted: 'quickstart', 'sweeps/tiny'."""
    folder = locate_file('configs')
    return sorted(path.relative_to(folder).with_suffix('').as_posix() for path in folder.rglob('[!_]*.py'))


def name_launcher(name: str) -> str:
    """The module of a launcher, for python -m: 'launch.local' or, in an installation, 'areal_jax.launch.local'."""
    return f'{"areal_jax." if find_clone() is None else ""}launch.{name}'


def build_python_path() -> str:
    """PYTHONPATH for a process that must import this copy of the package; an installed copy needs no entry."""
    clone = find_clone()
    entries = ('' if clone is None else str(clone), os.environ.get('PYTHONPATH', ''))
    return os.pathsep.join(entry for entry in entries if entry)


def strip_python_path() -> str:
    """PYTHONPATH without the clone, for a process that must not import this package through it."""
    clone = find_clone()
    entries = os.environ.get('PYTHONPATH', '').split(os.pathsep)
    return os.pathsep.join(entry for entry in entries if entry and (clone is None or pathlib.Path(entry) != clone))


def find_cache() -> pathlib.Path:
    """The folder of files that can be made again: areal_jax in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
    return pathlib.Path(home) / 'areal_jax'


def describe_install(extra: str) -> str:
    """The shell command that adds the packages of an extra of setup.py to the interpreter in use."""
    clone = find_clone()
    if clone is None:
        return describe_pip(*_list_requirements(extra))
    where = '.' if pathlib.Path.cwd() == clone else str(clone)
    return describe_pip('-e', f'{where}[{extra}]')


def describe_pip(*words: str) -> str:
    """The shell command by which pip installs into the interpreter in use."""
    python, here = pathlib.Path(sys.executable), pathlib.Path.cwd()
    shown = python.relative_to(here) if python.is_relative_to(here) else python
    return shlex.join([str(shown), '-m', 'pip', 'install', *words])


def find_command(program: str) -> str:
    """Returns a command of the package as this shell finds it: by name, or by its path next to the interpreter."""
    import shutil  # here: a scorer process, which starts in milliseconds, finds none

    beside = pathlib.Path(sys.executable).with_name(program)
    return program if shutil.which(program) or not beside.exists() else os.path.relpath(beside)


def _list_requirements(extra: str) -> list[str]:
    """The requirements of an extra, as the installed package declares them: 'aiohttp>=3.11', ..."""
    import importlib.metadata  # here: a scorer process, which starts in milliseconds, lists none

    declared = importlib.metadata.requires('areal_jax') or []
    split = [requirement.partition(';') for requirement in declared]
    return [name.strip() for name, _, marker in split if re.search(rf"""extra == ['"]{extra}['"]""", marker)]


__version__ = '0.2.0'
_PACKAGE = pathlib.Path(__file__).parent
_SUFFIXES = ('.py', '.cc', '.h')
_DIGITS = 12


@functools.cache
def read_code_version() -> str:
    """'0.2.0+1f0c52b6a9de': the release, and a sha256 over the names and bytes of the package's sources.

    The sources are read at the first call: call it when the process starts, before someone edits them.
    """
    return f'{__version__}+{digest_sources(_PACKAGE)}'


def digest_sources(package: pathlib.Path) -> str:
    """The first hex digits of a sha256 over the sources of a package, without the folders in BESIDE."""
    import hashlib  # here: most processes ask for no version of the code

    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob('*') if path.suffix in _SUFFIXES):
        place = path.relative_to(package)
        if place.parts[0] in BESIDE:
            continue
        name, content = str(place).encode(), path.read_bytes()
        for part in (name, content):
            digest.update(len(part).to_bytes(8, 'little') + part)
    return digest.hexdigest()[:_DIGITS]
