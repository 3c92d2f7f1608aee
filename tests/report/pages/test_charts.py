"""What the figures are given to draw."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.pages import charts as figures
from areal_jax.report.pages.run_plots import Curve, moving_mean
from areal_jax.report.pages.web_page import PALETTE
from areal_jax.report.report_keys import TokenFates


def data(figure: Any, index: int = 0) -> dict[str, list[float]]:
    """Of one of the things that it draws."""
    return dict(figure.renderers[index].data_source.data)


def test_histograms_of_runs_stand_beside_each_other_in_shares():
    chart = figures.draw_histogram('t', 'versions', [('a', {0: 3, 2: 1}), ('b', {0: 8})])
    figure = chart.figure
    first, second = data(figure), data(figure, 1)
    assert (first['top'], first['tokens']) == ([0.75, 0.25], [3, 1])
    assert second['top'] == [1.0]
    assert first['x'][0] < 0 < second['x'][0]  # either side of age 0
    assert [key.label for key in chart.keys] == ['a', 'b']
    assert [key.name for key in chart.keys] == [renderer.name for renderer in figure.renderers]
    assert (chart.table.head, chart.table.rows) == (('age', 'a', 'b'), [('0', '75%', '100%'), ('2', '25%', '0%')])


def test_fates_are_on_top_of_each_other():
    figure = figures.draw_fates('t', 'age', {'trained': [3, 1], 'masked': [], 'dropped/over_age': [0, 0, 2]}).figure
    trained, dropped = data(figure), data(figure, 1)
    assert (trained['bottom'], trained['top']) == ([0, 0, 0], [3, 1, 0])
    assert (dropped['bottom'], dropped['top']) == ([3, 1, 0], [3, 1, 2])


def test_shares_of_runs_with_other_fates():
    def fates(**tokens: int) -> TokenFates:
        by = {'by_age': {}, 'by_version': None, 'fault': ''}
        return {'generated': sum(tokens.values()), 'fates': tokens, **by}  # type: ignore[typeddict-item]

    figure = figures.draw_fate_shares({'a': fates(trained=4), 'b': fates(trained=1, masked=3)}).figure
    assert (data(figure)['share'], data(figure)['right']) == ([1.0, 0.25], [1.0, 0.25])
    assert (data(figure, 1)['left'], data(figure, 1)['right']) == ([1.0, 0.25], [1.0, 1.0])


def test_a_fate_has_one_color_and_reasons_of_drops_differ():
    drops = ['dropped/over_age', 'dropped/cancelled']
    assert len({figures.fate_color(fate, ['trained', *drops]) for fate in ('trained', *drops)}) == 3
    assert figures.fate_color('trained', ['trained']) == figures.fate_color('trained', ['masked', 'trained'])


@pytest.mark.parametrize(
    ('values', 'start', 'end'), [([0.5, 2.0], 0, None), ([0.0, 0.0], 0, 1), ([-1.0, 1.0], None, None)]
)
def test_the_axis_of_what_is_never_negative_begins_at_0(values: list[float], start: float | None, end: float | None):
    chart = figures.draw_curve(Curve('t', '', (), ''), [('l', [1, 2], values)], figures.new_updates())
    limits = (chart.figure.y_range.start, chart.figure.y_range.end)
    shown = [None if limit is None or limit != limit else limit for limit in limits]
    assert shown == [start, end]


def test_a_line_without_a_point_keeps_its_place_among_the_colors():
    lines = [('a', [], []), ('b', [1], [1.0])]
    figure = figures.draw_curve(Curve('t', '', (), ''), lines, figures.new_updates()).figure
    assert figure.renderers[0].glyph.line_color == PALETTE[1]
    assert figures.draw_curve(Curve('t', '', (), ''), lines[:1], figures.new_updates()).figure.renderers == []


def test_a_long_noisy_curve_is_faint_with_its_moving_mean_on_it():
    values = [float(update % 2) for update in range(100)]
    lines = [('a', list(range(100)), values)]
    raw, smoothed = (
        figures.draw_curve(Curve('t', '', (), '', smooth=smooth), lines, figures.new_updates())
        for smooth in (False, True)
    )
    assert [renderer.glyph.line_alpha for renderer in raw.figure.renderers] == [1.0]
    assert raw.caption == ''
    faint, strong = smoothed.figure.renderers
    assert faint.glyph.line_alpha < 0.5 < strong.glyph.line_alpha
    assert data(smoothed.figure)['y'] == values
    assert data(smoothed.figure, 1)['y'] == moving_mean(values, 5)
    assert 'mean of the last 5 updates' in smoothed.caption


def test_the_table_of_a_long_curve_is_thinned_and_has_its_ends():
    lines = [('a', list(range(1, 1001)), [0.5] * 1000), ('b', [1000], [7.0])]
    table = figures.draw_curve(Curve('t', '', (), ''), lines, figures.new_updates()).table
    assert table.head == ('update', 'a', 'b')
    assert len(table.rows) <= 41
    assert (table.rows[0], table.rows[-1]) == (('1', '0.5', '-'), ('1000', '0.5', '7'))


def test_an_update_is_set_beside_its_limit():
    time = {'generate': 2.0, 'train': None, 'publish': 0.5, 'ideal': 2.0, 'achieved': 2.5, 'ideal_rule': ''}
    chart = figures.draw_time(time)  # type: ignore[arg-type]
    assert data(chart.figure)['name'] == ['achieved', 'limit (ideal)', 'generate', 'publish']
    assert data(chart.figure)['seconds'] == [2.5, 2.0, 2.0, 0.5]
    assert chart.alt == 'Bars: achieved 2.5 s, limit (ideal) 2 s, generate 2 s, publish 0.5 s.'
