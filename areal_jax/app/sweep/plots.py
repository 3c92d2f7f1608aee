"""Pictures of a sweep: curves with bands over seeds, and every endpoint with its seeds."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.app.sweep.endpoints import ArmRecord, Curve, Endpoint
from areal_jax.app.sweep.sweep_results import Results
from areal_jax.report.pages.colors import Look, choose_looks
from areal_jax.report.pages.metric_curves import moving_mean, smoothing_window
from areal_jax.report.pages.run_plots import label_axes, make_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECTORY = 'plots'
_WIDTH = 13  # inches
_STYLES, _MARKERS = ('-', '--', ':', '-.'), ('o', 's', '^', 'D')  # by the number of a look
_PLACES = 200  # along an axis, at which a band is drawn
_PANELS = 3  # of endpoints in a row
_FEW = 4  # groups, up to which bands are told apart
_AXES = {'updates': 'update', 'tokens': 'trained tokens', 'seconds': 'seconds of the clock'}


def write_plots(results: Results, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths, relative to the work directory, of those that have data."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    rewards = [len(result.record.reward.values) for result in results.arms if result.record]
    window = smoothing_window(max(rewards, default=0))
    drawn = {
        'reward.png': _plot_curves(
            results, directory / 'reward.png', lambda record: record.reward, window,
            f'mean reward of the batch, last {window} updates' if window > 1 else 'mean reward of the batch',
        ),
        'evaluation.png': _plot_curves(
            results, directory / 'evaluation.png', lambda record: record.evaluation, 1, 'held-out score'
        ),
        'endpoints.png': _plot_endpoints(results, directory / 'endpoints.png'),
    }  # fmt: skip
    return [f'{DIRECTORY}/{name}' for name, has_data in drawn.items() if has_data]


def band(curves: Sequence[Curve], axis: str, smoothing: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(places, mean, lowest, highest) of several seeds along an axis, over the range that all of them cover.

    Each curve is first replaced by the mean of its last `smoothing` points, then read between its points by straight
    lines.
    """
    lines = [(np.array(curve.axis(axis)), np.array(moving_mean(curve.values, smoothing))) for curve in curves]
    places = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), _PLACES)
    values = np.stack([np.interp(places, x, y) for x, y in lines])
    return places, values.mean(0), values.min(0), values.max(0)


def _plot_curves(
    results: Results, path: pathlib.Path, take: Callable[[ArmRecord], Curve], smoothing: int, label: str
) -> bool:
    """One panel for each of _AXES. False: no data, no file."""
    curves = {
        index: [
            take(result.record) for result in group.finished if result.record and len(take(result.record).values) > 1
        ]
        for index, group in enumerate(results.groups)
    }
    if not any(curves.values()):
        return False
    field, looks = group_looks(results)
    figure = make_figure(5.2, _WIDTH)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    alpha = 0.15 if sum(map(bool, curves.values())) <= _FEW else 0.06
    for axes, (axis, x) in zip(panels, _AXES.items(), strict=True):
        for index, found in curves.items():
            if not found:
                continue
            places, mean, low, high = band(found, axis, smoothing)
            name = results.groups[index].name
            color, style = looks[name]
            line = {'color': color, 'linestyle': _STYLES[style % len(_STYLES)], 'label': f'{name} ({len(found)})'}
            axes.plot(places, mean, linewidth=2, **line)
            axes.fill_between(places, low, high, color=color, alpha=alpha, linewidth=0)
        axes.locator_params(axis='x', nbins=5)
        label_axes(axes, f'over {axis}', x, label if axis == 'updates' else '')
    _draw_legend(figure, panels[0], field, list(looks))
    figure.suptitle('Mean over the seeds (their number in brackets); band: lowest to highest seed', fontsize=12)
    save_figure(figure, path)
    return True


def _draw_legend(figure: Figure, axes: Axes, field: str, names: Sequence[str]) -> None:
    """Beside the panels, in the order of the looks; its title is the field that the colours follow."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: names.index(labels[index].rpartition(' (')[0]))
    figure.legend(
        [handles[index] for index in order], [labels[index] for index in order], loc='outside right upper',
        title=f'colours: {field}' if field else None, frameon=False, fontsize=9, title_fontsize=9,
    )  # fmt: skip


def _plot_endpoints(results: Results, path: pathlib.Path) -> bool:
    """A panel for each outcome: thin lines join the points of one seed. False: no data, no file."""
    if not results.outcomes:
        return False
    rows = -(-len(results.outcomes) // _PANELS)
    _, looks = group_looks(results)
    figure = make_figure(0.6 + rows * (0.8 + 0.32 * max(3, len(results.groups))), _WIDTH)
    panels = figure.subplots(rows, min(_PANELS, len(results.outcomes)), squeeze=False, sharey=True).flatten()
    for axes, endpoint in zip(panels, results.outcomes, strict=False):
        draw_endpoint(axes, results, endpoint, looks)
    for axes in panels[len(results.outcomes) :]:
        axes.set_visible(False)
    figure.suptitle('Points: seeds, joined where they are the same; bars: mean with its 95% interval', fontsize=12)
    save_figure(figure, path)
    return True


def draw_endpoint(axes: Axes, results: Results, endpoint: Endpoint, looks: Mapping[str, Look]) -> None:
    """A row a group, so that names of any length fit."""
    seeds: dict[int, list[tuple[float, int]]] = {}
    for row, group in enumerate(results.groups):
        for result in group.arms:
            if endpoint.name in result.values:
                seeds.setdefault(result.arm.seed, []).append((result.values[endpoint.name], row))
    for points in seeds.values():
        axes.plot(*zip(*points, strict=True), color='#999999', linewidth=0.7, zorder=1)
    for row, group in enumerate(results.groups):
        color, style = looks[group.name]
        own = [result.values[endpoint.name] for result in group.arms if endpoint.name in result.values]
        axes.scatter(own, [row] * len(own), s=18, color=color, marker=_MARKERS[style % len(_MARKERS)], zorder=2)
        if (mean := group.means.get(endpoint.name)) is None:
            continue
        axes.plot([mean.mean] * 2, [row - 0.28, row + 0.28], color=color, linewidth=3, zorder=3)
        if mean.low is not None and mean.high is not None:
            error = [[mean.mean - mean.low], [mean.high - mean.mean]]
            axes.errorbar(mean.mean, row, xerr=error, color=color, capsize=4, linewidth=1.5, zorder=3)
    axes.set_yticks(range(len(results.groups)), [group.name for group in results.groups], fontsize=9)
    axes.set_ylim(len(results.groups) - 0.5, -0.5)
    axes.locator_params(axis='x', nbins=6)
    label_axes(axes, endpoint.name, '', '')


def group_looks(results: Results) -> tuple[str, dict[str, Look]]:
    """The config field that the colours of the groups follow, '' for none; and the look of each group."""
    return choose_looks({group.name: group.arms[0].arm.values() for group in results.groups})
