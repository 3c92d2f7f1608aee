"""Eight times the devices: with fixed work a device, and with a fixed batch as in figure 4 of arXiv 2505.24298."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.simulation import constants
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, lanes
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.simulated import Simulations

KEPT = 0.90  # of the speed a device, at fixed work
ETA = 8
_SCALE = constants.SCALE.value
_CONTEXT = 32_768


def setting_of(model: str, devices: int, groups: int, updates: int) -> Setting:
    return Setting(model, devices // _SCALE, groups // _SCALE, ETA, updates=updates)


def compare_devices(simulations: Simulations, updates: int) -> Result:
    small, model = 32, rows.TABLE_1[0].model
    groups = rows.TABLE_1_BATCH.groups
    fixed_work = [setting_of(model, small, groups // 4, updates), setting_of(model, 8 * small, 2 * groups, updates)]
    of_few, of_many = map(simulations.find, fixed_work)
    kept = of_many.tokens_s / of_few.tokens_s / 8 if of_few and of_many else None
    both = f'{small} devices: {lanes(of_few)}; {8 * small}: {lanes(of_many)}' if of_few and of_many else ''
    note = 'at least this much is asked for' if kept else 'there was no time for it'
    found = [
        Comparison(
            'speed a device of 8 times the devices, fixed work a device', 'of that of few', None, kept, None,
            both, f'{note}; {both}', min(map(simulations.seeds_of, fixed_work)),
        )
    ]  # fmt: skip
    for (model, context), published in rows.FIGURE_4.items():
        if context == _CONTEXT and len(published) > 2:
            found += _compare_fixed_batch(model, published, simulations, updates)
    value: dict[str, object] = {'speed a device kept, fixed work': kept}
    bar = f'fixed work a device: >= {KEPT:.0%} of the speed a device; fixed batch beside figure 4'
    return Result('devices', bar, value, kept is not None and kept >= KEPT, found)


def _compare_fixed_batch(
    model: str, published: Mapping[int, tuple[float, float | None]], simulations: Simulations, updates: int
) -> list[Comparison]:
    fewest = min(published)
    found: list[Comparison] = []
    base = None
    for devices, (speed, _) in sorted(published.items()):
        setting = setting_of(model, devices, rows.TABLE_1_BATCH.groups, updates)
        measured = simulations.find(setting)
        base = base or measured
        ratio = measured.tokens_s / base.tokens_s if measured and base else None
        name = f'figure 4, {model}, {devices} devices'
        seeds, shown = simulations.seeds_of(setting), lanes(measured) if measured else ''
        missing = '' if measured else 'there was no time for it'
        if devices == fewest:
            found.append(
                Comparison(
                    f'{name}, tokens a second', 'tokens/s', 1e3 * speed,
                    _SCALE * measured.tokens_s if measured else None, None, shown,
                    missing or 'absolute; figure 4 does not agree with figure 5c, see closure.py', seeds,
                )
            )  # fmt: skip
            continue
        found.append(
            Comparison(
                f'{name} over {fewest}, fixed batch', 'times', speed / published[fewest][0], ratio, None, shown,
                missing, seeds,
            )
        )  # fmt: skip
    return found
