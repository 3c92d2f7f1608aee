"""Whether published numbers agree with each other, before anything is compared with them.

python -m benchmarks.simulation.closure     prints each check
"""

from __future__ import annotations

import dataclasses

from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.simulation.closed_forms import stale_share, staleness
from areal_jax.simulation.drawn_answers import group_moments
from areal_jax.simulation.prices import H800, Reached, Roofline, find_shape
from benchmarks.simulation import published_rows as rows
from benchmarks.simulation.constants import PASSES, R1_LENGTHS

_WHOLE = Reached(1.0, 1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Check:
    """One quantity by two ways, or what a published number means."""

    what: str
    found: float
    other: float  # what it is compared with
    note: str = ''

    @property
    def ratio(self) -> float:
        return self.found / self.other


def answer_tokens(hours: float, tokens_s: float) -> float:
    """Mean tokens of a trained answer that hours of table 1 (1.5B) and a rate of figure 5c say together."""
    return rows.TABLE_1[0].update_s(hours) * tokens_s / rows.TABLE_1_BATCH.answers


def mean_answer() -> float:
    """Of the asynchronous arm: what both rows of the 1.5B model are worked out with."""
    return answer_tokens(rows.TABLE_1[0].async_h, rows.FIGURE_5C[8])


def trainer_flops(row: rows.Table1Row) -> float:
    """A second, of each device that trains, in the asynchronous arm; mean positions from `R1_LENGTHS`."""
    lengths = parse_lengths(R1_LENGTHS.value, rows.TABLE_1_BATCH.cap)
    positions = group_moments(lengths, rows.TABLE_1_BATCH.group_size).live_position
    tokens = rows.TABLE_1_BATCH.answers * mean_answer()
    learner = Roofline(H800, find_shape(row.model), _WHOLE, round((1 - rows.GENERATING) * row.devices))
    return H800.flops * learner.train_s(tokens, tokens * positions, PASSES.value) / row.update_s(row.async_h)


def generated_tokens_s(row: rows.Table1Row) -> float:
    """Of each device that generates, in the asynchronous arm."""
    tokens = rows.TABLE_1_BATCH.answers * mean_answer()
    return tokens / row.update_s(row.async_h) / (rows.GENERATING * row.devices)


def check_areal() -> list[Check]:
    """Table 1, figures 4, 5c, 6a and 6b and table 7 among themselves."""
    small, larger = rows.TABLE_1[:2]
    figure_4 = 1e3 * rows.FIGURE_4[small.model, 32_768][small.devices][0]
    few_devices = 1e3 * rows.FIGURE_4[small.model, 32_768][32][0]
    kernels = [speed.interrupted / (rows.FIGURE_6B_NODES * rows.NODE * rows.GENERATING) for speed in rows.FIGURE_6B]
    return [
        Check(
            'tokens an answer, table 1 x figure 5c: asynchronous, synchronous',
            mean_answer(), answer_tokens(small.sync_h, rows.FIGURE_5C[0]), 'they agree, and fix the mean length',
        ),
        Check(
            'tokens/s of 1.5B on 128 devices: figure 5c at eta 8, figure 4', rows.FIGURE_5C[8], figure_4,
            'they do not agree: figure 4 serves for ratios and slopes only',
        ),
        Check(
            'tokens/s of 1.5B: table 7 on 8 devices, figure 4 on 32', rows.TABLE_7[16][0], few_devices,
            'nor do these, though the context is shorter in table 7',
        ),
        Check('TFLOP/s of a trainer, 1.5B: table 1, figure 6a', trainer_flops(small) / 1e12, rows.FIGURE_6A['1B'][0]),
        Check('TFLOP/s of a trainer, 7B: table 1, figure 6a', trainer_flops(larger) / 1e12, rows.FIGURE_6A['7B'][0]),
        Check('tokens/s of an engine, 1.5B: table 1, figure 6b', generated_tokens_s(small), kernels[0]),
        Check(
            'tokens/s of an engine, 7B: table 1, figure 6b', generated_tokens_s(larger), kernels[1],
            'neither side is busy at the rates of its kernels',
        ),
    ]  # fmt: skip


def check_others() -> list[Check]:
    """Applied Compute's table against its formula, marin's ledgers against themselves."""
    found = [
        Check(
            f'versions, C {row.slots}, B {row.batch}, q {row.capacity:g}, rho {row.rho}: formula, printed prediction',
            staleness(row.slots, row.batch, row.capacity, row.rho, row.tail), row.predicted,
        )
        for row in rows.QUEUE_ROWS
    ]  # fmt: skip
    found += [
        Check('tokens by fate, tokens generated', ledger.generated - ledger.open_tokens, ledger.generated)
        for ledger in rows.LEDGERS
    ]
    generated, _, stale = rows.STALE_GROUPS
    found.append(Check('share of stale groups: rule A / (K + A), ledger', stale_share(2, 1), stale / generated))
    found += [
        Check('s of 25 updates: sum of parts, whole', row.waiting_s + row.train_s + row.publication_s, row.total_s)
        for row in rows.ALLOCATION_ROWS
    ]
    return found


def number(value: float) -> str:
    return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def describe(checks: list[Check]) -> str:
    lines = [
        f'{check.what}: {number(check.found)} and {number(check.other)}, ratio {check.ratio:.2f}'
        + (f' ({check.note})' if check.note else '')
        for check in checks
    ]
    return '\n'.join(lines)


if __name__ == '__main__':
    print(describe([*check_areal(), *check_others()]))
