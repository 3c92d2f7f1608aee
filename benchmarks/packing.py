"""Sequences into bins of 32k tokens: time and utilisation of each way to fill them, side by side.

    python -m benchmarks.packing --out=benchmarks/results/packing.json

Lengths are lognormal (median 6000, sigma 0.9), clipped to [64, 28672]. Utilisation is over all tokens of the bins; the
bound is ceil(sum / capacity) bins. Every way packs the same lengths in turn; times are medians of the rounds, CPU time
of one thread. A second table packs (tokens, loss tokens) into two capacities that both decide. A third is of static
micro-batches over many random steps, one row for each of eight data shards: utilisation of the rows in use, with the
empty rows of the last micro-batch, and with that cut to a half or a quarter where it fits (first fit spreads it for
that); and how evenly the shards finish.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from areal_jax.learning.packing.packing import pack_fewest_first, pack_first_fit, spread_remainder
from areal_jax.learning.packing.rows import (
    cost_coefficients,
    place_rows,
    row_cost,
    shard_costs,
    tail_buckets,
    visible_pairs,
)
from benchmarks.report import write_report

CAPACITY, LOSS_CAPACITY, SHARDS = 32_768, 20_480, 8
Bins = list[list[int]]
Pack = Callable[[np.ndarray, tuple[int, ...]], Bins]
# attention and feed-forward matrices of a layer of Qwen2.5-1.5B, and its head
QWEN2_1_5B = cost_coefficients(
    n_layers=28, n_parameters_per_layer=46_793_728, n_heads=12, head_dim=128, n_head_parameters=151_936 * 1536
)


def draw_lengths(rng: np.random.Generator, n: int) -> np.ndarray:
    """int64 [n]."""
    return np.clip(rng.lognormal(np.log(6000), 0.9, n), 64, 28_672).astype(np.int64)


def pack_by_argmax(sizes: np.ndarray, capacity: tuple[int, ...]) -> Bins:
    """First fit decreasing, the bin found by numpy's argmax over all free space: what the tree is compared with."""
    free = np.full((len(capacity), len(sizes)), np.array(capacity)[:, None])
    bins: Bins = []
    for i in np.argsort(-(sizes / capacity).max(1), kind='stable').tolist():
        found = int((free[:, : len(bins) + 1] >= sizes[i][:, None]).all(0).argmax())
        free[:, found] -= sizes[i]
        if found == len(bins):
            bins.append([])
        bins[found].append(i)
    return bins


WAYS: dict[str, Pack] = {'first_fit': pack_first_fit, 'argmax': pack_by_argmax, 'algorithm_1': pack_fewest_first}


def compare(sizes: np.ndarray, capacity: tuple[int, ...], rounds: int, ways: list[str]) -> dict[str, dict[str, float]]:
    """Per way the time, the bins, and the utilisation against what the bound allows."""
    bound = int(np.ceil((sizes.sum(0) / capacity).max()))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found = {}
    for _ in range(rounds):
        for way in ways:
            start = time.process_time()
            found[way] = len(WAYS[way](sizes, capacity))
            seconds[way].append(time.process_time() - start)
    return {
        way: {
            'milliseconds': 1e3 * statistics.median(seconds[way]),
            'bins': found[way],
            'bound': bound,
            'bound_over_bins': bound / found[way],
            'rounds': rounds,
        }
        for way in ways
    }


def place(lengths: np.ndarray, bins: Bins, in_order: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Micro-batches of one row for each shard: (tokens of each row, its place [M, SHARDS], shard balance)."""
    tokens = np.array([lengths[b].sum() for b in bins])
    pairs = np.array([sum(visible_pairs(int(lengths[i])) for i in b) for b in bins])
    costs = row_cost(tokens.astype(float), pairs.astype(float), QWEN2_1_5B)
    placement = place_rows(costs, tokens / CAPACITY, SHARDS, SHARDS, in_order=in_order)
    paid = shard_costs(costs, placement, SHARDS)
    return tokens, placement, paid.mean(1).sum() / paid.max(1).sum()


def static_step(lengths: np.ndarray, way: str) -> dict[str, float]:
    """One update of static rows, then the same with tail buckets."""
    padded, sizes = way == 'padded', lengths[:, None]
    bins = [[i] for i in range(len(lengths))] if padded else WAYS[way](sizes, (CAPACITY,))
    tokens, placement, balance = place(lengths, bins, padded)
    found = {
        'utilization': tokens.sum() / (len(bins) * CAPACITY),
        'utilization_with_empty_rows': tokens.sum() / (placement.size * CAPACITY),
        'shard_balance': balance,
    }
    buckets = np.array([shape.tokens for shape in tail_buckets(CAPACITY, CAPACITY, 3)])
    if way == 'first_fit':
        bins = spread_remainder(bins, sizes, SHARDS, [(n,) for n in buckets.tolist()])
    tokens, placement, balance = place(lengths, bins, padded)
    longest = np.append(tokens, 0)[placement].max(1)  # EMPTY = -1 takes the 0
    trimmed = buckets[np.searchsorted(buckets, longest)].sum() * SHARDS
    tail = {'utilization_with_tail_buckets': tokens.sum() / trimmed, 'shard_balance_with_tail_buckets': balance}
    return found | tail


def static_steps(n: int, steps: int) -> dict[str, dict[str, float]]:
    """Per way the mean over random updates of n sequences, and the least utilisation."""
    rng = np.random.default_rng(n)
    drawn = [draw_lengths(rng, n) for _ in range(steps)]
    table = {}
    for way in ('first_fit', 'algorithm_1', 'padded'):
        found = [static_step(lengths, way) for lengths in drawn]
        table[way] = {name: statistics.fmean(float(step[name]) for step in found) for name in found[0]}
        table[way] |= {'least_utilization': float(min(step['utilization'] for step in found)), 'steps': steps}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--sizes', default='1000,10000,100000')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=50)
    options = parser.parse_args()
    one, two = {}, {}
    for n in map(int, options.sizes.split(',')):
        ways = list(WAYS) if n <= 20_000 else ['first_fit']  # the others are quadratic
        rng = np.random.default_rng(0)
        answers = draw_lengths(rng, n)
        prompts = np.clip(rng.lognormal(np.log(2000), 1.2, n), 10, 8192).astype(np.int64)
        both = np.stack([np.minimum(answers + prompts, CAPACITY), np.minimum(answers, LOSS_CAPACITY)], 1)
        one[n] = compare(answers[:, None], (CAPACITY,), options.rounds, ways)
        two[n] = compare(both, (CAPACITY, LOSS_CAPACITY), options.rounds, ways)
        print(n, one[n], two[n], file=sys.stderr, flush=True)
    numbers = {
        'one_capacity': one, 'two_capacities': two,
        'static_micro_batches': {n: static_steps(n, options.steps) for n in (128, 512, 2048)},
        'command': ' '.join(['python -m benchmarks.packing', *sys.argv[1:]]),
    }  # fmt: skip
    write_report(numbers, options.out)


if __name__ == '__main__':
    main()
