"""Finds gold answers that math-verify cannot parse, in processes of its own: one of them may compute without end.

It runs when a file is loaded. `python -m areal_jax.tasks.answers.gold_answers` reads one JSON text a line and writes
true or false for each. The parser takes about 20 ms, so a numeral is not sent, and of golds that differ in their
numerals alone only the first is.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple

from areal_jax.tasks.answers import mathematics
from areal_jax.tasks.answers.number import read_whole
from areal_jax.workers.batch_process import Finished, count_processes, run_processes
from areal_jax.workers.descendants import die_with_parent

_SECONDS = 10  # for one gold; the kernel then ends the process, whatever it computes
_NUMERAL = re.compile(r'[0-9]+(?:\.[0-9]+)?')
PER_PROCESS = 100  # golds that are worth another process, which imports for about a second


class Fault(NamedTuple):
    """A gold that cannot be compared with, and why."""

    gold: str
    reason: str


def find_fault(golds: Sequence[str]) -> Fault | None:
    """The first gold, in their order, that cannot be parsed; None if all can be."""
    by_shape: dict[str, str] = {}
    for gold in golds:
        if read_whole(gold) is None:
            by_shape.setdefault(_NUMERAL.sub('2', gold), gold)
    asked = list(by_shape.values())
    n = count_processes(len(asked), PER_PROCESS)
    parts = [asked[len(asked) * k // n : len(asked) * (k + 1) // n] for k in range(n)]
    finished = run_processes(__name__, [[json.dumps(gold) for gold in part] for part in parts])
    faults = [_find_fault(part, process) for part, process in zip(parts, finished, strict=True)]
    return next((fault for fault in faults if fault), None)


def _find_fault(golds: Sequence[str], process: Finished) -> Fault | None:
    if 'false' in process.lines:
        return Fault(golds[process.lines.index('false')], 'cannot be parsed by math-verify')
    if process.exit_code == 0:
        return None
    late = process.exit_code == -signal.SIGALRM
    reason = f'takes more than {_SECONDS} s to parse' if late else f'ends the parser (exit code {process.exit_code})'
    return Fault(golds[min(len(process.lines), len(golds) - 1)], reason)


def main() -> None:
    """The process: for each line true where the gold can be parsed, else false."""
    die_with_parent()
    mathematics.warm_up()
    for line in sys.stdin:
        signal.alarm(_SECONDS)  # without a handler: the kernel ends the process, in the middle of C code too
        print(json.dumps(mathematics.is_parsed(mathematics.parse_gold(json.loads(line)))), flush=True)


if __name__ == '__main__':
    main()
