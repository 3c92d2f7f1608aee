"""Keys and values of all rows anew, after new weights: by prefills of 2,048 tokens and of 8,192, in turns.

    python -m benchmarks.gpu_parts.rebuild [--tiny] OUT

64 rows of 1,535 tokens of the 1.5b shape, as in the swap of `decode_64`.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np

from areal_jax.learning import weights as trees
from areal_jax.models.decoder import Decoder
from benchmarks.gpu_parts.cells import Cells, run_part, summarize
from benchmarks.gpu_parts.decode import SEED, Decoding
from benchmarks.gpu_parts.shapes import decode_case

BUCKETS = (2048, 8192)
TINY_BUCKETS = (32, 64)
_TURNS = 4


def measure(cells: Cells, *, tiny: bool) -> None:
    case = decode_case(64, 2048, tiny)
    params = jax.block_until_ready(trees.cast(Decoder(case.model).init(SEED), 'bfloat16'))
    length = case.prompt_tokens + case.new_tokens - 1
    rng = np.random.default_rng(SEED)
    rows = list(rng.integers(8, case.model.vocab_size, (case.slots, length)).astype(np.int32))
    sizes = TINY_BUCKETS if tiny else BUCKETS
    engines = {size: Decoding(dataclasses.replace(case, prefill_tokens=size), params, 'bfloat16') for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(_TURNS + 1):
        for size, decoding in engines.items():
            began = time.perf_counter()
            decoding.compute(rows)
            decoding.wait()
            if turn:  # the first compiles
                seconds[size].append(time.perf_counter() - began)
            else:
                cells.add(f'first_{size}_s', time.perf_counter() - began)
    for size in sizes:
        timing = summarize(seconds[size])
        cells.add(str(size), {**timing, 'tokens_per_second': case.slots * length / timing['median_s']})
    cells.add('case', {'slots': case.slots, 'tokens': case.slots * length})


if __name__ == '__main__':
    run_part(measure)
