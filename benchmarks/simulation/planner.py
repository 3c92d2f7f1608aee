"""The planner against brute force over splits and eta, on drawn clusters of at most 8 devices.

    python -m benchmarks.simulation.planner --minutes=30 --seed=0 --json=FILE     12 clusters, 20 settings each
    python -m benchmarks.simulation.planner --clusters=2 --settings=6             a small one

64 answers an update. A cluster is drawn with its chip, model, lengths, size of groups, largest eta and price of age.
Brute force simulates so many settings, every split with the largest eta, with half of it, a quarter and so on, each as
the planner does. Two checks a cluster:

 - the planner's plan is worth at most 2% less than the best of brute force and planner together;
 - its interval holds the speed at which another run of the plan, with other lengths, trains in 12 updates in a row.

Ends with 0 only if all clusters ran in time, each plan was within 2%, and five of six intervals held.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from areal_jax.app.simulate.planning import MOST_SIMULATIONS, WINDOW, simulate_plan
from areal_jax.config.fields import ConfigError
from areal_jax.simulation.planner.advice import describe_lengths, find_interval, make_setting
from areal_jax.simulation.planner.neighbours import Outcome, Plan, Search, Setting, choose_start, list_plans, worth
from areal_jax.simulation.prices import find_chip, find_shape

ANSWERS = 64
CORES = 2
WITHIN, HELD = 0.02, 5 / 6  # of the best; of the intervals
_DEVICES = range(3, 9)
_CHIPS = ('H800', 'A100', 'H100', 'H200')
_MODELS = ('Qwen3-0.6B', 'R1-distill-1.5B', 'R1-distill-1.5B', 'Qwen3-8B')
_LENGTHS = (
    'lognormal(1000, 0.6)', 'lognormal(2000, 0.75)', 'lognormal(4000, 1.0)', 'exponential(1500)', 'uniform(200, 3000)',
    'constant(1500)', 'mixture(0.7 lognormal(500, 0.5), 0.3 lognormal(2000, 0.5))',
)  # fmt: skip
_GROUP_SIZES = (4, 8, 16)
_MOST_ETA = (8, 16, 32)
_PRICES = (0.0, 0.0, 0.01, 0.03)
_PARTS = (1, 0.5, 0.25, 0.75, 0.125, 0.375, 0.0625, 0.625, 0.875, 0)  # of the largest eta
_SEED, _OTHER_SEED = 1, 1001  # of lengths: of the plan, and of the run that its interval is to hold


@dataclasses.dataclass(frozen=True)
class Case:
    devices: int
    chip: str
    model: str
    lengths: str
    group_size: int
    most_eta: int
    age_price: float

    def build(self) -> Setting:
        """Raises ConfigError where the devices are too few."""
        answers = describe_lengths(self.lengths, ANSWERS, self.group_size)
        chip, shape = find_chip(self.chip), find_shape(self.model)
        return make_setting(self.devices, chip, shape, answers, most_eta=self.most_eta, age_price=self.age_price)


def draw_cases(count: int, seed: int) -> list[Case]:
    """Clusters that hold an engine and a learner, with more than one split."""
    rng, cases = random.Random(seed), list[Case]()
    while len(cases) < count:
        asked = (_DEVICES, _CHIPS, _MODELS, _LENGTHS, _GROUP_SIZES, _MOST_ETA, _PRICES)
        case = Case(*(rng.choice(choices) for choices in asked))
        try:
            setting = case.build()
        except ConfigError:
            continue
        if len(list(list_plans(setting, 1, 0))) > 1:
            cases.append(case)
    return cases


def list_settings(setting: Setting, count: int) -> list[Plan]:
    """All splits with each eta in turn."""
    etas = dict.fromkeys(round(setting.most_eta * part) for part in _PARTS)
    plans = itertools.chain.from_iterable(list_plans(setting, setting.most_slots, eta) for eta in etas)
    return list(itertools.islice(plans, count))


class _LateError(Exception):
    """The minutes are over."""


def run_case(case: Case, settings: int, end_s: float) -> dict[str, Any]:
    """One cluster; {'late': True} where there was no time for it. `end_s`: of time.time."""
    setting, known, began = case.build(), dict[Plan, Outcome](), time.process_time()

    def simulate(plan: Plan) -> Outcome:
        if time.time() > end_s:
            raise _LateError
        if plan not in known:
            known[plan] = simulate_plan(setting, plan, seed=_SEED)
        return known[plan]

    try:
        search = Search(setting, simulate, MOST_SIMULATIONS)
        plan = search.run(choose_start(setting))
        planned_s = time.process_time() - began
        brute = {one: simulate(one) for one in list_settings(setting, settings)}
        again = simulate_plan(setting, plan, seed=_OTHER_SEED, updates=WINDOW)
    except _LateError:
        return {'case': dataclasses.asdict(case), 'late': True}
    best = max(known, key=lambda one: worth(setting, known[one]))
    low, high = find_interval(setting, plan, known[plan])
    return {
        'case': dataclasses.asdict(case), 'late': False,
        'plan': dataclasses.asdict(plan), 'outcome': dataclasses.asdict(known[plan]),
        'best': dataclasses.asdict(best), 'best_outcome': dataclasses.asdict(known[best]),
        'short': 1 - worth(setting, known[plan]) / worth(setting, known[best]),
        'interval': [low, high], 'again': again.trained_s, 'holds': low <= again.trained_s <= high,
        'simulations': len(search.tried), 'settings': len(brute), 'planned_cpu_s': planned_s,
        'cpu_s': time.process_time() - began,
        'known': [[one.engines, one.training, one.eta, found.tokens_s, found.age_mean] for one, found in known.items()],
    }  # fmt: skip


def describe(row: dict[str, Any]) -> str:
    case = row['case']
    name = (
        f'{case["devices"]} x {case["chip"]:4} {case["model"]:16} {case["lengths"]:24} x {case["group_size"]:2}, '
        f'eta to {case["most_eta"]:2}, price {case["age_price"]:g}'
    )
    if row['late']:
        return f'{name}: no time'
    (plan, best), (low, high) = (row['plan'], row['best']), row['interval']
    return (
        f'{name}: {plan["engines"]} + {plan["training"]} eta {plan["eta"]}, best {best["engines"]} + '
        f'{best["training"]} eta {best["eta"]}: {100 * row["short"]:.1f}% short; {low:,.0f} to {high:,.0f}, '
        f'again {row["again"]:,.0f}{"" if row["holds"] else " MISSED"}; {row["simulations"]} simulations, '
        f'{row["cpu_s"]:.0f} CPU s'
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=30.0)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', type=pathlib.Path)
    parser.add_argument('--clusters', type=int, default=12)
    parser.add_argument('--settings', type=int, default=20)
    options = parser.parse_args(arguments)
    began_s = time.time()
    end_s = began_s + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    spawned = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(CORES, mp_context=spawned) as pool:
        cases = draw_cases(options.clusters, options.seed)
        work = [pool.submit(run_case, case, options.settings, end_s) for case in cases]
        for done in concurrent.futures.as_completed(work):
            rows.append(done.result())
            print(describe(rows[-1]), flush=True)
    ran = [row for row in rows if not row['late']]
    within, held = (sum(map(bool, found)) for found in ([r['short'] <= WITHIN for r in ran], [r['holds'] for r in ran]))
    met = len(ran) == len(rows) > 0 and within == len(ran) and held >= HELD * len(ran)
    summary = {
        'met': met, 'clusters': len(rows), 'ran': len(ran), 'within': within, 'intervals_held': held,
        'most_short': max((row['short'] for row in ran), default=None), 'minutes': (time.time() - began_s) / 60,
        'seed': options.seed, 'rows': rows,
    }  # fmt: skip
    print(json.dumps({name: value for name, value in summary.items() if name != 'rows'}))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summary, indent=1) + '\n')
    return 0 if met else 1


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
