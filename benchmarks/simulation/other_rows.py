"""Published rows that are not simulated, with the reason: they are compared with a closed form."""

from __future__ import annotations

import statistics

from areal_jax.simulation.closed_forms import stale_share, staleness
from areal_jax.studies.page import smallest_difference
from areal_jax.studies.plan import Margins
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, largest_error, median_error
from benchmarks.simulation.simulated import Simulations

_EVERY_UPDATE = (
    'the loop publishes after every update, and the delays of staleness.schedule are lock-step, without surplus groups'
)
_PAIRED = Margins(score=0.0, confidence=0.95, power=0.8, slow=0.0, flat=0.0, flat_from=0.0)
_NO_DROPPING = 'closed form, not simulated: a full buffer closes admission here, and never drops its oldest groups'


def compare_others(simulations: Simulations, updates: int) -> Result:
    """Nothing is simulated."""
    queue = [
        Comparison(
            f'Applied Compute, C {row.slots}, B {row.batch}, q {row.capacity:g}, rho {row.rho}: staleness', 'versions',
            row.measured, staleness(row.slots, row.batch, row.capacity, row.rho, row.tail), None, '', _NO_DROPPING,
        )
        for row in rows.QUEUE_ROWS
    ]  # fmt: skip
    generated, _, stale = rows.STALE_GROUPS
    found = [
        *queue,
        Comparison(
            'marin, stale share of the groups, published every 2 updates, age at most 1: rule A / (K + A)', 'share',
            stale / generated, stale_share(2, 1), None, '', f'closed form, not simulated: {_EVERY_UPDATE}',
        ),
        Comparison(
            'marin, margin of five matched seeds: smallest difference that they show', 'points', rows.SEED_MARGIN,
            smallest_difference(statistics.stdev(rows.SEED_DIFFERENCES), len(rows.SEED_DIFFERENCES), _PAIRED), None,
            note='two-sided paired t-test, 95%, power 80%; not simulated: a simulation has no scores',
        ),
    ]  # fmt: skip
    value: dict[str, object] = {
        'Applied Compute, closed form: median error': median_error(queue), 'largest': largest_error(queue),
        'simulated': 0,
    }  # fmt: skip
    return Result('others', 'every row of 1.3 and of Applied Compute is printed with its error', value, None, found)
