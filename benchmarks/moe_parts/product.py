"""CPU seconds of one layer of experts on one core: our product against other ways in JAX (5), and against torch (6).

Every side is a process on the same core; they are asked in turns, and ratios are taken turn by turn.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.moe_parts.layer_case import GRADIENT, PASSES, SIZES
from benchmarks.ratios import Bar, Ratio, spread
from benchmarks.sides import Run, Side, ask_in_turns

_OURS, _SIDE, _TORCH_SIDE = 'native', 'benchmarks.moe_parts.product_side', 'benchmarks.moe_parts.torch_side'
BARS_IN_JAX = {'scan': Bar(2.0, at_least=True), 'ragged': Bar(8.0, at_least=True)}
MEMORY_BAR = 8.0  # temporary memory of ragged_dot over ours, at least
TORCH_BAR = Bar(1.0, at_least=True)
_SAME = 1e-4  # relative difference of the sides' mean squares


def measure_products(options: Any) -> dict[str, Any]:
    """Row 5: forward and gradient at B: CPU of a scan over all experts and of ragged_dot over ours, and memory."""
    sizes = SIZES['small' if options.small else 'B']
    others = ('scan', 'ragged', 'blocks')
    sides = {name: (sys.executable, _SIDE, {'mixer': name}) for name in (_OURS, *others)}
    calls, facts = _ask(sides, {'sizes': sizes, 'pass': GRADIENT}, options.turns)
    found = {name: _compare(calls, name) for name in others}
    memory = facts['ragged']['temp_bytes'] / facts[_OURS]['temp_bytes']
    return {
        'value': {name: ratio.median for name, ratio in found.items()} | {'memory': memory},
        'quartile': {name: ratio.quartile for name, ratio in found.items()},
        'turns': options.turns,
        'met': memory >= MEMORY_BAR and all(bar.holds(found[name]) for name, bar in BARS_IN_JAX.items()),
        'cpu_ms': _spread_ms(calls),
        'temp_bytes': {name: fact['temp_bytes'] for name, fact in facts.items()},
    }


def measure_against_torch(options: Any) -> dict[str, Any]:
    """Row 6: CPU of grouped_mm in torch over ours, at A and B, forward alone and with the gradient.

    `options.torch_python` is the interpreter of an environment with torch and transformers; UserError without it.
    """
    if not options.torch_python:
        raise UserError('--torch-python is not set: an interpreter with torch and transformers is needed')
    cases = {
        f'{case} {what}': {'sizes': SIZES[case], 'pass': what}
        for case in (('small',) if options.small else ('A', 'B'))
        for what in PASSES
    }
    found, cpu_ms, facts = {}, {}, {}
    sides = {_OURS: (sys.executable, _SIDE, {'mixer': _OURS}), 'torch': (options.torch_python, _TORCH_SIDE, {})}
    for name, case in cases.items():
        calls, facts = _ask(sides, case, options.turns)
        found[name], cpu_ms[name] = _compare(calls, 'torch'), _spread_ms(calls)
    return {
        'value': {name: ratio.median for name, ratio in found.items()},
        'quartile': {name: ratio.quartile for name, ratio in found.items()},
        'turns': options.turns,
        'met': all(map(TORCH_BAR.holds, found.values())),
        'cpu_ms': cpu_ms,
        'versions': {name: fact['versions'] for name, fact in facts.items()},
    }


def _ask(
    sides: Mapping[str, tuple[str, str, dict[str, Any]]], case: Mapping[str, Any], turns: int
) -> tuple[dict[str, list[Run]], dict[str, Run]]:
    """(calls, facts) of sides (interpreter, module, its arguments). Raises RuntimeError where their results differ."""
    core = max(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(Side(python, module, {**own, **case, 'core': core}))
            for name, (python, module, own) in sides.items()
        }
        calls = ask_in_turns(running, turns)
        facts = {name: side.facts() for name, side in running.items()}
    squares = {name: of[-1]['checks']['square'] for name, of in calls.items()}
    if max(squares.values()) > min(squares.values()) * (1 + _SAME):
        raise RuntimeError(f'the sides compute different layers, mean squares of y: {squares}')
    return calls, facts


def _compare(calls: Mapping[str, Sequence[Run]], other: str) -> Ratio:
    """CPU of the other side over ours."""
    pairs = zip(calls[_OURS], calls[other], strict=True)
    found = spread([_cpu_s(theirs) / _cpu_s(ours) for ours, theirs in pairs])
    return Ratio(found['median'], found.get('lower', found['median']))


def _cpu_s(call: Run) -> float:
    return float(call['checks']['part_cpu_s'])


def _spread_ms(calls: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    return {name: spread([1e3 * _cpu_s(call) for call in of]) for name, of in calls.items()}
