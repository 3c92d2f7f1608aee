"""Asynchronous training with a server and a learner on a core each, against synchronous training on both cores.

    python -m benchmarks.async_speedup --out=benchmarks/results/async_speedup.json [--lengths=equal,heavy] [--small]

SmolLM2-135M on one-digit arithmetic, --groups groups of 8 answers an update, all trained. Lengths of answers are a
function of draw and sample (rollout.answer_lengths), so that every arm does the same work: all 32 tokens ('equal'),
or lognormal with sigma 1 and at most 192 ('heavy').

  synchronous    eta 0 in one process on both cores, with each number of slots of --sync_slots; the best one counts
  one process    eta 2 in one process on both cores
  asynchronous   eta 2, a server on one core and the learner on the other

Runs are made in turns. Speeds are trained tokens a second from the publication of version --first to the last one;
`gain` is the median over the turns of the speed divided by the best synchronous arm's, less 1, in wall seconds. There
is no bar. `publication_wait_share` is the part of that time in which the learner waited for publication: it copies the
weights, and waits while the version before has not left; `wait_met` where it is at most a hundredth. The copy takes as
long whatever an update has to learn from, so that share says something for updates as large as in a run: --groups=8, as
in its config, or more.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.errors import UserError
from benchmarks.options import Row, make_parser, report, run, show, split_choices
from benchmarks.ratios import CLOCKS, Bar, ratio, strongest
from benchmarks.sides import ARITHMETIC
from benchmarks.timed_run import Arm, run_arm

ETA = 2.0
MOST_WAIT = 0.01
CORES = 2
ASYNCHRONOUS, ONE_PROCESS = 'asynchronous', 'one process'
LENGTHS = {'equal': 'constant(32)', 'heavy': 'lognormal(32, 1)'}
COMMON = {
    'rollout.ignore_eos': True, 'rollout.max_new_tokens': 192,
    'rollout.context_tokens': 256, 'rollout.block_tokens': 64, 'rollout.prefill_buckets': (64, 512),
    'rollout.decode_steps': 8, 'learner.row_tokens': 512,
    'learner.row_loss_tokens': 448, 'learner.filter_equal_rewards': False,
    'evaluation.problems': 0,
    'checkpoint.every': 0, 'telemetry.tensorboard': False, 'telemetry.plots': False, 'telemetry.progress': False,
}  # fmt: skip
SMALL = {'learner.groups_per_update': 2, 'rollout.group_size': 2}  # whatever --groups says


def make_arms(options: argparse.Namespace) -> list[Arm]:
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise UserError('two cores are needed: one for the server, one for the learner')
    both = tuple(cores)
    synchronous = [
        Arm(f'synchronous, {slots} slots', {'staleness.eta': 0.0, 'rollout.slots': slots}, both)
        for slots in options.sync_slots
    ]
    late = {'staleness.eta': ETA, 'rollout.slots': options.slots}
    apart = {**late, 'rollout.server': 'own', 'publication.channel': 'files'}
    arms = [*synchronous, Arm(ONE_PROCESS, late, both), Arm(ASYNCHRONOUS, apart, both[:1], (both[1:],))]
    return [arm for arm in arms if not options.arms or any(arm.name.startswith(name) for name in options.arms)]


def measure_lengths(options: argparse.Namespace, lengths: str, directory: pathlib.Path) -> Row:
    overrides = COMMON | {'run.steps': options.steps, 'rollout.answer_lengths': LENGTHS[lengths]}
    overrides |= SMALL if options.small else {'learner.groups_per_update': options.groups}
    arms = make_arms(options)
    calls: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for turn in range(options.turns):
        for arm in arms:
            workdir = directory / f'{lengths}_{turn}_{arm.name.replace(" ", "_")}'
            calls[arm.name].append(run_arm(arm, ARITHMETIC, overrides, workdir, options.first))
            print(lengths, arm.name, calls[arm.name][-1], file=sys.stderr, flush=True)
    row = {'cell': lengths, 'turns': options.turns, 'overrides': overrides, **gains(calls), 'calls': calls}
    if ASYNCHRONOUS in calls:
        share = statistics.median(call['checks']['publication_wait_share'] for call in calls[ASYNCHRONOUS])
        row |= {'publication_wait_share': share, 'wait_bar': MOST_WAIT, 'wait_met': share <= MOST_WAIT}
    return row


def gains(calls: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """By clock: the best synchronous arm, and by how much each other arm is faster."""
    synchronous = {name: runs for name, runs in calls.items() if name.startswith('synchronous')}
    fields: dict[str, Any] = {}
    for clock in CLOCKS if synchronous else ():
        best, short = strongest(synchronous, clock), clock.removesuffix('_s')
        fields[f'against_{short}'] = best
        for name in (ONE_PROCESS, ASYNCHRONOUS):
            if name in calls:
                found = ratio(calls[name], calls[best], clock, Bar(1.0, True))
                key = f'{name.replace(" ", "_")}_gain_{short}'
                fields |= {key: found.median - 1, f'{key}_quartile': found.quartile - 1}
    return fields


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, turns=3)
    parser.add_argument('--lengths', default='equal,heavy')
    parser.add_argument('--arms', default='', help='only those whose name begins with one of these; all by default')
    parser.add_argument('--steps', type=int, default=8, help='updates of a run')
    parser.add_argument('--first', type=int, default=3, help='version from whose publication on is timed')
    parser.add_argument('--groups', type=int, default=4, help='of 8 answers, in an update')
    parser.add_argument('--slots', type=int, default=16, help='of the asynchronous arms')
    parser.add_argument('--sync_slots', default='16,32', help='of the synchronous arms; the best counts')
    options = parser.parse_args(arguments)
    options.lengths = split_choices('lengths', options.lengths, LENGTHS)
    options.sync_slots = [int(slots) for slots in options.sync_slots.split(',')]
    options.arms = [name for name in options.arms.split(',') if name]
    if not 1 <= options.first < options.steps:
        raise UserError(f'--first={options.first} must be at least 1 and below --steps={options.steps}')
    if options.threads != CORES:
        raise UserError(f'--threads={options.threads}: the arms share {CORES} cores; leave it out')
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for lengths in options.lengths:
            rows.append(measure_lengths(options, lengths, pathlib.Path(directory)))
            show(rows[-1])
    return rows


def main(arguments: Sequence[str] | None = None) -> Row:
    options = read_options(arguments)
    return report('async_speedup', arguments, options, lambda: measure(options))


if __name__ == '__main__':
    run('async_speedup', main)
