"""A short list of attempts that a confined process makes at the start of a run: what passes would pass later.

`try_sandbox` runs it in a process of its own, `python -m areal_jax.workers.sandbox.sandbox_trial`, since it forks.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

from areal_jax.workers.sandbox.confinement import (
    Confinement,
    SandboxError,
    choose_confinement,
    confine,
    require_support,
)
from areal_jax.workers.worker_process import worker_environment

_LONGEST_S = 60.0


def try_sandbox() -> int:
    """Confines a process as scorers are; returns the ABI of Landlock. Raises SandboxError that says what fails."""
    done = subprocess.run(
        [sys.executable, '-m', 'areal_jax.workers.sandbox.sandbox_trial'], env=worker_environment(),
        capture_output=True, text=True, timeout=_LONGEST_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SandboxError((done.stderr.strip().splitlines() or [f'the self-test ended with {done.returncode}'])[-1])
    return int(done.stdout)


def try_confinement(confinement: Confinement) -> int:
    """Tries it out in a child; returns the ABI of Landlock. Raises SandboxError that names what passed, or failed."""
    abi = require_support(confinement)
    outcomes = _run_confined(confinement)
    if 'fault' in outcomes:
        raise SandboxError(outcomes['fault'])
    passed = [name for name in _ATTEMPTS if not outcomes[name]]
    failed = [f'{name} ({outcomes[name]})' for name in _CONTROLS if outcomes[name]]
    if passed:
        raise SandboxError(f'confined code could {", ".join(passed)} (Landlock ABI {abi}): nothing is confined here')
    if failed:
        raise SandboxError(f'confined code could not {", ".join(failed)} (Landlock ABI {abi})')
    return abi


def _read_password_file() -> None:
    with open('/etc/passwd', 'rb') as file:
        file.read(1)


def _write_temporary_file() -> None:
    with open(f'/tmp/areal-sandbox-{os.getpid()}', 'wb') as file:
        file.write(b'x')


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
    'read a file of the system': _read_password_file,
    'list the root folder': lambda: os.listdir('/'),
    'write a temporary file': _write_temporary_file,
    'open a socket': lambda: socket.socket().close(),
    'signal its parent': lambda: os.kill(os.getppid(), 0),
    'leave its session': lambda: _fork(os.setsid),
}
_CONTROLS: Mapping[str, Callable[[], object]] = {
    'list /usr': lambda: os.listdir('/usr'),
    'fork': _fork,
    'make a pair of sockets': socket.socketpair,
}


def _run_confined(confinement: Confinement) -> dict[str, str]:
    """By attempt, the error that it got; '' = it passed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setsid()
            _report(confinement, writer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, 'rb') as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    found: dict[str, str] = json.loads(told or b'{"fault": "the process that tried the sandbox ended at once"}')
    return found


def _report(confinement: Confinement, writer: int) -> None:
    try:
        confine(confinement)
        outcomes = {name: _try(attempt) for name, attempt in {**_ATTEMPTS, **_CONTROLS}.items()}
    except SandboxError as error:
        outcomes = {'fault': str(error)}
    os.write(writer, json.dumps(outcomes).encode())


def _try(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return str(error.strerror)
    return ''


def main() -> int:
    """Prints the ABI, or why nothing is confined, and returns the exit code."""
    try:
        print(try_confinement(choose_confinement(memory_bytes=0)))
    except SandboxError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
