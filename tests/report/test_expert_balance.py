"""Loads of experts over a run, by hand: the fullest, those without a token, and loads by age."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from areal_jax.report import expert_balance
from areal_jax.report.engine_work import summarize_experts
from areal_jax.report.pages.charts import build_loads
from areal_jax.report.pages.colors import LEVELS, VERMILION
from areal_jax.report.pages.figures import draw_chart, new_updates
from areal_jax.report.pages.pictures import draw_cells, write_plots
from areal_jax.report.pages.run_page import render_page
from areal_jax.report.report import build_report
from tests.telemetry.logs import two_facts, two_metrics, two_updates

# layer 1 goes to expert 2 alone, layer 4 is even; update 2 trained nothing
ONE_EXPERT = [
    {'step': 1, 'experts/loads/1': [1, 0, 3, 4], 'experts/loads/4': [2, 2, 2, 2]},
    {'step': 2},
    {'step': 3, 'experts/loads/1': [0, 0, 8, 0], 'experts/loads/4': [2, 2, 2, 2]},
    {'step': 4, 'experts/loads/1': [0, 0, 8, 0], 'experts/loads/4': [2, 2, 4, 0]},
]
METRICS = [line | {'experts/load': 4.0, 'experts/dead': 3.0} for line in two_metrics()]


def report_of(loads):
    return build_report(two_updates(), METRICS, two_facts(), loads=loads)


def test_a_router_that_sends_everything_to_one_expert_shows():
    full, even = expert_balance.summarize_layers(ONE_EXPERT)
    assert full['load'] == pytest.approx((2 + 4 + 4) / 3)  # 4 and 8 of 8 tokens, to the mean of 4 experts
    assert (full['layer'], full['fullest'], full['share'], full['dead']) == (1, 2, 19 / 24, 3)
    assert (even['layer'], even['load'], even['dead']) == (4, pytest.approx((1 + 1 + 2) / 3), 1)
    page = render_page(report_of(ONE_EXPERT), [])
    assert '| layer 1 | 3.33 | expert 2, 79% | 3 |' in page


def test_experts_without_a_token_are_listed_since_when():
    rows = [tuple(row.values()) for row in expert_balance.list_dead(ONE_EXPERT)]
    assert rows == [(1, 1, 1, 3), (1, 0, 3, 2), (1, 3, 3, 2), (4, 3, 4, 1)]  # layer, expert, since, updates
    assert '| layer 1, expert 1 | 1 | 3 |' in render_page(report_of(ONE_EXPERT), [])
    alive = [*ONE_EXPERT, {'step': 5, 'experts/loads/1': [1, 1, 1, 1], 'experts/loads/4': [2, 2, 2, 2]}]
    assert expert_balance.list_dead(alive) == []


def by_age(step, **ages):
    found = {'step': step}
    for age, (tokens, counts) in ages.items():
        prefix = f'experts/loads_of_age/{age.removeprefix("age").replace("_", "-")}'
        found |= {f'{prefix}/tokens': tokens, f'{prefix}/1': counts}
    return found


def test_tokens_of_an_age_that_reach_other_experts():
    lines = [
        by_age(1, age0=(6, [6, 0, 6]), age1=(2, [0, 2, 2])),
        by_age(2, age0=(4, [2, 2, 4])),  # alone in its update: compared with itself
    ]
    young, old = expert_balance.summarize_ages(lines)
    # of 8 tokens 6 reach expert 0, 2 expert 1, 8 expert 2: of two tokens 1.5, 0.5 and 2 are expected
    assert (old['age'], old['tokens'], old['load']) == ('1', 2, 1.5)
    assert old['moved'] == pytest.approx(0.5 * (1.5 + 1.5) / 4)
    # hypergeometric: 2 of 8 tokens without replacement, and no chance in what all tokens do
    deviation = (2 * 0.75 * 0.25 * 6 / 7) ** 0.5
    assert old['by_chance'] == pytest.approx(0.5 * 2 * (2 / np.pi) ** 0.5 * deviation / 4)
    assert (young['age'], young['tokens'], young['load']) == ('0', 10, 3 * 10 / 20)
    assert young['moved'] == pytest.approx(0.5 * (1.5 + 1.5) / 20)
    page = render_page(report_of([ONE_EXPERT[0] | lines[0], ONE_EXPERT[2] | lines[1] | {'step': 2}]), [])
    assert '| 1 | 2 | 1.5 | 38% |' in page
    assert 'By chance is for tokens drawn one by one' in page


def test_differences_that_cancel_over_the_updates_are_no_other_experts():
    lines = [by_age(1, age0=(2, [2, 0]), age1=(2, [0, 2])), by_age(2, age0=(2, [0, 2]), age1=(2, [2, 0]))]
    assert [row['moved'] for row in expert_balance.summarize_ages(lines)] == [0, 0]


def test_ranges_of_ages_are_in_their_order():
    lines = [by_age(1, age9_16=(1, [1, 0]), age3_4=(1, [1, 0]), age0=(1, [1, 0]))]
    assert [row['age'] for row in expert_balance.summarize_ages(lines)] == ['0', '3-4', '9-16']


def test_a_run_without_loads_by_expert_says_what_gives_them():
    found = summarize_experts(METRICS)
    assert found is not None
    assert (found['layers'], found['dead_experts'], found['ages']) == ([], [], [])
    assert expert_balance.describe_loads(found) == ''
    assert build_loads((), report_of(())) == {}
    assert '`rollout.record_routes=True`' in render_page(report_of(ONE_EXPERT), [])


def cells_of(loads, layer=1):
    chart = build_loads(loads, report_of(loads))[f'loads_of_layer_{layer}']
    (cells,) = chart.marks
    return chart, cells


def test_a_cell_is_the_load_to_the_mean_of_its_layer():
    chart, cells = cells_of(ONE_EXPERT)
    nan = np.nan  # update 2
    np.testing.assert_array_equal(cells.values[0], [0.5, nan, 0, 0])
    np.testing.assert_array_equal(cells.values[2], [1.5, nan, 4, 4])
    np.testing.assert_array_equal(cells.level_of[2], [3, -1, 5, 5])  # 1 to 2; empty; 4 and more
    np.testing.assert_array_equal(cells.level_of[1], [nan, -1, nan, nan])  # never reached
    assert (cells.left, cells.right) == (0.5, 4.5)
    assert chart.caption == 'Times the mean of the layer. Empty where no update trained a token.'
    assert chart.alt.endswith('expert 2 has most tokens, 3.17 times the mean; 3 experts have none in the last update.')
    assert chart.table.rows[0] == ('2', '3.17', '1.5', '4')


def test_the_page_draws_the_colours_of_the_legend():
    chart, cells = cells_of(ONE_EXPERT)
    assert [key.color for key in chart.keys] == [VERMILION, *LEVELS]
    (image,) = draw_chart(chart, new_updates()).renderers
    mapper = image.glyph.color_mapper
    assert (tuple(mapper.palette), mapper.nan_color) == (LEVELS, VERMILION)
    assert (mapper.low, mapper.high) == (-0.5, len(LEVELS) - 0.5)  # level i has colour i
    np.testing.assert_array_equal(image.data_source.data['image'][0], cells.level_of)
    # the page changes the colours of a legend that it knows for a dark page, and not those of an image
    assert all(key.dark == key.color for key in chart.keys[1:])


def test_a_long_run_is_summed_into_columns():
    loads = [{'step': step, 'experts/loads/1': [step % 2, 1]} for step in range(1, 251)]
    chart, cells = cells_of(loads)
    assert cells.values.shape == (2, 84)  # 250 updates by three
    np.testing.assert_allclose(cells.values[0, :2], [2 / 2.5, 1 / 2])  # 1 + 0 + 1 of 5 tokens, 0 + 1 + 0 of 4
    assert (cells.left, cells.right) == (0.5, 252.5)
    assert 'A column has 3 updates.' in chart.caption


def test_a_picture_by_age_adds_up_the_updates():
    of_update = {'experts/loads/1': [6, 4, 0, 2]}
    loads = [
        of_update | by_age(1, age0=(3, [3, 0, 0, 0]), age1=(4, [0, 4, 0, 0])),
        of_update | by_age(2, age0=(5, [3, 0, 0, 2])),
    ]
    chart = build_loads(loads, report_of(loads))['loads_by_age_of_layer_1']
    (cells,) = chart.marks
    np.testing.assert_array_equal(cells.values.T, [[6 / 2, 0, 0, 2 / 2], [0, 4, 0, 0]])  # 8 and 4 choices of 4 experts
    assert (cells.left, cells.right, chart.names) == (-0.5, 1.5, ['0', '1'])
    assert chart.alt == 'Cells by expert and age: expert 0 has most of age 0, expert 1 has most of age 1.'
    assert chart.table.rows[0] == ('1', '0', '4')
    del loads[0]
    assert list(build_loads(loads, report_of(loads))) == ['loads_of_layer_1']  # one age


def test_the_fullest_layers_are_pictured():
    loads = [{'step': 1} | {f'experts/loads/{layer}': [10, layer] for layer in range(7)}]
    assert list(build_loads(loads, report_of(loads))) == [f'loads_of_layer_{layer}' for layer in range(4)]


def test_the_report_has_a_picture(tmp_path: pathlib.Path):
    report = report_of(ONE_EXPERT)
    assert 'plots/expert_loads.png' in write_plots(two_updates(), METRICS, report, tmp_path, ONE_EXPERT)
    first, _ = draw_cells([*build_loads(ONE_EXPERT, report).values()]).axes
    pixels = first.images[0].make_image(None, unsampled=True)[0]
    color = lambda place: tuple(int(place[i : i + 2], 16) for i in (1, 3, 5))
    assert tuple(pixels[2, 0, :3]) == color(LEVELS[3])
    assert tuple(pixels[1, 0, :3]) == color(VERMILION)
    assert pixels[1, 1, 3] == 0  # empty
