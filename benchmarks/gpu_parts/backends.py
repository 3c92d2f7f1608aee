"""The self-check of every attention backend, and of decoding: which ran, which was refused and why, with what error.

    python -m benchmarks.gpu_parts.backends [--tiny] OUT

A backend that the hardware can run and that computes wrong values fails the part.
"""

from __future__ import annotations

import itertools
from typing import Any

from areal_jax.models.attention import BACKENDS, AttentionError, choose_implementation, local_device, self_check
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
    'bfloat16, slices': {'dtype': 'bfloat16', 'head_dim': 64, 'slices': True},
}
_PLAIN = ('bfloat16, heads of 64', 'float32, heads of 64')  # of the backends in plain JAX: enough
# nats, mean over the tokens: accelerators multiply float32 with fewer bits, and the two sides in another order
ALLOWED_MEAN = {'float32': 5e-3, 'bfloat16': 5e-2}


def measure(cells: Cells, *, tiny: bool) -> None:
    for name, case in itertools.product(BACKENDS, _CASES):
        if not BACKENDS[name].platforms and (case not in _PLAIN or (tiny and case != _PLAIN[0])):
            continue
        cells.attempt(f'attention {name}: {case}', lambda name=name, case=case: _check(name, _CASES[case], tiny))
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


def _check_decode(dtype: str) -> dict[str, Any]:
    """Raises ArithmeticError where the engine's log-probs are not the learner's."""
    errors = decode_errors(TINY, dtype)
    if not errors['mean_difference'] <= ALLOWED_MEAN[dtype]:
        raise ArithmeticError(f'log-probs of decoding and training differ: {errors}, allowed {ALLOWED_MEAN[dtype]}')
    return {'status': 'ran', **errors}


if __name__ == '__main__':
    run_part(measure)
