"""A filter of system calls for what Landlock does not govern: all are refused but those of system_calls.ALLOWED."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from collections.abc import Iterator, Sequence

from areal_jax.workers.sandbox.confinement import ALLOWED
from areal_jax.workers.sandbox.landlock import load_libc

# AUDIT_ARCH_*: a process that has switched to another architecture has other numbers
MACHINES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}
_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_FARTHEST = 255  # instructions that a jump can skip
_Fields = tuple[int, int, int, int]
_Rule = list[_Fields]  # instructions that end in a verdict
_NUMBER, _ARCH, _FIRST, _SECOND, _FOURTH = 0, 4, 16, 24, 40  # offsets in seccomp_data; the last three are of arguments
_PERMIT, _REFUSE = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | errno.EPERM)
_ALLOWED: _Rule = [_PERMIT]
_REFUSED: _Rule = [_REFUSE]

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_UNIX, _STREAM, _SEQPACKET, _KINDS = 1, 1, 5, 0xF  # of sockets; a datagram of a pair reaches any socket with a path
_SET_NAME, _GET_NAME, _SET_VMA = 15, 16, 0x53564D41  # prctl: names of threads and of memory
_SET_LEASE, _NOTIFY, _SET_PIPE_SIZE = 1024, 1026, 1031  # fcntl: they stop, or use up, what others have
_HUGE_FILE, _HUGE_MAP = 0x4, 0x40000  # memfd_create, mmap: of pages that the machine keeps for somebody


class _Instruction(ctypes.Structure):
    _fields_ = (('code', ctypes.c_uint16), ('yes', ctypes.c_uint8), ('no', ctypes.c_uint8), ('value', ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (('length', ctypes.c_uint16), ('instructions', ctypes.POINTER(_Instruction)))


def install() -> None:
    """This thread and what it starts get EPERM for all but ALLOWED. Needs PR_SET_NO_NEW_PRIVS; raises OSError."""
    program = assemble()
    if load_libc().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f'the kernel refuses a filter of system calls (seccomp): {os.strerror(number)}')


@functools.cache
def assemble() -> _Program:
    """The filter as the kernel takes it; a process that forks many confined ones assembles it once."""
    instructions = [_Instruction(*one) for one in build(platform.machine())]
    return _Program(len(instructions), (_Instruction * len(instructions))(*instructions))


def build(machine: str) -> Iterator[_Fields]:
    """The instructions for one of MACHINES: code, jumps where it holds and where not, value."""
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, MACHINES[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield from _search(_list_spans(machine))


def _list_spans(machine: str) -> list[tuple[int, _Rule]]:
    """The first number of each row of calls with the same rule, and the rule; the first is 0."""
    column = list(MACHINES).index(machine)
    rules = {numbers[column]: _RULES.get(name, _ALLOWED) for name, numbers in ALLOWED.items()}
    known = {number: rule for number, rule in rules.items() if number is not None}
    spans: list[tuple[int, _Rule]] = []
    for number in range(max(known) + 2):  # the last row has no end: x32 lies in it
        rule = known.get(number, _REFUSED)
        if not spans or spans[-1][1] is not rule:
            spans.append((number, rule))
    return spans


def _search(spans: Sequence[tuple[int, _Rule]]) -> _Rule:
    """By halves: the kernel runs a new filter for each number that there is."""
    if len(spans) == 1:
        return spans[0][1]
    lower, upper = spans[: len(spans) // 2], spans[len(spans) // 2 :]
    below = _search(lower)
    assert len(below) <= _FARTHEST
    return [(_IF_AT_LEAST, len(below), 0, upper[0][0]), *below, *_search(upper)]


def _refuse_bits(argument: int, bits: int) -> _Rule:
    return [(_LOAD, 0, 0, argument), (_IF_ANY, 0, 1, bits), _REFUSE, _PERMIT]


def _one_of(argument: int, values: Sequence[int], found: _Fields, other: _Fields) -> _Rule:
    tests = [(_IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(_LOAD, 0, 0, argument), *tests, other, found]


def _pair_of_streams() -> _Rule:
    kind = [(_LOAD, 0, 0, _SECOND), (_AND, 0, 0, _KINDS)]
    of_kind = [*kind, *_one_of(_SECOND, (_STREAM, _SEQPACKET), _PERMIT, _REFUSE)[1:]]
    return [(_LOAD, 0, 0, _FIRST), (_IF_EQUAL, 1, 0, _UNIX), _REFUSE, *of_kind]


# of arguments; the low halves of those that are int, and of flags
_RULES: dict[str, _Rule] = {
    'clone': _refuse_bits(_FIRST, _NEW_NAMESPACES),
    # glibc falls back to clone for this error alone; with EPERM no thread starts
    'clone3': [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)],
    'fcntl': _one_of(_SECOND, (_SET_LEASE, _NOTIFY, _SET_PIPE_SIZE), _REFUSE, _PERMIT),
    'memfd_create': _refuse_bits(_SECOND, _HUGE_FILE),
    'mmap': _refuse_bits(_FOURTH, _HUGE_MAP),
    'prctl': _one_of(_FIRST, (_SET_NAME, _GET_NAME, _SET_VMA), _PERMIT, _REFUSE),
    'prlimit64': _one_of(_FIRST, (0,), _PERMIT, _REFUSE),  # its own limits
    'socketpair': _pair_of_streams(),  # asyncio needs pairs
}
