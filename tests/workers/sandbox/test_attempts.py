"""Attempts to leave the sandbox: each is refused, and its allowed twin is not; as root, and as an ordinary user."""

from __future__ import annotations

import os
import platform
import sys

import pytest

from areal_jax.workers.sandbox.confinement import BUBBLEWRAP, find_abi
from tests.workers.sandbox.attempts import ATTEMPTS, CONTROLS, LEFT_OPEN
from tests.workers.sandbox.try_attempts import PASSED, Request, Tries, find_open_interpreter

_ABI = find_abi() if sys.platform == 'linux' and platform.machine() == 'x86_64' else 0
pytestmark = pytest.mark.skipif(_ABI < 1, reason='it confines on Linux on x86-64 with Landlock, which is not here')
_WAYS = (['root'] if hasattr(os, 'getuid') and os.getuid() == 0 else []) + ['user']
_LEAST = 80  # of the attempts get through without a sandbox, also where a container refuses some
_ALWAYS = {
    'read /etc/passwd', "read the parent's environ", 'write in /tmp', 'write through a symlink', 'chmod', 'setxattr',
    'TCP connect', 'UDP', 'unix connect', 'abstract unix bind', 'datagram from a socketpair', 'signal 0 to the parent',
    'SIGTERM to the parent', 'setsid', 'setpgid', 'fork bomb', '3 GB of memory', 'a file of 2 MB', '200 open files',
}  # fmt: skip


@pytest.fixture(scope='module')
def tries():
    tries = Tries()
    yield tries
    tries.close()


@pytest.fixture(scope='module')
def readable_tries():
    """With an interpreter that every user can read: this one, or that of the system."""
    interpreter = find_open_interpreter()
    if not interpreter:
        pytest.skip('no interpreter that every user can read')
    tries = Tries(interpreter)
    yield tries
    tries.close()


@pytest.fixture(params=_WAYS)
def is_user(request):
    if request.param == 'user' and _ABI < 6:
        pytest.skip('signals to processes of the same user are refused from ABI 6 of Landlock')
    return request.param == 'user'


def test_the_table_is_long():
    assert len(ATTEMPTS) >= 140


@pytest.mark.parametrize('name', ATTEMPTS)
def test_an_attempt_is_refused_and_its_twin_is_not(tries, is_user, name):
    outcomes = tries.run(Request(name, is_user))
    assert outcomes.get('control') == PASSED, outcomes
    assert outcomes['attempt'] in ATTEMPTS[name].refused


@pytest.mark.parametrize('name', LEFT_OPEN)
def test_what_is_left_open_is_open(tries, is_user, name):
    assert tries.run(Request(name, is_user)) == {'attempt': PASSED}


@pytest.mark.parametrize('name', [name for name in CONTROLS if not name.startswith('import')])
def test_what_programs_need_works(tries, is_user, name):
    assert tries.run(Request(name, is_user)) == {'attempt': PASSED}


@pytest.mark.parametrize('name', [name for name in CONTROLS if name.startswith('import')])
def test_modules_of_a_readable_interpreter_can_be_imported(readable_tries, is_user, name):
    if readable_tries.run(Request(name, is_user, is_confined=False))['attempt'] != PASSED:
        pytest.skip('the interpreter that every user can read has no such module')
    assert readable_tries.run(Request(name, is_user)) == {'attempt': PASSED}


def test_attempts_get_through_without_a_sandbox(tries):
    outcomes = {name: tries.run(Request(name, is_confined=False)) for name in ATTEMPTS}
    assert {name for name, outcome in outcomes.items() if outcome.get('control') != PASSED} == set()
    through = {name for name, outcome in outcomes.items() if outcome['attempt'] == PASSED}
    assert set() == _ALWAYS - through
    assert len(through) >= _LEAST


def test_without_a_work_folder_nothing_is_written(tries, is_user):
    for name in ('write and read in work', 'folders in work', 'a temporary file in work'):
        assert tries.run(Request(name, is_user, limits={'work': ''})) == {'attempt': 'EACCES'}


def test_a_readable_folder_is_read_alone(tries, is_user):
    def run(name):
        return tries.run(Request(name, is_user, limits={'readable': 'outside'}))['attempt']

    assert run('read an outside file') == PASSED
    assert {run(name) for name in ('write an outside file', 'unlink an outside file', 'read a secret')} == {'EACCES'}


@pytest.mark.parametrize(
    ('name', 'limits'),
    [
        ('3 GB of memory', {'memory_bytes': 0}),
        ('a file of 2 MB', {'file_bytes': 4 << 20}),
        ('200 open files', {'open_files': 300}),
        ('fork bomb', {'processes': 100}),
        ('thread bomb', {'processes': 100}),
    ],
)
def test_what_a_bound_allows_passes(tries, is_user, name, limits):
    assert tries.run(Request(name, is_user, limits=limits)) == {'control': PASSED, 'attempt': PASSED}


@pytest.mark.slow
@pytest.mark.skipif(_WAYS[0] != 'root', reason='only root is confined with an early Landlock')
def test_an_early_landlock_lets_files_be_emptied_and_nothing_else(tries):
    """What the levels require of it: confinement.require_support."""

    def run(abi, **limits):
        outcomes = {name: tries.run(Request(name, is_user=False, abi=abi, limits=limits)) for name in ATTEMPTS}
        return {name for name, of in outcomes.items() if of['attempt'] not in ATTEMPTS[name].refused}

    assert run(3) == set()
    assert run(1, level=BUBBLEWRAP) == {
        'truncate an outside file'
    }  # bubblewrap itself is not there: nothing is read-only


def test_processor_time_has_a_bound(tries, is_user):
    outcomes = tries.run(Request('seconds of a processor', is_user, limits={'cpu_s': 1}))
    assert outcomes['attempt'] in ('SIGXCPU', 'SIGKILL')
