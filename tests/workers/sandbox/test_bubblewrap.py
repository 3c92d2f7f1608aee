"""Bubblewrap: what a wrapped command keeps and loses, and what a machine that cannot run it is told."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from areal_jax.workers.sandbox import confinement, sandbox_trial
from areal_jax.workers.sandbox.confinement import (
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
