"""The filter of system calls, run by an interpreter of its instructions, over all numbers of each architecture."""

from __future__ import annotations

import errno
import pathlib
import re

import pytest

from areal_jax.workers.sandbox import confinement
from areal_jax.workers.sandbox.confinement import ALLOWED

ALLOW, REFUSE, NO_SUCH, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
MOST = 1024  # far beyond the last number of a kernel
BY_ARGUMENT = {'clone', 'clone3', 'fcntl', 'memfd_create', 'mmap', 'prctl', 'prlimit64', 'socketpair'}
HEADERS = {
    'x86_64': (pathlib.Path('/usr/include/x86_64-linux-gnu/asm/unistd_64.h'), r'#define __NR_(\w+)\s+(\d+)'),
    'aarch64': (pathlib.Path('/usr/include/asm-generic/unistd.h'), r'#define __NR(?:3264)?_(\w+)\s+(\d+)'),
}
# must never be among the calls that programs have: they take what belongs to the machine, or show or change it
NEVER = (
    'accept', 'accept4', 'acct', 'add_key', 'bind', 'bpf', 'chroot', 'chmod', 'chown', 'clock_settime', 'connect',
    'delete_module', 'fanotify_init', 'fanotify_mark', 'fchmodat2', 'finit_module', 'fsmount', 'fsopen', 'init_module',
    'inotify_add_watch', 'inotify_init', 'inotify_init1', 'io_setup', 'io_submit', 'io_uring_enter', 'io_uring_setup',
    'kcmp', 'kexec_load', 'keyctl', 'listmount', 'lookup_dcookie', 'memfd_secret', 'mlock', 'mount', 'move_mount',
    'mq_open', 'msgget', 'name_to_handle_at', 'open_by_handle_at', 'open_tree', 'perf_event_open', 'personality',
    'pidfd_getfd', 'pidfd_open', 'pivot_root', 'process_vm_readv', 'ptrace', 'quotactl', 'quotactl_fd', 'reboot',
    'request_key', 'seccomp', 'semget', 'sethostname', 'setns', 'setpgid', 'setsid', 'setuid', 'shmget', 'socket',
    'splice', 'statmount', 'swapon', 'sync', 'syslog', 'umount2', 'unshare', 'userfaultfd', 'utimensat', 'vmsplice',
)  # fmt: skip


@pytest.fixture(params=list(confinement.MACHINES))
def machine(request):
    return request.param


def number_calls(machine):
    column = list(confinement.MACHINES).index(machine)
    return {name: numbers[column] for name, numbers in ALLOWED.items() if numbers[column] is not None}


def run_filter(machine, number, *arguments, architecture=None):
    """What the kernel does with the instructions for a system call."""
    words = {0: number, 4: confinement.MACHINES[machine] if architecture is None else architecture}
    words |= {16 + 8 * i: argument for i, argument in enumerate([*arguments, 0, 0, 0, 0][:6])}
    instructions, loaded, place = list(confinement.build(machine)), 0, 0
    while True:
        code, yes, no, value = instructions[place]
        place += 1
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = words[value]
        elif code == 0x54:
            loaded &= value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            place += yes if holds else no


def test_the_filter_allows_the_calls_of_the_list_and_no_other(machine):
    calls = number_calls(machine)
    plain = {number for name, number in calls.items() if name not in BY_ARGUMENT}
    for number in set(range(MOST)) - {calls[name] for name in BY_ARGUMENT}:
        assert run_filter(machine, number) == (ALLOW if number in plain else REFUSE), number
    for number in (0x40000000, 0x40000000 + 39, 0x40000000 + 521, 2**32 - 1):  # x32, and what no kernel has
        assert run_filter(machine, number) == REFUSE
    assert run_filter(machine, 0, architecture=0x40000003) == KILL


def test_arguments_decide_where_a_call_has_two_sides(machine):
    calls = number_calls(machine)

    def run(name, *arguments):
        return run_filter(machine, calls[name], *arguments)

    assert run('clone3') == NO_SUCH
    assert run('clone', 17) == run('clone', 0x3D0F00) == ALLOW  # a fork, a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert run('clone', 17 | flag) == REFUSE
    assert run('socketpair', 1, 1) == run('socketpair', 1, 5 | 0o2000000) == ALLOW
    for family, kind in ((1, 2), (1, 3), (1, 0), (2, 1), (30, 1), (30, 5)):
        assert run('socketpair', family, kind) == REFUSE, (family, kind)
    assert (run('prlimit64', 0), run('prlimit64', 1), run('prlimit64', 999)) == (ALLOW, REFUSE, REFUSE)
    assert [run('prctl', option) for option in (15, 16, 0x53564D41)] == [ALLOW] * 3
    assert {run('prctl', option) for option in (1, 4, 22, 23, 35, 36, 38, 47, 53, 59)} == {REFUSE}
    assert [run('fcntl', 3, command) for command in (0, 1, 4, 6, 1030, 1032)] == [ALLOW] * 6
    assert [run('fcntl', 3, command) for command in (1024, 1026, 1031)] == [REFUSE] * 3
    assert (run('memfd_create', 0, 1), run('memfd_create', 0, 5)) == (ALLOW, REFUSE)
    assert (run('mmap', 0, 4096, 3, 0x22), run('mmap', 0, 4096, 3, 0x40022)) == (ALLOW, REFUSE)


def test_the_numbers_are_those_of_the_headers_of_the_system(machine):
    """Renamed for 32 bits: asm-generic says `fstatat` for what every 64-bit machine calls newfstatat."""
    file, pattern = HEADERS[machine]
    if not file.exists():
        pytest.skip(f'there is no {file}')
    found: dict[str, int] = {}
    for name, number in re.findall(pattern, file.read_text()):
        found.setdefault({'fstatat': 'newfstatat'}.get(name, name), int(number))
    assert {name: found.get(name) for name in number_calls(machine)} == number_calls(machine)
    refused = [found[name] for name in NEVER if name in found]
    assert len(refused) > 55
    assert {run_filter(machine, number) for number in refused} == {REFUSE}


def test_no_call_that_harms_the_machine_is_on_the_list():
    assert set(NEVER).isdisjoint(ALLOWED)


def test_the_filter_is_short_and_its_numbers_are_distinct(machine):
    """It is compiled for each process that is confined."""
    calls = number_calls(machine)
    assert len(set(calls.values())) == len(calls) > 130
    assert len(list(confinement.build(machine))) <= 256
