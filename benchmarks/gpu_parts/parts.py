"""Runs parts one after the other as processes, each with a time limit, and all within one limit. Standard library only.

A part writes its numbers as JSON into the file named by its last argument. A part that fails, hangs or writes nothing
has its error in the result; the parts after it run all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
RAN, FAILED, TIMED_OUT, LEFT_OUT = 'ran', 'failed', 'timed out', 'left out'
_ERROR_CHARACTERS = 3000
_GRACE_S = 5.0  # for a process that is asked to end

Result = dict[str, Any]  # status, seconds, numbers; error where it failed


@dataclasses.dataclass(frozen=True)
class Part:
    """A command, and the seconds that it gets."""

    name: str
    command: Sequence[str]  # the path of the file of numbers is added
    limit_s: float  # it is ended after so many
    least_s: float  # it is left out if fewer are left
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: str = ''  # of XLA, that this part is measured with; left out where XLA does not know them


def run_parts(
    parts: Sequence[Part],
    seconds: float,
    note: Callable[[str, Result], None],
    announce: Callable[[str, float], None] = lambda name, limit_s: None,
) -> dict[str, Result]:
    """The result of every part by name; `note` gets each as soon as it is there.

    Args:
      seconds: for all parts together, from now on.
      announce: called before each part that runs, with its time limit.
    """
    deadline = time.monotonic() + seconds
    results: dict[str, Result] = {}
    for part in parts:
        left = deadline - time.monotonic()
        if left < part.least_s:
            reason = f'{max(left, 0):.0f} s were left, it needs {part.least_s:.0f}'
            results[part.name] = {'status': LEFT_OUT, 'reason': reason}
        else:
            limit_s = min(part.limit_s, left)
            announce(part.name, limit_s)
            results[part.name] = run_part(part, limit_s)
        note(part.name, results[part.name])
    return results


def run_part(part: Part, limit_s: float) -> Result:
    """The result of one part, ended after `limit_s` seconds; once more without flags that XLA does not know."""
    began = time.monotonic()
    result = _run_once(part, limit_s)
    if part.flags and 'Unknown flag' in result.get('error', ''):
        unknown = {'flags_left_out': part.flags}
        result = _run_once(dataclasses.replace(part, flags=''), limit_s - (time.monotonic() - began)) | unknown
    return result


def _run_once(part: Part, limit_s: float) -> Result:
    environment = dict(os.environ) | dict(part.environment) | {'AREAL_JAX_GPU_LIMIT_S': f'{limit_s:.0f}'}
    environment['XLA_FLAGS'] = ' '.join(filter(None, (environment.get('XLA_FLAGS', ''), part.flags)))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = pathlib.Path(folder, 'numbers.json'), pathlib.Path(folder, 'log')
        with log.open('wb') as text:
            process = subprocess.Popen(
                [*part.command, str(out)], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=text, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        result: Result = {'seconds': round(time.monotonic() - began, 1), 'xla_flags': environment['XLA_FLAGS']}
        numbers, fault = _read(out)
        if code == 0 and fault is None:
            return {'status': RAN, **result, 'numbers': numbers}
        told = _last(log.read_text(errors='replace'))
        if code is None:
            return {'status': TIMED_OUT, **result, 'error': f'ended after {limit_s:.0f} s; {told}', 'numbers': numbers}
        error = told or fault or ''
        return {'status': FAILED, **result, 'exit_code': code, 'error': error, 'numbers': numbers}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it started: their group is of this part alone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            if number == signal.SIGTERM and not _has_members(process.pid):
                return


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _read(path: pathlib.Path) -> tuple[Any, str | None]:
    """(numbers, None), or (None, the reason)."""
    try:
        return json.loads(path.read_text()), None
    except (OSError, ValueError) as error:
        return None, f'no numbers: {error}'


def _last(text: str) -> str:
    return text.strip()[-_ERROR_CHARACTERS:]
