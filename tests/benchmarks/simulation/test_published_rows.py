"""benchmarks/simulation/published_rows.py: what follows from the rows by hand, and ledgers that close."""

import statistics

import pytest

from benchmarks.simulation.published_rows import (
    ADDITIVE_ANSWERS,
    ADDITIVE_ROWS,
    ALLOCATION_ROWS,
    FIGURE_4,
    FIGURE_5C,
    FIGURE_6B,
    LEDGERS,
    QUEUE_ROWS,
    SEED_DIFFERENCES,
    STALE_GROUPS,
    STALE_TOKENS,
    TABLE_1,
    TABLE_1_BATCH,
    TABLE_7,
)


@pytest.mark.parametrize(
    ('row', 'seconds', 'ratios'),
    [
        (0, (484, 590, 213), (2.27, 2.77)),
        (1, (750, 831, 366), (2.05, 2.27)),
        (2, (1998, 2196, 986), (2.03, 2.23)),
        (3, (2784, 3066, 1866), (1.49, 1.64)),
    ],
)
def test_seconds_an_update_and_speed_ups_of_table_1(row, seconds, ratios):
    found = TABLE_1[row]
    hours = (found.verl_h, found.sync_h, found.async_h)
    assert [found.update_s(one) for one in hours] == pytest.approx(seconds, abs=0.6)
    assert [one / found.async_h for one in hours[:2]] == pytest.approx(ratios, abs=0.006)


def test_an_update_of_table_1_has_8192_answers():
    assert TABLE_1_BATCH.answers == 8192
    assert [row.devices for row in TABLE_1] == [128, 192, 256, 384]


def test_eta_one_is_worth_more_than_a_factor_of_two_in_figure_5c_and_less_in_table_7():
    assert FIGURE_5C[1] / FIGURE_5C[0] == pytest.approx(2.09, abs=0.005)
    assert TABLE_7[1][0] / TABLE_7[0][0] == pytest.approx(1.76, abs=0.005)


def test_eight_times_the_devices_are_five_times_as_fast_in_figure_4():
    devices = FIGURE_4['R1-distill-Qwen-1.5B', 32_768]
    assert devices[256][0] / devices[32][0] / 8 == pytest.approx(0.62, abs=0.006)


def test_interruption_gains_12_and_17_percent():
    gains = [row.interrupted / row.waiting - 1 for row in FIGURE_6B]
    assert gains == pytest.approx([0.12, 0.17], abs=0.005)


def test_every_token_of_the_ledgers_has_a_fate():
    """5,807,538 and 1,357,964 tokens; a third of the first ones, and 30.6% of the second, were stale."""
    assert 3_629_028 + 1_910_321 + 268_189 == LEDGERS[0].generated == 5_807_538
    assert 658_641 + 416_114 + 283_209 == LEDGERS[1].generated == 1_357_964
    assert [ledger.open_tokens for ledger in LEDGERS] == [0, 0]
    assert LEDGERS[0].stale / LEDGERS[0].generated == pytest.approx(ADDITIVE_ROWS[1].stale, abs=5e-4)
    assert LEDGERS[1].stale / LEDGERS[1].generated == pytest.approx(STALE_TOKENS, abs=5e-4)
    assert LEDGERS[0].consumed == ADDITIVE_ROWS[1].consumed


def test_groups_of_a_version_are_used_or_stale():
    generated, used, stale = STALE_GROUPS
    assert generated == used + stale


def test_parts_of_marins_seconds():
    assert ADDITIVE_ROWS[0].parts_s == pytest.approx((509, 170, 235), abs=0.6)
    assert ADDITIVE_ROWS[1].parts_s == pytest.approx((511, 452, 239), abs=0.6)
    assert [row.consumed / ADDITIVE_ANSWERS for row in ADDITIVE_ROWS] == pytest.approx([981, 1134], abs=0.5)
    few, many = ALLOCATION_ROWS
    assert 1 - many.total_s / few.total_s == pytest.approx(0.058, abs=5e-4)


def test_the_noise_of_five_matched_seeds():
    assert statistics.fmean(SEED_DIFFERENCES) == pytest.approx(0.31, abs=0.005)
    assert statistics.stdev(SEED_DIFFERENCES) == pytest.approx(12.0, abs=0.05)


def test_printed_predictions_are_near_what_was_measured():
    assert all(abs(row.predicted / row.measured - 1) < 0.12 for row in QUEUE_ROWS)
