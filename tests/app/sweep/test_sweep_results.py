"""Bands over seeds, by hand, and pictures only of what there is."""

import itertools

import numpy as np

from areal_jax.app.sweep.endpoints import Curve, Endpoint
from areal_jax.app.sweep.sweep_results import GroupResult, Results, band, draw_endpoint, write_plots
from areal_jax.report.pages.colors import BLUE
from areal_jax.report.pages.pictures import make_figure


def curve(values, tokens):
    updates = tuple(range(1, len(values) + 1))
    return Curve(updates, tuple(tokens), tuple(tokens), tuple(values))


def test_a_band_covers_the_range_of_all_seeds_and_goes_from_the_lowest_to_the_highest():
    places, mean, low, high = band([curve([0, 1, 2], [10, 20, 30]), curve([4, 6], [5, 25])], 'tokens', smoothing=1)
    assert (places[0], places[-1]) == (10, 25)
    np.testing.assert_allclose(low, (places - 10) / 10)
    np.testing.assert_allclose(high, 4 + (places - 5) / 10)
    np.testing.assert_allclose(mean, (low + high) / 2)


def test_curves_are_smoothed_over_the_last_points():
    _, mean, _, _ = band([curve([0, 3, 6, 0], [1, 2, 3, 4])], 'updates', smoothing=3)
    np.testing.assert_allclose(mean[[0, -1]], [0, 3])
    _, mean, _, _ = band([curve([0, 3, 6, 0], [1, 2, 3, 4])], 'updates', smoothing=1)
    np.testing.assert_allclose(mean[[0, -1]], [0, 0])


def test_a_sweep_without_a_finished_arm_has_no_pictures(tmp_path):
    assert write_plots(Results('toy.py', (), ()), tmp_path) == []
    assert list(tmp_path.rglob('*.png')) == []


def test_names_of_groups_stand_beside_each_other_and_never_on_each_other(tmp_path):
    groups = [f'eta{eta}_a_method_with_a_long_name_{method}' for eta in range(4) for method in ('plain', 'decoupled')]
    looks = dict.fromkeys(groups, (BLUE, 0))
    results = Results('toy.py', tuple(GroupResult(name, (), {}) for name in groups), ())
    figure = make_figure(4, 13)
    panels = figure.subplots(1, 3, sharey=True)
    for axes in panels:
        draw_endpoint(axes, results, Endpoint('reward_last', '', lambda record, horizon: None), looks)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for axes in panels for label in axes.get_yticklabels() if label.get_visible()]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == groups
    assert [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)] == []
