"""CPU seconds of one layer of experts on one core: our product against other ways in JAX (5), and against torch (6).

Every side is a process on the same core; they are asked in turns, and ratios are taken turn by turn.
"""

from __future__ import annotations

import sys
from typing import Any

from areal_jax.errors import UserError
from benchmarks.moe_parts.layer_case import GRADIENT, PASSES, SIZES
from benchmarks.moe_parts.turns import ask_on_one_core, compare_cpu, require_same, spread_ms
from benchmarks.ratios import Bar

_OURS, _SIDE, _TORCH_SIDE = 'native', 'benchmarks.moe_parts.product_side', 'benchmarks.moe_parts.torch_side'
BARS_IN_JAX = {'scan': Bar(2.0, at_least=True), 'ragged': Bar(8.0, at_least=True)}
MEMORY_BAR = 8.0  # temporary memory of ragged_dot over ours, at least
TORCH_BAR = Bar(1.0, at_least=True)


def measure_products(options: Any) -> dict[str, Any]:
    """Row 5: forward and gradient at B: CPU of a scan over all experts and of ragged_dot over ours, and memory."""
    sizes = SIZES['small' if options.small else 'B']
    others = ('scan', 'ragged', 'blocks')
    sides = {name: (sys.executable, _SIDE, {'mixer': name}) for name in (_OURS, *others)}
    calls, facts = ask_on_one_core(sides, {'sizes': sizes, 'pass': GRADIENT}, options.turns)
    require_same(calls)
    found = {name: compare_cpu(calls[name], calls[_OURS], TORCH_BAR) for name in others}
    memory = facts['ragged']['temp_bytes'] / facts[_OURS]['temp_bytes']
    return {
        'value': {name: ratio.median for name, ratio in found.items()} | {'memory': memory},
        'quartile': {name: ratio.quartile for name, ratio in found.items()},
        'turns': options.turns,
        'met': memory >= MEMORY_BAR and all(bar.holds(found[name]) for name, bar in BARS_IN_JAX.items()),
        'cpu_ms': spread_ms(calls),
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
    sides = {
        _OURS: (sys.executable, _SIDE, {'mixer': _OURS}),
        'torch': (options.torch_python, _TORCH_SIDE, {'experts': 'grouped_mm'}),
    }
    for name, case in cases.items():
        calls, facts = ask_on_one_core(sides, case, options.turns)
        require_same(calls)
        found[name], cpu_ms[name] = compare_cpu(calls['torch'], calls[_OURS], TORCH_BAR), spread_ms(calls)
    return {
        'value': {name: ratio.median for name, ratio in found.items()},
        'quartile': {name: ratio.quartile for name, ratio in found.items()},
        'turns': options.turns,
        'met': all(map(TORCH_BAR.holds, found.values())),
        'cpu_ms': cpu_ms,
        'versions': {name: fact['versions'] for name, fact in facts.items()},
    }
