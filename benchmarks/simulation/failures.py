"""Servers that die and come back: what is left of the speed, and what is generated again.

    python -m benchmarks.simulation.failures --json=benchmarks/results/simulation/failures.json

Simulated: configs/simulate/sixteen.py, 12 servers and a learner on 4 accelerators. A server lives for an exponential
time; another one has started in its place after RESTART_S. `engines` are in the process of the learner and do not die.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from areal_jax.events.schema import Event
from areal_jax.files import write_json
from benchmarks.simulation.simulated import simulate_file

CONFIG = 'configs/simulate/sixteen.py'
SERVERS, STEPS, FIRST, LAST = 12, 24, 1, 20  # updates of the run, and those between which it is measured
RESTART_S = 120
OWN = {'rollout.server': 'own', 'publication.channel': 'files', 'rollout.max_retries': 8}
LIFETIMES = {'2 hours': 7200, '30 minutes': 1800, '10 minutes': 600}


def list_arms() -> dict[str, dict[str, Any]]:
    dying = {
        f'die after {name}': OWN
        | {'simulation.failures': f'exponential({seconds})', 'simulation.restart': f'constant({RESTART_S})'}
        for name, seconds in LIFETIMES.items()
    }
    return {'engines': {}, 'live': OWN, **dying}


def simulate(fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
    began_s = time.process_time()
    rows, events = simulate_file(CONFIG, {'run.seed': seed, 'run.steps': STEPS, **fields})
    start_s, end_s = float(rows[FIRST - 1]['time']), float(rows[LAST - 1]['time'])
    measured = rows[FIRST:LAST]
    prefilled = [event for event in events if event['kind'] == 'prefill']
    return {
        'trained_tokens_s': sum(row['update/trained_tokens'] for row in measured) / (end_s - start_s),
        'update_s': (end_s - start_s) / (LAST - FIRST),
        'up': 1 - share_down(events, start_s, end_s) if 'rollout.server' in fields else 1.0,
        'deaths': sum(event['kind'] == 'leave' for event in events),
        'moved': sum(event['kind'] == 'move' for event in events),
        'lost_groups': sum(event['kind'] == 'drop' for event in events),
        'rebuilt_tokens': sum(event['rebuilt'] for event in prefilled),
        'generated_again': find_repeated(events),
        'cpu_s': time.process_time() - began_s,
    }


def share_down(events: list[Event], start_s: float, end_s: float) -> float:
    """Of the time of all servers, from when the pool takes one out until it takes it in again."""
    down_s, out_since = 0.0, dict[str, float]()
    for event in events:
        if event['kind'] == 'engine_state':
            if event['state'] == 'serving' and event['engine'] in out_since:
                since_s = out_since.pop(event['engine'])
                down_s += max(0.0, min(event['time'], end_s) - max(since_s, start_s))
            elif event['state'] != 'serving':
                out_since.setdefault(event['engine'], event['time'])
    down_s += sum(max(0.0, end_s - max(since_s, start_s)) for since_s in out_since.values())
    return down_s / (SERVERS * (end_s - start_s))


def find_repeated(events: list[Event]) -> int:
    """Tokens that were decoded and are in no answer, of runs that have ended; answers under way left out."""
    decoded = sum(event['tokens'] - event.get('discarded', 0) for event in events if event['kind'] == 'decode')
    return decoded - sum(event['tokens'] for event in events if event['kind'] == 'finish')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=pathlib.Path, help='where the results go')
    parser.add_argument('--seed', type=int, default=0)
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name, fields in list_arms().items():
        found[name] = simulate(fields, options.seed)
        share = found[name]['trained_tokens_s'] / found['engines']['trained_tokens_s']
        found[name]['share_of_engines'] = share
        print(name, found[name], flush=True)
    if options.json:
        write_json(options.json, {'config': CONFIG, 'restart_s': RESTART_S, 'seed': options.seed, 'arms': found})


if __name__ == '__main__':
    main()
