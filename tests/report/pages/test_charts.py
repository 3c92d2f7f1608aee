"""What the charts declare, and what Bokeh is given to draw of it."""

from __future__ import annotations

from typing import Any

import pytest

from areal_jax.report.pages import charts
from areal_jax.report.pages.blocks import Bars, Chart
from areal_jax.report.pages.colors import PALETTE
from areal_jax.report.pages.curves import Curve, moving_mean
from areal_jax.report.pages.figures import draw_chart, new_updates
from areal_jax.report.report_keys import TokenFates


def draw(chart: Chart) -> Any:
    return draw_chart(chart, new_updates())


def data(figure: Any, index: int = 0) -> dict[str, list[float]]:
    """Of one of the things that it draws."""
    return dict(figure.renderers[index].data_source.data)


def bars(chart: Chart) -> list[tuple[list[float], list[float]]]:
    """Starts and ends."""
    return [(list(mark.starts), list(mark.ends)) for mark in chart.marks if isinstance(mark, Bars)]


def curve_of(*lines: charts.Points, smooth: bool = True) -> Chart:
    return charts.build_curve(Curve('t', '', (), '', smooth=smooth), lines)


def test_histograms_of_runs_stand_beside_each_other_in_shares():
    chart = charts.build_histogram('t', 'versions', [('a', {0: 3, 2: 1}), ('b', {0: 8})])
    assert [ends for _, ends in bars(chart)] == [[0.75, 0.25], [1.0]]
    assert [key.label for key in chart.keys] == ['a', 'b']
    figure = draw(chart)
    first, second = data(figure), data(figure, 1)
    assert (first['y'], first['tokens']) == ([0.75, 0.25], [3, 1])
    assert first['x'][0] < 0 < second['x'][0]  # either side of age 0
    assert [key.name for key in chart.keys] == [renderer.name for renderer in figure.renderers]
    assert (chart.table.head, chart.table.rows) == (('age', 'a', 'b'), [('0', '75%', '100%'), ('2', '25%', '0%')])


def test_fates_are_on_top_of_each_other_and_none_can_be_hidden():
    chart = charts.build_fates('t', 'age', {'trained': [3, 1], 'masked': [], 'dropped/over_age': [0, 0, 2]})
    assert bars(chart) == [([0, 0, 0], [3, 1, 0]), ([3, 1, 0], [3, 1, 2])]
    assert [(key.label, key.name) for key in chart.keys] == [('trained', ''), ('dropped/over_age', '')]
    assert data(draw(chart), 1)['start'] == [3, 1, 0]


def test_shares_of_runs_with_other_fates():
    def fates(**tokens: int) -> TokenFates:
        by = {'by_age': {}, 'by_version': None, 'fault': ''}
        return {'generated': sum(tokens.values()), 'fates': tokens, **by}  # type: ignore[typeddict-item]

    chart = charts.build_fate_shares({'a': fates(trained=4), 'b': fates(trained=1, masked=3)})
    assert bars(chart) == [([0.0, 0.0], [1.0, 0.25]), ([1.0, 0.25], [1.0, 1.0])]
    assert chart.names == ['a', 'b']


def test_a_fate_has_one_color_and_reasons_of_drops_differ():
    drops = ['dropped/over_age', 'dropped/cancelled']
    assert len({charts.fate_color(fate, ['trained', *drops]) for fate in ('trained', *drops)}) == 3
    assert charts.fate_color('trained', ['trained']) == charts.fate_color('trained', ['masked', 'trained'])


@pytest.mark.parametrize(
    ('values', 'start', 'end'), [([0.5, 2.0], 0, None), ([0.0, 0.0], 0, 1), ([-1.0, 1.0], None, None)]
)
def test_the_axis_of_what_is_never_negative_begins_at_0(values: list[float], start: float | None, end: float | None):
    figure = draw(curve_of(('l', [1, 2], values)))
    limits = (figure.y_range.start, figure.y_range.end)
    shown = [None if limit is None or limit != limit else limit for limit in limits]
    assert shown == [start, end]


def test_a_line_without_a_point_keeps_its_place_among_the_colors():
    empty = ('a', [], [])
    assert draw(curve_of(empty, ('b', [1], [1.0]))).renderers[0].glyph.line_color == PALETTE[1]
    assert draw(curve_of(empty)).renderers == []


def test_curves_of_a_grid_zoom_together():
    updates, chart = new_updates(), curve_of(('a', [1, 2], [1.0, 2.0]))
    assert {draw_chart(one, updates).x_range for one in (chart, chart)} == {updates}
    assert draw_chart(charts.build_fates('t', 'age', {'trained': [3]}), updates).x_range != updates


def test_a_long_noisy_curve_is_faint_with_its_moving_mean_on_it():
    values = [float(update % 2) for update in range(100)]
    raw, smoothed = (curve_of(('a', list(range(100)), values), smooth=smooth) for smooth in (False, True))
    assert [renderer.glyph.line_alpha for renderer in draw(raw).renderers] == [1.0]
    assert raw.caption == ''
    faint, strong = draw(smoothed).renderers
    assert faint.glyph.line_alpha < 0.5 < strong.glyph.line_alpha
    assert (faint.data_source.data['y'], strong.data_source.data['y']) == (values, moving_mean(values, 5))
    assert 'mean of the last 5 updates' in smoothed.caption


def test_the_table_of_a_long_curve_is_thinned_and_has_its_ends():
    table = curve_of(('a', list(range(1, 1001)), [0.5] * 1000), ('b', [1000], [7.0])).table
    assert table.head == ('update', 'a', 'b')
    assert len(table.rows) <= 41
    assert (table.rows[0], table.rows[-1]) == (('1', '0.5', '-'), ('1000', '0.5', '7'))


def test_an_update_is_set_beside_its_limit():
    time = {'generate': 2.0, 'train': None, 'publish': 0.5, 'ideal': 2.0, 'achieved': 2.5, 'ideal_rule': ''}
    chart = charts.build_time(time)  # type: ignore[arg-type]
    assert chart.names == ['achieved', 'limit (ideal)', 'generate', 'publish']
    assert [end for _, ends in bars(chart) for end in ends] == [2.5, 2.0, 2.0, 0.5]
    assert chart.alt == 'Bars: achieved 2.5 s, limit (ideal) 2 s, generate 2 s, publish 0.5 s.'
    texts = [data(figure, index)['text'] for figure in [draw(chart)] for index in range(1, 8, 2)]
    assert texts == [[' 2.5 s'], [' 2 s'], [' 2 s'], [' 0.5 s']]
