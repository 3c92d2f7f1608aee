"""Runs `python FILE.py` or `python -m MODULE` in this process, as a new interpreter would run it."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence

_NAMES = ('python', 'python3')
_CANNOT_OPEN = 2  # the exit code of python without its file


def find_python_program(command: Sequence[str]) -> list[str]:
    """['FILE.py', ...] or ['-m', 'MODULE', ...] of a command that is one of these; else [].

    Other options of the interpreter, as -u or -c, need an interpreter of their own.
    """
    words = list(command[1:])
    is_module, is_file = words[:1] == ['-m'] and len(words) > 1, bool(words) and words[0].endswith('.py')
    return words if is_python(command[0]) and (is_module or is_file) else []


def is_python(word: str) -> bool:
    """Whether a command with this first word means the interpreter of the run."""
    return word in (*_NAMES, sys.executable)


def import_as(words: Sequence[str]) -> None:
    """Have imports find what they would in that program: put its directory first in sys.path."""
    place = os.getcwd() if words[0] == '-m' else os.path.dirname(os.path.realpath(words[0]))
    sys.path.insert(0, place)


def run_python(words: Sequence[str]) -> int:
    """Run the program in this process; the exit code that its interpreter would have, its traceback on stderr."""
    sys.orig_argv = [sys.executable, *words]
    try:
        return _run_module(words[1], words[2:]) if words[0] == '-m' else _run_file(words)
    except SystemExit as end:
        return _read_exit_code(end.code)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return 1


def _run_file(words: Sequence[str]) -> int:
    sys.argv, path = list(words), os.path.abspath(words[0])
    try:
        with open(path, 'rb') as file:
            source = file.read()
    except OSError as error:
        return _refuse(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}", _CANNOT_OPEN)
    loader = importlib.machinery.SourceFileLoader('__main__', path)
    _run_main(compile(source, path, 'exec', dont_inherit=True), __file__=path, __loader__=loader, __package__=None)
    return 0


def _run_module(name: str, arguments: Sequence[str]) -> int:
    """As `runpy`, which however takes the module away before its threads and exit functions have ended."""
    sys.argv = ['-m', *arguments]
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f'{name}.__main__'
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        return _refuse(f'No module named {name}', 1)
    sys.argv[0] = spec.origin or name
    names = {'__file__': spec.origin, '__cached__': spec.cached, '__spec__': spec, '__package__': spec.parent}
    _run_main(code, __loader__=spec.loader, **names)
    return 0


def _run_main(code: types.CodeType, **names: object) -> None:
    module = types.ModuleType('__main__')
    vars(module).update({'__cached__': None, '__builtins__': builtins, '__annotations__': {}, **names})
    sys.modules['__main__'] = module
    exec(code, vars(module))


def _refuse(reason: str, exit_code: int) -> int:
    print(f'{sys.executable}: {reason}', file=sys.stderr)
    return exit_code


def _read_exit_code(code: object) -> int:
    """What `sys.exit(code)` means to the parent of an interpreter."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
