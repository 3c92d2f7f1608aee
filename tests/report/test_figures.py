"""What the figures are given to draw."""

from __future__ import annotations

import pytest

from areal_jax.report import figures
from areal_jax.report.contents import TokenFates
from areal_jax.report.metric_curves import Curve


def data(figure: figures.Figure, index: int = 0) -> dict[str, list[float]]:
    """Of one of the things that it draws."""
    return dict(figure.renderers[index].data_source.data)


def test_histograms_of_runs_stand_beside_each_other_in_shares():
    figure = figures.draw_histogram('t', 'versions', [('a', {0: 3, 2: 1}), ('b', {0: 8})])
    first, second = data(figure), data(figure, 1)
    assert (first['top'], first['tokens']) == ([0.75, 0.25], [3, 1])
    assert second['top'] == [1.0]
    assert first['x'][0] < 0 < second['x'][0]  # either side of age 0
    assert [item.label.value for item in figure.legend[0].items] == ['a', 'b']


def test_fates_are_on_top_of_each_other():
    figure = figures.draw_fates('t', 'age', {'trained': [3, 1], 'masked': [], 'dropped/over_age': [0, 0, 2]})
    trained, dropped = data(figure), data(figure, 1)
    assert (trained['bottom'], trained['top']) == ([0, 0, 0], [3, 1, 0])
    assert (dropped['bottom'], dropped['top']) == ([3, 1, 0], [3, 1, 2])


def test_shares_of_runs_with_other_fates():
    def fates(**tokens: int) -> TokenFates:
        by = {'by_age': {}, 'by_version': None, 'fault': ''}
        return {'generated': sum(tokens.values()), 'fates': tokens, **by}  # type: ignore[typeddict-item]

    figure = figures.draw_fate_shares({'a': fates(trained=4), 'b': fates(trained=1, masked=3)})
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
    figure = figures.draw_curve(Curve('t', '', ()), [('l', [1, 2], values)], figures.new_updates())
    shown = [None if limit is None or limit != limit else limit for limit in (figure.y_range.start, figure.y_range.end)]
    assert shown == [start, end]


def test_a_line_without_a_point_keeps_its_place_among_the_colors():
    lines = [('a', [], []), ('b', [1], [1.0])]
    figure = figures.draw_curve(Curve('t', '', ()), lines, figures.new_updates())
    assert figure.renderers[0].glyph.line_color == figures.PALETTE[1]
    assert figures.draw_curve(Curve('t', '', ()), lines[:1], figures.new_updates()).renderers == []
