from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from areal_jax.report.pages.blocks import Line
from areal_jax.report.pages.charts import build_curve, build_evaluation
from areal_jax.report.pages.curves import Curve, moving_mean
from areal_jax.report.pages.pictures import draw_lines, draw_picture, make_figure, write_plots
from areal_jax.report.report import build_report
from areal_jax.telemetry import names
from tests.telemetry.logs import dispatch, event_log, two_facts, two_metrics, two_updates


def test_pictures_are_pictures(tmp_path: pathlib.Path):
    from matplotlib.image import imread

    metrics = [{**line, names.TOKEN_AGE_MEAN: 0.5, names.TOKEN_AGE_MAX: 1.0} for line in two_metrics()]
    paths = write_plots(two_updates(), metrics, build_report(two_updates(), metrics, two_facts()), tmp_path)
    assert paths == ['plots/reward.png', 'plots/evaluation.png', 'plots/token_age.png', 'plots/slots.png']
    for path in paths:
        pixels = imread(tmp_path / path)
        assert pixels.shape[1] == 1200
        assert pixels.shape[0] >= 300
        colors = np.unique((pixels[::3, ::3, :3] * 255).astype(np.uint8).reshape(-1, 3), axis=0)
        assert len(colors) > 30
        ink = (pixels[..., :3].min(-1) < 0.9).mean()
        assert 0.01 < ink < 0.9, (path, ink)


def test_no_data_no_picture(tmp_path: pathlib.Path):
    report = build_report([], [], two_facts(evaluation_before=None, evaluation_after=None))
    assert write_plots([], [], report, tmp_path) == []
    assert list((tmp_path / 'plots').iterdir()) == []


@pytest.mark.filterwarnings('error')
def test_slots_without_publication_or_interruption_are_drawn_without_a_warning(tmp_path: pathlib.Path):
    report = build_report([], [], two_facts(evaluation_before=None, evaluation_after=None))
    assert write_plots(event_log(*dispatch(0, 20, 0, ['a'], 1, 0)), [], report, tmp_path) == ['plots/slots.png']


def test_scores_during_training_are_drawn_between_those_before_and_after():
    interval = lambda mean: {'mean': mean, 'low': mean - 0.125, 'high': mean + 0.125, 'n': 8}
    row = {'greedy': interval(0.5), 'sampled': None, 'seconds': 1.0, 'lane_seconds': 0.5, 'lane_share': 0.1}
    around = {'before': interval(0.25), 'after': interval(0.75)}
    changes = {
        'evaluation_curve_ends': {'greedy': around, 'sampled': {'before': None, 'after': None}},
        'evaluation_curve': [row | {'version': 4}], 'steps': 8,
    }  # fmt: skip
    chart = build_evaluation({**build_report([], [], two_facts()), **changes})
    assert chart is not None
    axes = draw_picture(chart).axes[0]
    (line,) = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 4, 8], [0.25, 0.5, 0.75])
    (bars,) = axes.collections
    assert [[y for _, y in segment] for segment in bars.get_segments()] == [
        [0.125, 0.375],
        [0.375, 0.625],
        [0.625, 0.875],
    ]


def test_a_picture_has_what_the_chart_declares():
    values = [float(update % 2) for update in range(100)]
    curve = Curve('Title', 'nats', (), '')
    chart = build_curve(curve, [('a', list(range(100)), values), ('b', [1, 2], [3.0, 4.0])])
    figure = draw_picture(dataclasses.replace(chart, bound=('eta = 4', 4.0)))
    (axes,), (legend,) = figure.axes, figure.legends
    faint, strong, short, bound = axes.lines
    assert (list(faint.get_ydata()), list(strong.get_ydata())) == (values, moving_mean(values, 5))
    assert faint.get_alpha() < 0.5
    assert (list(short.get_ydata()), list(bound.get_ydata())) == ([3.0, 4.0], [4.0, 4.0])
    assert [text.get_text() for text in legend.get_texts()] == ['a', 'b', 'eta = 4']
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ('Title', 'update', 'nats')


@pytest.mark.parametrize('points', [3, 100])
@pytest.mark.parametrize(('style', 'drawn'), list(enumerate(('-', '--', ':', '-.'))))
def test_a_style_is_drawn_with_markers_and_without(style, drawn, points):
    """matplotlib reads '-' and the marker '.' in one text as '-.'."""
    axes = make_figure(4.8).add_subplot()
    draw_lines(axes, [Line('a', range(points), range(points), '#000000', style)])
    (line,) = axes.lines
    assert line.get_linestyle() == drawn
    assert (line.get_marker() == '.') == (points == 3)
