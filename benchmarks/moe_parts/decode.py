"""CPU seconds of the experts of a decode step on one core (8): 1 row against 32, and against other ways and torch."""

from __future__ import annotations

import sys
from typing import Any

from areal_jax.errors import UserError
from benchmarks.moe_parts.layer_case import SIZES
from benchmarks.moe_parts.turns import Program, ask_on_one_core, compare_cpu, require_same, spread_ms
from benchmarks.ratios import Bar

_SIDE, _TORCH_SIDE = 'benchmarks.moe_parts.decode_side', 'benchmarks.moe_parts.torch_side'
_OURS, _ONE, _MANY, _STEPS = 'step', 1, 32, 64
_OTHERS = ('native', 'scan')  # ways of ours in XLA: around the grouped product, and all experts one by one
_TORCH = ('grouped_mm', 'batched_mm')  # ways of transformers; the cheaper one counts
SHARE_BAR = Bar(0.15, at_least=False)  # CPU of 1 row over that of 32
SCAN_BAR = Bar(1.5, at_least=True)
TORCH_BARS = {_ONE: Bar(2.0, at_least=True), _MANY: Bar(1.0, at_least=True)}


def measure_decode(options: Any) -> dict[str, Any]:
    """Row 8. Every call is so many steps of other tokens; UserError without `options.torch_python`."""
    if not options.torch_python:
        raise UserError('--torch-python is not set: an interpreter with torch and transformers is needed')
    sizes, steps = SIZES['small' if options.small else 'A'], 2 if options.small else _STEPS
    sides: dict[str, Program] = {}
    for rows in (_ONE, _MANY):
        case = {'rows': rows, 'sizes': sizes | {'tokens': steps * rows}}
        for way in (_OURS, *_OTHERS):
            sides[f'{way} {rows}'] = (sys.executable, _SIDE, {'way': way, **case})
        for experts in _TORCH:
            sides[f'{experts} {rows}'] = (options.torch_python, _TORCH_SIDE, {'experts': experts, **case})
    calls, facts = ask_on_one_core(sides, {}, options.turns)
    for rows in (_ONE, _MANY):
        require_same({name: of for name, of in calls.items() if name.endswith(f' {rows}')})
    cpu_ms = spread_ms(calls, steps)
    ours = {rows: calls[f'{_OURS} {rows}'] for rows in (_ONE, _MANY)}
    found = {'1 row over 32': (compare_cpu(ours[_ONE], ours[_MANY], SHARE_BAR), SHARE_BAR)}
    found['scan over ours, 32'] = (compare_cpu(calls[f'scan {_MANY}'], ours[_MANY], SCAN_BAR), SCAN_BAR)
    for rows, bar in TORCH_BARS.items():
        best = min(_TORCH, key=lambda way: cpu_ms[f'{way} {rows}']['median'])
        found[f'torch over ours, {rows}'] = (compare_cpu(calls[f'{best} {rows}'], ours[rows], bar), bar)
    return {
        'value': {name: ratio.median for name, (ratio, _) in found.items()},
        'quartile': {name: ratio.quartile for name, (ratio, _) in found.items()},
        'turns': options.turns,
        'met': all(bar.holds(ratio) for ratio, bar in found.values()),
        'cpu_ms': cpu_ms,
        'versions': {name: fact['versions'] for name, fact in facts.items() if name.endswith(f' {_ONE}')},
    }
