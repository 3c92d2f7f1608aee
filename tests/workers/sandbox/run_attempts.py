"""Runs every attempt to leave the sandbox, as root and as an ordinary user, at both levels, and prints what it covered.

`python -m tests.workers.sandbox.run_attempts [--json FILE]`. Exit code 0: each kind ran, every attempt was refused and
what must work did; 1: something got through, or was refused that must work; 2: a kind cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterator
from typing import TypedDict

from areal_jax.workers.sandbox.confinement import (
    BUBBLEWRAP,
    CONFINING,
    Confinement,
    SandboxError,
    find_abi,
    require_support,
    wrap_command,
)
from tests.workers.sandbox.attempts import ATTEMPTS, CONTROLS, LEFT_OPEN
from tests.workers.sandbox.try_attempts import NOBODY, PASSED, Request, Tries, find_open_interpreter

ROOT, USER = USERS = 'root', 'user'


class Counts(TypedDict):
    """What one kind of run came to."""

    level: str  # of confinement.CONFINING
    user: str  # 'root', which becomes another user, or 'user'
    landlock_abi: int
    attempts: int  # that were made
    passed: int  # of them got through: 0 where the sandbox holds
    controls: int  # allowed twins, and what programs need
    failed: int  # of them: 0 where the sandbox refuses no more than it must


def count_attempts(level: str, user: str) -> tuple[Counts, list[str]]:
    """Every attempt with its twin, and every control, with a line for each that is not as it must be.

    Raises SandboxError where this kind cannot run here.
    """
    found, faults = Counts(level=level, user=user, landlock_abi=0, attempts=0, passed=0, controls=0, failed=0), []
    interpreter = _require(level, user)
    found['landlock_abi'] = find_abi()
    tries = Tries(interpreter, level, NOBODY if user == USER and os.getuid() == 0 else None)
    refused = ('EROFS',) if level == BUBBLEWRAP else ()  # files outside are read-only
    try:
        for name, attempt in ATTEMPTS.items():
            outcomes = tries.run(Request(name, user == USER))
            is_refused = outcomes['attempt'] in (*attempt.refused, *refused)
            works = outcomes.get('control') == PASSED
            faults += [] if is_refused and works else [f'{name}: {outcomes}']
            found['attempts'], found['passed'] = found['attempts'] + 1, found['passed'] + (not is_refused)
            found['controls'], found['failed'] = found['controls'] + 1, found['failed'] + (not works)
        for name in _list_controls(tries, user):
            outcomes = tries.run(Request(name, user == USER))
            works = outcomes == {'attempt': PASSED}
            faults += [] if works else [f'{name}: {outcomes}']
            found['controls'], found['failed'] = found['controls'] + 1, found['failed'] + (not works)
    finally:
        tries.close()
    return found, faults


def _list_controls(tries: Tries, user: str) -> Iterator[str]:
    """Those that work without a sandbox: the interpreter may lack a module."""
    for name in (*CONTROLS, *LEFT_OPEN):
        if tries.run(Request(name, user == USER, is_confined=False))['attempt'] == PASSED:
            yield name


def _require(level: str, user: str) -> str:
    """The interpreter to run; raises SandboxError."""
    if sys.platform != 'linux' or platform.machine() != 'x86_64':
        raise SandboxError(f'code is confined on Linux on x86-64, and this is {sys.platform} on {platform.machine()}')
    if user == ROOT and os.getuid() != 0:
        raise SandboxError('start it as root')
    interpreter = find_open_interpreter() if os.getuid() == 0 else sys.executable
    if not interpreter:
        raise SandboxError(
            'there is no interpreter that every user can read: install python3.11 or python3.12 of the system'
        )
    wrap_command(level, [])
    if os.getuid() == 0:
        require_support(Confinement(uid=NOBODY, level=level))
    else:
        require_support(Confinement(level=level))
    return interpreter


def main() -> int:
    """Prints a line for each kind, and writes the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--json', help='Write the counts there too.')
    options = parser.parse_args()
    rows, wrong, missing = [], 0, []
    for level in CONFINING:
        for user in USERS:
            try:
                counts, faults = count_attempts(level, user)
            except SandboxError as error:
                missing.append(f'{level} as {user}')
                print(f'{level} as {user}: cannot run here: {error}', flush=True)
                continue
            rows.append(counts)
            wrong += len(faults)
            print(
                f'{level} as {user}: {counts["attempts"] - counts["passed"]} of {counts["attempts"]} attempts refused, '
                f'{counts["controls"] - counts["failed"]} of {counts["controls"]} controls worked '
                f'(Landlock ABI {counts["landlock_abi"]})',
                *faults, sep='\n  ', flush=True,
            )  # fmt: skip
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({'runs': rows, 'missing': missing}, indent=1) + '\n')
    print(f'{len(rows)} of {len(CONFINING) * len(USERS)} kinds ran; {wrong} faults')
    return 1 if wrong else 2 if missing else 0


if __name__ == '__main__':
    sys.exit(main())
