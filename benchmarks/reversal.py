"""Token reversal with weights that are 30 updates old: what learns, and what stays at chance.

    python -m benchmarks.reversal --minutes=30 --seed=500 --json=benchmarks/results/reversal.json [--small]

The task is `CONTROLS.known` of configs/sweeps/staleness.py under staleness.schedule=fixed(30): ten prompts of ten
symbols, ten answers each, one minibatch, one Adam step of 3e-4. Objectives:

  dg          Delightful Policy Gradient, arXiv 2603.14608
  importance  unclipped importance weights π_θ / π_behav
  ppo         PPO around the behavior policy, ε = 0.2

Seeds are arms of one program, trained a few at a time; those that have not begun after --minutes are left out. What
counts is the share of right symbols in the updates 250 to 300, and in the last 50 where there are more: the median over
the seeds. The bars are those of a public implementation of the task.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_jax.app.command_line import load_config
from areal_jax.plugins import load_module
from areal_jax.studies.arms.arm import Arm
from areal_jax.studies.arms.arm_training import train_arms
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line
from benchmarks.options import split_choices
from benchmarks.report import write_report

CONFIG = 'configs/sweeps/staleness.py'
LAG, WINDOW = 30, 50
METHODS: Mapping[str, Mapping[str, Any]] = {
    'dg': {'loss.objective': 'dg'},
    'importance': {'loss.proximal': 'behavior', 'loss.clip_epsilon': 1.0, 'loss.clip_epsilon_high': 1e9},
    'ppo': {'loss.proximal': 'behavior'},
}
BOUNDS = {'dg': (0.90, 1.0), 'importance': (0.45, 0.55), 'ppo': (0.0, 0.65)}  # of the median
TOGETHER = 4  # arms of a program: as many as fit a CPU's cache


def make_arm(method: str, seed: int, updates: int, known: Mapping[str, Any]) -> Arm:
    config = load_config(CONFIG)
    own = {'run.steps': updates, 'run.seed': seed, 'staleness.schedule': f'fixed({LAG})', 'learner.n_minibatches': 1}
    common = {'rollout.ignore_eos': True, 'learner.row_tokens': 256, 'learner.row_loss_tokens': 256}
    config.update_from_flattened_dict({**common, **known, **METHODS[method], **own})
    return Arm(f'{method}_{seed}', config)


def share_right(arm: Arm, line: Line) -> float:
    """Share of right symbols: a reward is right symbols / (symbols + 1), because the end of an answer counts too."""
    symbols = arm.config.task.length
    return float(str(line[names.REWARD_MEAN])) * (symbols + 1) / symbols


def measure(
    methods: Sequence[str], seeds: Sequence[int], updates: int, known: Mapping[str, Any], end_s: float
) -> dict[str, Any]:
    """{method: {'seeds', 'rewards': shares of right symbols of the last updates, 'median', 'bounds', 'met'}}."""
    found: dict[str, dict[str, Any]] = {method: {'seeds': [], 'rewards': [], 'at_300': []} for method in methods}
    for first, (method, row) in itertools.product(range(0, len(seeds), TOGETHER), found.items()):
        if first and time.monotonic() > end_s:
            continue
        some = seeds[first : first + TOGETHER]
        arms = [make_arm(method, seed, updates, known) for seed in some]
        for seed, result in zip(some, train_arms(arms), strict=True):
            rewards = [share_right(result.arm, line) for line in result.lines]
            row['seeds'].append(seed)
            row['rewards'].append(float(np.mean(rewards[-WINDOW:])))
            row['at_300'].append(float(np.mean(rewards[250:300])) if len(rewards) >= 300 else None)
        print(method, row['seeds'][-1], row['rewards'][-TOGETHER:], file=sys.stderr, flush=True)
    for method, row in found.items():
        low, high = BOUNDS[method]
        judged = [value for value in row['at_300'] if value is not None] or row['rewards']
        row |= {'median': statistics.median(judged), 'median_at_end': statistics.median(row['rewards'])}
        row |= {'bounds': [low, high], 'met': low <= row['median'] <= high}
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Exits with 0 only if each median lies within its bounds and every seed ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=30.0, help='seeds that have not begun by then are left out')
    parser.add_argument('--seed', type=int, default=500, help='the first one')
    parser.add_argument('--seeds', type=int, default=16)
    parser.add_argument('--updates', type=int, default=300)
    parser.add_argument('--methods', default=','.join(METHODS))
    parser.add_argument('--json', type=pathlib.Path, help='where the report is written')
    parser.add_argument('--small', action='store_true', help='two seeds, 40 updates, no bounds: to try the command')
    options = parser.parse_args(arguments)
    if options.small:
        options.seeds, options.updates = 2, 40
    known = load_module(f'{CONFIG}:get_config', 'CONFIG').CONTROLS.known
    seeds = range(options.seed, options.seed + options.seeds)
    methods = split_choices('methods', options.methods, METHODS)
    found = measure(methods, seeds, options.updates, known, time.monotonic() + 60 * options.minutes)
    covered = {method: len(row['seeds']) for method, row in found.items()}
    print(f'covered: {covered} of {options.seeds} seeds', file=sys.stderr, flush=True)
    report = write_report({'options': {**vars(options), 'json': str(options.json)}, 'methods': found}, options.json)
    complete = all(count == options.seeds for count in covered.values())
    if not options.small and not (complete and all(row['met'] for row in found.values())):
        sys.exit(1)
    return report


if __name__ == '__main__':
    main()
