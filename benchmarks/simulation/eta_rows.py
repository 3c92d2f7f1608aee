"""Throughput over eta: figure 5c and table 7 of arXiv 2505.24298, as ratios over eta 0."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.simulation import constants
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, lanes, largest_error, median_error
from benchmarks.simulation.setting import Setting
from benchmarks.simulation.simulated import Simulations

MEDIAN, EACH = 0.15, 0.30  # bars of the errors
MODEL = rows.TABLE_1[0].model
_SCALE = constants.SCALE.value


def figure_5c_setting(eta: float, updates: int) -> Setting:
    groups = rows.TABLE_1_BATCH.groups // _SCALE
    return Setting(MODEL, rows.TABLE_1[0].devices // _SCALE, groups, eta, updates=updates)


def table_7_setting(eta: float, updates: int) -> Setting:
    """Not divided: 8 devices."""
    return Setting(
        MODEL, rows.TABLE_7_DEVICES, rows.TABLE_7_BATCH.groups, eta, rows.TABLE_7_BATCH,
        constants.R1_LENGTHS_8K.value, updates=updates,
    )  # fmt: skip


def compare_figure_5c(simulations: Simulations, updates: int) -> Result:
    settings = {eta: figure_5c_setting(eta, updates) for eta in rows.FIGURE_5C}
    return _compare('figure 5c', settings, rows.FIGURE_5C, _SCALE, simulations)


def compare_table_7(simulations: Simulations, updates: int) -> Result:
    settings = {eta: table_7_setting(eta, updates) for eta in rows.TABLE_7}
    return _compare('table 7', settings, {eta: speed for eta, (speed, _) in rows.TABLE_7.items()}, 1, simulations)


def _compare(
    part: str, settings: Mapping[float, Setting], published: Mapping[float, float], scale: int, simulations: Simulations
) -> Result:
    base = simulations.find(settings[0])
    ratios, speeds = [], []
    for eta, setting in settings.items():
        found = simulations.find(setting)
        shown, seeds = (lanes(found) if found else ''), simulations.seeds_of(setting)
        if eta:
            ratio = found.tokens_s / base.tokens_s if found and base else None
            ratios.append(
                Comparison(
                    f'{part}, eta {eta:g} over eta 0', 'times', published[eta] / published[0], ratio, EACH, shown,
                    '' if found else 'there was no time for it', seeds,
                )
            )  # fmt: skip
        speeds.append(
            Comparison(
                f'{part}, eta {eta:g}, tokens a second', 'tokens/s', published[eta],
                scale * found.tokens_s if found else None, None, shown,
                'absolute' if found else 'there was no time for it', seeds,
            )
        )  # fmt: skip
    middle, most = median_error(ratios), largest_error(ratios)
    met = (
        middle is not None and middle <= MEDIAN and all(row.is_met for row in ratios)
    )  # one that was not run is missed
    value: dict[str, object] = {'median_error': middle, 'largest_error': most}
    return Result(part, f'median error <= {MEDIAN:.0%}, each <= {EACH:.0%}', value, met, [*ratios, *speeds])
