"""Loads user functions given as 'path/to/file.py:name' or 'package.module:name'.

'package:configs/templates/two_turns.py:build' is a function of a file that comes with this package.

Used for the user's tasks, rewards, advantages, workflows and telemetry hooks, in this process and in scorer processes.
It imports only errors.py and installation.py of the package, and no jax.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import TypeAlias

from areal_jax.errors import UserError, suggest
from areal_jax.installation import PACKAGE, locate_file

Function: TypeAlias = Callable[..., object]

VERIFIERS = 'verifiers:'  # prefix of task.name: a taskset of that framework follows, not a function
_PACKAGE = f'{pathlib.Path(__file__).parent}/'
_DIGEST = '__areal_jax_digest__'  # attribute with the digest of a module's source


def is_own(name: str) -> bool:
    """Whether a name is 'FILE:FUNCTION' or 'MODULE:FUNCTION', and not a name that this project declares."""
    return ':' in name and not is_environment(name)


def is_environment(name: str) -> bool:
    """Whether task.name is 'verifiers:TASKSET'."""
    return name.startswith(VERIFIERS)


def load_function(spec: str, field: str) -> Function:
    """Loads 'path/to/file.py:name' (absolute or relative to the working directory) or 'package.module:name'.

    A file becomes a module whose name depends only on its path; it runs once per process unless it changes.

    Args:
      field: the config field that holds `spec`, for errors: 'task.name'.

    Raises UserError that names the field and the spec, and the file and line of an exception while loading.
    """
    place, name = _split(spec, field)
    module = load_module(spec, field)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith('_')]
        said = f'{name} is no function' if name in vars(module) else f'there is no function {name!r}'
        raise UserError(f'{field}={spec}: {said} in {place}{suggest(name, known)}')
    return function


def load_module(spec: str, field: str) -> types.ModuleType:
    """The module that holds the function of `spec`. Raises UserError as `load_function` does."""
    place, _ = _split(spec, field)
    with raising_user_error(spec, field):
        return _load_file(spec, field) if _is_file(place) else _import(place, spec, field)


def absolute_spec(spec: str) -> str:
    """The spec with an absolute path, valid in every working directory; a spec without a path stays unchanged."""
    place, _, name = spec.rpartition(':')
    return f'{_path(place)}:{name}' if _is_file(place) and not place.startswith(PACKAGE) else spec


def spec_of(function: Function) -> str:
    """The spec by which another process finds a function of a module or a loaded file: inverts `load_function`.

    A function that is not at the top level of its module also has a spec, but `load_function` refuses it.
    """
    module_name = getattr(function, '__module__', None) or type(function).__module__
    module = sys.modules.get(module_name)
    place = getattr(module, '__file__', None) if hasattr(module, _DIGEST) else None
    return f'{place or module_name}:{getattr(function, "__qualname__", repr(function))}'


def source_file(spec: str, field: str) -> pathlib.Path | None:
    """The file that holds the function of `spec`; None for a module without a file. Raises UserError."""
    file = getattr(load_module(spec, field), '__file__', None)
    return pathlib.Path(file) if file else None


@contextlib.contextmanager
def raising_user_error(spec: str, field: str) -> Iterator[None]:
    """Wraps a call of user code: turns its exceptions into a UserError with the file and the line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f'{field}={spec}: {_describe(error, spec)}') from error


def _load_file(spec: str, field: str) -> types.ModuleType:
    shown, _ = _split(spec, field)
    path = _path(shown)
    if not path.is_file():
        near = '' if path.exists() else suggest(path.name, [file.name for file in path.parent.glob('*.py')])
        what = f'{shown} is not a file' if path.exists() else f'there is no file {shown!r}'
        raise UserError(
            f'{field}={spec}: {what}{near}; a path is relative to the working directory {pathlib.Path.cwd()}'
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f'{field}={spec}: {shown} cannot be read: {error.strerror}') from error
    import hashlib  # here: it loads OpenSSL, and --help and most runs have no code of the user's own

    digest = hashlib.sha256(source).hexdigest()
    stem, place = re.sub(r'\W', '_', path.stem), hashlib.sha256(str(path).encode()).hexdigest()
    name = f'areal_jax_own_{stem}_{place[:12]}'
    if getattr(sys.modules.get(name), _DIGEST, '') == digest:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__ = str(path)
    setattr(module, _DIGEST, digest)
    # Not imported with a loader: it would write a .pyc, which an edit within the same second does not outdate.
    code = compile(source, str(path), 'exec', dont_inherit=True)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look up a class by its module's name
    try:
        exec(code, vars(module))
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _import(place: str, spec: str, field: str) -> types.ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f'{place}.'.startswith(f'{error.name}.'):
            raise  # the module exists and imports another one that does not
        raise UserError(
            f'{field}={spec}: there is no module {error.name!r}; install its package, add its directory to PYTHONPATH, '
            'or name a file: path/to/file.py:name'
        ) from error


def _split(spec: str, field: str) -> tuple[str, str]:
    place, _, name = spec.rpartition(':')
    if (
        not place
        or not name.isidentifier()
        or not (_is_file(place) or re.fullmatch(r'[^\W\d]\w*(\.[^\W\d]\w*)*', place))
    ):
        raise UserError(f'{field}={spec!r} must name a function: path/to/file.py:name or package.module:name')
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith('.py') or '/' in place


def _path(place: str) -> pathlib.Path:
    if place.startswith(PACKAGE):
        return locate_file(place)
    return pathlib.Path(place).expanduser().resolve()


def _describe(error: BaseException, spec: str) -> str:
    """'line 3 of my_task.py raises ValueError: no digits', with the innermost line of that file."""
    place = spec.rpartition(':')[0]
    file = str(_path(place)) if _is_file(place) else getattr(sys.modules.get(place), '__file__', None)
    if isinstance(error, SyntaxError):
        line = f'line {error.lineno} of ' if error.lineno else ''
        where = place if error.filename in (None, file) else error.filename
        return f'{line}{where} is not Python: {error.msg}'
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if frame.filename == file]
    others = [frame for frame in frames if not frame.filename.startswith(('<frozen', _PACKAGE))]
    place_of = lambda frame: f'line {frame.lineno} of {place if own and _is_file(place) else frame.filename}'
    raised_in = place_of((own or others)[-1]) if own or others else place
    return f'{raised_in} raises {type(error).__name__}: {" ".join(str(error).split())}'.rstrip(': ')
