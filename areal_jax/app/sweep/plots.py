"""Pictures of a sweep: curves with bands over seeds, and every endpoint with its seeds. Used by main_sweep.py."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax import files
from areal_jax.app.sweep.endpoints import ArmRecord, Curve, Endpoint
from areal_jax.app.sweep.results import Results

if TYPE_CHECKING:  # drawing is imported where it is needed: it takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECTORY = 'plots'
_DPI = 100
# Okabe and Ito's palette, which people with any kind of colour vision can tell apart; then once more, dashed
_COLORS = ('#0072B2', '#E69F00', '#009E73', '#D55E00', '#CC79A7', '#56B4E9', '#000000', '#B8A600')
_STYLES = ('-', '--', ':', '-.')
_SMOOTHING = 5  # updates in the moving mean of the reward
_PLACES = 200  # along an axis, at which a band is drawn
_PANELS = 3  # of endpoints in a row
_AXES = {'updates': 'update', 'tokens': 'trained tokens', 'seconds': 'seconds of the clock'}


def write_plots(results: Results, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths, relative to the work directory, of those that have data."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    drawn = {
        'reward.png': _plot_curves(
            results, directory / 'reward.png', lambda record: record.reward, _SMOOTHING,
            f'mean reward of the batch, last {_SMOOTHING} updates',
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
    lines = [(np.array(curve.axis(axis)), _moving_mean(np.array(curve.values), smoothing)) for curve in curves]
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
    figure = make_figure(5.2)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for axes, (axis, x) in zip(panels, _AXES.items(), strict=True):
        for index, found in curves.items():
            if not found:
                continue
            places, mean, low, high = band(found, axis, smoothing)
            color, style = look(index)
            group = results.groups[index]
            axes.plot(places, mean, color=color, linestyle=style, linewidth=2, label=f'{group.name} ({len(found)})')
            axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
        label_axes(axes, f'over {axis}', x, label if axis == 'updates' else '')
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=min(6, len(labels)), frameon=False)
    figure.suptitle('Mean over the seeds (their number in brackets); band: lowest to highest seed', fontsize=12)
    save_figure(figure, path)
    return True


def _plot_endpoints(results: Results, path: pathlib.Path) -> bool:
    """A panel for each outcome: thin lines join the points of one seed. False: no data, no file."""
    if not results.outcomes:
        return False
    rows = -(-len(results.outcomes) // _PANELS)
    figure = make_figure(1 + 3.6 * rows)
    panels = figure.subplots(rows, min(_PANELS, len(results.outcomes)), squeeze=False).flatten()
    for axes, endpoint in zip(panels, results.outcomes, strict=False):
        _draw_endpoint(axes, results, endpoint)
    for axes in panels[len(results.outcomes) :]:
        axes.set_visible(False)
    figure.suptitle('Points: seeds, joined where they are the same; bars: mean with its 95% interval', fontsize=12)
    save_figure(figure, path)
    return True


def _draw_endpoint(axes: Axes, results: Results, endpoint: Endpoint) -> None:
    seeds: dict[int, list[tuple[int, float]]] = {}
    for index, group in enumerate(results.groups):
        for result in group.arms:
            if endpoint.name in result.values:
                seeds.setdefault(result.arm.seed, []).append((index, result.values[endpoint.name]))
    for points in seeds.values():
        axes.plot(*zip(*points, strict=True), color='#999999', linewidth=0.7, zorder=1)
    for index, group in enumerate(results.groups):
        color, _ = look(index)
        own = [result.values[endpoint.name] for result in group.arms if endpoint.name in result.values]
        axes.scatter([index] * len(own), own, s=16, color=color, zorder=2)
        if (mean := group.means.get(endpoint.name)) is None:
            continue
        axes.plot([index - 0.2, index + 0.2], [mean.mean] * 2, color=color, linewidth=3, zorder=3)
        if mean.low is not None and mean.high is not None:
            error = [[mean.mean - mean.low], [mean.high - mean.mean]]
            axes.errorbar(index, mean.mean, error, color=color, capsize=5, linewidth=1.5, zorder=3)
    names = [group.name for group in results.groups]
    axes.set_xticks(range(len(names)), names, rotation=30 if max(map(len, names)) > 6 else 0, ha='center', fontsize=9)
    axes.set_xlim(-0.5, len(names) - 0.5)
    label_axes(axes, endpoint.name, '', '')


def look(index: int) -> tuple[str, str]:
    """(colour, line style) of the line with this number."""
    return _COLORS[index % len(_COLORS)], _STYLES[index // len(_COLORS) % len(_STYLES)]


def _moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)


def make_figure(height: float) -> Figure:
    """A figure 1300 px wide; made without pyplot, which keeps global state and may need a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, height), dpi=_DPI, layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=12)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.spines[['top', 'right']].set_visible(False)


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI, format='png')
    files.write_bytes(path, png.getvalue())
