"""Published rows as settings, and how they are compared."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from benchmarks.simulation import published_rows as rows
from benchmarks.simulation import simulated
from benchmarks.simulation.comparison import Comparison, Result
from benchmarks.simulation.interruption_rows import Point, closed_form, place, setting_of
from benchmarks.simulation.other_rows import compare_others
from benchmarks.simulation.setting import Setting, build_config, in_milliseconds, snowball_shape
from benchmarks.simulation.simulated import Measured, Simulations
from benchmarks.simulation.snowball_rows import setting_of as snowball_setting
from benchmarks.simulation.table_1_rows import asynchronous, synchronous

FOUND = Measured(10.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ('row', 'engines', 'tensor', 'slots', 'learner'),
    [(0, 12, 1, 256, 4), (1, 18, 1, 138, 6), (2, 12, 2, 81, 8), (3, 9, 4, 118, 12)],
)
def test_three_quarters_of_an_eighth_of_the_devices_generate(row, engines, tensor, slots, learner):
    """Weights of 3.6, 15.2, 29.5 and 65.5 GB in a quarter of 80 GB at most: 1, 1, 2 and 4 devices an engine."""
    setting = asynchronous(rows.TABLE_1[row], 8)
    found = setting.engines, setting.tensor, setting.slots, setting.learner
    assert found == (engines, tensor, slots, learner)
    in_turns = synchronous(rows.TABLE_1[row], 8)
    assert in_turns.engines * in_turns.tensor == in_turns.learner == rows.TABLE_1[row].devices // 8
    assert build_config(in_turns, 0).cluster.engines == f'{in_turns.engines} x shared'


def test_the_warm_up_is_three_times_the_open_answers():
    # 12 engines with 256 slots and a group of 16 that waits: 3,264 answers, of which eta 0 allows 1,024
    assert [Setting('R1-distill-Qwen-1.5B', 16, 64, eta).warm_up for eta in (0, 1, 8)] == [5, 6, math.ceil(3 * 3.1875)]


def test_rewards_are_in_milliseconds():
    assert (in_milliseconds('constant(0.005)'), in_milliseconds('exponential(2)')) == (
        'constant(5)',
        'exponential(2000)',
    )


def test_misses_come_first_and_what_is_not_simulated_last():
    compared = [
        Comparison('met', '', 1.0, 1.1, 0.3),
        Comparison('unknown', '', 1.0, None),
        Comparison('shown', '', 1.0, 3.0),
        Comparison('missed', '', 1.0, 0.5, 0.3),
        Comparison('missed by more', '', 1.0, 2.0, 0.3),
    ]
    ordered = [row.row for row in Result('part', '', {}, None, compared).misses_first()]
    assert ordered == ['missed by more', 'missed', 'met', 'shown', 'unknown']


def test_the_assumed_shape_has_the_sizes_that_are_published():
    shape = snowball_shape()
    assert (shape.parameters, shape.active_parameters) == (pytest.approx(67e9, rel=0.01), pytest.approx(2e9, rel=0.05))
    setting = snowball_setting(32, 8, 4096, 1, 25)
    # 134 GB of weights in a quarter of 80 GB each: eight devices are one engine
    assert (setting.engines, setting.tensor, setting.learner, setting.batch.answers) == (1, 8, 32, 128)
    assert build_config(setting, 0).model.experts == 351


def test_even_steps_cost_what_a_full_engine_takes():
    even = dataclasses.replace(setting_of('R1-distill-Qwen-1.5B', 16, 'wait'), even_steps=True)
    config = build_config(even, 0)
    assert (config.simulation.prices, config.virtual.decode_step_s) == ('virtual', even.step_s)
    assert build_config(dataclasses.replace(even, even_steps=False), 0).simulation.prices == 'roofline'


def test_a_gain_lies_between_two_points_of_a_curve():
    curve = [Point(1.0, 0.5), Point(2.0, 0.3), Point(4.0, 0.1)]
    assert place(0.2, curve) == 'at an update every 3.0 mean answers'
    assert place(0.6, curve) == 'nowhere on the simulated curve'


def test_an_engine_that_drains_loses_less_where_its_steps_get_faster():
    form = closed_form(setting_of('R1-distill-Qwen-1.5B', 16, 'wait'))
    assert form.batch_s == pytest.approx(form.answer_s)  # 256 answers on 256 slots
    assert form.faster_drain_s < form.drain_s
    # without an update in sight both gains vanish
    assert dataclasses.replace(form, batch_s=1e9).gain == pytest.approx(0, abs=1e-5)
    assert form.gain == pytest.approx((form.batch_s + form.drain_s) / (form.batch_s + form.rebuild_s) - 1)


def test_every_row_that_is_not_simulated_says_why_and_has_an_error():
    result = compare_others(Simulations((0,), 0.0), 8)
    assert all(row.note for row in result.rows)
    *others, seeds = [abs(row.error or math.inf) for row in result.rows if row.error != 0]
    assert max(others) < 0.12
    # SD 12.0 of five pairs: (2.776 + 0.941) * 12.0 / sqrt(5) points, where 15 were taken
    assert seeds == pytest.approx((2.776 + 0.941) * 12.0 / math.sqrt(5) / 15 - 1, abs=0.005)


def test_runs_that_were_kept_are_not_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(simulated, 'simulate', lambda setting, seed: made.append(seed) or FOUND)
    setting = Setting('R1-distill-Qwen-1.5B', 16, 64, 1)
    for seeds in ((0,), (0, 1)):
        runs = Simulations(seeds, math.inf, tmp_path / 'kept')
        assert runs.find(setting) == FOUND
    assert made == [0, 1]
    assert json.loads((tmp_path / 'kept').read_text().splitlines()[0])['measured']['update_s'] == 10.0
    assert Simulations((2,), 0.0, tmp_path / 'kept').find(setting) is None
