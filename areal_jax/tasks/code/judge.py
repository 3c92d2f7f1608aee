"""Judges an answer: code and tests in two confined children, or a program for each input; a label, and why.

What the answer does is a verdict. Whatever else goes wrong raises ServerLostError: it says nothing about the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_jax.labels import CODE
from areal_jax.tasks.code.answer_program import Failure
from areal_jax.tasks.code.checks_program import GONE
from areal_jax.workers.sandbox.confined_children import (
    Child,
    ConfinedChildren,
    Ended,
    ServerLostError,
    hand_text,
    is_runnable,
    read_cpu_s,
)

_ANSWER, _CHECKS = 'areal_jax.tasks.code.answer_program', 'areal_jax.tasks.code.checks_program'
# what solutions import most: a fork has them already
_PRELOADED = (
    'bisect', 'collections', 'copy', 'dataclasses', 'datetime', 'functools', 'hashlib', 'heapq', 'itertools', 'math',
    'operator', 'random', 're', 'string', 'typing',
)  # fmt: skip
_WALL = 3.0  # seconds for a CPU second of the limit; then a sleeping answer is late
_STARVED_WALL = 30.0  # and then the machine is too busy to judge one that would run
_OUTPUT_BYTES, _TOLD_BYTES = 2**20, 2**24  # of a program, and of the tests
_SHORTEST_S = 0.002  # between two looks at a clock
_OK: Failure = ('ok', '')


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What an answer comes to.

    Args:
      label: 'ok', or that of the first test that fails (types.SCORED_LABELS).
      share: of the tests that pass; without partial credit the first failure ends them.
      cpu_s: of both children.
    """

    label: str
    share: float
    reason: str = ''
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Judge:
    """One check at a time, in children of one server that has held no test of another problem."""

    def __init__(self, level: str):
        self._children = ConfinedChildren(level, (*_PRELOADED, _ANSWER, _CHECKS))

    def check(
        self, problem: Mapping[str, Any], code: str, tests: Sequence[Any], *, is_partial: bool = False
    ) -> Judgement:
        """Runs the code against the tests.

        Args:
          problem: a problem of code_problems.py: entry_point, setup, test, time_limit_s, memory_limit_mb.
          tests: for it: of its tests, or of its hidden ones; [] = those of its `test`.
          is_partial: run all of them.

        Raises ServerLostError.
        """
        start_s = time.monotonic()
        if problem['entry_point']:
            outcomes, cpu_s = self._check_function(problem, code, tests, is_partial)
        else:
            outcomes, cpu_s = self._check_programs(problem, code, tests, is_partial)
        failed = [outcome for outcome in outcomes if outcome[0] != 'ok']
        label, reason = failed[0] if failed else _OK
        passed = len(outcomes) - len(failed)
        share = passed / max(len(tests), 1)
        return Judgement(label, share, reason, cpu_s, time.monotonic() - start_s)

    def close(self) -> None:
        """Ends the server of the children."""
        self._children.close()

    @property
    def server_pid(self) -> int:
        """Of the server of the children."""
        return self._children.pid

    def _check_function(
        self, problem: Mapping[str, Any], code: str, tests: Sequence[Any], is_partial: bool
    ) -> tuple[list[Failure], float]:
        limits = _limits(problem)
        with contextlib.ExitStack() as opened:
            answer = _hand(opened, {'code': code, 'entry_point': problem['entry_point']})
            asked = {key: problem[key] for key in ('entry_point', 'setup')}
            asked |= {'tests': tests, 'test': '' if tests else problem['test'], 'is_partial': is_partial}
            checks = _hand(opened, asked)
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
            ours, theirs = socket.socketpair()
            with ours, theirs, open(writer, 'wb'):  # ends that a child holds are its alone
                pids = self._children.start([
                    Child(f'{_ANSWER}:serve_answer', (answer, theirs.fileno()), limits),
                    Child(f'{_CHECKS}:run_checks', (checks, ours.fileno(), writer), limits),
                ])  # fmt: skip
            told, late = _read_until_end(reader, pids, problem['time_limit_s'], _TOLD_BYTES)
            ended = self._children.end()
        return _read_outcomes(told, late, ended, problem), sum(child.cpu_s for child in ended)

    def _check_programs(
        self, problem: Mapping[str, Any], code: str, tests: Sequence[Any], is_partial: bool
    ) -> tuple[list[Failure], float]:
        outcomes, total_s = [], 0.0
        for test in tests:
            outcome, cpu_s = self._run_program(problem, code, test)
            outcomes.append(outcome)
            total_s += cpu_s
            if outcome[0] != 'ok' and not is_partial:
                break
        return outcomes, total_s

    def _run_program(self, problem: Mapping[str, Any], code: str, test: Mapping[str, str]) -> tuple[Failure, float]:
        with contextlib.ExitStack() as opened:
            program = _hand(opened, {'code': code})
            given = hand_text(test['input'].encode(errors='surrogatepass'))
            opened.callback(os.close, given)
            (output, printed), (told, tells) = os.pipe(), os.pipe()
            for descriptor in (output, told):
                opened.callback(os.close, descriptor)
            try:
                pids = self._children.start([
                    Child(f'{_ANSWER}:run_answer', (program, tells, given, printed), _limits(problem), 2, 3)
                ])  # fmt: skip
            finally:
                for descriptor in (printed, tells):
                    os.close(descriptor)
            text, late = _read_until_end(output, pids, problem['time_limit_s'], _OUTPUT_BYTES)
            (ended,) = self._children.end()
            said = os.read(told, 2**16)
        return _judge_output(text, said, late, ended, test['output'], problem), ended.cpu_s


def _hand(opened: contextlib.ExitStack, given: Mapping[str, Any]) -> int:
    descriptor = hand_text(json.dumps(given).encode())
    opened.callback(os.close, descriptor)
    return descriptor


def _limits(problem: Mapping[str, Any]) -> dict[str, int]:
    # the kernel's limit is whole seconds, and ends what the judge's clock does not see: processes of the answer
    return {
        'memory_bytes': int(problem['memory_limit_mb'] * 2**20), 'cpu_s': math.ceil(problem['time_limit_s']) + 1,
    }  # fmt: skip


def _read_until_end(reader: int, pids: Sequence[int], limit_s: float, most_bytes: int) -> tuple[bytes, bool]:
    """What is written until all writers have closed the pipe, and whether the time was over before.

    It is over where a child has used `limit_s` of CPU time, or sleeps at _WALL times that. Raises ServerLostError where
    the machine did not let it run.
    """
    parts: list[bytes] = []
    size = 0
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    start_s = time.monotonic()
    while True:
        used_s = max(map(read_cpu_s, pids))
        passed_s = time.monotonic() - start_s
        if used_s >= limit_s or size > most_bytes:
            return b''.join(parts), used_s >= limit_s
        if passed_s >= _WALL * limit_s:
            if not any(map(is_runnable, pids)):
                return b''.join(parts), True
            if passed_s >= _STARVED_WALL * limit_s:
                raise ServerLostError(f'a check got {used_s:.2f} s of a processor in {passed_s:.0f} s')
        wait_s = min(limit_s - used_s, max(_WALL * limit_s - passed_s, 0.05))
        if not poll.poll(max(wait_s, _SHORTEST_S) * 1000):
            continue
        part = os.read(reader, 2**16)
        if not part:
            return b''.join(parts), False
        parts.append(part)
        size += len(part)


def _read_outcomes(told: bytes, late: bool, ended: Sequence[Ended], problem: Mapping[str, Any]) -> list[Failure]:
    """The outcome of each test that ran. Raises ServerLostError where the tests' own process failed."""
    lines = [json.loads(line) for line in told.splitlines(keepends=True) if line.endswith(b'\n')]
    outcomes: list[Failure] = [(line[0], line[1]) for line in lines if line]
    if [] in lines:
        gone = _describe_gone(ended[0], problem)
        return [gone if label == GONE else (label, reason) for label, reason in outcomes]
    if late:
        return [*outcomes, ('time_limit', f'more than {problem["time_limit_s"]:g} s')]
    if len(told) > _TOLD_BYTES:
        raise ServerLostError('the tests tell more than a verdict')
    raise ServerLostError(f'the process of the tests ended with status {ended[1].status} before its verdict')


def _describe_gone(answer: Ended, problem: Mapping[str, Any]) -> Failure:
    """Why the process of the answer was gone before its tests were done."""
    if answer.cpu_s >= problem['time_limit_s']:
        return 'time_limit', f'{answer.cpu_s:.1f} s of a processor'
    if not os.WIFSIGNALED(answer.status):
        return 'exception', f'its process ended with exit code {os.waitstatus_to_exitcode(answer.status)}'
    number = os.WTERMSIG(answer.status)
    if number == signal.SIGSYS:
        return 'forbidden', 'a system call of another architecture'
    return 'killed', f'by {signal.Signals(number).name}'


def _judge_output(
    text: bytes, said: bytes, late: bool, ended: Ended, expected: str, problem: Mapping[str, Any]
) -> Failure:
    if late:
        return 'time_limit', f'more than {problem["time_limit_s"]:g} s'
    if len(text) > _OUTPUT_BYTES:
        return 'wrong', f'it printed more than {_OUTPUT_BYTES} bytes'
    try:
        label, reason = json.loads(said)
    except (ValueError, TypeError, RecursionError):
        return _describe_gone(ended, problem)
    if label != 'ok':
        return (label if label in CODE else 'exception'), str(reason)
    equal = list(_lines(text.decode(errors='replace'))) == list(_lines(expected))
    return _OK if equal else ('wrong', 'another output')


def _lines(text: str) -> Iterator[str]:
    """Without blanks at the ends of lines, and without empty lines at the end."""
    return (line.rstrip() for line in text.rstrip().split('\n'))
