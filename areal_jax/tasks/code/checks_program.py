"""The child of a check that holds the tests: it calls a stand-in for the answer's function and tells which tests pass.

The values that it gets are plain (pair_protocol.py), so that no code of the answer runs here.

Outputs and results agree with the expected ones as contests judge, with a tolerance for decimals: a decimal agrees
within TOLERANCE of the expected one, relative or absolute. The absolute tolerance is at most half a unit of the last
digit of the expected decimal as it is written: 0 is not 1.6e-19. Whole numbers and texts are exact.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import dis
import json
import os
import re
import socket
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from areal_jax.tasks.code.answer_program import Failure, serve_answer
from areal_jax.tasks.code.pair_protocol import (
    FrameError,
    LinkEndedError,
    NotPlainError,
    decode,
    encode,
    read_given,
    read_reason,
    receive_frame,
    send_frame,
)
from areal_jax.tasks.scoring.score_call import describe_error

if TYPE_CHECKING:
    from areal_jax.files import JsonObject

TOLERANCE = 1e-6
_DECIMAL = re.compile(r'[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?', re.ASCII)
_NUMERAL = re.compile(r'[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?', re.ASCII)
_LONGEST = 400  # characters of a number: 1.8e308 has 309 digits before its point


def outputs_agree(printed: str, expected: str) -> bool:
    """Whether each line is as expected, ignoring blanks at its end and empty lines at the end of the output.

    In an expected line with a decimal, blanks do not count, and decimals are compared with the tolerance.
    """
    lines, others = _list_lines(printed), _list_lines(expected)
    return lines == others or (len(lines) == len(others) and all(map(_lines_agree, lines, others)))


def values_agree(found: object, expected: object) -> bool:
    """Whether a value of plain types (pair_protocol.py) equals one that was written as JSON.

    Values that are equal in Python agree: True and 1, 2.0 and 2. JSON has no tuples, and only texts as keys. So a tuple
    agrees with a list, and a key that is a number, a bool or None with the text that JSON makes of it. The tolerance is
    for an expected float and a number that is no bool; NaN agrees with NaN.
    """
    return found == expected or _parts_agree(found, expected)


def _list_lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split('\n')]


def _lines_agree(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    tokens, others = printed.split(), expected.split()
    has_decimal = len(tokens) == len(others) and any(map(_is_decimal, others))
    return has_decimal and all(map(_tokens_agree, tokens, others))


def _tokens_agree(token: str, expected: str) -> bool:
    if token == expected:
        return True
    is_number = _is_decimal(expected) and len(token) <= _LONGEST and _NUMERAL.fullmatch(token) is not None
    return is_number and _is_near(float(token), expected)


def _is_decimal(token: str) -> bool:
    return len(token) <= _LONGEST and _DECIMAL.fullmatch(token) is not None


def _is_near(found: float, written: str) -> bool:
    """Whether a number is near a number that is written as a decimal."""
    expected = float(written)
    mantissa, _, exponent = written.lower().partition('e')
    digits = len(mantissa.partition('.')[2])
    power = max(-_LONGEST, min(_LONGEST, int(exponent or 0))) - digits  # of the unit of the last digit
    absolute = min(TOLERANCE, 0.5 * 10.0 ** min(0, power))
    tolerance = max(TOLERANCE * abs(expected), absolute)
    return expected - tolerance <= found <= expected + tolerance  # exact for an int of any size; False at an infinity


def _parts_agree(found: object, expected: object) -> bool:
    if isinstance(expected, float):
        if not isinstance(found, int | float) or isinstance(found, bool):
            return False
        return _is_near(found, repr(expected)) if expected == expected else found != found
    if isinstance(expected, list):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return False
        return all(map(values_agree, found, expected))
    if isinstance(expected, dict):
        return isinstance(found, dict) and _mappings_agree(found, expected)
    return False


def _mappings_agree(found: Mapping[object, object], expected: Mapping[str, object]) -> bool:
    by_text = {_write_key(key): value for key, value in found.items()}
    is_alike = len(by_text) == len(found) and by_text.keys() == expected.keys()
    return is_alike and all(values_agree(by_text[key], value) for key, value in expected.items())


def _write_key(key: object) -> object:
    """The key as JSON writes it; a key that JSON cannot have stays unchanged."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key


GONE = 'gone'  # the label of a test whose answer's process has ended; its wait status gives the reason
_LABELS = ('syntax', 'exception', 'memory_limit', 'forbidden', 'wrong')  # that the child with the answer may give
_BROKEN = b'["memory_limit", "the tests have no memory left beside what it sent"]\n[]\n'
_WARM = 30  # rounds
_LIBRARY = os.path.join(os.path.dirname(os.__file__), '')
# folders in it that are not the library's, and modules whose callers expect them to catch exceptions
_NOT_OF_LIBRARY = tuple(_LIBRARY + name for name in ('site-packages/', 'dist-packages/', 'unittest/', 'doctest.py'))
_RAISED_ON = ('RERAISE', 'END_ASYNC_FOR', 'CLEANUP_THROW')  # last instruction of a frame that an exception left again
_CATCHES_END = {'StopAsyncIteration', 'Exception', 'BaseException'}
_Test = Callable[[], bool]


def run_checks(program: int, link: int, told: int) -> None:
    """Runs the tests in turn; writes a line for each, [label, reason], and [] at the end.

    Args:
      program: a descriptor from which {entry_point, setup, test, tests, is_partial} is read.
      link: a stream to the child with the answer.
      told: a descriptor for the lines; the child with the answer does not hold it.
    """
    given = read_given(program)
    answer = _StandIn(link)
    tests = _list_tests(given, answer)
    try:
        for test in tests:
            outcome = _run_test(test, answer)
            _tell(told, outcome)
            if answer.failure or (outcome[0] != 'ok' and not given['is_partial']):
                break
        _tell(told, ())
    except BaseException:  # the answer's values take the memory that this process needs
        os.write(told, _BROKEN)


def warm_up() -> None:
    """Judges a sample answer several times, with both sides in threads of this process."""
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
    """Raised if a call has no result to test; a test that expects an exception does not catch this one."""


@dataclasses.dataclass(frozen=True)
class _Raised:
    """The exception of a call, and the answer's failure if no test expects the exception."""

    error: Exception
    failure: Failure


class _StandIn:
    def __init__(self, link: int):
        self._link = link
        self.failure: Failure | None = None  # of all further calls
        self.begin_test()

    def begin_test(self) -> None:
        self.raised: _Raised | None = None  # by the last call that raised
        self.spoilt: Failure | None = None  # why this test fails, even if it returns True
        self._open: dict[int, _Raised] = {}  # by thread: of the last call, while it may still be under way

    def __call__(self, *args: object, **keywords: object) -> object:
        self._settle(threading.get_ident())
        if not self.failure:
            number = os.urandom(8).hex()
            sent = encode(list(args))
            try:
                send_frame(self._link, {'id': number, 'args': sent, 'keywords': encode(keywords)})
                found = self._take(receive_frame(self._link), number, args)
            except LinkEndedError:
                self.failure = (GONE, 'its process ended')
            except FrameError as error:
                self.failure = ('wrong', f'it sent {error}')
            except MemoryError:
                self.failure = ('memory_limit', 'what it sent does not fit in the memory of the tests')
            else:
                if not isinstance(found, _Raised):
                    return found
                self.raised = self._open[threading.get_ident()] = found
                try:
                    raise found.error
                finally:  # this handler gives the exception a traceback; unittest sets it to None
                    del found
        raise _UnusableError

    def settle(self) -> None:
        """Ends a test: an exception that was raised in it, and that no code of the test caught, spoils it."""
        for thread in list(self._open):
            self._settle(thread)

    def _settle(self, thread: int) -> None:
        raised = self._open.pop(thread, None)
        if raised is not None and not _is_caught(raised.error):
            self.spoilt = self.spoilt or (raised.failure[0], f'{raised.failure[1]}: the test never saw it')

    def _take(self, reply: JsonObject, number: str, args: Sequence[object]) -> object:
        if reply.get('id') != number:
            raise FrameError('a reply to another call')
        try:
            if 'args' in reply:
                for before, after in zip(args, decode(_read_text(reply['args'])), strict=True):  # type: ignore[call-overload]
                    refresh(before, after)
            if 'result' in reply:
                return decode(_read_text(reply['result']))
        except (NotPlainError, TypeError, ValueError, RecursionError) as error:
            raise FrameError(describe_error(error)) from error
        if 'raised' in reply:
            return _read_raised(reply['raised'])
        if 'unusable' in reply:
            self.spoilt = self.spoilt or ('wrong', read_reason(reply['unusable']))
        else:
            self.failure = _read_failure(reply.get('failed'))
        raise _UnusableError


def _read_text(value: object) -> str:
    if type(value) is not str:
        raise FrameError('a value that is no text')
    return value


def _read_raised(said: object) -> _Raised:
    if type(said) is not list or len(said) != 3:
        raise FrameError('an exception without a name')
    name, reason, label = map(read_reason, said)
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        kind = RuntimeError  # SystemExit and KeyboardInterrupt too: they are the answer's, and end no test
    try:
        error = kind(reason)
    except TypeError:  # UnicodeDecodeError takes more
        error = RuntimeError(reason)
    return _Raised(error, (label if label in _LABELS else 'exception', reason))


def _is_caught(error: BaseException) -> bool:
    """Whether code of the tests has caught the exception of a call, and not the interpreter or a library on its behalf.

    An iteration that ends, a default of getattr and a thread that dies swallow exceptions: `all(map(f, xs))` is True if
    f raises StopIteration. The outermost frame in the traceback is the last one that got the exception. It left this
    frame too if the frame stopped at the instruction that raised, or at an instruction that raises again.
    """
    place = error.__traceback__
    if place is None:  # unittest removes the traceback of an exception that it has caught
        return True
    frame = place.tb_frame
    code = frame.f_code
    if not _is_running(frame):
        opcode, argument = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        is_bare_raise = dis.opname[opcode] == 'RAISE_VARARGS' and argument == 0
        if frame.f_lasti == place.tb_lasti or dis.opname[opcode] in _RAISED_ON or is_bare_raise:
            return False
    if isinstance(error, StopAsyncIteration) and not _CATCHES_END & {*code.co_names}:
        return False  # an `async for` ends with it
    path = code.co_filename
    return path.startswith(_NOT_OF_LIBRARY) or not path.startswith((_LIBRARY, '<frozen'))


def _is_running(frame: types.FrameType) -> bool:
    """Whether the caller runs inside this frame."""
    above: types.FrameType | None = sys._getframe(1)
    while above is not None and above is not frame:
        above = above.f_back
    return above is frame


def refresh(before: object, after: object) -> None:
    """Gives a mutable argument the content that it had after the call, inner lists and dicts included."""
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
        return failed[0], read_reason(failed[1])
    return 'wrong', 'a reply that is none'


def _list_tests(given: JsonObject, answer: _StandIn) -> list[_Test]:
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
    return lambda: values_agree(answer(*arguments), expected)


def _passes(function: Callable[..., object], *arguments: object) -> bool:
    function(*arguments)
    return True


def _run_test(test: _Test, answer: _StandIn) -> Failure:
    answer.begin_test()
    try:
        passed = test()
        reason = 'another result'
    except BaseException as error:
        if answer.raised and error is answer.raised.error:
            return answer.raised.failure
        passed, reason = False, describe_error(error)
    if passed:
        answer.settle()
    return answer.failure or answer.spoilt or (('ok', '') if passed else ('wrong', reason))


def _tell(told: int, words: Sequence[str]) -> None:
    os.write(told, json.dumps(words).encode() + b'\n')
