"""Table 1 of arXiv 2505.24298: asynchronous training against two synchronous systems; ours is colocated, in turns."""

from __future__ import annotations

import dataclasses

from benchmarks.simulation import constants
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, lanes
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.simulated import Simulations

EACH, ENOUGH = 0.30, 3  # bar of the error of a ratio, and rows of four that keep it
_SCALE = constants.SCALE.value


def asynchronous(row: rows.Table1Row, updates: int) -> Setting:
    reward = constants.CODE_REWARD if row.task == 'code' else constants.MATH_REWARD
    groups = rows.TABLE_1_BATCH.groups // _SCALE
    return Setting(row.model, row.devices // _SCALE, groups, row.eta, reward=reward.value, updates=updates)


def synchronous(row: rows.Table1Row, updates: int) -> Setting:
    """All devices generate, then all train; switching is free (constants.SWITCH_S)."""
    return dataclasses.replace(asynchronous(row, updates), eta=0, in_turns=True)


def compare_table_1(simulations: Simulations, updates: int) -> Result:
    found = [_compare(row, simulations, updates) for row in rows.TABLE_1]
    kept = {
        name: sum(bool(each[place].is_met) for each in found)
        for place, name in enumerate(('against sync AReaL', 'against verl'))
    }
    bar = f'{ENOUGH} of 4 ratios of synchronous to asynchronous within {EACH:.0%}, against each system'
    value: dict[str, object] = {f'rows within {EACH:.0%}, {name}': count for name, count in kept.items()}
    return Result('table 1', bar, value, min(kept.values()) >= ENOUGH, [one for each in found for one in each])


def _compare(row: rows.Table1Row, simulations: Simulations, updates: int) -> list[Comparison]:
    """The two ratios first, then seconds of an update."""
    settings = asynchronous(row, updates), synchronous(row, updates)
    ours, sync = (simulations.find(setting) for setting in settings)
    name = f'table 1, {row.model} {row.task}'
    seeds = min(map(simulations.seeds_of, settings))
    ratio = sync.update_s / ours.update_s if ours and sync else None
    both = f'asynchronous: {lanes(ours)}; in turns: {lanes(sync)}' if ours and sync else ''
    missing = '' if ratio else 'there was no time for it'
    published = row.update_s(row.sync_h), row.update_s(row.verl_h), row.update_s(row.async_h)
    of_sync, of_verl, of_ours = published
    return [
        Comparison(f'{name}, sync AReaL / AReaL', 'times', of_sync / of_ours, ratio, EACH, both, missing, seeds),
        Comparison(f'{name}, verl / AReaL', 'times', of_verl / of_ours, ratio, EACH, both, missing, seeds),
        Comparison(
            f'{name}, asynchronous', 's an update', of_ours, ours.update_s if ours else None, None,
            lanes(ours) if ours else '', missing or 'absolute', seeds,
        ),
        Comparison(
            f'{name}, synchronous (ours: in turns, free switching)', 's an update', of_sync,
            sync.update_s if sync else None, None, lanes(sync) if sync else '', missing or 'absolute', seeds,
        ),
    ]  # fmt: skip
