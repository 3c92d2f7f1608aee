"""Runs one program that a model wrote, in a confined child of a server: what it printed, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
from collections.abc import Mapping
from typing import Any

from areal_jax.tasks.code.answer_program import Failure
from areal_jax.tasks.code.pair_protocol import FrameError, read_reason
from areal_jax.tasks.code.program_run import CheckTime, ProgramTime
from areal_jax.workers.sandbox.confined_children import (
    Child,
    ConfinedChildren,
    Ended,
    hand_text,
)
from areal_jax.workers.sandbox.control_group import Meter
from areal_jax.workers.worker_process import name_signal

PROGRAM = 'areal_jax.tasks.code.answer_program'  # the module of the child

# what programs import most: a fork has them already
PRELOADED = (
    'bisect', 'collections', 'copy', 'dataclasses', 'datetime', 'functools', 'hashlib', 'heapq', 'itertools', 'math',
    'operator', 'random', 're', 'string', 'threading', 'typing',
)  # fmt: skip
LABELS = ('wrong', 'syntax', 'exception', 'memory_limit', 'forbidden')  # that the child may give itself
TOO_MUCH: Failure = ('memory_limit', 'its processes had more memory together than one may have')
_SAID_BYTES = 2**16  # of how a program ended
_SHORTEST_S = 0.002  # between two looks at a clock


@dataclasses.dataclass(frozen=True)
class ProgramLimits:
    """What a program may use.

    Args:
      time_s: of CPU time; one that sleeps is ended at three times that.
      memory_mb: MiB of address space.
      output_bytes: that are read; one that prints more is ended there.
    """

    time_s: float
    memory_mb: int
    output_bytes: int

    def for_child(self) -> dict[str, int]:
        """As fields of confinement.Confinement."""
        # the kernel's limit is whole seconds, and ends what the clock here does not see: processes of the program
        return {'memory_bytes': int(self.memory_mb * 2**20), 'cpu_s': math.ceil(self.time_s) + 1}


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """What came of a program.

    Args:
      output: what it printed; longer than the limit where that ended it, and 'ok' is the label then.
      label: 'ok', or why it failed (labels.CODE).
      cpu_s: of its process.
    """

    output: bytes
    label: str
    reason: str
    cpu_s: float


def run_program(
    children: ConfinedChildren, code: str, given: bytes, limits: ProgramLimits, whole: CheckTime | None = None
) -> ProgramEnd:
    """Runs the program with `given` as its standard input.

    Args:
      children: a server that has imported PROGRAM, with no child at work.
      whole: the time of the check that the program is a part of; None = it is all of it.

    Raises ServerLostError, which says nothing about the program.
    """
    with contextlib.ExitStack() as opened:
        program = hand_json(opened, {'code': code})
        stdin = hand_text(given)
        opened.callback(os.close, stdin)
        (output, printed), (told, tells) = os.pipe(), os.pipe()
        for descriptor in (output, told):
            opened.callback(os.close, descriptor)
        try:
            children.start([
                Child(f'{PROGRAM}:run_answer', (program, tells, stdin, printed), limits.for_child(), True, 2, 3)
            ])  # fmt: skip
        finally:
            for descriptor in (printed, tells):
                os.close(descriptor)
        text, late = read_until_end(output, children.meter, limits.time_s, limits.output_bytes, whole or CheckTime())
        (ended,) = children.end()
        said = os.read(told, _SAID_BYTES)
    label, reason = _find_end(len(text) > limits.output_bytes, said, late, ended, limits.time_s)
    return ProgramEnd(text, label, reason, ended.cpu_s)


def hand_json(opened: contextlib.ExitStack, given: Mapping[str, Any]) -> int:
    """A descriptor from which a child reads this; `opened` closes it."""
    descriptor = hand_text(json.dumps(given).encode())
    opened.callback(os.close, descriptor)
    return descriptor


def read_until_end(reader: int, meter: Meter, limit_s: float, most_bytes: int, whole: CheckTime) -> tuple[bytes, str]:
    """What is written until all writers have closed the pipe, and why the time was over before; '' = it was not.

    It is over where a child, or the answer with all its processes, has used `limit_s` of CPU time, or WALL times that
    of its own, and where the check has none left. Reading ends too where the meter finds too much memory.
    Raises ServerLostError where the machine did not let it run.
    """
    parts: list[bytes] = []
    size, late = 0, ''
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    program = ProgramTime(whole, meter, limit_s)
    while size <= most_bytes and not meter.is_over:
        used_s = meter.read_cpu_s()
        if late := program.find_late(used_s):
            break
        if not poll.poll(max(program.find_wait_s(used_s), _SHORTEST_S) * 1000):
            continue
        part = os.read(reader, 2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    program.end()
    return b''.join(parts), late


def describe_gone(program: Ended, time_s: float) -> Failure:
    """Why the process of a program was gone before it had said how it ended."""
    if program.is_over:
        return TOO_MUCH
    if program.cpu_s >= time_s:
        return 'time_limit', f'{program.cpu_s:.1f} s of a processor'
    if not os.WIFSIGNALED(program.status):
        return 'exception', f'its process ended with exit code {os.waitstatus_to_exitcode(program.status)}'
    number = os.WTERMSIG(program.status)
    if number == signal.SIGSYS:
        return 'forbidden', 'a system call of another architecture'
    return 'killed', f'by {name_signal(number)}'


def _find_end(is_long: bool, said: bytes, late: str, ended: Ended, time_s: float) -> Failure:
    if ended.is_over:
        return TOO_MUCH
    if late:
        return 'time_limit', late
    if is_long:
        return 'ok', ''
    try:
        label, reason = json.loads(said)
        reason = read_reason(reason)
    except (ValueError, TypeError, RecursionError, FrameError):
        return describe_gone(ended, time_s)
    if label == 'ok':
        return 'ok', ''
    return (label if label in LABELS else 'exception'), reason
