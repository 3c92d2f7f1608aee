"""The child of a check that holds the answer: it runs the answer's definitions, and calls its function on request.

Its messages are not trusted: the answer may have written all of them.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import types
from typing import TYPE_CHECKING

from areal_jax.tasks.code.pair_protocol import (
    LinkEndedError,
    NotPlainError,
    decode,
    encode,
    label_error,
    read_given,
    receive_frame,
    send_frame,
)
from areal_jax.tasks.scoring.score_call import describe_error

if TYPE_CHECKING:
    from areal_jax.files import JsonObject

_STACK_FRAMES = 1000  # Python's own bound, whatever the server's is
Failure = tuple[str, str]  # label, reason


def serve_answer(program: int, link: int) -> None:
    """Answers calls until the other child has no more.

    Args:
      program: a descriptor from which {code, entry_point} is read.
      link: a stream to the child with the tests.
    """
    given = read_given(program)
    function, failure = _load(given['code'], given['entry_point'])
    while True:
        try:
            request = receive_frame(link)
            send_frame(link, {'id': request['id'], **_call(function, failure, request)})
        except LinkEndedError:
            return


def run_answer(program: int, told: int) -> None:
    """Runs the answer as a separate program with this process's stdin and stdout.

    Writes [label, reason] of its ending to `told`: ['ok', ''] if it ran to its end.
    """
    given = read_given(program)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False), errors='backslashreplace')
    try:
        _execute(given['code'], '__main__')
        ending = ('ok', '')
    except _FailedError as failed:
        ending = failed.failure
    try:
        sys.stdout.flush()
    except OSError:
        ending = ('wrong', 'its output was not taken to the end')
    os.write(told, json.dumps(ending).encode())


class _FailedError(Exception):
    def __init__(self, label: str, reason: str):
        super().__init__(reason)
        self.failure: Failure = (label, reason)


def _load(code: str, entry_point: str) -> tuple[object, Failure | None]:
    try:
        namespace = _execute(code, 'answer')
    except _FailedError as failed:
        return None, failed.failure
    if entry_point not in namespace:
        return None, ('exception', f'it defines no {entry_point}')
    return namespace[entry_point], None


def _execute(code: str, name: str) -> dict[str, object]:
    sys.setrecursionlimit(_STACK_FRAMES)
    module = sys.modules[name] = types.ModuleType(name)  # where dataclasses and pickle look for it
    try:
        compiled = compile(code, '<answer>', 'exec')
    except BaseException as error:
        raise _FailedError('syntax', describe_error(error)) from error
    try:
        exec(compiled, vars(module))
    except SystemExit as error:
        if name == '__main__' and error.code in (None, 0):
            return vars(module)
        raise _FailedError('exception', describe_error(error)) from error
    except BaseException as error:
        raise _FailedError(label_error(error), describe_error(error)) from error
    return vars(module)


def _call(function: object, failure: Failure | None, request: JsonObject) -> JsonObject:
    if failure:
        return {'failed': failure}
    args, keywords = decode(request['args']), decode(request['keywords'])
    try:
        result = function(*args, **keywords)  # type: ignore[operator, misc, arg-type]
    except BaseException as error:
        reply: JsonObject = {'raised': [_builtin_name(error), describe_error(error), label_error(error)]}
    else:
        try:
            reply = {'result': encode(result)}
        except (NotPlainError, RecursionError) as error:
            reply = {'unusable': f'it returned {error}'}
    try:
        after = encode(args)
    except (NotPlainError, RecursionError):
        return reply
    return reply if after == request['args'] else {**reply, 'args': after}


def _builtin_name(error: BaseException) -> str:
    kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    return next(kinds)
