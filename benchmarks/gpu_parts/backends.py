"""The self-check of every attention of training and of decoding, and of decoding as a whole: which ran or was refused.

    python -m benchmarks.gpu_parts.backends [--tiny] OUT

Each cell has the largest error, or the reason. One that the hardware can run and that computes wrong values fails.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax

from areal_jax.models.attention.backends import BACKENDS, AttentionError, choose_implementation, local_device
from areal_jax.models.attention.check import self_check
from areal_jax.rollout.decode.attention import choose as check
from areal_jax.rollout.decode.attention.choose import IMPLEMENTATIONS, Demand
from areal_jax.rollout.decode.attention.choose import choose_implementation as choose_cache_attention
from benchmarks.gpu_parts.cells import Cells, run_part
from benchmarks.gpu_parts.decode import decode_errors
from benchmarks.gpu_parts.shapes import TINY

_TOKENS = 4096  # of a row that the choice is made for; the check has its own
# the features of a call: the dtype and the head size of most models, and what a mask may have to express
_CASES: dict[str, dict[str, Any]] = {
    'bfloat16, heads of 64': {'dtype': 'bfloat16', 'head_dim': 64},
    'bfloat16, heads of 128': {'dtype': 'bfloat16', 'head_dim': 128},
    'float32, heads of 64': {'dtype': 'float32', 'head_dim': 64},
    'bfloat16, window': {'dtype': 'bfloat16', 'head_dim': 64, 'window': 1024},
    'bfloat16, sinks': {'dtype': 'bfloat16', 'head_dim': 64, 'sinks': True},
    'bfloat16, window and sinks': {'dtype': 'bfloat16', 'head_dim': 64, 'window': 1024, 'sinks': True},
    'bfloat16, slices': {'dtype': 'bfloat16', 'head_dim': 64, 'slices': True},
}
_PLAIN = ('bfloat16, heads of 64', 'float32, heads of 64')  # of the backends in plain JAX: enough
# the heads of Qwen2.5-1.5B and -7B, of SmolLM2 and of gpt-oss; tables as long as in the check
_PAGED_CASES = {
    'bfloat16, 12 on 2 heads of 128': Demand(12, 2, 128, 64, check.TABLE_BLOCKS, 'bfloat16', windows=False),
    'bfloat16, 28 on 4 heads of 128': Demand(28, 4, 128, 64, check.TABLE_BLOCKS, 'bfloat16', windows=False),
    'float32, 9 on 3 heads of 64': Demand(9, 3, 64, 64, check.TABLE_BLOCKS, 'float32', windows=False),
    'bfloat16, window': Demand(12, 2, 128, 64, check.TABLE_BLOCKS, 'bfloat16', windows=True),
    'bfloat16, sinks': Demand(64, 8, 64, 64, check.TABLE_BLOCKS, 'bfloat16', windows=True, sinks=True),
    'float32, sinks': Demand(64, 8, 64, 64, check.TABLE_BLOCKS, 'float32', windows=True, sinks=True),
}
# nats, mean over the tokens: accelerators multiply float32 with fewer bits, and the two sides in another order
ALLOWED_MEAN = {'float32': 5e-3, 'bfloat16': 5e-2}


def measure(cells: Cells, *, tiny: bool) -> None:
    for name, case in itertools.product(BACKENDS, _CASES):
        if not BACKENDS[name].platforms and (case not in _PLAIN or (tiny and case != _PLAIN[0])):
            continue
        cells.attempt(f'attention {name}: {case}', lambda name=name, case=case: _check(name, _CASES[case], tiny))
    for name, (case, demand) in itertools.product(IMPLEMENTATIONS, _PAGED_CASES.items()):
        cells.attempt(f'paged {name}: {case}', lambda name=name, demand=demand: _check_paged(name, demand, tiny))
    for dtype in ALLOWED_MEAN:
        cells.attempt(f'decode: {dtype}', lambda dtype=dtype: _check_decode(dtype))


def _check(name: str, case: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Raises AttentionError for a backend that this device can run, and that does not run or is wrong."""
    case = case | {'head_dim': 16} if tiny else case
    platform, capability = local_device()
    try:
        choose_implementation(name, platform=platform, capability=capability, tokens=_TOKENS, **case)
    except AttentionError as error:
        return {'status': 'refused', 'reason': str(error)}
    return {'status': 'ran', 'largest_error': self_check(name, **case)}


def _check_paged(name: str, demand: Demand, tiny: bool) -> dict[str, Any]:
    """Likewise, over the cache of blocks."""
    if tiny:
        demand = dataclasses.replace(demand, heads=4, kv_heads=2, head_dim=16, block_tokens=16)
    device = jax.local_devices()[0]
    try:
        choose_cache_attention(name, demand, device)
    except AttentionError as error:
        return {'status': 'refused', 'reason': str(error)}
    return {'status': 'ran', 'largest_error': check.self_check(IMPLEMENTATIONS[name].make(demand), demand, device)}


def _check_decode(dtype: str) -> dict[str, Any]:
    """Raises ArithmeticError where the engine's log-probs are not the learner's."""
    errors = decode_errors(TINY, dtype)
    if not errors['mean_difference'] <= ALLOWED_MEAN[dtype]:
        raise ArithmeticError(f'log-probs of decoding and training differ: {errors}, allowed {ALLOWED_MEAN[dtype]}')
    return {'status': 'ran', **errors}


if __name__ == '__main__':
    run_part(measure)
