"""Attempts on what the kernel has once for the machine or for a user: calls, and arguments, that the filter refuses."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
from collections.abc import Callable

from tests.workers.sandbox.place import Attempt, Place, call, in_child, raw

_AT, _LAZY, _LISTENER = -100, 2, 8
_NAMESPACES = {
    'mounts': 0x00020000, 'groups': 0x02000000, 'names': 0x04000000, 'System V': 0x08000000, 'users': 0x10000000,
    'processes': 0x20000000, 'network': 0x40000000,
}  # fmt: skip
_EITHER = ('EPERM', 'EACCES', 'ENOSYS')
_BUFFER = ctypes.create_string_buffer(4096)
_REQUEST = (ctypes.c_uint64 * 4)(32, 2**64 - 1, 0, 0)  # of listmount and statmount: the root of the namespace


def some_call(place: Place) -> None:
    assert call(39) == os.getpid()
    os.close(call(319, b'memory', 0))  # memfd_create


def map_memory(place: Place) -> None:
    with mmap.mmap(-1, 4096) as memory:
        memory[:1] = b'x'


def use_pipe(place: Place) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'x')
    assert os.read(reader, 1) == b'x'
    assert fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) > 0
    os.close(reader)
    os.close(writer)


def lengthen_pipe(place: Place) -> None:
    reader, _ = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 2**20)


def on_folder(command: int, value: int) -> Callable[[Place], object]:
    return lambda place: fcntl.fcntl(os.open('/usr/lib', os.O_RDONLY), command, value)


def lease(place: Place) -> None:
    fcntl.fcntl(os.open(place.work / 'leased', os.O_RDONLY | os.O_CREAT), fcntl.F_SETLEASE, fcntl.F_WRLCK)


def name_thread(place: Place) -> None:
    call(157, 15, b'named', 0, 0, 0)  # PR_SET_NAME


def clone(flags: int) -> Callable[[Place], object]:
    def attempt(place: Place) -> None:
        child = call(56, flags | signal.SIGCHLD, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    return attempt


def listen_to_filter(place: Place) -> None:
    in_child(lambda: call(317, 1, _LISTENER, _BUFFER))


def fork_once(place: Place) -> None:
    in_child(lambda: None)


ASYNCHRONOUS = {
    'io_setup': Attempt(raw(206, 1, (ctypes.c_uint64 * 1)(0)), some_call),
    'io_setup of all events of the machine': Attempt(raw(206, 65536, (ctypes.c_uint64 * 1)(0)), some_call),
    'io_destroy': Attempt(raw(207, 0), some_call),
    'io_getevents': Attempt(raw(208, 0, 0, 0, None, None), some_call),
    'io_submit': Attempt(raw(209, 0, 0, None), some_call),
    'io_cancel': Attempt(raw(210, 0, None, None), some_call),
    'io_pgetevents': Attempt(raw(333, 0, 0, 0, None, None, None), some_call),
    'io_uring_setup with a thread of the kernel': Attempt(
        raw(425, 1, (ctypes.c_uint32 * 30)(0, 0, 2)), some_call
    ),
    'x32 io_uring_setup': Attempt(raw(0x40000000 + 425, 1, _BUFFER), some_call),
    'x32 io_setup': Attempt(raw(0x40000000 + 543, 1, _BUFFER), some_call),
}  # fmt: skip
WATCHES = {
    'inotify_init': Attempt(raw(253), some_call),
    'inotify_init1': Attempt(raw(294, 0), some_call),
    'inotify_add_watch': Attempt(raw(254, -1, b'/', 2), some_call),
    'fanotify_init': Attempt(raw(300, 0x200, 0), some_call),  # for anybody: FAN_REPORT_FID
    'fanotify_mark': Attempt(raw(301, -1, 1, 2, _AT, b'/'), some_call),
    'notices of a folder': Attempt(on_folder(fcntl.F_NOTIFY, fcntl.DN_CREATE), use_pipe),
    'a lease of a file': Attempt(lease, use_pipe),
    'a long pipe': Attempt(lengthen_pipe, use_pipe),
    'a listener of a filter': Attempt(listen_to_filter, fork_once),
}
KEYS = {
    'a session keyring': Attempt(raw(250, 1, None), some_call),
    'the keyring of the user': Attempt(raw(250, 0, -4, 1), some_call),
    'the persistent keyring': Attempt(raw(250, 22, -1, -2), some_call),
    'add_key of a keyring': Attempt(raw(248, b'keyring', b'sandbox', None, 0, -3), some_call),
    'x32 keyctl': Attempt(raw(0x40000000 + 250, 0, -3, 0), some_call),
}
MOUNTS = {
    'statmount': Attempt(raw(457, _REQUEST, _BUFFER, 4096, 0), some_call),
    'listmount': Attempt(raw(458, _REQUEST, _BUFFER, 1, 0), some_call),
    'listns': Attempt(raw(470, _REQUEST, _BUFFER, 1, 0), some_call),
    'open_tree of a clone': Attempt(raw(428, _AT, b'/', 1), some_call),
    'mount of proc': Attempt(raw(165, b'proc', b'/no/such', b'proc', 0, None), some_call),
    'mount by a bind': Attempt(raw(165, b'/', b'/no/such', None, 4096, None), some_call),
    'umount of /proc': Attempt(raw(166, b'/no/such', _LAZY), some_call),
    'swapon': Attempt(raw(167, b'/no/such', 0), some_call),
    'swapoff': Attempt(raw(168, b'/no/such'), some_call),
    'quotactl': Attempt(raw(179, 0x80000100, None, 0, None), some_call),
    'quotactl_fd': Attempt(raw(443, -1, 0x80000100, 0, None), some_call),
}
NAMESPACES = {
    **{f'unshare of {name}': Attempt(raw(272, flag), some_call) for name, flag in _NAMESPACES.items()},
    **{f'clone with its own {name}': Attempt(clone(flag), fork_once) for name, flag in _NAMESPACES.items()},
    'setns by a file': Attempt(raw(308, 0, 0x10000000), some_call),
}
MEMORY = {
    'memfd_secret': Attempt(raw(447, 0), some_call, _EITHER),
    'huge pages of a file': Attempt(raw(319, b'huge', 4), some_call),
    'huge pages of memory': Attempt(raw(9, 0, 2 << 20, 3, 0x40022, -1, 0), map_memory),
    'mlock': Attempt(raw(149, _BUFFER, 4096), map_memory),
    'mlock2': Attempt(raw(325, _BUFFER, 4096, 0), map_memory),
    'mlockall': Attempt(raw(151, 1), map_memory),
    'mbind': Attempt(raw(237, _BUFFER, 4096, 0, None, 0, 0), map_memory),
    'set_mempolicy': Attempt(raw(238, 0, None, 0), map_memory),
    'vmsplice': Attempt(raw(278, -1, None, 0, 0), use_pipe),
    'splice': Attempt(raw(275, -1, None, -1, None, 1, 0), use_pipe),
    'process_mrelease': Attempt(raw(448, -1, 0), map_memory),
}
MACHINE = {
    'sync': Attempt(raw(162), some_call),
    'syncfs': Attempt(raw(306, -1), some_call),
    'syslog': Attempt(raw(103, 10, None, 0), some_call),
    'personality': Attempt(raw(135, 0xFFFFFFFF), some_call),
    'sethostname': Attempt(raw(170, b'x', -1), some_call),
    'setdomainname': Attempt(raw(171, b'x', -1), some_call),
    'clock_settime': Attempt(raw(227, 0, None), some_call),
    'clock_adjtime': Attempt(raw(305, 0, None), some_call),
    'adjtimex': Attempt(raw(159, None), some_call),
    'init_module': Attempt(raw(175, None, 0, b''), some_call),
    'finit_module': Attempt(raw(313, -1, b'', 0), some_call),
    'delete_module': Attempt(raw(176, b'no such', 0), some_call),
    'reboot': Attempt(raw(169, 0, 0, 0, None), some_call),
    'acct': Attempt(raw(163, b'/no/such'), some_call),
    'modify_ldt': Attempt(raw(154, 0, _BUFFER, 16), some_call),
    'ioperm': Attempt(raw(173, 0, 1, 0), some_call),
    'timer_create': Attempt(raw(222, 0, None, (ctypes.c_int * 1)(0)), some_call),
    'outlive the server': Attempt(raw(157, 1, 0, 0, 0, 0), name_thread),  # PR_SET_PDEATHSIG
    'adopt orphans': Attempt(raw(157, 36, 1, 0, 0, 0), name_thread),  # PR_SET_CHILD_SUBREAPER
    'be traced by anybody': Attempt(raw(157, 0x59616D61, -1, 0, 0, 0), name_thread),  # PR_SET_PTRACER
}
KERNEL = {**ASYNCHRONOUS, **WATCHES, **KEYS, **MOUNTS, **NAMESPACES, **MEMORY, **MACHINE}
