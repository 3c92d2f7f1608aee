"""Judges an answer: code and tests in two confined children, or a program for each input; gives a label and a reason.

The behaviour of the answer gives a verdict. Any other failure raises ServerLostError: it says nothing about the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.tasks.code.answer_program import Failure
from areal_jax.tasks.code.checks_program import GONE, outputs_agree
from areal_jax.tasks.code.program_run import (
    PRELOADED,
    PROGRAM,
    TOO_MUCH,
    CheckTime,
    ProgramEnd,
    ProgramLimits,
    describe_gone,
    hand_json,
    read_until_end,
    run_program,
)
from areal_jax.workers.sandbox.confined_children import Child, ConfinedChildren, Ended, ServerLostError

_CHECKS = 'areal_jax.tasks.code.checks_program'
_OUTPUT_BYTES, _TOLD_BYTES = 2**20, 2**15  # of a program, and of each test: its label and a reason as JSON
_OK: Failure = ('ok', '')


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The verdict on an answer.

    Args:
      label: 'ok', or the label of the first test that fails (labels.CODE).
      share: of the tests that pass; without partial credit, the first failure ends the tests.
      cpu_s: of both children.
    """

    label: str
    share: float
    reason: str = ''
    cpu_s: float = 0.0
    wall_s: float = 0.0


class Judge:
    """One check at a time, in children of one server that has held no test of another problem."""

    def __init__(self, level: str, readable: Sequence[str] = ()):
        """Starts the server. `readable`: files and folders of packages that code can import."""
        self._children = ConfinedChildren(level, (*PRELOADED, PROGRAM, _CHECKS), readable)

    def check(
        self,
        problem: Mapping[str, Any],
        code: str,
        tests: Sequence[Any],
        *,
        is_partial: bool = False,
        whole: CheckTime | None = None,
    ) -> Judgement:
        """Runs the code against the tests.

        Args:
          problem: a problem of code_task.py: entry_point, setup, test, time_limit_s, memory_limit_mb.
          tests: the problem's tests or hidden tests; [] = its `test`.
          is_partial: whether to run the tests after a failure, as far as there is time.
          whole: the time of the whole check; None = as the problem's limit allows.

        Raises ServerLostError.
        """
        start_s, whole = time.monotonic(), whole or CheckTime()
        check = self._check_function if problem['entry_point'] else self._check_programs
        outcomes, cpu_s = check(problem, code, tests, is_partial, whole)
        failed = [outcome for outcome in outcomes if outcomes[-1][0] != 'ok']
        label, reason = failed[0] if failed else _OK
        passed = len(outcomes) - len(failed)
        share = passed / max(len(tests), 1)
        return Judgement(label, share, reason, cpu_s, time.monotonic() - start_s)

    def close(self) -> None:
        self._children.close()

    @property
    def server_pid(self) -> int:
        return self._children.pid

    def _check_function(
        self, problem: Mapping[str, Any], code: str, tests: Sequence[Any], is_partial: bool, whole: CheckTime
    ) -> tuple[list[Failure], float]:
        limits = _limits(problem).for_child()
        with contextlib.ExitStack() as opened:
            answer = hand_json(opened, {'code': code, 'entry_point': problem['entry_point']})
            asked = {key: problem[key] for key in ('entry_point', 'setup')}
            asked |= {'tests': tests, 'test': '' if tests else problem['test'], 'is_partial': is_partial}
            checks = hand_json(opened, asked)
            reader, writer = os.pipe()
            opened.callback(os.close, reader)
            ours, theirs = socket.socketpair()
            with ours, theirs, open(writer, 'wb'):  # ends that a child holds are closed here
                self._children.start([
                    Child(f'{PROGRAM}:serve_answer', (answer, theirs.fileno()), limits, is_counted=True),
                    Child(f'{_CHECKS}:run_checks', (checks, ours.fileno(), writer), limits),
                ])  # fmt: skip
            told_bytes = _TOLD_BYTES * (len(tests) + 1)
            told, late = read_until_end(reader, self._children.meter, problem['time_limit_s'], told_bytes, whole)
            ended = self._children.end()
        return _read_outcomes(told, late, ended, problem), sum(child.cpu_s for child in ended)

    def _check_programs(
        self, problem: Mapping[str, Any], code: str, tests: Sequence[Any], is_partial: bool, whole: CheckTime
    ) -> tuple[list[Failure], float]:
        outcomes, total_s = [], 0.0
        for test in tests:
            given = test['input'].encode(errors='surrogatepass')
            end = run_program(self._children, code, given, _limits(problem), whole)
            outcomes.append(_judge_output(end, test['output']))
            total_s += end.cpu_s
            if outcomes[-1][0] != 'ok' and (not is_partial or whole.left_s <= 0):
                break
        return outcomes, total_s


def _limits(problem: Mapping[str, Any]) -> ProgramLimits:
    return ProgramLimits(problem['time_limit_s'], problem['memory_limit_mb'], _OUTPUT_BYTES)


def _read_outcomes(told: bytes, late: str, ended: Sequence[Ended], problem: Mapping[str, Any]) -> list[Failure]:
    lines = [json.loads(line) for line in told.splitlines(keepends=True) if line.endswith(b'\n')]
    outcomes: list[Failure] = [(line[0], line[1]) for line in lines if line]
    if ended[0].is_over and [] in lines and all(label == 'ok' for label, _ in outcomes):
        return [TOO_MUCH]  # of a process other than the one that answers
    if [] in lines:
        gone = describe_gone(ended[0], problem['time_limit_s'])
        return [gone if label == GONE else (label, reason) for label, reason in outcomes]
    if ended[0].is_over:
        return [*outcomes, TOO_MUCH]
    if late or ended[1].cpu_s >= problem['time_limit_s']:  # the kernel may end it before the clock here is read
        return [*outcomes, ('time_limit', late or f'more than {problem["time_limit_s"]:g} s')]
    raise ServerLostError(f'the process of the tests ended with status {ended[1].status} before its verdict')


def _judge_output(end: ProgramEnd, expected: str) -> Failure:
    if end.label != 'ok':
        return end.label, end.reason
    if len(end.output) > _OUTPUT_BYTES:
        return 'wrong', f'it printed more than {_OUTPUT_BYTES} bytes'
    agrees = outputs_agree(end.output.decode(errors='replace'), expected)
    return _OK if agrees else ('wrong', 'another output')
