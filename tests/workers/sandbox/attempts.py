"""Every attempt to leave the sandbox, each with an allowed twin, and what must work inside."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from tests.workers.sandbox.attempts_files import FILES, read_own, write_own
from tests.workers.sandbox.attempts_kernel import KERNEL, fork_once, some_call
from tests.workers.sandbox.needs import (
    compute_decimals,
    import_again,
    multiply_in_threads,
    run_coroutine,
    run_in_processes,
    run_pool,
    run_program,
    run_program_of_coroutine,
    run_thread,
    use_sqlite,
    write_temporary,
)
from tests.workers.sandbox.place import Attempt, Place, call, in_child, raw

_AT, _NEW_USER, _MANY = -100, 0x10000000, 64
_EITHER = ('EPERM', 'EACCES', 'ENOSYS')
_BUFFER = ctypes.create_string_buffer(4096)  # at the same address in the parent


def pair(place: Place) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'x')
        assert theirs.recv(1) == b'x'


def signal_own(place: Place) -> None:
    """Itself and a child."""
    os.kill(os.getpid(), 0)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def open_socket(family: int, kind: int, *then: tuple[str, Callable[[Place], object]]) -> Callable[[Place], object]:
    """A socket, and then methods with an address."""

    def attempt(place: Place) -> None:
        with socket.socket(family, kind) as one:
            for method, address in then:
                getattr(one, method)(address(place))

    return attempt


def accept_inherited(place: Place) -> None:
    one = place.inherited['tcp']
    one.setblocking(False)
    one.accept()


def send_from_pair(place: Place) -> None:
    """A datagram needs no connection: each has an address of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.sendto(b'x', place.datagram)


def connect_pair(place: Place) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:
        ours.connect(place.datagram)


def on_parent(number: int, *arguments: object) -> Callable[[Place], object]:
    """A system call whose first argument is the parent's number."""
    return lambda place: call(number, place.parent, *arguments)


def copy_memory(number: int) -> Callable[[Place], object]:
    def attempt(place: Place) -> None:
        here = (ctypes.c_size_t * 2)(ctypes.addressof(_BUFFER), 8)
        call(number, place.parent, here, 1, here, 1, 0)

    return attempt


def trace(place: Place) -> None:
    call(101, 0x4206, place.parent, 0, 0)  # PTRACE_SEIZE


def set_limit_of_parent(place: Place) -> None:
    call(302, place.parent, 0, (ctypes.c_uint64 * 2)(100, 100), None)  # RLIMIT_CPU


def clone_user(place: Place) -> None:
    child = call(56, _NEW_USER | signal.SIGCHLD, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def clone3_user(place: Place) -> None:
    arguments = (ctypes.c_uint64 * 11)(_NEW_USER, 0, 0, 0, signal.SIGCHLD)
    child = call(435, arguments, 88)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def make_shared(get: int, control: int, *arguments: int) -> Callable[[Place], object]:
    """Of System V, that outlives the process; removed where it was made."""

    def attempt(place: Place) -> None:
        number = call(get, 0, *arguments)
        call(control, number, *([0, 0] if control == 66 else [0, None]))

    return attempt


def make_queue(place: Place) -> None:
    name = f'sandbox-{os.getpid()}'.encode()
    os.close(call(240, name, os.O_CREAT | os.O_RDWR, 0o600, None))
    call(241, name)


def map_shared(place: Place) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:1] = b'x'


def fork_many(place: Place) -> None:
    children: list[int] = []
    try:
        while len(children) < _MANY:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def start_many_threads(place: Place) -> None:
    end = threading.Event()
    threads = []
    try:
        for _ in range(_MANY):
            thread = threading.Thread(target=end.wait)
            thread.start()
            threads.append(thread)
    finally:
        end.set()
        for thread in threads:
            thread.join()


def allocate(number: int) -> Callable[[Place], object]:
    return lambda place: bytes(number)  # not touched


def write_bytes(number: int) -> Callable[[Place], object]:
    return lambda place: (place.work / 'big').write_bytes(bytes(number))


def lengthen(number: int) -> Callable[[Place], object]:
    def attempt(place: Place) -> None:
        with open(place.work / 'long', 'wb') as file:
            os.ftruncate(file.fileno(), number)

    return attempt


def open_many(number: int) -> Callable[[Place], object]:
    def attempt(place: Place) -> None:
        opened = []
        try:
            for _ in range(number):
                opened.append(os.open('/dev/null', os.O_RDONLY))
        finally:
            for one in opened:
                os.close(one)

    return attempt


def limit_files(number: int) -> Callable[[Place], object]:
    """Both limits of the number of open files."""
    return lambda place: call(302, 0, 7, (ctypes.c_uint64 * 2)(number, number), None)


def at(one: str) -> Callable[[Place], object]:
    return lambda place: getattr(place, one)


def tcp(place: Place) -> tuple[str, int]:
    return '127.0.0.1', place.port


def any_port(place: Place) -> tuple[str, int]:
    return '127.0.0.1', 0


_INET, _UNIX, _STREAM, _DATAGRAM = socket.AF_INET, socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM
_NETWORK = {
    'TCP connect': Attempt(open_socket(_INET, _STREAM, ('connect', tcp)), pair),
    'TCP bind': Attempt(open_socket(_INET, _STREAM, ('bind', any_port)), pair),
    'TCP of IPv6': Attempt(open_socket(socket.AF_INET6, _STREAM), pair),
    'UDP': Attempt(open_socket(_INET, _DATAGRAM, ('connect', tcp)), pair),
    'raw IP': Attempt(open_socket(_INET, socket.SOCK_RAW), pair),
    'packet': Attempt(open_socket(socket.AF_PACKET, socket.SOCK_RAW), pair),
    'unix connect': Attempt(open_socket(_UNIX, _STREAM, ('connect', at('stream'))), pair),
    'unix datagram': Attempt(open_socket(_UNIX, _DATAGRAM, ('connect', at('datagram'))), pair),
    'unix bind': Attempt(open_socket(_UNIX, _STREAM, ('bind', lambda place: str(place.outside / 'socket'))), pair),
    'abstract unix bind': Attempt(
        open_socket(_UNIX, _STREAM, ('bind', lambda place: f'\0sandbox-{os.getpid()}')), pair
    ),
    'netlink': Attempt(open_socket(socket.AF_NETLINK, socket.SOCK_RAW), pair),
    'vsock': Attempt(open_socket(socket.AF_VSOCK, _STREAM), pair),
    'kernel cryptography': Attempt(open_socket(socket.AF_ALG, socket.SOCK_SEQPACKET), pair),
    'connect of an inherited socket': Attempt(lambda place: place.inherited['tcp'].connect(tcp(place)), pair),
    'bind of an inherited socket': Attempt(lambda place: place.inherited['tcp'].bind(any_port(place)), pair),
    'accept of an inherited socket': Attempt(accept_inherited, pair),
    'unix connect of an inherited socket': Attempt(lambda place: place.inherited['unix'].connect(place.stream), pair),
    'datagram from a socketpair': Attempt(send_from_pair, pair),
    'connect of a socketpair': Attempt(connect_pair, pair),
}
_PROCESSES = {
    'signal 0 to the parent': Attempt(lambda place: os.kill(place.parent, 0), signal_own),
    'SIGTERM to the parent': Attempt(lambda place: os.kill(place.parent, signal.SIGTERM), signal_own),
    'signal 0 to pid 1': Attempt(lambda place: os.kill(1, 0), signal_own),
    'tgkill of the parent': Attempt(lambda place: call(234, place.parent, place.parent, 0), signal_own),
    'tkill of the parent': Attempt(on_parent(200, 0), signal_own),
    'ptrace of the parent': Attempt(trace, some_call),
    'process_vm_readv of the parent': Attempt(copy_memory(310), some_call),
    'process_vm_writev of the parent': Attempt(copy_memory(311), some_call),
    'kcmp with the parent': Attempt(lambda place: call(312, place.parent, os.getpid(), 1, 0, 0), some_call, _EITHER),
    'pidfd_open of the parent': Attempt(on_parent(434, 0), some_call),
    'pidfd_getfd': Attempt(raw(438, -1, 0, 0), some_call),
    'pidfd_send_signal': Attempt(raw(424, -1, 0, None, 0), some_call),
    'process_madvise': Attempt(raw(440, -1, None, 0, 0, 0), some_call),
    'limits of the parent': Attempt(set_limit_of_parent, limit_files(32)),
    'processors of the parent': Attempt(on_parent(203, 128, b'\xff' * 128), some_call),
    'scheduler of the parent': Attempt(on_parent(144, 5, bytes(8)), some_call),  # SCHED_IDLE
    'niceness of the parent': Attempt(lambda place: call(141, 0, place.parent, 19), some_call),
    'priority of input and output of the parent': Attempt(lambda place: call(251, 1, place.parent, 3 << 13), some_call),
    'memory policy of the parent': Attempt(on_parent(256, 64, bytes(8), bytes(8)), some_call, (*_EITHER, 'ESRCH')),
    'setsid': Attempt(lambda place: in_child(os.setsid), fork_once),
    'setpgid': Attempt(lambda place: in_child(lambda: os.setpgid(0, 0)), fork_once),
    # a namespace of users may have no root at all
    'setuid to root': Attempt(lambda place: os.setresuid(0, 0, 0), fork_once, ('EPERM', 'EINVAL')),
    'System V shared memory': Attempt(make_shared(29, 31, 4096, 0o1600), map_shared, _EITHER),
    'System V semaphores': Attempt(make_shared(64, 66, 1, 0o1600), map_shared, _EITHER),
    'System V messages': Attempt(make_shared(68, 71, 0o1600), map_shared, _EITHER),
    'POSIX messages': Attempt(make_queue, map_shared, _EITHER),
}
_KERNEL = {
    'unshare': Attempt(raw(272, _NEW_USER), some_call),
    'setns': Attempt(raw(308, -1, 0), some_call),
    'clone of a user namespace': Attempt(clone_user, fork_once),
    'clone3 of a user namespace': Attempt(clone3_user, fork_once, _EITHER),
    'mount': Attempt(raw(165, None, b'/no/such', b'tmpfs', 0, None), some_call),
    'umount2': Attempt(raw(166, b'/', 1 << 30), some_call),
    'chroot': Attempt(raw(161, b'/no/such'), some_call),
    'pivot_root': Attempt(raw(155, b'/no/such', b'/no/such'), some_call),
    'open_tree_attr': Attempt(raw(467, _AT, b'/', 0, None, 0), some_call, _EITHER),
    'open_tree': Attempt(raw(428, _AT, b'/', 0), some_call),
    'move_mount': Attempt(raw(429, -1, b'', -1, b'', 0), some_call),
    'fsopen': Attempt(raw(430, b'tmpfs', 0), some_call),
    'fsconfig': Attempt(raw(431, -1, 0, None, None, 0), some_call),
    'fsmount': Attempt(raw(432, -1, 0, 0), some_call),
    'fspick': Attempt(raw(433, _AT, b'/', 0), some_call),
    'mount_setattr': Attempt(raw(442, -1, b'', 1 << 30, None, 0), some_call),
    'bpf': Attempt(raw(321, 0, bytes(8192), 8192), some_call),
    'io_uring_setup': Attempt(raw(425, 1, _BUFFER), some_call),
    'io_uring_enter': Attempt(raw(426, -1, 0, 0, 0, None, 0), some_call),
    'io_uring_register': Attempt(raw(427, -1, 0, None, 0), some_call),
    'perf_event_open': Attempt(raw(298, None, 0, -1, -1, 1 << 30), some_call),
    'userfaultfd': Attempt(raw(323, 1), some_call),
    'keyctl': Attempt(raw(250, 0, -3, 0), some_call),
    'add_key': Attempt(raw(248, b'user', b'sandbox', b'x', 1, -2), some_call),
    'request_key': Attempt(raw(249, b'user', b'sandbox', None, 0), some_call),
    'kexec_load': Attempt(raw(246, 0, 0, None, 0), some_call),
    'kexec_file_load': Attempt(raw(320, -1, -1, 0, None, 0), some_call),
    'open_by_handle_at': Attempt(raw(304, -1, bytes(16), 0), some_call),
    'name_to_handle_at': Attempt(raw(303, _AT, b'/', bytes(8), bytes(8), 0), some_call),
    'x32 getpid': Attempt(raw(0x40000000 + 39), some_call),
    'x32 socket': Attempt(raw(0x40000000 + 41, 2, 1, 0), some_call),
    'x32 ptrace': Attempt(raw(0x40000000 + 521, 0, 0, 0, 0), some_call),
}
_RESOURCES = {
    'fork bomb': Attempt(fork_many, fork_once, ('EAGAIN',)),
    'thread bomb': Attempt(start_many_threads, fork_once, ('RuntimeError',)),
    '3 GB of memory': Attempt(allocate(3 << 30), allocate(10 << 20), ('MemoryError',)),
    'a file of 2 MB': Attempt(write_bytes(2 << 20), write_bytes(1000), ('EFBIG', 'SIGXFSZ')),
    'a sparse file of 2 MB': Attempt(lengthen(2 << 20), lengthen(1000), ('EFBIG', 'SIGXFSZ')),
    '200 open files': Attempt(open_many(200), open_many(10), ('EMFILE',)),
    'more open files than allowed': Attempt(limit_files(200), open_many(10)),
}
KINDS: dict[str, dict[str, Attempt]] = {
    **FILES,
    'use the network': _NETWORK,
    'reach other processes': _PROCESSES,
    'change what the kernel shows': _KERNEL,
    'take what the kernel has once': KERNEL,
    'use up the machine': _RESOURCES,
}
ATTEMPTS = {name: attempt for kind in KINDS.values() for name, attempt in kind.items()}


CONTROLS: dict[str, Callable[[Place], object]] = {
    'write and read in work': read_own,
    'folders in work': write_own,
    'a temporary file in work': write_temporary,
    'a thread': run_thread,
    'a coroutine': run_coroutine,
    'a pair of sockets': pair,
    'a program': run_program,
    'shared memory of its own': map_shared,
    'import of json and math': import_again('json', 'math'),
    'import of modules of the standard library': import_again(
        'argparse', 'ast', 'csv', 'ctypes', 'datetime', 'decimal', 'difflib', 'fractions', 'gzip', 'inspect', 'logging',
        'lzma', 'multiprocessing', 'pickle', 'sqlite3', 'ssl', 'statistics', 'unittest', 'uuid', 'zoneinfo',
        'xml.etree.ElementTree',
    ),
    'import of asyncio and a program of a coroutine': run_program_of_coroutine,
    'import of multiprocessing and two processes': run_in_processes,
    'import of concurrent.futures and threads': run_pool,
    'import of sqlite3 and a file of it in work': use_sqlite,
    'import of decimal and many digits': compute_decimals,
    'import of numpy': import_again('numpy'),
    'import of numpy and four threads': multiply_in_threads,
}  # fmt: skip


def run_from_memory(place: Place) -> None:
    """A program that is no file: it runs under the same rules."""
    memory = os.memfd_create('program', 0)
    with open('/usr/bin/true', 'rb') as true:
        os.write(memory, true.read())
    in_child(lambda: os.execve(memory, ['true'], {}))


LEFT_OPEN: dict[str, Callable[[Place], object]] = {
    'tell whether a file is there, and its size and times': lambda place: os.stat(place.secret),
    'read programs and libraries of the system': lambda place: os.listdir('/usr/bin'),
    'run a program that it wrote into memory': run_from_memory,
    'tell the name and the kernel of the machine': lambda place: os.uname(),
}


def burn(place: Place) -> None:
    while time.process_time() < 4:
        pass


MEASURED: dict[str, Callable[[Place], object]] = {'seconds of a processor': burn}


def name_outcome(error: BaseException) -> str:
    """EPERM and its like, or the name of an exception."""
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno))
    return type(error).__name__
