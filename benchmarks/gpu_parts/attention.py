"""Attention alone: the backends of training on one packed row, and how the paged kernel cuts its work.

    python -m benchmarks.gpu_parts.attention [--tiny] OUT

The best cut of the last is the default of rollout.decode.attention.pallas_kernels.default_tuning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.rollout.decode.attention.pallas_kernels import PallasGpuAttention, Tuning
from benchmarks.gpu_parts.cells import Cells, measure_time, run_part
from benchmarks.gpu_parts.shapes import find_peak, train_case
from benchmarks.gpu_parts.train import time_layer_attention

_BLOCK_TOKENS, _LAYERS = 64, 4  # a call reads a cache of its own, as layers do: none is in the GPU's cache
_HEADS, _KV_HEADS, _DIM = 12, 2, 128  # of the 1.5b shape
_CASES = {'64 rows of 1,024 in 2,048': (64, 1024, 2048), '64 rows of 16,240 in 16,384': (64, 16240, 16384)}
_TUNINGS = [
    Tuning(part, warps, stages)
    for part, warps, stages in (
        (512, 4, 2), (256, 4, 2), (128, 4, 2), (256, 2, 2), (256, 4, 4), (128, 2, 3), (512, 2, 4), (256, 8, 2),
    )
]  # fmt: skip


def measure(cells: Cells, *, tiny: bool) -> None:
    backends = ('blocked',) if tiny else ('cudnn', 'pallas')
    for backend in backends:
        cells.attempt(f'train {backend}', lambda backend=backend: _train(backend, tiny))
    for name, (rows, length, context) in _CASES.items():
        if tiny:
            rows, length, context = 2, 100, 128
        for tuning in _TUNINGS[: 1 if tiny else len(_TUNINGS)]:
            cells.attempt(
                f'paged {name}: {tuple(tuning)}',
                lambda shape=(rows, length, context), tuning=tuning: _paged(*shape, tuning, tiny),
            )


def _train(backend: str, tiny: bool) -> dict[str, Any]:
    """Of one layer over the row of `train_1.5b`, forward and backward."""
    case = train_case('1.5b', tiny)
    lengths = [len(answer) + case.workload.prompts().shape[1] for group in case.workload.answers() for answer in group]
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)[: case.row_tokens]
    ids = jnp.asarray(np.pad(ids, (0, case.row_tokens - len(ids))), jnp.int32)[None]
    return time_layer_attention(case.model, ids, backend, calls=5)


def _paged(rows: int, length: int, context: int, tuning: Tuning, tiny: bool) -> dict[str, Any]:
    """Of one layer; a program runs several, each over its own cache."""
    attention, per_row = PallasGpuAttention(_DIM, interpret=tiny, tuning=tuning), -(-context // _BLOCK_TOKENS)
    layers = 1 if tiny else _LAYERS
    shape = (_KV_HEADS, rows * per_row, _BLOCK_TOKENS, _DIM)
    cache = [
        tuple(jax.random.normal(jax.random.key(2 * layer + side), shape, jnp.bfloat16) for side in range(2))
        for layer in range(layers)
    ]
    q = jax.random.normal(jax.random.key(99), (rows, _HEADS, _DIM), jnp.bfloat16)
    tables = jnp.asarray(np.random.default_rng(0).permutation(rows * per_row).reshape(rows, -1), jnp.int32)
    lengths = jnp.full(rows, length, jnp.int32)

    @jax.jit
    def run(q: jax.Array, cache: Any) -> jax.Array:
        for layer in cache:
            q = attention.attend(q, layer, tables, lengths, None)
        return q

    timing = measure_time(lambda: run(q, cache), 5, calls=5)
    seconds = timing['median_s'] / layers
    read = 2 * rows * length * _KV_HEADS * _DIM * 2
    peak = find_peak(jax.local_devices()[0].device_kind)
    return {
        'seconds': seconds,
        'bytes_per_second': read / seconds,
        'share_of_bandwidth': peak and read / seconds / peak.bytes_per_second,
    }


if __name__ == '__main__':
    run_part(measure)
