"""The child of a check that holds the tests: it calls a stand-in of the answer's function and says which tests pass.

The values that it gets are plain ones (plain_values.py), so that nothing of the answer runs here.
"""

from __future__ import annotations

import builtins
import collections
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from areal_jax.tasks.code.answer_program import Failure, serve_answer
from areal_jax.tasks.code.pair_protocol import (
    FrameError,
    LinkEndedError,
    read_given,
    receive_frame,
    send_frame,
)
from areal_jax.tasks.code.plain_values import NotPlainError, decode, encode
from areal_jax.tasks.scoring.score_call import describe_error

if TYPE_CHECKING:
    from areal_jax.files import JsonObject

GONE = 'gone'  # the label of a test whose answer has no process any more; its wait status tells the rest
_LABELS = ('syntax', 'exception', 'memory_limit', 'forbidden', 'wrong')  # that the child with the answer may give
_WARM = 30  # rounds
_Test = Callable[[], bool]


def run_checks(program: int, link: int, told: int) -> None:
    """Runs the tests in turn; writes a line for each, [label, reason], and [] at the end.

    Args:
      program: where {entry_point, setup, test, tests, is_partial} is read.
      link: a stream to the child with the answer.
      told: where the lines go; the child with the answer does not hold it.
    """
    given = read_given(program)
    answer = _StandIn(link)
    for test in _list_tests(given, answer):
        outcome = _run_test(test, answer)
        _tell(told, outcome)
        if answer.failure or (outcome[0] != 'ok' and not given['is_partial']):
            break
    _tell(told, ())


def warm_up() -> None:
    """Judges an answer of its own some times, both sides in threads of this process."""
    code = 'def f(xs):\n    return sorted({x * 2 for x in xs})\n'
    checks = {'entry_point': 'f', 'setup': '', 'test': '', 'tests': [[[[1, 2]], [2, 4]]], 'is_partial': False}
    for _ in range(_WARM):
        ours, theirs = (end.detach() for end in socket.socketpair())
        answer = threading.Thread(target=serve_answer, args=(_write({'code': code, 'entry_point': 'f'}), theirs))
        answer.start()
        told = os.memfd_create('told')
        run_checks(_write(checks), ours, told)
        os.close(ours)
        answer.join()
        os.close(theirs)
        os.close(told)


def _write(given: JsonObject) -> int:
    descriptor = os.memfd_create('given')
    os.write(descriptor, json.dumps(given).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class _UnusableError(BaseException):
    """A call has no result that could be tested: a test that expects an exception does not catch this one."""


class _StandIn:
    """The answer's function, for the tests."""

    def __init__(self, link: int):
        self._link = link
        self.failure: Failure | None = None  # of all further calls
        self.raised: tuple[BaseException, str] | None = None  # by the last call that raised, with its label

    def __call__(self, *args: object, **keywords: object) -> object:
        if not self.failure:
            number = os.urandom(8).hex()
            sent = encode(list(args))
            try:
                send_frame(self._link, {'id': number, 'args': sent, 'keywords': encode(keywords)})
                return self._take(receive_frame(self._link), number, args)
            except LinkEndedError:
                self.failure = (GONE, 'its process ended')
            except FrameError as error:
                self.failure = ('wrong', f'it sent {error}')
        raise _UnusableError

    def _take(self, reply: JsonObject, number: str, args: Sequence[object]) -> object:
        if reply.get('id') != number:
            raise FrameError('a reply to another call')
        try:
            if 'args' in reply:
                for before, after in zip(args, decode(str(reply['args'])), strict=True):  # type: ignore[call-overload]
                    refresh(before, after)
            if 'result' in reply:
                return decode(str(reply['result']))
        except (NotPlainError, TypeError, ValueError) as error:
            raise FrameError(str(error)) from error
        if 'raised' in reply:
            self._raise(reply['raised'])
        if 'unusable' in reply:
            self.raised = (_UnusableError(str(reply['unusable'])), 'wrong')
            raise self.raised[0]
        label, reason = _read_failure(reply.get('failed'))
        self.failure = (label, reason)
        raise _UnusableError

    def _raise(self, raised: object) -> None:
        if type(raised) is not list or len(raised) != 3:
            raise FrameError('an exception without a name')
        name, reason, label = map(str, raised)
        kind = getattr(builtins, name, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            kind = RuntimeError  # SystemExit and KeyboardInterrupt too: they are the answer's, and end no test
        try:
            error = kind(reason)
        except TypeError:  # UnicodeDecodeError takes more
            error = RuntimeError(reason)
        self.raised = (error, label if label in _LABELS else 'exception')
        raise error


def refresh(before: object, after: object) -> None:
    """Gives a mutable argument the content that the call left it with, inner lists and dicts included."""
    if type(before) is not type(after):
        return
    if isinstance(before, list) and isinstance(after, list):
        before[:] = [_refreshed(*pair) for pair in zip(before, after, strict=False)] + after[len(before) :]
    elif isinstance(before, dict) and isinstance(after, dict):
        kept = {key: _refreshed(before[key], item) if key in before else item for key, item in after.items()}
        before.clear()
        before.update(kept)
    elif isinstance(before, set) and isinstance(after, set):
        before.intersection_update(after)
        before.update(after)
    elif isinstance(before, bytearray) and isinstance(after, bytearray):
        before[:] = after
    elif isinstance(before, collections.deque) and isinstance(after, collections.deque):
        before.clear()
        before.extend(after)
    elif isinstance(before, tuple) and isinstance(after, tuple):
        for pair in zip(before, after, strict=False):
            refresh(*pair)


def _refreshed(before: object, after: object) -> object:
    if isinstance(after, list | dict | set | bytearray | collections.deque) and type(before) is type(after):
        refresh(before, after)
        return before
    return after


def _read_failure(failed: object) -> Failure:
    if type(failed) is list and len(failed) == 2 and failed[0] in _LABELS:
        return failed[0], str(failed[1])
    return 'wrong', 'a reply that is none'


def _list_tests(given: JsonObject, answer: _StandIn) -> list[_Test]:
    """The tests, each of which returns whether it passes, or raises."""
    namespace: dict[str, object] = {'__name__': 'tests'}
    exec(compile(given['setup'], '<setup>', 'exec'), namespace)
    if given['test']:
        exec(compile(given['test'], '<test>', 'exec'), namespace)
        check = cast(Callable[..., object], namespace['check'])
        namespace[given['entry_point']] = answer
        return [lambda: _passes(check, answer)]
    namespace[given['entry_point']] = answer
    return [_make_test(test, answer, namespace) for test in given['tests']]


def _make_test(test: object, answer: _StandIn, namespace: dict[str, object]) -> _Test:
    if isinstance(test, str):
        return lambda: _passes(exec, compile(test, '<test>', 'exec'), namespace)
    arguments, expected = cast(tuple[list[object], object], test)
    return lambda: bool(answer(*arguments) == expected)


def _passes(function: Callable[..., object], *arguments: object) -> bool:
    function(*arguments)
    return True


def _run_test(test: _Test, answer: _StandIn) -> Failure:
    answer.raised = None
    try:
        passed = test()
        reason = 'another result'
    except BaseException as error:
        if answer.raised and error is answer.raised[0]:
            return answer.raised[1], str(error.args[0])  # the text of a KeyError is a repr of it
        passed, reason = False, describe_error(error)
    if answer.failure:
        return answer.failure
    if answer.raised and isinstance(answer.raised[0], _UnusableError):
        return answer.raised[1], str(answer.raised[0])  # the test caught it
    return ('ok', '') if passed else ('wrong', reason)


def _tell(told: int, words: Sequence[str]) -> None:
    os.write(told, json.dumps(words).encode() + b'\n')
