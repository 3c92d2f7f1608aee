"""Whether this machine confines code, said before a run begins: what it lacks by name, and what passes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from areal_jax.workers.sandbox import confinement, sandbox_trial
from areal_jax.workers.sandbox.confinement import (
    Confinement,
    SandboxError,
    choose_confinement,
    find_abi,
    require_support,
)
from areal_jax.workers.sandbox.sandbox_trial import describe_sandbox, describe_unconfined, try_sandbox
from areal_jax.workers.worker_process import worker_environment
from tests.workers.sandbox.try_attempts import find_open_interpreter

needs_landlock = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')


@pytest.fixture
def interpreter(monkeypatch):
    """One that every user can read; the self-test starts it in place of this one."""
    found = find_open_interpreter() if os.getuid() == 0 else sys.executable
    if not found:
        pytest.skip('no interpreter that every user can read')
    monkeypatch.setattr(sys, 'executable', found)


@needs_landlock
def test_the_trial_tells_what_it_tried_and_leaves_this_process_as_it_was(interpreter):
    record = try_sandbox('landlock')
    assert (record['level'], record['landlock_abi'], record['own_processes']) == ('landlock', find_abi(), False)
    assert (record['user'] == os.getuid()) == (os.getuid() != 0)
    told = describe_sandbox(record)
    assert told.startswith(
        f"The sandbox 'landlock' confines the code that the scorer runs (Landlock ABI {find_abi()}, "
    )
    assert 'At the start it could not read a file of the system, ' in told
    assert 'start many processes; it could list /usr/lib, fork, make a pair of sockets, import a module.' in told
    assert os.listdir('/')


def test_no_sandbox_is_told_too():
    assert describe_sandbox(describe_unconfined()) == 'Nothing confines the code that the scorer runs.'


def test_what_a_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(confinement, 'find_abi', lambda: 0)
    with pytest.raises(SandboxError, match='Landlock, which this kernel has not got'):
        require_support(choose_confinement(0))
    monkeypatch.setattr(os, 'getuid', lambda: 1000)
    for abi in (1, 2):
        monkeypatch.setattr(confinement, 'find_abi', lambda abi=abi: abi)
        said = rf'Landlock ABI 3 \(Linux 6\.2\), which keeps it from emptying files .* this kernel has ABI {abi}$'
        with pytest.raises(SandboxError, match=said):
            require_support(Confinement())
    for abi in (3, 4, 5):
        monkeypatch.setattr(confinement, 'find_abi', lambda abi=abi: abi)
        with pytest.raises(SandboxError, match=rf'ABI 6 .* this kernel has ABI {abi}: start the run as root'):
            require_support(Confinement())
        with pytest.raises(SandboxError, match=rf'ABI 6 .* this kernel has ABI {abi}: start the run as root'):
            require_support(Confinement(level='bubblewrap'))
    with pytest.raises(SandboxError, match=r'ABI 6 .* this kernel has ABI 5: start the run as root'):
        require_support(Confinement())
    with pytest.raises(SandboxError, match='uid 60001 is for root, and this is uid 1000'):
        require_support(Confinement(uid=60001))
    monkeypatch.setattr(os, 'getuid', lambda: 0)
    assert require_support(Confinement(uid=60001)) == 5
    monkeypatch.setattr(confinement, 'find_abi', lambda: 2)
    with pytest.raises(SandboxError, match=r'ABI 3 .* this kernel has ABI 2$'):
        require_support(Confinement(uid=60001))
    assert require_support(Confinement(uid=60001, level='bubblewrap')) == 2  # what it could empty is read-only there
    monkeypatch.setattr(confinement, 'find_abi', lambda: 5)
    with pytest.raises(SandboxError, match='root is confined as another user'):
        require_support(Confinement())
    monkeypatch.setattr(platform, 'machine', lambda: 'riscv64')
    with pytest.raises(SandboxError, match='Linux on x86_64 and aarch64, and this is linux on riscv64'):
        require_support(Confinement(uid=60001))


@needs_landlock
@pytest.mark.parametrize(
    ('protection', 'passed'),
    [
        ('landlock.enter = lambda ruleset: None', 'list the root folder'),
        ('confinement.install = lambda: None', 'open a socket, leave its session'),
        ('confinement.resource.setrlimit = lambda kind, bounds: None', 'start many processes'),
    ],
)
def test_a_protection_that_is_taken_out_is_missed(protection, passed):
    told = run_changed_trial(protection)
    assert told.startswith('confined code could ')
    assert passed in told


@needs_landlock
def test_a_kernel_without_seccomp_is_named():
    told = run_changed_trial('confinement._SET_SECCOMP = 9999')  # an option of prctl that no kernel has
    assert told == (
        'the process cannot be confined: the kernel refuses a filter of system calls (seccomp): Invalid argument (22)\n'
    )


def test_a_machine_without_landlock_is_told_that_no_level_works(monkeypatch):
    assert run_changed_trial('confinement.find_abi = lambda: 0').startswith(
        'code is confined by Landlock, which this kernel has not got'
    )
    monkeypatch.setattr(sys, 'executable', '/no/such/python')
    monkeypatch.setattr(sandbox_trial, 'wrap_command', refuse_to_wrap)
    with pytest.raises(SandboxError, match=r"^task\.sandbox='landlock': it fails; no other level works here either$"):
        try_sandbox('landlock')


def refuse_to_wrap(level, command):
    raise SandboxError('it fails')


@needs_landlock
@pytest.mark.skipif(os.getuid() != 0, reason='an ordinary user can read its own interpreter')
def test_an_interpreter_that_the_user_of_the_sandbox_cannot_read_is_named_with_the_fix(tmp_path):
    closed = tmp_path / 'closed'
    closed.mkdir(mode=0o700)
    told = run_changed_trial(
        f"sandbox_trial._NOT_PRELOADED = ('not_there',); sandbox_trial.os.__file__ = {str(closed / 'os.py')!r}"
    )
    assert told.startswith('confined code could not import a module (uid 6')
    assert ' cannot read /' in told
    assert ', whose mode is 0700: `chmod o+rx /' in told
    assert 'use an interpreter that every user can read, or start the run as an ordinary user' in told


def run_changed_trial(change):
    """What the self-test says where the program is changed."""
    given = {'level': 'landlock', 'namespaces': {}, 'packages': ()}
    code = (
        'import sys; from areal_jax.workers.sandbox import confinement, landlock, sandbox_trial\n'
        f'{change}\nsys.exit(sandbox_trial.main({json.dumps(given)!r}))'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], env=worker_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done
    return done.stderr
