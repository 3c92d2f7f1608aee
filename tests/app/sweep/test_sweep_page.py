"""Bands over seeds, by hand, pictures only of what there is, and charts with the numbers of the reports."""

import itertools
import math

import numpy as np

from areal_jax.app.sweep.endpoints import Curve, Endpoint
from areal_jax.app.sweep.sweep_page import band, build_curve_chart, build_value_chart, draw_endpoint, write_plots
from areal_jax.app.sweep.sweep_results import GroupResult, Results, build_results
from areal_jax.report.pages.colors import BLUE
from areal_jax.report.pages.figures import draw_chart, new_updates
from areal_jax.report.pages.pictures import make_figure
from tests.app.sweep.toy_sweep import ToySweep


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


def run_etas(directory, monkeypatch, etas, seeds=(0, 1)):
    """A toy sweep over eta, finished."""
    arms = {f'eta{eta:g}_seed{seed}': {'staleness.eta': eta, 'run.seed': seed} for eta in etas for seed in seeds}
    sweep = ToySweep(directory, arms)
    assert sweep.run(monkeypatch, '--jobs=4', draws=True) == 0
    return sweep


def glyphs_of(chart):
    return {type(renderer.glyph).__name__ for renderer in draw_chart(chart, new_updates()).renderers}


def test_a_sweep_over_a_number_has_charts_by_its_values_and_a_page_with_the_verdicts(tmp_path, monkeypatch):
    sweep = run_etas(tmp_path, monkeypatch, (4.0, 0.0, 1.0))  # in another order than that of the values
    results = build_results('toy.py', sweep.arms())
    ages = build_value_chart(results, 'ages')
    assert ages.names == ['0', '1', '4']
    assert [(line.label, line.xs, line.ys) for line in ages.marks] == [
        ('token_age', [0, 1, 2], [0, 0.5, 2]),
        ('token_age_max', [0, 1, 2], [0, 1, 4]),
    ]
    [speed] = build_value_chart(results, 'throughput').marks
    assert speed.ys == [5, 6, 9]
    reward = build_curve_chart(results, 'reward', 'seconds')
    assert [line.label for line in reward.marks] == ['eta0 (2)', 'eta1 (2)', 'eta4 (2)']
    assert (reward.marks[0].xs[0], reward.marks[0].xs[-1]) == (2, 8)  # four updates of two seconds
    # seeds differ by 0.01, etas by 0.016: rate + seed / 100 + eta * update / 1000
    np.testing.assert_allclose(np.subtract(reward.marks[0].highs, reward.marks[0].lows), 0.01)
    assert math.isclose(reward.marks[2].ys[-1] - reward.marks[0].ys[-1], 0.016)
    assert glyphs_of(reward) == {'VArea', 'Line'}  # bands
    assert glyphs_of(ages) == {'Segment', 'Line', 'Scatter'}  # intervals of points
    page = (sweep.workdir / 'results.html').read_text()
    for figure in (
        'reward_over_updates',
        'reward_over_seconds',
        'age_over_updates',
        'ages_by_value',
        'throughput_by_value',
    ):
        assert f'data-figure="{figure}"' in page
    told = 'eta0 is lower than eta4; eta1 is lower than eta4; eta1 is higher than eta0'
    assert told in page
    assert told in (sweep.workdir / 'results.md').read_text()
    assert (sweep.workdir / 'plots' / 'overview.png').exists()


def test_a_sweep_over_names_has_curves_and_no_charts_by_value(tmp_path, monkeypatch):
    arms = {name: {'loss.proximal': name} for name in ('recompute', 'behavior')}
    sweep = ToySweep(tmp_path, arms)
    assert sweep.run(monkeypatch, '--jobs=2', draws=True) == 0
    assert build_value_chart(build_results('toy.py', sweep.arms()), 'ages') is None
    page = (sweep.workdir / 'results.html').read_text()
    assert 'data-figure="reward_over_updates"' in page
    assert '_by_value' not in page
    assert not (sweep.workdir / 'plots' / 'overview.png').exists()


def test_pairs_without_a_difference_are_counted(tmp_path, monkeypatch):
    arms = {
        f'rate{rate}_seed{seed}': {'optimizer.learning_rate': rate, 'run.seed': seed}
        for rate in (0.1, 0.2, 0.3)
        for seed in (0, 1)
    }
    sweep = ToySweep(tmp_path, arms)
    assert sweep.run(monkeypatch, '--jobs=3') == 0
    page = (sweep.workdir / 'results.md').read_text()
    rewards, speeds = (
        page.split(f'## Differences in {name}')[1].split('##')[0] for name in ('reward_last', 'tokens_per_second')
    )
    assert 'rate0.2 is higher than rate0.1; rate0.3 is higher than rate0.1; rate0.3 is higher than rate0.2' in rewards
    assert 'no difference shown: 3 of 3 pairs' in speeds  # the rate does not change the toy's speed
