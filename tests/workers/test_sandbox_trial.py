"""Whether this machine confines code, said before a run begins: what it lacks by name, and what passes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from areal_jax.workers.sandbox import confinement, seccomp
from areal_jax.workers.sandbox.confinement import (
    Confinement,
    SandboxError,
    choose_confinement,
    find_abi,
    require_support,
)
from areal_jax.workers.sandbox.sandbox_trial import try_sandbox
from areal_jax.workers.worker_process import worker_environment

needs_landlock = pytest.mark.skipif(find_abi() < 1, reason='this kernel has no Landlock')


@needs_landlock
def test_the_trial_gives_the_abi_and_leaves_this_process_as_it_was():
    assert try_sandbox() == find_abi()
    assert os.listdir('/')


def test_what_a_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr(confinement, 'find_abi', lambda: 0)
    with pytest.raises(SandboxError, match='Landlock, which this kernel has not got'):
        require_support(choose_confinement(0))
    monkeypatch.setattr(confinement, 'find_abi', lambda: 5)
    monkeypatch.setattr(os, 'getuid', lambda: 1000)
    with pytest.raises(SandboxError, match=r'ABI 6 .* this kernel has ABI 5: start the run as root'):
        require_support(Confinement())
    with pytest.raises(SandboxError, match='uid 60001 is for root, and this is uid 1000'):
        require_support(Confinement(uid=60001))
    monkeypatch.setattr(os, 'getuid', lambda: 0)
    assert require_support(Confinement(uid=60001)) == 5
    with pytest.raises(SandboxError, match='root is confined as another user'):
        require_support(Confinement())
    monkeypatch.setattr(platform, 'machine', lambda: 'aarch64')
    with pytest.raises(SandboxError, match='Linux on x86-64, and this is linux on aarch64'):
        require_support(Confinement(uid=60001))


@needs_landlock
@pytest.mark.parametrize(
    ('protection', 'passed'),
    [
        ('landlock.restrict = lambda rules, abi: None', 'list the root folder'),
        ('seccomp.install = lambda: None', 'open a socket, leave its session'),
    ],
)
def test_a_protection_that_is_taken_out_is_missed(protection, passed):
    code = (
        f'import sys; from areal_jax.workers.sandbox import landlock, seccomp; {protection}\n'
        'from areal_jax.workers.sandbox.sandbox_trial import main; sys.exit(main())'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], env=worker_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith('confined code could ')
    assert passed in done.stderr


def test_each_call_that_is_refused_is_in_the_filter_once():
    numbers = [number for numbers in seccomp.REFUSED.values() for number in numbers]
    assert len(numbers) == len(set(numbers))
    compared = [value for code, _, _, value in seccomp.build() if code == 0x15]
    assert compared == [0xC000003E, 435, 56, 53, 1, 5, 302, 0, *numbers]
