"""Bubblewrap: what a wrapped command keeps and loses, and what a machine that cannot run it is told; the filter of
system calls, run by an interpreter of its instructions."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from areal_jax.workers.sandbox import confinement, sandbox_trial
from areal_jax.workers.sandbox.confinement import (
    ALLOWED,
    BUBBLEWRAP,
    PROGRAM,
    SandboxError,
    find_abi,
    has_own_processes,
    wrap_command,
)
from areal_jax.workers.sandbox.sandbox_trial import describe_sandbox, try_sandbox
from tests.workers.sandbox.run_attempts import ROOT, USER, count_attempts
from tests.workers.sandbox.try_attempts import NOBODY, PASSED, Request, Tries, find_open_interpreter

NO_NAMESPACES = 'bwrap: No permissions to create new namespace, likely because the kernel does not allow it.'
NO_PROC = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
RUN = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'


@pytest.fixture
def stub(monkeypatch):
    """Puts a program of this text in the place of bubblewrap, for every user; '' for none."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def put(text):
            if text:
                file = pathlib.Path(folder, PROGRAM)
                file.write_text(f'#!/bin/sh\n{text}\n')
                file.chmod(0o755)
            monkeypatch.setenv('PATH', folder)

        yield put


@pytest.fixture
def real(monkeypatch):
    """The machine has it, and an interpreter that every user can read."""
    interpreter = find_open_interpreter() if os.getuid() == 0 else sys.executable
    try:
        wrap_command(BUBBLEWRAP, [])
    except SandboxError as error:
        pytest.skip(str(error))
    if not interpreter or find_abi() < 1:
        pytest.skip('no interpreter that every user can read, or no Landlock')
    monkeypatch.setattr(sys, 'executable', interpreter)


def run(*words, writable=(), **options):
    command = wrap_command(BUBBLEWRAP, words, writable=writable)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_without_bubblewrap_a_command_stays_as_it_is():
    assert wrap_command('landlock', ['python', '-m', 'x']) == ['python', '-m', 'x']
    assert wrap_command('none', ('python',)) == ['python']


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        ('', r'bubblewrap is not installed: there is no bwrap on the PATH \(apt-get install bubblewrap\)'),
        (f'echo "{NO_NAMESPACES}" >&2; exit 1', f'bubblewrap does not run here: {NO_NAMESPACES}'),
        (f'echo "{NO_PROC}" >&2; exit 1', f'bubblewrap does not run here: {NO_PROC}'),
        ('exit 3', 'bubblewrap does not run here: it ends with 3'),
        ('exec sleep 100', r'bubblewrap does not run here: it starts nothing within 0\.2 s'),
    ],
)
def test_a_machine_that_cannot_run_it_is_told_why(stub, monkeypatch, text, said):
    monkeypatch.setattr(confinement, 'LONGEST_S', 0.2 if 'sleep' in text else 20.0)
    stub(text.replace('sleep', '/bin/sleep'))
    with pytest.raises(SandboxError, match=f'^{said}$'):
        wrap_command(BUBBLEWRAP, ['true'])


def test_where_proc_cannot_be_mounted_that_of_the_machine_stays_and_so_do_its_pids(stub):
    stub(f'case " $* " in *" --proc "*) echo "{NO_PROC}" >&2; exit 1;; esac; {RUN}')
    command = wrap_command(BUBBLEWRAP, ['true'])
    assert not {'--proc', '--unshare-pid'} & set(command)
    assert '--bind /proc /proc' in ' '.join(command)  # writable: a process makes itself the first to be killed
    assert '--unshare-net' in command
    assert not has_own_processes(command)
    record = {**sandbox_trial.describe_unconfined(), 'level': BUBBLEWRAP, 'landlock_abi': 7, 'user': 1}
    assert '(Landlock ABI 7, uid 1, /proc of the machine)' in describe_sandbox(record)


def test_one_that_isolates_nothing_is_found_out(stub):
    stub(RUN)
    with pytest.raises(SandboxError) as raised:
        try_sandbox(BUBBLEWRAP)
    said = "task.sandbox='bubblewrap': bubblewrap has made no namespace of its own for mnt, net, ipc, uts; "
    assert str(raised.value).startswith(said)


def test_the_levels_that_work_are_named(stub, monkeypatch):
    stub('')
    interpreter = find_open_interpreter() if os.getuid() == 0 else sys.executable
    if not interpreter or find_abi() < 6:
        pytest.skip('the other level does not work here')
    monkeypatch.setattr(sys, 'executable', interpreter)
    said = r"^task\.sandbox='bubblewrap': bubblewrap is not installed: .*; task\.sandbox='landlock' works here$"
    with pytest.raises(SandboxError, match=said):
        try_sandbox(BUBBLEWRAP)


def test_the_trial_runs_in_namespaces_of_its_own(real):
    record = try_sandbox(BUBBLEWRAP)
    assert (record['level'], record['landlock_abi']) == (BUBBLEWRAP, find_abi())


def test_descriptors_environment_folder_and_exit_code_pass(real, tmp_path, monkeypatch):
    reader, writer = os.pipe()
    monkeypatch.setenv('KEPT', 'yes')
    code = f'import os; os.write({writer}, os.environ["KEPT"].encode()); print(os.getcwd()); os._exit(7)'
    done = run(sys.executable, '-c', code, pass_fds=[writer], cwd=tmp_path)
    os.close(writer)
    with os.fdopen(reader, 'rb') as pipe:
        assert pipe.read() == b'yes'
    assert (done.returncode, done.stdout.strip()) == (7, str(tmp_path))


def test_files_are_read_only_but_for_the_folders_that_are_named(real, tmp_path):
    open_file, folder = tmp_path / 'open', tmp_path / 'folder'
    open_file.write_text('x')
    open_file.chmod(0o666)
    folder.mkdir()
    code = (
        'import os, sys\nfor act in (lambda: os.truncate(sys.argv[1], 0), lambda: open(sys.argv[2] + "/new", "w")):\n'
        '    try: act(); print("done")\n    except OSError as error: print(error.errno)'
    )
    read_only = '30'
    assert run(sys.executable, '-c', code, open_file, folder).stdout.split() == [read_only] * 2
    assert run(sys.executable, '-c', code, open_file, folder, writable=[str(folder)]).stdout.split() == [
        read_only,
        'done',
    ]
    assert open_file.read_text() == 'x'


def test_it_sees_no_process_and_no_network_of_others(real):
    code = (
        'import json, os\nnets = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]\n'
        'print(json.dumps([[name for name in os.listdir("/proc") if name.isdecimal()], nets]))'
    )
    command = wrap_command(BUBBLEWRAP, [sys.executable, '-c', code])
    pids, networks = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert networks == ['lo']
    if has_own_processes(command):
        assert len(pids) <= 2


def test_root_becomes_another_user_in_each_worker(real):
    if os.getuid() != 0:
        pytest.skip('an ordinary user stays')
    code = 'from areal_jax.workers.sandbox.confinement import choose_confinement as c; print(c(0).uid)'
    root = pathlib.Path(__file__).parents[3]
    commands = [wrap_command(BUBBLEWRAP, [sys.executable, '-c', f'{code}; input()']) for _ in range(3)]
    programs = [
        subprocess.Popen(one, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for one in commands
    ]
    users = [program.stdout.readline() for program in programs]
    for program in programs:
        program.communicate('\n')
    assert len(set(users)) == len(users)


@pytest.mark.skipif(os.getuid() != 0, reason='only root can start processes of another user')
def test_processes_of_the_user_outside_do_not_raise_its_bound_where_proc_is_that_of_the_machine(real, stub):
    stub(f'case " $* " in *" --proc "*) echo "{NO_PROC}" >&2; exit 1;; esac; exec {shutil.which(PROGRAM)} "$@"')
    others = [subprocess.Popen(['/bin/sleep', '100'], user=NOBODY, group=NOBODY, extra_groups=[]) for _ in range(60)]
    try:
        tries = Tries(sys.executable, BUBBLEWRAP, NOBODY)
        assert tries.run(Request('fork bomb')) == {'control': PASSED, 'attempt': 'EAGAIN'}
        tries.close()
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
@pytest.mark.parametrize('user', [ROOT, USER])
def test_every_attempt_is_refused_and_every_control_works(user):
    try:
        counts, faults = count_attempts(BUBBLEWRAP, user)
    except SandboxError as error:
        pytest.skip(str(error))
    assert faults == []
    assert (counts['passed'], counts['failed']) == (0, 0)
    assert counts['attempts'] >= 140


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
