"""marin's runs on 32 + 8 H100, at their own size, with an assumed shape of the model (constants.SNOWBALL_SHAPE).

Their loop drops answers that are too old and generates others, and publishes after every second update where it says
so; here an answer that would be too old is not begun, and every update is published.
"""

from __future__ import annotations

from areal_jax.simulation.prices import H100
from benchmarks.simulation import constants
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, lanes, median_error
from benchmarks.simulation.setting import SNOWBALL, Setting
from benchmarks.simulation.simulated import Simulations

GROUP_SIZE, CAP = 4, rows.ADDITIVE_ROWS[-1].cap  # the cap where a row names none
ANSWERS = rows.ADDITIVE_ANSWERS // rows.ADDITIVE_UPDATES  # of an update
ALLOWANCE_UPDATES = 100
_ASSUMED = 'the shape of the model is assumed'
_EVERY = 'published after every second update there, after every one here'
_NO_CAP = f'the cap is not published, {CAP:,} is assumed'


def setting_of(training: int, generating: int, cap: int, eta: float, updates: int) -> Setting:
    batch = rows.Batch(ANSWERS // GROUP_SIZE, GROUP_SIZE, cap, minibatches=1)
    return Setting(
        SNOWBALL, training + generating, batch.groups, eta, batch, constants.SNOWBALL_LENGTHS.value,
        generating=generating, updates=updates, chip=H100,
    )  # fmt: skip


def compare_snowball(simulations: Simulations, updates: int) -> Result:
    """Wall seconds of so many updates: those of the simulated ones, times as many."""

    def compare(row: str, setting: Setting, total: int, published: float, note: str) -> Comparison:
        found = simulations.find(setting)
        if found is None:
            return Comparison(row, 's', published, None, note='there was no time for it')
        return Comparison(
            row, 's', published, total * found.update_s, None, lanes(found), f'absolute; {note}',
            simulations.seeds_of(setting),
        )  # fmt: skip

    caps = {row.cap: setting_of(32, 8, row.cap, 1, updates) for row in rows.ADDITIVE_ROWS}
    splits = {row: setting_of(row.training, row.generating, CAP, 1, updates) for row in rows.ALLOCATION_ROWS}
    allowances = {eta: setting_of(32, 8, CAP, eta, updates) for eta in range(len(rows.ALLOWANCE_MAIN))}
    absolute = [
        *(
            compare(
                f'marin, cap {row.cap:,}: seconds of 25 updates', caps[row.cap], rows.ADDITIVE_UPDATES, row.core_s,
                f'{_ASSUMED}; publication is {row.publication:.0%} of the published time',
            )
            for row in rows.ADDITIVE_ROWS
        ),
        *(
            compare(
                f'marin, {row.training} + {row.generating} devices: seconds of 25 updates', setting,
                rows.ADDITIVE_UPDATES, row.total_s, f'{_ASSUMED}; {_NO_CAP}; {_EVERY}',
            )
            for row, setting in splits.items()
        ),
        *(
            compare(
                f'marin, allowance {eta}: seconds of {ALLOWANCE_UPDATES} updates', setting, ALLOWANCE_UPDATES,
                rows.ALLOWANCE_MAIN[eta], f'{_ASSUMED}; {_NO_CAP}',
            )
            for eta, setting in allowances.items()
        ),
    ]  # fmt: skip
    few, many = (simulations.find(setting) for setting in splits.values())
    published = [row.total_s for row in rows.ALLOCATION_ROWS]
    at_zero = simulations.find(allowances[0])
    ratios = [
        Comparison(
            'marin, 32 + 16 devices over 32 + 8: seconds', 'times', published[1] / published[0],
            many.update_s / few.update_s if few and many else None, None, '', _ASSUMED,
        ),
        *(
            Comparison(
                f'marin, allowance {eta} over 0: seconds', 'times', rows.ALLOWANCE_MAIN[eta] / rows.ALLOWANCE_MAIN[0],
                found.update_s / at_zero.update_s if at_zero and (found := simulations.find(setting)) else None,
                None, '', _ASSUMED,
            )
            for eta, setting in allowances.items()
            if eta
        ),
    ]  # fmt: skip
    value: dict[str, object] = {'ratios: median error': median_error(ratios), 'absolute': median_error(absolute)}
    return Result('snowball', "every row of marin's is printed with its error", value, None, [*ratios, *absolute])
