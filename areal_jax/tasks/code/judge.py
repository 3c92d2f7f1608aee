"""Judges an answer: code and tests in two confined children, or a program for each input; gives a label and a reason.

A program runs in a confined child of a server, which tells its output and its ending. The behaviour of the answer gives
a verdict. Any other failure raises ServerLostError: it says nothing about the answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import re
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.tasks.code.answer_program import Failure
from areal_jax.tasks.code.checks_program import GONE, outputs_agree
from areal_jax.tasks.code.pair_protocol import FrameError, read_reason
from areal_jax.workers.sandbox.confined_children import Child, ConfinedChildren, Ended, ServerLostError, hand_text
from areal_jax.workers.sandbox.control_group import LOOK_S, Meter
from areal_jax.workers.worker_process import name_signal

# three to sixteen backticks or tildes, indented or after the mark of a list, and the language
_FENCE = re.compile(
    r'^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)'
    r'(?P<mark>`{3,16}(?!`)(?=[^`\n]*$)|~{3,16}(?!~))[ \t]*(?P<info>[^\n]*)$',
    re.MULTILINE,
)
_INNER = 4  # columns: a fence that is further right by this than its block's fence belongs to the code
_LANGUAGE = re.compile(r'\{?\s*(?:#\S+\s+)?\.?([^\s{}:;,=]*)')  # of 'py title="x"', '{.python #id}', 'python:main.py'
_PYTHON = re.compile(r'(?:(?:i?python|pypy|py)[\d.]*|.+\.py)?', re.IGNORECASE)  # or no word at all, or a file


@dataclasses.dataclass(frozen=True)
class _Block:
    """The text between two fences, or after the last one."""

    info: str
    code: str

    @property
    def is_python(self) -> bool:
        word = _LANGUAGE.match(self.info)
        return bool(self.code.strip()) and word is not None and bool(_PYTHON.fullmatch(word[1]))


def find_code(text: str, entry_point: str = '', prompt: str = '') -> str:
    """Returns the source of the answer, with lines that end in '\\n'; '' if it has no source.

    It is the last fenced block of Python that defines `entry_point`, else the last block of Python, or the whole text
    of an answer without fences. A block is Python if its fence says so or names no language, and it is not blank; the
    last block needs no closing fence. If the source does not define `entry_point` and the problem has a `prompt`, the
    source is the completion of the prompt.
    """
    text = text.replace('\r\n', '\n').replace('\r', '\n')
    blocks = _list_blocks(text)
    sources = [block.code for block in reversed(blocks) if block.is_python] if blocks else [text]
    if not sources or not sources[0].strip():
        return ''
    if not entry_point:
        return sources[0]
    if code := next((one for one in sources if defines(one, entry_point)), ''):
        return code
    return prompt + sources[0] if prompt else sources[0] if blocks else ''


def defines(code: str, name: str) -> bool:
    """Whether the source seems to give a value to the name at its top level."""
    word = re.escape(name)
    return bool(
        re.search(rf'^(?:async[ \t]+)?def[ \t]+{word}\b|^class[ \t]+{word}\b|^{word}[ \t]*(?::[^=\n]*)?=', code, re.M)
        or re.search(rf'^from\b.*\bimport\b.*\b{word}\b', code, re.M)
    )


def _list_blocks(text: str) -> Sequence[_Block]:
    """Lists blocks as in CommonMark, but a fence with a language, which cannot close its block, begins the next one."""
    blocks: list[_Block] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened and not _ends(fence, opened):
            continue
        if opened:
            blocks.append(_cut(text, opened, fence.start()))
        opened = fence if opened is None or fence['info'].strip() else None
    return [*blocks, _cut(text, opened, len(text))] if opened else blocks


def _ends(fence: re.Match[str], opened: re.Match[str]) -> bool:
    """Whether a fence ends the block of another: it has the same mark, as long or longer, and is not in the code."""
    is_alike = fence['mark'].startswith(opened['mark'])
    return is_alike and len(fence['indent'].expandtabs()) < len(opened['indent'].expandtabs()) + _INNER


def _cut(text: str, opened: re.Match[str], end: int) -> _Block:
    """The block after its opening fence, without the blanks that indent the fence."""
    code = text[opened.end() : end].removeprefix('\n')
    if indent := len(opened['indent']):
        code = re.sub(rf'^[ \t]{{1,{indent}}}', '', code, flags=re.MULTILINE)
    return _Block(opened['info'], code)


# How long an answer may take, and whether it was the answer or the machine that took the time.


WALL = 3.0  # wall seconds per CPU second of a limit
STARVED_WALL = 30.0  # wall seconds per CPU second: after that, the machine is too busy to judge a runnable answer
_SHORTEST_S = 0.02  # between two checks of processes that wait for a processor


class CheckTime:
    """The time of a check, which runs programs one after the other.

    Args:
      budget_s: wall seconds; an answer that takes more is late if it was not kept waiting in at least 1 / WALL of them.
    """

    def __init__(self, budget_s: float = math.inf):
        self._budget_s, self._start_s = budget_s, time.monotonic()
        self._kept_s = 0.0
        self._end_s = self._start_s + budget_s

    @property
    def left_s(self) -> float:
        """Seconds until the budget is used up."""
        return self._end_s - time.monotonic()

    def add_kept(self, seconds: float) -> None:
        """Adds the seconds for which a program that has ended waited for the machine."""
        self._kept_s += seconds

    def judge_budget(self, kept_s: float) -> str:
        """Why the answer is late; '' = it has time left. Raises ServerLostError if the machine is too busy.

        `kept_s`: seconds for which the running program waited for the machine.
        """
        if self.left_s > 0:
            return ''
        own_s = self._budget_s - self._kept_s - kept_s
        if own_s >= self._budget_s / WALL:
            return f'its whole check took more than {self._budget_s:g} s'
        raise ServerLostError(f'an answer had {own_s:.2f} s of the machine in {self._budget_s:g} s')


class ProgramTime:
    """The time of one program.

    If a process waits for a processor at a check, the time since the last check counts as the machine's, less the CPU
    time that the processes used; all other time is the program's own. Checks come at random times: otherwise code that
    works when a check is due, and sleeps in between, would seem to wait for the machine.
    """

    def __init__(self, whole: CheckTime, meter: Meter, limit_s: float):
        self._whole, self._meter, self._limit_s = whole, meter, limit_s
        self._start_s = self._looked_s = time.monotonic()
        self._next_s = self._draw_next()
        self._waited_s = self._kept_s = 0.0

    def find_late(self, used_s: float) -> str:
        """Why the program is late after `used_s` of CPU time; '' = it is not late.

        Raises ServerLostError if the machine did not let it run.
        """
        if used_s >= self._limit_s or self._has_slept(used_s):
            return f'more than {self._limit_s:g} s'
        passed_s = time.monotonic() - self._start_s
        if passed_s >= STARVED_WALL * self._limit_s:
            raise ServerLostError(f'a program got {used_s:.2f} s of a processor in {passed_s:.0f} s')
        return self._whole.judge_budget(self._kept_s)

    def find_wait_s(self, used_s: float) -> float:
        """Seconds to the next moment at which it can be late, or at which a check is due."""
        now_s = time.monotonic()
        slept_s = self._start_s + self._kept_s + WALL * self._limit_s - now_s
        return min(LOOK_S, self._limit_s - used_s, slept_s, self._next_s - now_s, self._whole.left_s)

    def end(self) -> None:
        """Adds the time for which this program waited for the machine to the check's; called once."""
        self._whole.add_kept(self._kept_s)

    def _has_slept(self, used_s: float) -> bool:
        now_s = time.monotonic()
        is_first = self._looked_s == self._start_s
        if now_s >= self._next_s or (is_first and now_s - self._start_s >= WALL * self._limit_s):
            if self._meter.waits():
                self._waited_s += now_s - self._looked_s
            self._looked_s, self._next_s = now_s, self._draw_next()
        self._kept_s = max(self._waited_s - used_s, 0.0)
        return now_s - self._start_s - self._kept_s >= WALL * self._limit_s

    def _draw_next(self) -> float:
        return time.monotonic() + random.uniform(_SHORTEST_S, LOOK_S)


PROGRAM = 'areal_jax.tasks.code.answer_program'  # the module of the child

# what programs import most: a fork has them already
PRELOADED = (
    'bisect', 'collections', 'copy', 'dataclasses', 'datetime', 'functools', 'hashlib', 'heapq', 'itertools', 'math',
    'operator', 'random', 're', 'string', 'threading', 'typing',
)  # fmt: skip
LABELS = ('wrong', 'syntax', 'exception', 'memory_limit', 'forbidden')  # that the child may give itself
TOO_MUCH: Failure = ('memory_limit', 'its processes had more memory together than one may have')
_SAID_BYTES = 2**16  # of the message with which a program ended
_PROGRAM_RUN_SHORTEST_S = 0.002  # between two looks at a clock


@dataclasses.dataclass(frozen=True)
class ProgramLimits:
    """The limits of a program.

    Args:
      time_s: of CPU time; a program that sleeps is ended at three times that.
      memory_mb: MiB of address space.
      output_bytes: of output that are read; a program that prints more is ended there.
    """

    time_s: float
    memory_mb: int
    output_bytes: int

    def for_child(self) -> dict[str, int]:
        """The limits as fields of confinement.Confinement."""
        # the kernel's limit, in whole seconds, ends processes of the program that the clock here does not see
        return {'memory_bytes': int(self.memory_mb * 2**20), 'cpu_s': math.ceil(self.time_s) + 1}


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """The result of a program.

    Args:
      output: its output; if it was ended for printing too much, longer than the limit, and the label is 'ok'.
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
      whole: the time of the check that the program is a part of; None = the program is the whole check.

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
            children.start(
                [Child(f'{PROGRAM}:run_answer', (program, tells, stdin, printed), limits.for_child(), True, 2, 3)]
            )
        finally:
            for descriptor in (printed, tells):
                os.close(descriptor)
        text, late = read_until_end(output, children.meter, limits.time_s, limits.output_bytes, whole or CheckTime())
        (ended,) = children.end()
        said = os.read(told, _SAID_BYTES)
    label, reason = _find_end(len(text) > limits.output_bytes, said, late, ended, limits.time_s)
    return ProgramEnd(text, label, reason, ended.cpu_s)


def hand_json(opened: contextlib.ExitStack, given: Mapping[str, Any]) -> int:
    """Returns a descriptor from which a child reads this as JSON; `opened` closes it."""
    descriptor = hand_text(json.dumps(given).encode())
    opened.callback(os.close, descriptor)
    return descriptor


def read_until_end(reader: int, meter: Meter, limit_s: float, most_bytes: int, whole: CheckTime) -> tuple[bytes, str]:
    """Reads until all writers have closed the pipe; returns the output, and why time ran out before that, or ''.

    Time runs out if a child, or the answer with all its processes, has used `limit_s` of CPU time, or WALL times that
    without waiting for the machine, or if the check has no time left. Reading also ends if the meter finds too much
    memory. Raises ServerLostError if the machine did not let the program run.
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
        if not poll.poll(max(program.find_wait_s(used_s), _PROGRAM_RUN_SHORTEST_S) * 1000):
            continue
        part = os.read(reader, 2**16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    program.end()
    return b''.join(parts), late


def describe_gone(program: Ended, time_s: float) -> Failure:
    """Explains the end of a process that ended before it reported how its program ended."""
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
        failed = [outcome for outcome in outcomes if outcome[0] != 'ok']
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
