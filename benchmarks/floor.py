"""What row 1 of generation.py costs at least on this machine: its products at peak rate, its bytes at full bandwidth.

    python -m benchmarks.floor --generation=benchmarks/results/generation.json --out=benchmarks/results/floor.json

The peak rate of float32 products and the bandwidth of reading are measured here, on one and on two threads, and the
best call counts. A decode step multiplies each live row with all weights and reads all weights and the KV cache of the
live rows once; the longer of the two is its floor. A prompt token is multiplied with the weights of the layers, its
last one also with the head. Nothing else is counted: no sampling, no norms, no softmax. Requests take the slots in
order, as in every engine of the table.

In CPU seconds the floor has one thread read, because two threads wait for the same memory. `best_ratio_*` is what an
engine at the floor would reach against the peer of the table: where it is below the bar, no engine of this schedule and
dtype can meet the bar on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ['OPENBLAS_NUM_THREADS'] = '1'  # threads are ours; read when numpy is imported

import numpy as np

from areal_jax.formats.gguf import find_package_file, load_gguf
from benchmarks.generation_cells import GGUF, LENGTHS, PROMPT_TOKENS, SLOTS, SMOLLM2_TOKENS
from benchmarks.report import write_report
from benchmarks.workload import Requests, RequestWorkload

_FLOAT32 = 4
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Machine:
    """What so many threads reach together."""

    threads: int
    flops: float  # a second, of float32 products
    bytes_s: float  # of reading memory


@dataclasses.dataclass(frozen=True)
class Weights:
    """Numbers of a model that tokens are multiplied with, and bytes of one position of its KV cache."""

    layers: float
    head: float
    kv_bytes: float

    @property
    def bytes(self) -> float:
        return _FLOAT32 * (self.layers + self.head)


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step over all slots."""

    rows: int
    positions: int  # of the KV cache, over the rows


def schedule(requests: Requests, slots: int) -> list[Step]:
    """Every step until the last answer is done, each slot taken at once by the next request.

    The first token of an answer comes with its prompt's prefill.
    """
    waiting = [(len(p) + 1, n - 1) for p, n in zip(requests.prompts, requests.new_tokens, strict=True) if n > 1][::-1]
    live: list[list[int]] = []  # [positions, tokens left]
    steps = []
    while waiting or live:
        while waiting and len(live) < slots:
            live.append(list(waiting.pop()))
        steps.append(Step(len(live), sum(positions for positions, _ in live)))
        live = [[positions + 1, left - 1] for positions, left in live if left > 1]
    return steps


def step_seconds(step: Step, weights: Weights, machine: Machine) -> float:
    flops = 2 * (weights.layers + weights.head) * step.rows
    return max(flops / machine.flops, (weights.bytes + weights.kv_bytes * step.positions) / machine.bytes_s)


def prefill_seconds(prompts: Sequence[int], weights: Weights, machine: Machine) -> float:
    """Of prompts of so many tokens; the head is multiplied with the last of each."""
    return 2 * (weights.layers * sum(prompts) + weights.head * len(prompts)) / machine.flops


def measure_machine(threads: int, repeats: int = 7) -> Machine:
    """The best of `repeats` calls."""
    rng = np.random.default_rng(0)
    squares = [rng.random((2048, 2048), np.float32) for _ in range(threads)]
    rows = rng.random((_GIB // _FLOAT32 // 1024 // 2, 1024), np.float32)  # beyond every cache
    parts, vector = np.array_split(rows, threads), np.ones(1024, np.float32)
    multiply_s = _best_seconds(lambda index: squares[index] @ squares[index], threads, repeats)
    read_s = _best_seconds(lambda index: parts[index] @ vector, threads, repeats)
    return Machine(threads, threads * 2 * 2048**3 / multiply_s, rows.nbytes / read_s)


def _best_seconds(work: Callable[[int], Any], threads: int, repeats: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        seconds = []
        for _ in range(repeats + 1):  # the first call has everything to fetch
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def smollm2_weights() -> Weights:
    config, _, _ = load_gguf(find_package_file(GGUF))
    width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    layer = config.d_model * (2 * width + 2 * kv_width + 3 * config.d_ff)
    head = config.vocab_size * config.d_model
    return Weights(config.n_layers * layer, head, 2 * config.n_layers * kv_width * _FLOAT32)


def floor_of_cell(lengths: str, seed: int, weights: Weights, one: Machine, two: Machine) -> dict[str, float]:
    mean, limit, sigma = LENGTHS[lengths]
    requests = RequestWorkload(64, PROMPT_TOKENS, mean, limit, sigma, SMOLLM2_TOKENS, seed).draw()
    steps = schedule(requests, SLOTS)
    prompts = [len(prompt) for prompt in requests.prompts]

    def floor(machine: Machine) -> float:
        decode = sum(step_seconds(step, weights, machine) for step in steps)
        return prefill_seconds(prompts, weights, machine) + decode

    return {
        'steps': len(steps),
        'steps_of_8_rows_or_fewer': sum(step.rows <= 8 for step in steps),
        'prompt_tokens': sum(prompts),
        'answer_tokens': requests.total_tokens,
        'floor_cpu_s': floor(one),
        'floor_wall_s': floor(two),
    }


def against_table(cell: dict[str, float], row: dict[str, Any]) -> dict[str, float]:
    """Medians of the strongest peer and of ours beside the floor; in each clock its strongest peer."""
    found: dict[str, float] = {'bar': row['bar']}
    for clock in ('cpu_s', 'wall_s'):
        medians = {
            side: statistics.median(run['checks'].get(f'part_{clock}', run[clock]) for run in runs)
            for side, runs in row['calls'].items()
        }
        ours = medians.pop('ours')
        found[f'ours_{clock}'], found[f'theirs_{clock}'] = ours, min(medians.values())
        found[f'best_ratio_{clock[:-2]}'] = min(medians.values()) / cell[f'floor_{clock}']
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--generation', type=pathlib.Path, help='a report of generation.py with row 1')
    parser.add_argument('--seed', type=int, default=0, help='of prompts and lengths, as given to generation.py')
    options = parser.parse_args()
    rows = json.loads(options.generation.read_text())['rows'] if options.generation else []
    table = {row['cell']: row for row in rows if row['row'] == 1}
    one, two, weights = measure_machine(1), measure_machine(2), smollm2_weights()
    cells = {}
    for lengths in LENGTHS:
        cells[lengths] = floor_of_cell(lengths, options.seed, weights, one, two)
        if lengths in table:
            cells[lengths] |= against_table(cells[lengths], table[lengths])
    machines = [dataclasses.asdict(machine) for machine in (one, two)]
    write_report({'machine': machines, 'weights': dataclasses.asdict(weights), 'cells': cells}, options.out)


if __name__ == '__main__':
    main()
