"""New weights between two dispatches against waiting for the running requests.

    python -m benchmarks.interruption --out=benchmarks/results/interruption.json [--cells=h800,cpu] [--small]

An engine has as many requests as slots, with lognormal lengths, and gets new weights every two mean lengths: the time
in which the engine, uninterrupted and full, generates two mean answers in every slot. interrupted_engine.py describes
the policies. Speeds are tokens a second, from weights in use to weights in use; `gain` is the speed divided by the
speed of 'wait', less 1.

  h800  The real engine under the virtual clock, with a backend that decodes nothing and prices from flops and bytes
        (simulation/prices.py): R1-distill-Qwen-1.5B on an H800, prompts of 512 tokens, answers of mean 9,000 and
        at most 27,648 with sigma 0.75, for each of --slots. Shares of the peaks are published ones, once those that
        favour waiting most (fast decode, slow prefill), once those that do least. A step also takes what one row takes
        longer than the weights are read ('published' overhead), or nothing besides its work ('none', a lower bound: a
        batch that gets emptier then gets as much faster as it reads less). All of it was fixed before a run, from
        sources that benchmarks/README.md names. Judged are the cells with the published overhead, each by itself:
        'recompute' gains a tenth or more. Those without are shown, and `met` is null there.
  cpu   SmolLM2-135M on this machine under the real clock, mean 64 tokens and at most 512 with sigma 1, 32 slots; one
        process, which calls the policies in turn. Reported; no bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.simulation.prices import H800, R1_DISTILL_1_5B, Reached, Roofline, step_overhead_s
from benchmarks.generation_cells import (
    CONTEXT_TOKENS,
    LENGTHS,
    SLOTS,
    SMOLLM2,
    SMOLLM2_TOKENS,
    engine_sizes,
    save_smollm2,
)
from benchmarks.host_toys import FastBackend
from benchmarks.interrupted_engine import POLICIES, InterruptedEngine, Load, Policy, gain_over_waiting
from benchmarks.options import Row, add_engine, make_parser, read_buckets, report, run, show, split_choices
from benchmarks.ratios import Bar, compare
from benchmarks.side_engine import LANES
from benchmarks.side_interruption import MEAN_LENGTHS, two_mean_lengths_s
from benchmarks.sides import Run, Side

GAIN = 0.1  # bar of 'recompute' under H800 prices
H800_STEPS, H800_PREFILL = 16, 16384  # tokens of a row in a dispatch, tokens of a prefill
JUDGED = 'published'  # of OVERHEADS
OVERHEADS = (JUDGED, 'none')
REACHED = {'favours waiting': Reached(bandwidth=0.85, prefill=0.5), 'favours interruption': Reached(0.6, 0.73)}
H800_LOAD = Load(
    prompt_tokens=512, mean_tokens=9000, limit_tokens=27648, sigma=0.75, vocabulary=2, seed=0, group_size=16,
    warm_up=2, updates=8,
)  # fmt: skip


def measure_h800(options: argparse.Namespace) -> Iterator[Row]:
    for slots, overhead, (name, reached) in itertools.product(options.slots, options.overheads, REACHED.items()):
        overhead_s = step_overhead_s(H800, R1_DISTILL_1_5B, reached) if overhead == JUDGED else 0.0
        roofline = Roofline(H800, R1_DISTILL_1_5B, reached, step_overhead_s=overhead_s)
        runs = [run_h800(options, roofline, slots, seed) for seed in range(options.seed, options.seed + options.seeds)]
        gains = [gain_over_waiting({policy: found['tokens_s'] for policy, found in run.items()}) for run in runs]
        middle = {policy: statistics.median(gain[policy] for gain in gains) for policy in gains[0]}
        yield {
            'cell': f'h800, {slots} slots, overhead {overhead}, {name}', 'clock': 'virtual', 'slots': slots,
            'step_overhead_ms': 1e3 * overhead_s, 'reached': dataclasses.asdict(reached),
            'chip': dataclasses.asdict(roofline.chip), 'model': dataclasses.asdict(roofline.shape),
            'load': dataclasses.asdict(h800_load(options, options.seed)), 'gain': middle, 'bar': GAIN,
            'met': middle['recompute'] >= GAIN if overhead == JUDGED else None, 'gains': gains, 'runs': runs,
        }  # fmt: skip


def h800_load(options: argparse.Namespace, seed: int) -> Load:
    load = dataclasses.replace(H800_LOAD, seed=seed, updates=options.updates)
    return dataclasses.replace(load, warm_up=1, updates=2) if options.small else load


def run_h800(options: argparse.Namespace, roofline: Roofline, slots: int, seed: int) -> dict[Policy, dict[str, float]]:
    """All policies; the first one, without new weights, says how long two mean lengths take."""
    load = h800_load(options, seed)
    cache = min(roofline.cache_tokens(), slots * (load.prompt_tokens + load.limit_tokens))
    interval_s = MEAN_LENGTHS * load.mean_tokens * roofline.step_s(slots, slots * load.mean_tokens)
    found: dict[Policy, dict[str, float]] = {}
    for policy in POLICIES:
        backend = FastBackend(
            slots, load.prompt_tokens + load.limit_tokens, largest_piece=H800_PREFILL, cache_tokens=cache
        )
        log = EventLog(keeps=False)
        clock = VirtualClock(LANES, log, roofline.prices())
        engine = InterruptedEngine(
            clock, log, backend, 0, load, policy, decode_steps=H800_STEPS, interval_s=interval_s
        )  # fmt: skip
        counts = engine.measure()
        found[policy] = {**counts, 'tokens_s': counts['tokens'] / counts['clock_s'], 'interval_s': interval_s}
        if policy == 'none':
            interval_s = two_mean_lengths_s(load, slots, found[policy]['tokens_s'])
        print(policy, found[policy], file=sys.stderr, flush=True)
    return found


def measure_cpu(options: argparse.Namespace) -> Iterator[Row]:
    mean, limit, sigma = LENGTHS['lognormal']
    load = Load(
        prompt_tokens=64, mean_tokens=mean, limit_tokens=limit, sigma=sigma, vocabulary=SMOLLM2_TOKENS,
        seed=options.seed, group_size=1, warm_up=1, updates=options.updates,
    )  # fmt: skip
    if options.small:
        load = dataclasses.replace(load, mean_tokens=8, limit_tokens=32, updates=1)
    slots = 4 if options.small else SLOTS
    sizes = engine_sizes(options, slots, CONTEXT_TOKENS, prefill_buckets=read_buckets(options))
    with tempfile.TemporaryDirectory() as directory:
        arguments = {
            'model': save_smollm2(pathlib.Path(directory)), 'engine': sizes, 'load': dataclasses.asdict(load),
            'first_interval_s': options.first_interval_s,
        }  # fmt: skip
        with Side(sys.executable, 'benchmarks.side_interruption', arguments) as side:
            facts = side.facts()
            calls = ask(side, options.turns)
    compared = {
        policy: compare(calls[policy], {'wait': calls['wait']}, Bar(1.0, True), ())
        for policy in POLICIES
        if policy != 'wait'
    }
    gain = {policy: ratio['ratio_wall'] - 1 for policy, ratio in compared.items()}
    for ratio in compared.values():
        del ratio['met']  # there is no bar
    yield {
        'cell': 'cpu', 'clock': 'real', 'model': SMOLLM2, 'slots': slots, 'load': dataclasses.asdict(load),
        'interval_s': facts['interval_s'], 'turns': options.turns, 'gain': gain, 'facts': facts,
        'against_wait': compared, 'calls': calls,
    }  # fmt: skip


def ask(side: Side, turns: int) -> dict[Policy, list[Run]]:
    """Calls of each policy, in turns."""
    calls: dict[Policy, list[Run]] = {policy: [] for policy in POLICIES}
    for _ in range(turns):
        for policy, found in calls.items():
            found.append(side.call())
            print(policy, found[-1], file=sys.stderr, flush=True)
    return calls


CELLS = {'h800': measure_h800, 'cpu': measure_cpu}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=5)
    add_engine(parser, prefill_buckets='80,160,320,1024')
    parser.add_argument('--cells', default='h800,cpu')
    parser.add_argument('--updates', type=int, default=8, help='measured intervals of a run')
    parser.add_argument('--seeds', type=int, default=1, help='h800: runs, each with the lengths of another seed')
    parser.add_argument('--slots', default='256', help='h800: of the engines')
    parser.add_argument('--overheads', default='published,none', help='h800: of a decode step, beside its work')
    parser.add_argument('--first_interval_s', type=float, default=10.0, help='cpu: of the run that finds the speed')
    options = parser.parse_args(arguments)
    options.cells = split_choices('cells', options.cells, tuple(CELLS))
    options.overheads = split_choices('overheads', options.overheads, OVERHEADS)
    options.slots = [int(slots) for slots in options.slots.split(',')]
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    for cell in options.cells:
        for row in CELLS[cell](options):
            rows.append(row)
            show({key: row.get(key) for key in ('cell', 'gain', 'met')})
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('interruption', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('interruption', main)
