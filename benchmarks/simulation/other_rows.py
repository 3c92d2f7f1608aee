"""Published rows that are not simulated, with the reason; those that a closed form gives are compared with it."""

from __future__ import annotations

from areal_jax.simulation.closed_forms.throughput import stale_share
from areal_jax.simulation.closed_forms.ungated import staleness
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.comparison import Comparison, Result, largest_error, median_error
from benchmarks.simulation.simulated import Simulations

_NO_SHAPE = 'the shape of the model (67B, 2B active) is not published, so nothing prices its work'
_EVERY_UPDATE = (
    'the loop publishes after every update, and the delays of staleness.schedule are lock-step, without surplus groups'
)
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
        *(
            Comparison(f'marin, cap {row.cap:,}: seconds of 25 updates', 's', row.core_s, None, note=_NO_SHAPE)
            for row in rows.ADDITIVE_ROWS
        ),
        *(
            Comparison(
                f'marin, {row.training} + {row.generating} devices: seconds of 25 updates', 's', row.total_s, None,
                note=f'{_NO_SHAPE}; {_EVERY_UPDATE}',
            )
            for row in rows.ALLOCATION_ROWS
        ),
        *(
            Comparison(f'marin, allowance {allowance}: seconds of 100 updates', 's', seconds, None, note=_NO_SHAPE)
            for allowance, seconds in enumerate(rows.ALLOWANCE_MAIN)
        ),
        Comparison(
            'marin, scores of five matched seeds', 'points', None, None,
            note='a simulation has no weights, so no scores',
        ),
    ]  # fmt: skip
    value: dict[str, object] = {
        'Applied Compute, closed form: median error': median_error(queue), 'largest': largest_error(queue),
        'simulated': 0,
    }  # fmt: skip
    return Result('others', 'every row of 1.3 and of Applied Compute is printed with its error', value, None, found)
