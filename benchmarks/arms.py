"""Many arms in one program against as many single runs one after another in one process.

    python -m benchmarks.arms --out=benchmarks/results/arms.json [--arms=64] [--runs=8] [--turns=5] [--small]

The work is configs/tiny_cpu.py with answers of one length (rollout.ignore_eos), in lock-step: lags 0 to 16 x decoupled,
plain and A-3PO x learning rates, a seed each. One side trains all arms with arms/, as one vmap. The other makes --runs
of them with the trainer of main_train, under the virtual clock and with an engine that decodes a batch in one dispatch;
their time counts as many times as there are more arms. Compilation, evaluation and the start of runs are left out on
both sides: a call of the program is timed whole, a run from its first admission to its last update. Sides are processes
that take turns. Ratios are single over together, in seconds a generated token: the median over the turns, and the lower
quartile. The bar is on CPU seconds.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from areal_jax.app.command_line import load_config
from areal_jax.errors import UserError
from benchmarks.generation import limit_threads, processor
from benchmarks.ratios import Bar, Run, compare
from benchmarks.report import write_report
from benchmarks.sides import Side, ask_in_turns

CONFIG = 'configs/tiny_cpu.py'
BAR = Bar(10.0, at_least=True)
LAGS = (0, 1, 2, 4, 8, 16)
CENTRES = ('recompute', 'behavior', 'loglinear')
_COMMON = {
    'run.clock': 'virtual', 'run.export': False, 'evaluation.problems': 0, 'telemetry.progress': False,
    'telemetry.tensorboard': False, 'telemetry.plots': False, 'rollout.ignore_eos': True,
}  # fmt: skip

Fields = Mapping[str, Any]


def arm_config(fields: Fields) -> config_dict.ConfigDict:
    """The config of an arm that differs from CONFIG in `fields`."""
    config = load_config(CONFIG)
    config.update_from_flattened_dict(dict(fields))
    return config


def make_arms(count: int, updates: int, *, minibatches: int, small: bool) -> dict[str, Fields]:
    """Fields of each arm by its name; neighbours differ in every axis, so that the first few are a sample of all."""
    config = load_config(CONFIG)
    groups, size = (2, 2) if small else (config.learner.groups_per_update, config.rollout.group_size)
    length = config.task.length
    work = {
        'run.steps': updates, 'rollout.group_size': size, 'learner.groups_per_update': groups,
        'learner.n_minibatches': minibatches, 'rollout.max_new_tokens': length, 'rollout.decode_steps': length,
        'rollout.slots': groups * size, 'rollout.max_running_groups': groups,
        # a micro-batch holds a minibatch
        'learner.rows_per_microbatch': 1, 'learner.row_tokens': groups * (2 * length + 1) * size,
        'learner.row_loss_tokens': groups * length * size,
    }  # fmt: skip
    arms: dict[str, Fields] = {}
    for number in range(count):
        seed, lag = number, LAGS[number % len(LAGS)]
        centre = CENTRES[(number // len(LAGS) + number) % len(CENTRES)]
        rate = (5e-4, 1e-3, 2e-3)[number // 2 % 3]
        own = {
            'run.seed': seed, 'staleness.schedule': f'fixed({lag})', 'loss.proximal': centre,
            'optimizer.learning_rate': rate,
        }  # fmt: skip
        arms[f'lag{lag}_{centre}_{rate:g}_seed{seed}'] = {**_COMMON, **work, **own}
    return arms


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Calls of both sides in turns, and their ratio."""
    calls = options.turns + 2 + -(-max(LAGS) // options.updates)  # at first it generates what the longest lag needs
    shape = {'minibatches': options.minibatches, 'small': options.small}
    together = make_arms(options.arms, calls * options.updates, **shape)
    single = dict(itertools.islice(make_arms(options.arms, options.updates, **shape).items(), options.runs))
    arguments_of = {
        'together': {'side': 'together', 'arms': together, 'updates': options.updates},
        'single': {'side': 'single', 'arms': single},
    }
    sides = {name: Side(sys.executable, 'benchmarks.side_arms', arguments) for name, arguments in arguments_of.items()}
    try:
        found: dict[str, list[Run]] = ask_in_turns(sides, options.turns)
    finally:
        for side in sides.values():
            side.close()
    ratios = compare(found['together'], {'single': found['single']}, BAR, ('cpu_s',))
    return {
        'arms': options.arms,
        'runs': options.runs,
        'updates': options.updates,
        'bar': BAR.value,
        **ratios,
        'calls': found,
    }


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path)
    parser.add_argument('--arms', type=int, default=64, help='in one program')
    parser.add_argument('--runs', type=int, default=8, help='single runs of a call')
    parser.add_argument('--updates', type=int, default=20, help='of a call')
    parser.add_argument('--minibatches', type=int, default=1, help='optimizer steps of an update')
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--small', action='store_true', help='updates of 2 groups of 2: to try the command')
    options = parser.parse_args(arguments)
    for name in ('arms', 'runs', 'updates', 'minibatches', 'turns'):
        if getattr(options, name) < 1:
            raise UserError(f'--{name}={getattr(options, name)} must be at least 1')
    if options.runs > options.arms:
        raise UserError(f'--runs={options.runs} are some of the arms, so at most --arms={options.arms}')
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = read_options(arguments)
    limit_threads(2)
    row = measure(options)
    command = 'python -m benchmarks.arms ' + ' '.join(sys.argv[1:] if arguments is None else arguments)
    return write_report({'rows': [row], 'command': command, 'processor': processor()}, options.out)


if __name__ == '__main__':
    try:
        main()
    except UserError as error:
        sys.exit(f'benchmarks.arms: {error}')
