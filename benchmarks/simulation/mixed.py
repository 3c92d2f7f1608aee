"""Engines of two speeds in one pool: tokens a second against the sum of both classes alone, and ages.

    python -m benchmarks.simulation.mixed --json=benchmarks/results/simulation/mixed.json

Simulated: configs/simulate/mixed.py, four engines and four of a third of their speed. `together` routes by outstanding
tokens, with `moved` an answer of three versions leaves a slow engine, and `bounded` drops groups with a token of more
than BOUND versions, which the slow class breaks and the fast one does not. `spare` leaves the slow class out where the
fast one has room (rollout.slow_engines): not here, where the learner waits, but where the learner is the bottleneck.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from areal_jax.files import write_json
from benchmarks.simulation.simulated import simulate_file

CONFIG = 'configs/simulate/mixed.py'
STEPS, FIRST, LAST = 40, 12, 30  # updates of the run, and those between which it is measured
VERSIONS, BOUND = 3, 14
ALONE = {'cluster.engines': '4 x tensor=1'}
MOVED = {'rollout.slow_versions': VERSIONS}
SPARE = {'rollout.slow_engines': 'spare'}
LEARNER_BOUND = {'cluster.learner': 'data=2', 'staleness.eta': 2.0}
BOUNDED = {'staleness.max_token_age': BOUND, 'staleness.over_age': 'drop'}
ARMS: Mapping[str, Mapping[str, Any]] = {
    'fast alone': ALONE | {'simulation.engine_chips': '4 x H800'},
    'slow alone': ALONE | {'simulation.engine_chips': '4 x H800/3'},
    'together': {},
    'together, moved': MOVED,
    'together, bounded': BOUNDED,
    'together, bounded, moved': BOUNDED | MOVED,
    'together, spare': SPARE,
    'learner-bound': LEARNER_BOUND,
    'learner-bound, moved': LEARNER_BOUND | MOVED,
    'learner-bound, spare': LEARNER_BOUND | SPARE,
    'learner-bound, fast alone': LEARNER_BOUND | ALONE | {'simulation.engine_chips': '4 x H800'},
}


def simulate(fields: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Tokens a second in the measured updates, of all engines and of each; ages and drops."""
    rows, events = simulate_file(CONFIG, {'run.seed': seed, 'run.steps': STEPS, **fields})
    start, end = float(rows[FIRST - 1]['time']), float(rows[LAST - 1]['time'])
    tokens: collections.Counter[str] = collections.Counter()
    for event in events:
        if event['kind'] == 'decode' and start < event['time'] <= end:
            tokens[event['engine']] += event['tokens']
    measured = rows[FIRST:LAST]
    return {
        'tokens_s': sum(tokens.values()) / (end - start),
        'by_engine': {name: count / (end - start) for name, count in sorted(tokens.items())},
        'age_mean': statistics.mean(row['staleness/token_age_mean'] for row in measured),
        'age_max': max(row['staleness/token_age_max'] for row in measured),
        'dropped': sum(event['kind'] == 'drop' for event in events),
        'moved': sum(event['kind'] == 'move' for event in events),
        'spared': [
            {name: event[name] for name in ('mode', 'version', 'open', 'slots', 'speed', 'reason')}
            for event in events
            if event['kind'] == 'spare'
        ],
        'trained_tokens_s': sum(row['update/trained_tokens'] for row in measured) / (end - start),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=pathlib.Path, help='where the results go')
    parser.add_argument('--seed', type=int, default=0, help='the first of the seeds')
    parser.add_argument('--seeds', type=int, default=1, help='how many')
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for seed in range(options.seed, options.seed + options.seeds):
        for name, fields in ARMS.items():
            found[name].append(simulate(fields, seed))
            print(seed, name, {key: value for key, value in found[name][-1].items() if key != 'by_engine'}, flush=True)
    alone = [
        fast['tokens_s'] + slow['tokens_s'] for fast, slow in zip(found['fast alone'], found['slow alone'], strict=True)
    ]
    shares = {
        name: [one['tokens_s'] / total for one, total in zip(arms, alone, strict=True)] for name, arms in found.items()
    }
    print({name: [round(share, 3) for share in of_arm] for name, of_arm in shares.items()})
    if options.json:
        write_json(options.json, {'arms': found, 'share_of_the_sum': shares})


if __name__ == '__main__':
    main()
