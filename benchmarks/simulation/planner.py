"""The planner's split against that of brute force: every split simulated, on clusters of 4 to 16 devices.

    python -m benchmarks.simulation.planner                       prints a line for each of 20 cases
    python -m benchmarks.simulation.planner --json=FILE           also writes them, each when it is known
    python -m benchmarks.simulation.planner --json=FILE --keep    goes on behind the cases that FILE has
    python -m benchmarks.simulation.planner --cases=3             the first three

256 answers an update. Brute force has the planner's eta and slots, and simulates every split of all devices; the
split of two loads alone (closed_forms.throughput.best_whole_split: full slots, no tail, no gate, no rebuilt caches)
stands beside both. A simulation does not tell splits apart that are within 1% of each other: `off_as_fast` is the
distance to the nearest of the splits that are as fast as the fastest, `off` that to the fastest itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import time
from typing import Any

from areal_jax.app.simulate.planning import simulate_plan
from areal_jax.simulation.chips import find_chip
from areal_jax.simulation.closed_forms.throughput import best_whole_split
from areal_jax.simulation.planner.neighbours import TIE, Search
from areal_jax.simulation.planner.plan_setting import Outcome, Plan, Setting
from areal_jax.simulation.planner.prediction import choose_start, list_plans, train_s
from areal_jax.simulation.planner.question import describe_lengths, make_setting
from areal_jax.simulation.roofline import Roofline, step_overhead_s
from areal_jax.simulation.shapes import find_shape

ANSWERS = 256
MOST_SIMULATIONS = 24


@dataclasses.dataclass(frozen=True)
class Case:
    devices: int
    chip: str
    model: str
    lengths: str
    group_size: int
    most_eta: int
    max_age: float | None = None


CASES = (
    Case(16, 'H800', 'R1-distill-1.5B', 'lognormal(9000, 0.75)', 16, 1),
    Case(8, 'H800', 'R1-distill-1.5B', 'lognormal(2000, 0.75)', 16, 2),
    Case(8, 'A100', 'Qwen3-0.6B', 'lognormal(1000, 0.6)', 8, 1),
    Case(9, 'H200', 'R1-distill-7B', 'lognormal(4000, 0.75)', 16, 1),
    Case(6, 'H100', 'Qwen3-0.6B', 'constant(2000)', 8, 2),
    Case(7, 'H800', 'R1-distill-1.5B', 'lognormal(4000, 1.0)', 8, 1),
    Case(4, 'H800', 'R1-distill-1.5B', 'lognormal(1000, 0.75)', 4, 1),
    Case(12, 'H800', 'Qwen3-8B', 'lognormal(2000, 0.6)', 8, 1),
    Case(8, 'H800', 'R1-distill-1.5B', 'exponential(3000)', 16, 2),
    Case(9, 'H800', 'R1-distill-7B', 'lognormal(8000, 0.75)', 8, 2),
    Case(6, 'H200', 'Qwen3-0.6B', 'lognormal(16000, 0.75)', 16, 1),
    Case(10, 'A100', 'R1-distill-1.5B', 'lognormal(1000, 0.75)', 16, 1),
    Case(5, 'H800', 'R1-distill-1.5B', 'lognormal(9000, 0.75)', 16, 3),
    Case(7, 'H100', 'Qwen3-0.6B', 'uniform(500, 4000)', 8, 1),
    Case(10, 'H800', 'R1-distill-1.5B', 'lognormal(500, 0.75)', 8, 1),
    Case(7, 'H200', 'Llama-3.1-8B', 'lognormal(1000, 0.75)', 8, 1),
    Case(8, 'v5p', 'R1-distill-1.5B', 'lognormal(4000, 0.75)', 16, 1),
    Case(12, 'v6e', 'Qwen3-0.6B', 'lognormal(500, 0.75)', 4, 1),
    Case(6, 'H800', 'R1-distill-1.5B', 'lognormal(2000, 0.75)', 16, 3, max_age=1.0),
    Case(8, 'H800', 'Qwen3-0.6B', 'mixture(0.7 lognormal(500, 0.5), 0.3 lognormal(2000, 0.5))', 8, 1),
)


def build(case: Case) -> Setting:
    answers = describe_lengths(case.lengths, ANSWERS, case.group_size)
    chip, shape = find_chip(case.chip), find_shape(case.model)
    return make_setting(case.devices, chip, shape, answers, case.max_age, case.most_eta)


def split_of_loads(setting: Setting) -> int:
    """Engines' devices by closed form 3.13."""
    answers, slots = setting.answers, setting.most_slots
    overhead_s = max(0.0, step_overhead_s(setting.chip, setting.shape, setting.costs.reached))
    engine = Roofline(setting.chip, setting.shape, setting.costs.reached, setting.engine_devices, overhead_s)
    generation_s = answers.tokens * engine.step_s(slots, slots * answers.live_positions) / slots
    device_s = generation_s * setting.engine_devices, train_s(setting, 1)
    return int(best_whole_split(setting.devices, *device_s).generating)


@dataclasses.dataclass(frozen=True)
class Row:
    case: Case
    plan: Plan
    brute: Plan  # the fastest split, all devices used
    off: int  # devices between the two splits
    off_as_fast: int  # to the nearest of the splits that are within TIE of the fastest
    slower: float  # of the planner's plan, against brute force
    off_closed_form: int
    simulations: int
    seconds: float
    speeds: dict[int, float]  # of every split: devices that generate -> tokens a second


def run_case(case: Case) -> Row:
    setting, began = build(case), time.perf_counter()
    known: dict[Plan, Outcome] = {}

    def simulate(plan: Plan) -> Outcome:
        if plan not in known:
            known[plan] = simulate_plan(setting, plan)
        return known[plan]

    search = Search(setting, simulate, MOST_SIMULATIONS)
    plan = search.run(choose_start(setting))
    simulations, seconds = len(search.tried), time.perf_counter() - began
    each = setting.engine_devices
    found = {one: simulate(one) for one in list_plans(setting, plan.slots, plan.eta)}
    bound = math.inf if case.max_age is None else case.max_age
    kept = {one: outcome for one, outcome in found.items() if outcome.age_mean <= bound} or found
    brute = max(kept, key=lambda one: kept[one].tokens_s)
    as_fast = [one for one in kept if kept[one].tokens_s >= (1 - TIE) * kept[brute].tokens_s]
    return Row(
        case, plan, brute,
        abs(brute.engines - plan.engines) * each, min(abs(one.engines - plan.engines) for one in as_fast) * each,
        1 - search.tried[plan].tokens_s / kept[brute].tokens_s,
        abs(split_of_loads(setting) - brute.engines * each), simulations, seconds,
        {one.engines * each: outcome.tokens_s for one, outcome in found.items()},
    )  # fmt: skip


def describe(row: Row) -> str:
    case, plan = row.case, row.plan
    return (
        f'{case.devices:2} x {case.chip:4} {case.model:16} {case.lengths:24} eta {plan.eta}: '
        f'{plan.engines} engines + {plan.training}, brute force {row.brute.engines} + {row.brute.training}: '
        f'{row.off} off ({row.off_as_fast} of one as fast), {100 * row.slower:.1f}% slower; closed form '
        f'{row.off_closed_form} off; {row.simulations} simulations, {row.seconds:.0f} s'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', type=int, default=len(CASES))
    parser.add_argument('--json', type=pathlib.Path)
    parser.add_argument('--keep', action='store_true')
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.keep else []
    for case in CASES[len(rows) : options.cases]:
        row = run_case(case)
        print(describe(row), flush=True)
        rows.append(dataclasses.asdict(row))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(rows, indent=1) + '\n')
    within, close = (sum(row[name] <= 1 for row in rows) for name in ('off', 'off_as_fast'))
    slowest = 100 * max(row['slower'] for row in rows)
    print(f'{within} of {len(rows)} within one device, {close} of one as fast; slower by {slowest:.1f}% at most')


if __name__ == '__main__':
    main()
