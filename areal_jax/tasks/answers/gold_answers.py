"""Finds gold answers of mathematics that do not equal themselves, in separate processes: one may compute without end.

It runs when a file is loaded. `python -m areal_jax.tasks.answers.gold_answers` reads one JSON text a line and writes
for each what is wrong with it, or "". The parser takes about 20 ms, so numbers and words are not sent. Of golds that
differ only in numerals, the first is sent, unless a numeral is a divisor 0 or follows ^, _ or a command.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from areal_jax.tasks.answers import mathematics
from areal_jax.workers.descendants import die_with_parent
from areal_jax.workers.worker_process import Finished, count_processes, run_processes

_SECONDS = 10  # of CPU time for one gold; the kernel then ends the process, whatever it computes
_NUMERAL = re.compile(r'(?<![A-Za-z_^.0-9])(?<![_^]\{)(?<!\^\{-)([0-9]+)(\.[0-9]+)?')
PER_PROCESS = 100  # golds that justify another process, which imports for about a second


class Fault(NamedTuple):
    """A gold that cannot be compared with, and the reason."""

    gold: str
    reason: str


def find_fault(golds: Sequence[str]) -> Fault | None:
    """The first gold, in their order, that does not equal itself; None if all do."""
    by_shape: dict[str, str] = {}
    for gold in golds:
        if mathematics.read_form(gold).kind == 'expression':
            by_shape.setdefault(_NUMERAL.sub(_shape, gold), gold)
    asked = list(by_shape.values())
    n = count_processes(len(asked), PER_PROCESS)
    parts = [asked[len(asked) * k // n : len(asked) * (k + 1) // n] for k in range(n)]
    finished = run_processes(__name__, [[json.dumps(gold) for gold in part] for part in parts])
    faults = [_find_fault(part, process) for part, process in zip(parts, finished, strict=True)]
    return next((fault for fault in faults if fault), None)


def _shape(numeral: re.Match[str]) -> str:
    """The placeholder of a numeral: '0' for a zero that may be a divisor, else '2'; '.2' is added for decimals."""
    before = numeral.string[: numeral.start()].rstrip()[-1:]
    is_divisor = before and before in '/:{' and not numeral[0].strip('.0')
    return ('0' if is_divisor else '2') + ('.2' if numeral[2] else '')


def _find_fault(golds: Sequence[str], process: Finished) -> Fault | None:
    for gold, line in zip(golds, process.lines, strict=False):
        if reason := json.loads(line):
            return Fault(gold, reason)
    if process.exit_code == 0:
        return None
    late = process.exit_code == -signal.SIGPROF
    reason = f'takes more than {_SECONDS} s to parse' if late else f'ends the parser (exit code {process.exit_code})'
    return Fault(golds[min(len(process.lines), len(golds) - 1)], reason)


def main() -> None:
    """Prints for each line of the input what is wrong with the gold, or ""."""
    die_with_parent()
    mathematics.warm_up()
    for line in sys.stdin:
        # Without a handler: the kernel ends the process, in the middle of C code too.
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        print(json.dumps(mathematics.find_gold_fault(json.loads(line))), flush=True)


if __name__ == '__main__':
    main()
