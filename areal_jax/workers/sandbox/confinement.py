"""Confines the calling process: limits, another user, Landlock, and a filter of system calls, in this order.

What it stops is code that a model wrote, and no exploit of the kernel. Descriptors that are open stay open, memory of
the process stays readable, and what it is told over its pipes it can answer as it likes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import resource
import signal
import sys
from collections.abc import Sequence

from areal_jax.errors import UserError
from areal_jax.workers.descendants import die_with_parent
from areal_jax.workers.sandbox import confinement as seccomp
from areal_jax.workers.sandbox import landlock
from areal_jax.workers.sandbox.landlock import find_abi as find_abi
from areal_jax.workers.sandbox.landlock import list_base

LANDLOCK, BUBBLEWRAP = CONFINING = 'landlock', 'bubblewrap'  # task.sandbox
_NO_NEW_PRIVILEGES = 38  # prctl
# of Landlock: from the first on files outside cannot be emptied, from the second on no process outside gets a signal
_TRUNCATE_ABI, _SIGNALS_ABI = 3, 6
_NULL = '/dev/null'
_FIRST_KILLED = b'1000'  # oom_score_adj
_USERS_OF_MACHINE = 'user:[4026531837]'  # linux/proc_ns.h; RLIMIT_NPROC counts in each namespace by itself
_ROOT_BECOMES, _MANY = 60_001, 4_000  # users that nothing else has


class SandboxError(UserError):
    """No process can be confined here, or not as asked."""


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What a process can use.

    Args:
      readable: files and folders that can be read and executed, besides readable.list_base.
      work: a folder that can be written, without a bound on the number of its files; '' = none.
      memory_bytes: of address space; 0 = no bound of its own.
      file_bytes: of a file.
      processes: besides those that its user has already, threads included.
      cpu_s: of CPU time; 0 = no bound.
      uid: that root becomes, one that nothing else uses; None = the user stays.
      level: of CONFINING, that the process runs at; BUBBLEWRAP has made files outside read-only already.
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
    """For this process: root becomes a user of its own, another user stays."""
    uid = _ROOT_BECOMES + (os.getpid() + _number_processes()) % _MANY if os.getuid() == 0 else None
    return Confinement(uid=uid, memory_bytes=memory_bytes, level=level, readable=tuple(readable))


def _number_processes() -> int:
    """Of the namespace of processes: pids are small in each of them, where users of root's children must differ."""
    namespace = '/proc/self/ns/pid'
    return os.stat(namespace).st_ino if os.path.exists(namespace) else 0


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What is the same for all children of a process that are confined alike.

    Args:
      ruleset: a descriptor of Landlock's rules.
      own_processes: of this user at the time, beside which a child may have its own; 0 for root.

    A signal of it is ignored from then on, by its forks too: that of a write beyond the limit.
    """

    ruleset: int
    own_processes: int


def prepare(confinement: Confinement) -> Preparation:
    """For the children that a process forks; without a folder to work in. Raises SandboxError."""
    abi = require_support(confinement)
    seccomp.assemble()
    ignore_file_limit()
    try:
        ruleset = landlock.build_ruleset(_list_rules(confinement), abi)
    except OSError as error:
        raise _failed(error) from error
    return Preparation(ruleset, 0 if confinement.uid is not None else count_own())


def confine(confinement: Confinement, prepared: Preparation | None = None) -> None:
    """Takes nothing back: for a child that leads its session and has one thread.

    `prepared`: by the process that forked this one. Raises SandboxError; the caller ends the process then, which may be
    confined in part.
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
        die_with_parent()  # a change of user takes it back, and the filter refuses it
        landlock.enter(prepared.ruleset)
        os.close(prepared.ruleset)
        seccomp.install()
    except OSError as error:
        raise _failed(error) from error


def _failed(error: OSError) -> SandboxError:
    return SandboxError(f'the process cannot be confined: {error.strerror} ({error.errno})')


def require_support(confinement: Confinement) -> int:
    """The ABI of Landlock; raises SandboxError that names what this machine lacks."""
    if sys.platform != 'linux' or platform.machine() not in seccomp.MACHINES:
        here, machines = f'{sys.platform} on {platform.machine()}', ' and '.join(seccomp.MACHINES)
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
    """A write beyond the limit of a file raises OSError, in this process and in its forks."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def set_limits(confinement: Confinement, own_processes: int = 0) -> None:
    """The limits alone, which stop accidents and no attempt; those of `own_processes` are allowed beside.

    For a process that ignores the signal (`ignore_file_limit`). Raises OSError.
    """
    limits = {
        resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_NOFILE: confinement.open_files,
        resource.RLIMIT_NPROC: confinement.processes + own_processes,
    }  # fmt: skip
    if confinement.memory_bytes:
        limits[resource.RLIMIT_AS] = confinement.memory_bytes
    if confinement.cpu_s:
        limits[resource.RLIMIT_CPU] = confinement.cpu_s
    for kind, bound in limits.items():
        _, hard = resource.getrlimit(kind)
        least = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (least, least))


def count_own() -> int:
    """Threads of this user, which count in its RLIMIT_NPROC."""
    own, found, namespace = os.getuid(), 0, _name_users()
    for name in filter(str.isdecimal, os.listdir('/proc')):
        try:
            if os.stat(f'/proc/{name}').st_uid == own and namespace in ('', _name_users(name)):
                found += len(os.listdir(f'/proc/{name}/task'))
        except OSError:  # it has ended
            continue
    return found


def _name_users(process: str = 'self') -> str:
    """The namespace of users of a process; '' for that of the machine. A process of another one raises OSError."""
    found = os.readlink(f'/proc/{process}/ns/user')
    return '' if found == _USERS_OF_MACHINE else found


def _list_rules(confinement: Confinement) -> dict[str, landlock.Access]:
    # an import lists the folders of sys.path that it looks through
    listed = {os.path.dirname(path) for path in confinement.readable}.intersection(sys.path)
    rules = dict.fromkeys(listed, landlock.Access.READ_DIR) | list_base()
    rules |= dict.fromkeys(confinement.readable, landlock.RUN)
    rules[_NULL] = landlock.READ | landlock.Access.WRITE_FILE
    return rules | ({confinement.work: landlock.READ | landlock.CHANGE} if confinement.work else {})
