"""The self-test of a sandbox at the start of a run: an attempt that succeeds now would also succeed later.

`try_sandbox` runs it in a separate process, since it forks: python -m areal_jax.workers.sandbox.sandbox_trial GIVEN.
GIVEN is JSON: {level, namespaces, packages}; `namespaces` are the caller's, which bubblewrap must have left.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict

from areal_jax.installation import FOLDER
from areal_jax.workers.sandbox.confinement import (
    CONFINING,
    LEVELS,
    NAMESPACES,
    Confinement,
    SandboxError,
    choose_confinement,
    confine,
    has_own_processes,
    require_support,
    wrap_command,
)
from areal_jax.workers.sandbox.control_group import LOOK_S, ControlGroup, make_group
from areal_jax.workers.sandbox.packages import find_packages, name_module
from areal_jax.workers.worker_process import worker_environment

_LONGEST_S = 60.0
_GROUP_BYTES, _FILLED_S = 32 * 2**20, 10
_MANY = 64  # processes, more than a confined one can have
_NOT_PRELOADED = ('colorsys', '_zoneinfo')  # of the standard library: a file of Python, and one that is compiled


class SandboxRecord(TypedDict):
    """The findings of a sandbox's self-test, for the report of a run."""

    level: str  # of confinement.CONFINING, or 'none': nothing confines
    landlock_abi: int | None  # None at the level 'none', like `user`
    user: int | None  # uid of confined code; under root, each process has another one
    own_processes: bool  # it sees no process of others: bubblewrap, if /proc can be mounted
    refused: list[str]  # attempts that failed, as they must
    allowed: list[str]  # attempts that must work, and did
    runners: NotRequired[list[str]]  # the parts that run confined code; absent = the scorer alone
    # what counts memory and CPU time of an answer over its processes: the kind of its control group, or '' = their sum
    group: NotRequired[str]


def try_sandbox(level: str, packages: tuple[str, ...] = ()) -> SandboxRecord:
    """Confines a process like a scorer; the process tries to get out, and to import these packages.

    Raises UserError for a package that is not installed, and a SandboxError that says what fails and which levels work
    on this machine.
    """
    find_packages(packages)
    try:
        return _try_level(level, packages)
    except SandboxError as error:
        works = [other for other in CONFINING if other != level and _works(other, packages)]
        instead = f'task.sandbox={works[0]!r} works here' if works else 'no other level works here either'
        raise SandboxError(f'task.sandbox={level!r}: {error}; {instead}') from error


def describe_sandbox(record: SandboxRecord) -> str:
    """Says in a sentence or two what confines the code that a scorer or a tool runs, and what the self-test tried."""
    if record['level'] not in CONFINING:
        return 'Nothing confines the code that the scorer runs.'
    runners = record.get('runners', ['the scorer'])
    run = f'{" and ".join(runners)} {"runs" if len(runners) == 1 else "run"}'
    shared = LEVELS[record['level']].has_namespaces and not record['own_processes']
    return (
        f'The sandbox {record["level"]!r} confines the code that {run} (Landlock ABI '
        f'{record["landlock_abi"]}, uid {record["user"]}{", /proc of the machine" if shared else ""}). At the start it '
        f'could not {", ".join(record["refused"])}; it could {", ".join(record["allowed"])}.{_describe_count(record)}'
    )


def _describe_count(record: SandboxRecord) -> str:
    if 'group' not in record:
        return ''
    by = f'a control group ({record["group"]})' if record['group'] else f'their sum, taken every {LOOK_S:g} s'
    return f' Memory and processor time of an answer count over all its processes, by {by}.'


def describe_unconfined() -> SandboxRecord:
    """The record for code of a model that runs at the level 'none'."""
    return {'level': 'none', 'landlock_abi': None, 'user': None, 'own_processes': False, 'refused': [], 'allowed': []}


def _works(level: str, packages: tuple[str, ...]) -> bool:
    try:
        _try_level(level, packages)
    except SandboxError:
        return False
    return True


def _try_level(level: str, packages: tuple[str, ...]) -> SandboxRecord:
    given = {'level': level, 'namespaces': _find_namespaces(), 'packages': packages}
    words = [sys.executable, '-m', 'areal_jax.workers.sandbox.sandbox_trial', json.dumps(given)]
    command = wrap_command(level, words)
    try:
        done = subprocess.run(
            command, env=worker_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_LONGEST_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f'the self-test has not ended within {_LONGEST_S:g} s') from error
    if done.returncode:
        raise SandboxError((done.stderr.strip().splitlines() or [f'the self-test ended with {done.returncode}'])[-1])
    record: SandboxRecord = json.loads(done.stdout)
    return {**record, 'own_processes': has_own_processes(command)}


def try_confinement(confinement: Confinement, packages: Sequence[str] = ()) -> SandboxRecord:
    """Runs the attempts and imports in a confined child. Raises a SandboxError that names what passed, or failed."""
    abi = require_support(confinement)
    imports = {f'import {name}': functools.partial(_import_package, name) for name in packages}
    controls: dict[str, Callable[[], object]] = {**_CONTROLS, **imports}
    outcomes = _run_confined(confinement, controls)
    if 'fault' in outcomes:
        raise SandboxError(outcomes['fault'])
    passed = [name for name in _ATTEMPTS if not outcomes[name]]
    failed = [f'{name} ({outcomes[name]})' for name in controls if outcomes[name]]
    if passed:
        raise SandboxError(f'confined code could {", ".join(passed)} (Landlock ABI {abi}): nothing is confined here')
    if failed:
        raise SandboxError(f'confined code could not {", ".join(failed)} (Landlock ABI {abi})')
    return {
        'level': confinement.level,
        'landlock_abi': abi,
        'user': os.getuid() if confinement.uid is None else confinement.uid,
        'own_processes': False,
        'refused': list(_ATTEMPTS),
        'allowed': list(controls),
        'group': try_group(),
    }


def try_group() -> str:
    """The kind of control group that an answer gets here; '' = no group can be made.

    Raises SandboxError if the processes of a group can have more memory together than its bound.
    """
    group = make_group()
    if group is None:
        return ''
    try:
        group.bound(_GROUP_BYTES, _MANY)
        before = group.read_used().kills
        with contextlib.suppress(OSError):  # the kernel may kill the process that waits
            _fork(functools.partial(_fill_memory, group))
        if group.read_used().kills == before:
            raise SandboxError('a control group was made, and its processes had more memory together than its bound')
    finally:
        group.close()
    return group.title


def _fill_memory(group: ControlGroup) -> None:
    """Fills memory in two processes of the group, each of which stays below the bound."""
    group.enter()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            memory = b'x' * (_GROUP_BYTES * 3 // 4)
            signal.alarm(_FILLED_S)  # the other one has its memory by then
            signal.pause()
            os._exit(len(memory))
        children.append(child)
    ended, _ = os.wait()
    for child in children:
        if child != ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def require_namespaces(outside: Mapping[str, int]) -> None:
    """Raises SandboxError if bubblewrap has not separated a namespace, or has not made files outside read-only."""
    inside = _find_namespaces()
    if shared := [name for name, number in outside.items() if inside[name] == number]:
        raise SandboxError(f'bubblewrap has made no namespace of its own for {", ".join(shared)}')
    if not os.statvfs('/').f_flag & os.ST_RDONLY:
        raise SandboxError('bubblewrap has left files outside as they are, and not read-only')


def find_unreadable(paths: Sequence[str]) -> str:
    """The first file or folder on the way to one of `paths` that this process cannot read, or search; '' = none.

    The kernel checks the permissions alone, whatever Landlock allows.
    """
    for path in paths:
        parts = [path]
        while parts[-1] != os.path.dirname(parts[-1]):
            parts.append(os.path.dirname(parts[-1]))
        for part in reversed(parts):
            if not os.access(part, os.X_OK | (os.R_OK if part == path else 0)):
                return part
    return ''


def _find_namespaces() -> dict[str, int]:
    folder = '/proc/self/ns'
    return {name: os.stat(f'{folder}/{name}').st_ino for name in NAMESPACES} if os.path.isdir(folder) else {}


def _read_byte(path: str | os.PathLike[str]) -> None:
    with open(path, 'rb') as file:
        file.read(1)


def _write_temporary_file() -> None:
    path = f'/tmp/areal-sandbox-{os.getpid()}'
    with open(path, 'wb') as file:
        file.write(b'x')
    os.remove(path)


def _fork_many() -> None:
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


def _import_more() -> None:
    try:
        for name in _NOT_PRELOADED:
            sys.modules.pop(name, None)
            importlib.import_module(name)
    except Exception as error:
        folders = [os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath(sys.prefix)]
        if not (unreadable := find_unreadable(folders)):
            raise OSError(f'{type(error).__name__}: {error}') from error
        mode = stat.S_IMODE(os.stat(unreadable).st_mode)
        raise OSError(
            f'uid {os.getuid()} cannot read {unreadable}, whose mode is {mode:04o}: `chmod o+rx {unreadable}`, use an '
            'interpreter that every user can read, or start the run as an ordinary user'
        ) from error


def _import_package(name: str) -> None:
    try:
        importlib.import_module(name_module(name))
    except Exception as error:
        raise OSError(f'{type(error).__name__}: {error}') from error


def _fork(in_child: Callable[[], object] = lambda: None) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            in_child()
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


_ATTEMPTS: Mapping[str, Callable[[], object]] = {
    'read a file of the system': lambda: _read_byte('/etc/passwd'),
    'list the root folder': lambda: os.listdir('/'),
    'read a solution of generated problems': lambda: _read_byte(FOLDER / 'tasks' / 'code' / 'function_families.py'),
    'read the environment of its parent': lambda: _read_byte(f'/proc/{os.getppid()}/environ'),
    'write a temporary file': _write_temporary_file,
    'open a socket': lambda: socket.socket().close(),
    'signal its parent': lambda: os.kill(os.getppid(), 0),
    'leave its session': lambda: _fork(os.setsid),
    'start many processes': _fork_many,
}
_CONTROLS: Mapping[str, Callable[[], object]] = {
    'list /usr/lib': lambda: os.listdir('/usr/lib'),
    'fork': _fork,
    'make a pair of sockets': socket.socketpair,
    'import a module': _import_more,
}


def _run_confined(confinement: Confinement, controls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setsid()
            _report(confinement, controls, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, 'rb') as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    found: dict[str, str] = json.loads(told or b'{"fault": "the process that tried the sandbox ended at once"}')
    return found


def _report(confinement: Confinement, controls: Mapping[str, Callable[[], object]], writer: int) -> None:
    try:
        confine(confinement)
        outcomes = {name: _try(attempt) for name, attempt in {**_ATTEMPTS, **controls}.items()}
    except SandboxError as error:
        outcomes = {'fault': str(error)}
    os.write(writer, json.dumps(outcomes).encode())


def _try(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return error.strerror or str(error)
    return ''


def main(given: str) -> int:
    """Prints the record of the level, or the reason why nothing is confined; returns the exit code."""
    asked = json.loads(given)
    level = asked['level']
    try:
        if level in LEVELS and LEVELS[level].has_namespaces:
            require_namespaces(asked['namespaces'])
        confinement = choose_confinement(0, level, find_packages(asked['packages']))
        print(json.dumps(try_confinement(confinement, asked['packages'])))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
