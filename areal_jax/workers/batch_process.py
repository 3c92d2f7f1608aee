"""Runs a module of this package in processes of its own over lines of input, for work before a run begins.

Used where the work may compute without end (answers/golds.py), or must not depend on this process (gym_items.py).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple

from areal_jax.workers.worker_process import worker_environment

_MOST_PROCESSES = 8


class Finished(NamedTuple):
    """What one process left."""

    exit_code: int  # negative: the signal that ended it
    lines: list[str]  # of its output


def count_processes(items: int, per_process: int) -> int:
    """As many as there are cores, but none that would get fewer than `per_process` items; 0 for no items."""
    return min(os.cpu_count() or 1, _MOST_PROCESSES, -(-items // per_process))


def run_processes(module: str, inputs: Sequence[Sequence[str]]) -> list[Finished]:
    """Run `python -m module` once for each list of lines, all at the same time, and wait for them.

    Strings are hashed as in every other such process (PYTHONHASHSEED=0), so that orders of sets repeat.
    """
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile('w+')) for _ in inputs]
        processes = []
        for lines, output in zip(inputs, outputs, strict=True):
            process = _start(module, lines, output)
            stack.callback(process.wait)
            stack.callback(process.kill)  # does nothing to a process that has ended
            processes.append(process)
        exit_codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
        return [Finished(code, output.read().splitlines()) for code, output in zip(exit_codes, outputs, strict=True)]


def _start(module: str, lines: Sequence[str], output: IO[str]) -> subprocess.Popen[bytes]:
    with tempfile.TemporaryFile('w+') as stdin:
        stdin.writelines(f'{line}\n' for line in lines)
        stdin.seek(0)
        environment = worker_environment() | {'PYTHONHASHSEED': '0'}
        return subprocess.Popen([sys.executable, '-m', module], stdin=stdin, stdout=output, env=environment)
