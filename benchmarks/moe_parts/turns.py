"""Sides that compute a layer on the same core, asked in turns, and ratios of their CPU seconds turn by turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.ratios import Bar, Ratio, spread
from benchmarks.sides import Run, Side, ask_in_turns

_SAME = 1e-4  # relative difference of the sides' mean squares
Program = tuple[str, str, dict[str, Any]]  # of a side: interpreter, module, its arguments


def ask_on_one_core(
    sides: Mapping[str, Program], case: Mapping[str, Any], turns: int
) -> tuple[dict[str, list[Run]], dict[str, Run]]:
    """(calls, facts) of sides whose arguments are their own and those of the case."""
    core = max(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(Side(python, module, {**case, **own, 'core': core}))
            for name, (python, module, own) in sides.items()
        }
        calls = ask_in_turns(running, turns)
        return calls, {name: side.facts() for name, side in running.items()}


def require_same(calls: Mapping[str, Sequence[Run]]) -> None:
    """Raises RuntimeError where the results of sides differ."""
    squares = {name: of[-1]['checks']['square'] for name, of in calls.items()}
    if max(squares.values()) > min(squares.values()) * (1 + _SAME):
        raise RuntimeError(f'the sides compute different layers, mean squares of y: {squares}')


def compare_cpu(costs: Sequence[Run], over: Sequence[Run], bar: Bar) -> Ratio:
    """CPU of some calls over that of others; the quartile on the side on which the bar would be missed."""
    found = spread([cpu_s(a) / cpu_s(b) for a, b in zip(costs, over, strict=True)])
    return Ratio(found['median'], found.get('lower' if bar.at_least else 'upper', found['median']))


def cpu_s(call: Run) -> float:
    return float(call['checks']['part_cpu_s'])


def spread_ms(calls: Mapping[str, Sequence[Run]], steps: int = 1) -> dict[str, dict[str, float]]:
    """CPU of each side, of one of `steps` that a call has."""
    return {name: spread([1e3 * cpu_s(call) / steps for call in of]) for name, of in calls.items()}
