"""Becomes a command that the kernel kills once the sweep is gone.

    python -m areal_jax.app.sweep.arm_process PID COMMAND...

PID: the process id of the sweep. This is a separate program because the sweep has threads: no Python should run between
fork and exec of a process with threads. On systems other than Linux an arm outlives a sweep that is killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from areal_jax.errors import ExitCode
from areal_jax.workers.descendants import die_with_parent


def become(parent: int, command: Sequence[str]) -> int:
    """Replaces this process by the command; returns only if the sweep has already ended or the command is missing."""
    die_with_parent()  # kept by exec
    if os.getppid() != parent:
        return ExitCode.STOPPED
    try:
        os.execv(command[0], list(command))
    except OSError as error:
        print(f'error: {command[0]} cannot be started ({error.strerror})', file=sys.stderr, flush=True)
        return ExitCode.USER_ERROR


if __name__ == '__main__':
    sys.exit(become(int(sys.argv[1]), sys.argv[2:]))
