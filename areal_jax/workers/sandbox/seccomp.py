"""A filter of system calls that Landlock does not govern, for x86-64: network, tracing, namespaces, ids, attributes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterator, Sequence

from areal_jax.workers.sandbox.landlock import load_libc

MACHINE = 'x86_64'
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64: another one has other numbers
_X32 = 0x40000000  # first number of the x32 ABI
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_CLONE, _CLONE3, _SOCKETPAIR, _PRLIMIT = 56, 435, 53, 302
_STREAM, _SEQPACKET, _KINDS = 1, 5, 0xF  # of sockets; a datagram of a pair reaches any socket with a path
_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _AND, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_FEW, _FARTHEST = 3, 255  # comparisons one after the other; instructions that a jump can skip
_Fields = tuple[int, int, int, int]
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in seccomp_data; the last two are of arguments

REFUSED = {
    'network': (41, 42, 43, 49, 288),  # socket, connect, accept, bind, accept4
    'other processes': (101, 310, 311, 312, 424, 434, 438, 440),  # ptrace, process_vm_*, kcmp, pidfd_*, process_madvise
    'mounts': (155, 161, 165, 166, *range(428, 434), 442, 467),  # pivot_root, chroot, mount, umount, open_tree, fsopen
    'namespaces': (272, 308),  # unshare, setns
    'kernel': (246, 248, 249, 250, 298, 320, 321, 323, 425, 426, 427),  # kexec, keys, perf, bpf, userfaultfd, io_uring
    'handles': (303, 304),  # name_to_handle_at, open_by_handle_at
    'shared memory': (29, 30, 31, 67),  # of System V: it outlives the process
    'semaphores and messages': (*range(64, 67), *range(68, 72), 220, *range(240, 246)),  # of System V and POSIX
    'shares of the machine': (141, 142, 144, 203, 251, 314),  # setpriority, sched_set*, ioprio_set
    'sessions': (109, 112),  # setpgid, setsid: a kill of the group reaches all
    'modes': (90, 91, 268, 452),  # chmod
    'owners': (92, 93, 94, 260),  # chown
    'attributes': (188, 189, 190, 197, 198, 199, 463, 466, 469),  # setxattr, removexattr, file_setattr
    'times': (132, 235, 261, 280),  # utime
}


class _Instruction(ctypes.Structure):
    _fields_ = (('code', ctypes.c_uint16), ('yes', ctypes.c_uint8), ('no', ctypes.c_uint8), ('value', ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (('length', ctypes.c_uint16), ('instructions', ctypes.POINTER(_Instruction)))


def install() -> None:
    """This thread and what it starts get EPERM for REFUSED. Needs PR_SET_NO_NEW_PRIVS; raises OSError."""
    program = assemble()
    if load_libc().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f'the kernel refuses a filter of system calls (seccomp): {os.strerror(number)}')


@functools.cache
def assemble() -> _Program:
    """The filter as the kernel takes it; a process that forks many confined ones assembles it once."""
    instructions = [_Instruction(*one) for one in build()]
    return _Program(len(instructions), (_Instruction * len(instructions))(*instructions))


def build() -> Iterator[_Fields]:
    """The instructions: code, jumps where it holds and where not, value."""
    refuse, allow = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, _ARCHITECTURE
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _IF_AT_LEAST, 0, 1, _X32
    yield refuse
    # glibc falls back to clone for this error alone; with EPERM no thread starts
    yield _IF_EQUAL, 0, 1, _CLONE3
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS
    yield _IF_EQUAL, 0, 4, _CLONE
    yield _LOAD, 0, 0, _FIRST
    yield _IF_ANY, 0, 1, _NEW_NAMESPACES
    yield refuse
    yield allow
    yield _IF_EQUAL, 0, 6, _SOCKETPAIR  # asyncio needs pairs
    yield _LOAD, 0, 0, _SECOND
    yield _AND, 0, 0, _KINDS
    yield _IF_EQUAL, 1, 0, _STREAM
    yield _IF_EQUAL, 0, 1, _SEQPACKET
    yield allow
    yield refuse
    yield _IF_EQUAL, 0, 4, _PRLIMIT
    yield _LOAD, 0, 0, _FIRST
    yield _IF_EQUAL, 0, 1, 0  # its own limits
    yield allow
    yield refuse
    yield from _search(sorted(number for numbers in REFUSED.values() for number in numbers), refuse, allow)


def _search(numbers: Sequence[int], refuse: _Fields, allow: _Fields) -> list[_Fields]:
    """By halves: the kernel runs a new filter for each number that there is."""
    if len(numbers) <= _FEW:
        return [one for number in numbers for one in ((_IF_EQUAL, 0, 1, number), refuse)] + [allow]
    lower, upper = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    below = _search(lower, refuse, allow)
    assert len(below) <= _FARTHEST
    return [(_IF_AT_LEAST, len(below), 0, upper[0]), *below, *_search(upper, refuse, allow)]
