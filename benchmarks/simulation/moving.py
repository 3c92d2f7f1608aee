"""Devices that follow growing answers, against splits that stay: configs/simulate/moving.py, 32 devices.

    python -m benchmarks.simulation.moving --json=benchmarks/results/simulation/moving.json

`auto` begins with half of the devices for generation. It is compared with the best of the splits that stay, and with
the one that was best in the first updates. Without drift (answers as long as in the middle) it begins
with the split that is best there, and should not leave it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.app.command_line import load_config
from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.config.cluster import parse_engines, parse_learner
from areal_jax.events.schema import Event
from areal_jax.files import write_json
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line

CONFIG = 'configs/simulate/moving.py'
MEASURED = 120  # updates, of which each quarter has its lengths; the run has more, so that engines stay supplied
FIRST, LAST = 10, 20  # updates between which the start is measured: the pipeline is full by then
STAYS = {'cluster.reallocate': 'off'}
PARTS = ('growing', 'constant')
CONSTANT = {'simulation.answers': 'lognormal(5657, 0.75)'}  # the middle of 2,000 and 16,000 on a logarithmic scale


class _Measured(Exception):
    """Ends a run whose measured updates are over."""


def split_fields(engines: int) -> dict[str, str]:
    """So many of the devices generate."""
    config = load_config(CONFIG)
    total = parse_learner(config.cluster.learner).devices + parse_engines(config.cluster.engines).devices
    return {'cluster.learner': f'data={total - engines}', 'cluster.engines': f'{engines} x tensor=1'}


def simulate(fields: Mapping[str, Any], seed: int, updates: int = MEASURED) -> dict[str, Any]:
    """Trained tokens a second, of the whole run and of its first updates, and the moves."""
    config, began_s = load_config(CONFIG), time.process_time()
    quiet = {'telemetry.progress': False, 'telemetry.tensorboard': False}
    with config.unlocked():
        config.update_from_flattened_dict({'run.seed': seed, **quiet, **fields})
    rows: list[Line] = []
    moves: list[Event] = []

    def on_event(event: Event) -> None:
        if event['kind'] == 'reallocate':
            moves.append(event)

    def on_row(step: int, row: Line) -> None:
        rows.append(row)
        if len(rows) == updates:
            raise _Measured

    with tempfile.TemporaryDirectory() as directory, contextlib.suppress(_Measured):
        run = build_simulation(config, pathlib.Path(directory) / 'run')
        run.program.parts.host.log.listeners.append(on_event)
        run.program.parts.metrics.listeners.append(on_row)
        run.train()
    tokens = list(itertools.accumulate(float(row[names.UPDATE_TOKENS]) for row in rows))
    first_s = float(rows[LAST - 1]['time']) - float(rows[FIRST - 1]['time'])
    return {
        'tokens_s': tokens[-1] / float(rows[-1]['time']),
        'first_tokens_s': (tokens[LAST - 1] - tokens[FIRST - 1]) / first_s,
        'seconds': float(rows[-1]['time']),
        'times': [round(float(row['time']), 1) for row in rows],
        'token_age': sum(float(row[names.TOKEN_AGE_MEAN]) for row in rows) / len(rows),
        'moves': [
            {key: value for key, value in move.items() if key in ('update', 'learner', 'engines', 'moved', 'seconds')}
            for move in moves
        ],
        'cpu_s': time.process_time() - began_s,
    }


def compare(found: Mapping[int, Mapping[str, Any]], moving: Mapping[str, Any]) -> dict[str, Any]:
    """`found` are the splits that stay, by engines."""
    best = max(found, key=lambda engines: found[engines]['tokens_s'])
    at_start = max(found, key=lambda engines: found[engines]['first_tokens_s'])
    return {
        'best_engines': best,
        'best_at_start_engines': at_start,
        'over_best': moving['tokens_s'] / found[best]['tokens_s'],
        'over_best_at_start': moving['tokens_s'] / found[at_start]['tokens_s'],
    }


def measure(
    engines: Sequence[int],
    seed: int,
    fields: Mapping[str, Any] | None = None,
    parts: Sequence[str] = PARTS,
    updates: int = MEASURED,
) -> dict[str, Any]:
    """Every split, then `auto`, with growing answers; and with constant ones, from the split that is best there."""
    results: dict[str, Any] = {}
    more = dict(fields or {})
    for name in parts:
        lengths = CONSTANT if name == 'constant' else {}
        stays = {}
        for number in engines:
            stays[number] = simulate({**more, **lengths, **split_fields(number), **STAYS}, seed, updates)
            print(seed, name, number, stays[number], flush=True)
        best = max(stays, key=lambda number: stays[number]['tokens_s'])
        begin = split_fields(best) if lengths else {}
        moving = simulate({**more, **lengths, **begin}, seed, updates)
        print(seed, name, 'auto', moving, flush=True)
        results[name] = {'stays': stays, 'auto': moving, **compare(stays, moving)}
        print({key: value for key, value in results[name].items() if key not in ('stays', 'auto')}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=pathlib.Path, help='where the results go')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--engines', default='12,13,14,16,18,19,20,22', help='the splits that stay')
    parser.add_argument('--eta', type=float, help='in place of staleness.eta of the config')
    parser.add_argument('--parts', default=','.join(PARTS), help='which lengths: growing, constant')
    parser.add_argument('--updates', type=int, default=MEASURED, help='that are measured')
    options = parser.parse_args()
    if unknown := sorted(set(options.parts.split(',')) - set(PARTS)):
        parser.error(f'--parts={options.parts}: {", ".join(unknown)} is none of {", ".join(PARTS)}')
    if options.updates < LAST:
        parser.error(f'--updates={options.updates}: the start is measured up to update {LAST}')
    fields = {} if options.eta is None else {'staleness.eta': options.eta}
    results = measure(
        [int(number) for number in options.engines.split(',')],
        options.seed,
        fields,
        options.parts.split(','),
        options.updates,
    )
    if options.json:
        write_json(options.json, {'seed': options.seed, **results})


if __name__ == '__main__':
    main()
