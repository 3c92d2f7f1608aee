"""torch on the same board: matrix products, a copy, and attention at the shapes of the other parts.

    python -m benchmarks.gpu_parts.peer [--tiny] OUT

What a mature library reaches here says what may be asked of ours. Uses no jax, which would take the GPU's memory.
Without torch in this Python the numbers say so.
"""

from __future__ import annotations

import importlib.util
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from areal_jax import files

_REPEATS, _SECONDS = 5, 1.0  # of one measurement: long enough for the limit of power to act
_PRODUCTS = {'8192': (8192, 8192, 8192), 'mlp of 1.5b': (16_384, 1536, 8960), 'head of 1.5b': (4096, 1536, 151_936)}
_TINY_PRODUCTS = {'tiny': (64, 64, 64)}


def main(out: pathlib.Path, *, tiny: bool) -> None:
    if importlib.util.find_spec('torch') is None:
        files.write_json(out, {'left_out': f'{sys.executable} has no torch'})
        return
    import torch

    if not (tiny or torch.cuda.is_available()):
        sys.exit('torch sees no GPU: install a torch for CUDA, or leave this part out')
    device = 'cpu' if tiny else 'cuda'
    numbers: dict[str, Any] = {'torch': torch.__version__}
    make = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    wait = (lambda: None) if tiny else torch.cuda.synchronize
    seconds = 0.01 if tiny else _SECONDS

    def add(name: str, call: Callable[[], Any], amount: float, unit: str) -> None:
        took = _time(call, wait, seconds)
        numbers[name] = {'median_s': took, unit: amount / took}
        files.write_json(out, numbers)

    for name, (m, k, n) in (_TINY_PRODUCTS if tiny else _PRODUCTS).items():
        a, b = make(m, k), make(k, n)
        add(f'product {name}', lambda a=a, b=b: a @ b, 2.0 * m * k * n, 'flops_per_second')
    source = make(1 << (12 if tiny else 30))
    target = source.clone()
    add('copy', lambda: target.copy_(source), 2.0 * source.nbytes, 'bytes_per_second')
    rows, heads, kv_heads, length = (2, 4, 2, 64) if tiny else (16, 12, 2, 1024)  # 16,384 tokens
    q, k, v = make(rows, heads, length, 128), make(rows, kv_heads, length, 128), make(rows, kv_heads, length, 128)
    for tensor in (q, k, v):
        tensor.requires_grad_()

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(out.detach())

    add('attention, forward and backward', attend, float(rows * length), 'tokens_per_second')


def _time(call: Callable[[], Any], wait: Callable[[], None], seconds: float) -> float:
    """Seconds of a call: the median over measurements of about `seconds` each, one behind the other on the device."""
    call()
    wait()
    began = time.perf_counter()
    call()
    wait()
    calls = max(1, int(seconds / (time.perf_counter() - began)))
    found = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


if __name__ == '__main__':
    main(pathlib.Path(sys.argv[-1]), tiny='--tiny' in sys.argv)
