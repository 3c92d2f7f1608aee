"""Confines the calling process by limits, another user, Landlock, and a filter of system calls, in this order.

This stops code that a model wrote, but no exploit of the kernel. Open descriptors stay open, memory of the process
stays readable, and the process can answer messages on its pipes as it likes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.workers.descendants import die_with_parent
from areal_jax.workers.sandbox import landlock
from areal_jax.workers.sandbox.landlock import find_abi as find_abi
from areal_jax.workers.sandbox.landlock import list_base, load_libc

ALLOWED: Mapping[str, tuple[int | None, int | None]] = {
    # files and folders
    'read': (0, 63), 'write': (1, 64), 'open': (2, None), 'close': (3, 57), 'stat': (4, None), 'fstat': (5, 80),
    'lstat': (6, None), 'newfstatat': (262, 79), 'statx': (332, 291), 'lseek': (8, 62), 'pread64': (17, 67),
    'pwrite64': (18, 68), 'readv': (19, 65), 'writev': (20, 66), 'preadv': (295, 69), 'pwritev': (296, 70),
    'preadv2': (327, 286), 'pwritev2': (328, 287), 'access': (21, None), 'faccessat': (269, 48),
    'faccessat2': (439, 439), 'openat': (257, 56), 'creat': (85, None), 'fcntl': (72, 25), 'flock': (73, 32),
    'fsync': (74, 82), 'fdatasync': (75, 83), 'truncate': (76, 45), 'ftruncate': (77, 46), 'fallocate': (285, 47),
    'fadvise64': (221, 223), 'getdents': (78, None), 'getdents64': (217, 61), 'getcwd': (79, 17), 'chdir': (80, 49),
    'fchdir': (81, 50), 'rename': (82, None), 'renameat': (264, 38), 'renameat2': (316, 276), 'mkdir': (83, None),
    'mkdirat': (258, 34), 'rmdir': (84, None), 'link': (86, None), 'linkat': (265, 37), 'unlink': (87, None),
    'unlinkat': (263, 35), 'symlink': (88, None), 'symlinkat': (266, 36), 'readlink': (89, None),
    'readlinkat': (267, 78), 'mknod': (133, None), 'mknodat': (259, 33), 'umask': (95, 166), 'statfs': (137, 43),
    'fstatfs': (138, 44), 'ioctl': (16, 29), 'dup': (32, 23), 'dup2': (33, None), 'dup3': (292, 24),
    'pipe': (22, None), 'pipe2': (293, 59), 'sendfile': (40, 71), 'copy_file_range': (326, 285),
    'close_range': (436, 436), 'memfd_create': (319, 279),
    # waiting
    'poll': (7, None), 'ppoll': (271, 73), 'select': (23, None), 'pselect6': (270, 72), 'epoll_create': (213, None),
    'epoll_create1': (291, 20), 'epoll_ctl': (233, 21), 'epoll_wait': (232, None), 'epoll_pwait': (281, 22),
    'epoll_pwait2': (441, 441), 'eventfd': (284, None), 'eventfd2': (290, 19), 'timerfd_create': (283, 85),
    'timerfd_settime': (286, 86), 'timerfd_gettime': (287, 87), 'futex': (202, 98), 'nanosleep': (35, 101),
    'clock_nanosleep': (230, 115), 'pause': (34, None), 'restart_syscall': (219, 128),
    # memory
    'mmap': (9, 222), 'mprotect': (10, 226), 'munmap': (11, 215), 'brk': (12, 214), 'mremap': (25, 216),
    'msync': (26, 227), 'mincore': (27, 232), 'madvise': (28, 233), 'membarrier': (324, 283),
    # processes and threads
    'clone': (56, 220), 'clone3': (435, 435), 'fork': (57, None), 'vfork': (58, None), 'execve': (59, 221),
    'execveat': (322, 281), 'exit': (60, 93), 'exit_group': (231, 94), 'wait4': (61, 260), 'waitid': (247, 95),
    'kill': (62, 129), 'tgkill': (234, 131), 'getpid': (39, 172), 'getppid': (110, 173), 'gettid': (186, 178),
    'getpgid': (121, 155), 'getpgrp': (111, None), 'getsid': (124, 156), 'getuid': (102, 174), 'geteuid': (107, 175),
    'getgid': (104, 176), 'getegid': (108, 177), 'getresuid': (118, 148), 'getresgid': (120, 150),
    'getgroups': (115, 158), 'set_tid_address': (218, 96), 'set_robust_list': (273, 99), 'rseq': (334, 293),
    'arch_prctl': (158, None), 'prctl': (157, 167), 'prlimit64': (302, 261), 'getrlimit': (97, 163),
    'getrusage': (98, 165), 'times': (100, 153), 'getpriority': (140, 141), 'sched_yield': (24, 124),
    'sched_getaffinity': (204, 123), 'sched_getparam': (143, 121), 'sched_getscheduler': (145, 120),
    'sched_get_priority_max': (146, 125), 'sched_get_priority_min': (147, 126), 'getcpu': (309, 168),
    # signals
    'rt_sigaction': (13, 134), 'rt_sigprocmask': (14, 135), 'rt_sigreturn': (15, 139), 'rt_sigpending': (127, 136),
    'rt_sigsuspend': (130, 133), 'rt_sigtimedwait': (128, 137), 'sigaltstack': (131, 132), 'alarm': (37, None),
    'getitimer': (36, 102), 'setitimer': (38, 103),
    # pairs of sockets
    'socketpair': (53, 199), 'sendto': (44, 206), 'recvfrom': (45, 207), 'sendmsg': (46, 211), 'recvmsg': (47, 212),
    'shutdown': (48, 210), 'getsockname': (51, 204), 'getpeername': (52, 205), 'getsockopt': (55, 209),
    'setsockopt': (54, 208),
    # the machine
    'time': (201, None), 'gettimeofday': (96, 169), 'clock_gettime': (228, 113), 'clock_getres': (229, 114),
    'uname': (63, 160), 'sysinfo': (99, 179), 'getrandom': (318, 278),
}  # fmt: skip


# A filter of system calls for what Landlock does not govern: it refuses every call that is not in ALLOWED.


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
_SET_LEASE, _NOTIFY, _SET_PIPE_SIZE = 1024, 1026, 1031  # fcntl: they block other processes, or use up what others need
_HUGE_FILE, _HUGE_MAP = 0x4, 0x40000  # memfd_create, mmap: pages that the machine has reserved


class _Instruction(ctypes.Structure):
    _fields_ = (('code', ctypes.c_uint16), ('yes', ctypes.c_uint8), ('no', ctypes.c_uint8), ('value', ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (('length', ctypes.c_uint16), ('instructions', ctypes.POINTER(_Instruction)))


def install() -> None:
    """Gives this thread and its children EPERM for all calls not in ALLOWED. Needs NO_NEW_PRIVS; raises OSError."""
    program = assemble()
    if load_libc().prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f'the kernel refuses a filter of system calls (seccomp): {os.strerror(number)}')


@functools.cache
def assemble() -> _Program:
    """The filter as the kernel takes it, cached: a process that forks many confined children assembles it once."""
    instructions = [_Instruction(*one) for one in build(platform.machine())]
    return _Program(len(instructions), (_Instruction * len(instructions))(*instructions))


def build(machine: str) -> Iterator[_Fields]:
    """The instructions for one of MACHINES: code, jump if true, jump if false, value."""
    yield _LOAD, 0, 0, _ARCH
    yield _IF_EQUAL, 1, 0, MACHINES[machine]
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield from _search(_list_spans(machine))


def _list_spans(machine: str) -> list[tuple[int, _Rule]]:
    column = list(MACHINES).index(machine)
    rules = {numbers[column]: _RULES.get(name, _ALLOWED) for name, numbers in ALLOWED.items()}
    known = {number: rule for number, rule in rules.items() if number is not None}
    spans: list[tuple[int, _Rule]] = []
    for number in range(max(known) + 2):  # the last span has no end: it covers x32
        rule = known.get(number, _REFUSED)
        if not spans or spans[-1][1] is not rule:
            spans.append((number, rule))
    return spans


def _search(spans: Sequence[tuple[int, _Rule]]) -> _Rule:
    """Finds the span by halving: the kernel runs a new filter once for every call number."""
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


# on arguments: on the low halves of those that are int, and of flags
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


LANDLOCK, BUBBLEWRAP = CONFINING = 'landlock', 'bubblewrap'  # task.sandbox
_NO_NEW_PRIVILEGES = 38  # prctl
# of Landlock: since the first, files outside cannot be emptied; since the second, processes outside get no signal
_TRUNCATE_ABI, _SIGNALS_ABI = 3, 6
_NULL = '/dev/null'
_FIRST_KILLED = b'1000'  # oom_score_adj
_USERS_OF_MACHINE = 'user:[4026531837]'  # linux/proc_ns.h; RLIMIT_NPROC counts in each namespace by itself
_ROOT_BECOMES, _MANY = 60_001, 4_000  # uids that nothing else uses


class SandboxError(UserError):
    """Raised if no process can be confined here, or not as requested."""


@dataclasses.dataclass(frozen=True)
class Confinement:
    """The resources that a process can use.

    Args:
      readable: files and folders that can be read and executed, in addition to landlock.list_base.
      work: a folder that can be written, without a bound on the number of its files; '' = none.
      memory_bytes: of address space; 0 = not bounded here.
      file_bytes: of a file.
      processes: in addition to those that its user already has; threads count.
      cpu_s: of CPU time; 0 = no bound.
      uid: the uid that root changes to, which nothing else uses; None = the user stays.
      level: the level of CONFINING at which the process runs; BUBBLEWRAP has already made files outside read-only.
    """

    readable: tuple[str, ...] = ()
    work: str = ''
    memory_bytes: int = 2 * 2**30
    file_bytes: int = 2**20
    open_files: int = 64
    processes: int = 16
    cpu_s: int = 0
    uid: int | None = None
    level: str = LANDLOCK


def choose_confinement(memory_bytes: int, level: str = LANDLOCK, readable: Sequence[str] = ()) -> Confinement:
    """The confinement for this process: root becomes a separate user, another user stays."""
    uid = _ROOT_BECOMES + (os.getpid() + _number_processes()) % _MANY if os.getuid() == 0 else None
    return Confinement(uid=uid, memory_bytes=memory_bytes, level=level, readable=tuple(readable))


def _number_processes() -> int:
    """The number of the pid namespace: pids are small in each of them, but users of root's children must differ."""
    namespace = '/proc/self/ns/pid'
    return os.stat(namespace).st_ino if os.path.exists(namespace) else 0


@dataclasses.dataclass(frozen=True)
class Preparation:
    """State that all children of a process with the same confinement share.

    Args:
      ruleset: a descriptor of Landlock's rules.
      own_processes: the user's processes at the time, which do not count against a child; 0 for root.

    After `prepare`, the process and its forks ignore SIGXFSZ, the signal of a write beyond the file limit.
    """

    ruleset: int
    own_processes: int


def prepare(confinement: Confinement) -> Preparation:
    """Prepares the confinement of the children that a process forks, without a work folder. Raises SandboxError."""
    abi = require_support(confinement)
    assemble()
    ignore_file_limit()
    try:
        ruleset = landlock.build_ruleset(_list_rules(confinement), abi)
    except OSError as error:
        raise _failed(error) from error
    return Preparation(ruleset, 0 if confinement.uid is not None else count_own())


def confine(confinement: Confinement, prepared: Preparation | None = None) -> None:
    """Confines this process irrevocably: for a child that leads its session and has one thread.

    `prepared`: by the process that forked this one. Raises SandboxError; the process may then be confined in part, and
    the caller ends it.
    """
    if prepared is None:
        prepared = prepare(confinement)
        if len(os.listdir('/proc/self/task')) > 1:
            raise SandboxError('a process with several threads cannot be confined: start none when code is loaded')
    try:
        os.chdir(confinement.work or '/')
        os.umask(0o077)
        file = os.open('/proc/self/oom_score_adj', os.O_WRONLY)
        os.write(file, _FIRST_KILLED)
        os.close(file)
        set_limits(confinement, prepared.own_processes)
        if confinement.uid is not None:
            os.setgroups([])
            os.setresgid(*[confinement.uid] * 3)
            os.setresuid(*[confinement.uid] * 3)
        if landlock.load_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        die_with_parent()  # a change of user would reset it, and the filter would refuse it
        landlock.enter(prepared.ruleset)
        os.close(prepared.ruleset)
        install()
    except OSError as error:
        raise _failed(error) from error


def _failed(error: OSError) -> SandboxError:
    return SandboxError(f'the process cannot be confined: {error.strerror} ({error.errno})')


def require_support(confinement: Confinement) -> int:
    """Returns the ABI of Landlock; raises a SandboxError that names what this machine lacks."""
    if sys.platform != 'linux' or platform.machine() not in MACHINES:
        here, machines = f'{sys.platform} on {platform.machine()}', ' and '.join(MACHINES)
        raise SandboxError(f'code is confined on Linux on {machines}, and this is {here}')
    abi = find_abi()
    if abi < 1:
        raise SandboxError('code is confined by Landlock, which this kernel has not got, or has switched off')
    if confinement.uid is not None and os.getuid() != 0:
        raise SandboxError(f'uid {confinement.uid} is for root, and this is uid {os.getuid()}')
    if confinement.uid is None and os.getuid() == 0:
        raise SandboxError('root is confined as another user, and none is named')
    if confinement.level == LANDLOCK and abi < _TRUNCATE_ABI:
        raise SandboxError(
            f'code is confined with Landlock ABI {_TRUNCATE_ABI} (Linux 6.2), which keeps it from emptying files that '
            f'everybody can write; this kernel has ABI {abi}'
        )
    if confinement.uid is None and abi < _SIGNALS_ABI:
        raise SandboxError(
            f'code of the same user is confined with Landlock ABI {_SIGNALS_ABI} (Linux 6.12), which refuses it '
            f'signals to others; this kernel has ABI {abi}: start the run as root'
        )
    return abi


def ignore_file_limit() -> None:
    """Makes a write beyond the file limit raise OSError, in this process and in its forks."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def set_limits(confinement: Confinement, own_processes: int = 0) -> None:
    """Sets resource limits only: they stop accidents, not attacks. `own_processes` additional processes are allowed.

    For a process that ignores SIGXFSZ (`ignore_file_limit`). Raises OSError.
    """
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_NOFILE: confinement.open_files,
        resource.RLIMIT_NPROC: confinement.processes + own_processes,
    }
    if confinement.memory_bytes:
        limits[resource.RLIMIT_AS] = confinement.memory_bytes
    if confinement.cpu_s:
        limits[resource.RLIMIT_CPU] = confinement.cpu_s
    for kind, bound in limits.items():
        _, hard = resource.getrlimit(kind)
        least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (least, least))


def count_own() -> int:
    """The number of threads of this user, which count in its RLIMIT_NPROC."""
    own, found, namespace = os.getuid(), 0, _name_users()
    for name in filter(str.isdecimal, os.listdir('/proc')):
        try:
            if os.stat(f'/proc/{name}').st_uid == own and namespace in ('', _name_users(name)):
                found += len(os.listdir(f'/proc/{name}/task'))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def _name_users(process: str = 'self') -> str:
    found = os.readlink(f'/proc/{process}/ns/user')
    return '' if found == _USERS_OF_MACHINE else found


def _list_rules(confinement: Confinement) -> dict[str, landlock.Access]:
    # an import lists the folders of sys.path that it looks through
    listed = {os.path.dirname(path) for path in confinement.readable}.intersection(sys.path)
    rules = dict.fromkeys(listed, landlock.Access.READ_DIR) | list_base()
    rules |= dict.fromkeys(confinement.readable, landlock.RUN)
    rules[_NULL] = landlock.READ | landlock.Access.WRITE_FILE
    return rules | ({confinement.work: landlock.READ | landlock.CHANGE} if confinement.work else {})


# The levels of task.sandbox that confine: how each of them starts a command, and its other properties.
#
# A new level is an entry here, a new module, and its name in config/agent_fields.py and confinement.py, by which the
# process that it starts confines itself.


PROGRAM = 'bwrap'
NAMESPACES = ('mnt', 'net', 'ipc', 'uts')  # separate for the command; also 'pid' if /proc can be mounted
_VIEW = ('--ro-bind', '/', '/', '--dev', '/dev')
_OWN = ('--unshare-net', '--unshare-ipc', '--unshare-uts', '--unshare-cgroup-try')
_PROCESSES, _PROC_OF_MACHINE = ('--unshare-pid', '--proc', '/proc'), ('--bind', '/proc', '/proc')
_ENDS = ('--die-with-parent', '--new-session')
# of root, until a confined process changes its user: for that change, to kill that user's processes, for its files
_CAPABILITIES = ('CAP_SETUID', 'CAP_SETGID', 'CAP_KILL', 'CAP_CHOWN', 'CAP_DAC_OVERRIDE')
_NO_PROC = 'mount proc'  # in the error of bwrap if a container has covered parts of /proc
LONGEST_S = 20.0


def wrap_bubblewrap(command: Sequence[str], writable: Sequence[str]) -> list[str]:
    """Returns the command line that starts the command inside; see wrap_command.

    The command has another pid inside; the process outside ends when the thread that started it ends. Raises a
    SandboxError with the reason if bubblewrap does not run here.
    """
    folders = [word for folder in writable for word in ('--bind', folder, folder)]
    return [*_find_prefix(os.environ.get('PATH', '')), *folders, '--', *command]


def has_own_processes(wrapped: Sequence[str]) -> bool:
    """Whether the command of `wrap_bubblewrap` has a separate pid namespace."""
    return _PROCESSES[0] in wrapped


@functools.cache
def _find_prefix(path: str) -> tuple[str, ...]:
    program = shutil.which(PROGRAM, path=path)
    if program is None:
        raise SandboxError(
            f'bubblewrap is not installed: there is no {PROGRAM} on the PATH (apt-get install bubblewrap)'
        )
    told = ''
    for processes in (_PROCESSES, _PROC_OF_MACHINE):
        prefix = (program, *_VIEW, *processes, *_OWN, *_choose_user(), *_ENDS)
        told = _try(prefix)
        if not told:
            return prefix
        if _NO_PROC not in told:
            break
    raise SandboxError(f'bubblewrap does not run here: {told}')


def _choose_user() -> list[str]:
    """Root keeps all users, so that it can become another one; an ordinary user gets a namespace with only itself."""
    if os.getuid() != 0:
        return ['--unshare-user']
    return ['--cap-drop', 'ALL', *(word for name in _CAPABILITIES for word in ('--cap-add', name))]


def _try(prefix: Sequence[str]) -> str:
    """Starts an empty command; returns the error, '' if it works."""
    command = [*prefix, '--', sys.executable, '-I', '-S', '-c', '']
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=LONGEST_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f'it starts nothing within {LONGEST_S:g} s'
    except OSError as error:
        return f'{prefix[0]}: {error.strerror}'
    if not done.returncode:
        return ''
    lines = done.stderr.decode(errors='replace').strip().splitlines()
    return lines[-1] if lines else f'it ends with {done.returncode}'


@dataclasses.dataclass(frozen=True)
class Level:
    """An entry of LEVELS."""

    wrap: Callable[[Sequence[str], Sequence[str]], list[str]]  # (command, folders that can be written) -> command line
    has_namespaces: bool = False  # the command has separate namespaces


LEVELS: Mapping[str, Level] = {
    LANDLOCK: Level(lambda command, writable: list(command)),
    BUBBLEWRAP: Level(wrap_bubblewrap, has_namespaces=True),
}


def wrap_command(level: str, command: Sequence[str], *, writable: Sequence[str] = ()) -> list[str]:
    """Returns the command line that starts the command at the level; at 'none' the command itself.

    Descriptors, environment, working directory and exit code are passed through.

    Args:
      level: of confinement.CONFINING, or 'none'.
      writable: folders that stay writable inside.

    Raises a SandboxError with the reason if the level does not work here.
    """
    return LEVELS[level].wrap(command, writable) if level in LEVELS else list(command)
