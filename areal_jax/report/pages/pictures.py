"""Pictures of charts (plots/*.png), drawn with matplotlib: the curves of a run, its slots, the loads of experts."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from areal_jax import files, lanes
from areal_jax.events.schema import Event
from areal_jax.report.aggregates import Metrics
from areal_jax.report.event_log import LaneInterval, lane_intervals
from areal_jax.report.pages.blocks import UPDATE, Cells, Chart, Line
from areal_jax.report.pages.charts import build_evaluation, build_loads, build_metrics
from areal_jax.report.pages.colors import GREY, INK, LEVELS
from areal_jax.report.pages.curves import MARKED, REWARD, TOKEN_AGE, moving_mean, smoothing_window
from areal_jax.report.pages.slot_timeline import (
    KEYS,
    MOST_INTERVALS,
    Interval,
    Slot,
    SlotTimeline,
    build_slot_timeline,
    first_view,
    version_colors,
)
from areal_jax.report.report_keys import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DIRECTORY = 'plots'
MARKERS = {'circle': 'o', 'square': 's', 'triangle': '^', 'diamond': 'D'}
_STYLES = ('-', '--', ':', '-.')  # by the number of a line's style, as colors.DASHES
_DPI = 100
_MOST_SLOTS = 32  # rows in slots.png


def write_plots(
    events: Sequence[Event], metrics: Metrics, report: Report, workdir: pathlib.Path, loads: Metrics = ()
) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths of the plots that have data, relative to the work directory."""
    (workdir / DIRECTORY).mkdir(parents=True, exist_ok=True)
    charts = {
        'reward.png': build_metrics(REWARD, metrics, report),
        'evaluation.png': build_evaluation(report),
        'token_age.png': build_metrics(TOKEN_AGE, metrics, report),
    }
    figures = {name: draw_picture(chart) for name, chart in charts.items() if chart and chart.marks}
    timeline = build_slot_timeline(events, MOST_INTERVALS)
    if timeline.slots:
        figures['slots.png'] = draw_slots(timeline, [i for i in lane_intervals(events) if i.work == 'train'])
    if over_updates := [chart for chart in build_loads(loads, report).values() if chart.x == UPDATE]:
        figures['expert_loads.png'] = draw_cells(over_updates)
    for name, figure in figures.items():
        save_figure(figure, workdir / DIRECTORY / name)
    return [f'{DIRECTORY}/{name}' for name in figures]


def draw_picture(chart: Chart) -> Figure:
    """Draws a chart of lines."""
    figure = make_figure(4.8)
    axes = figure.add_subplot()
    draw_lines(axes, [mark for mark in chart.marks if isinstance(mark, Line)], chart.window, chart.band)
    if chart.bound:
        axes.axhline(chart.bound[1], color=INK, linestyle='--', linewidth=1.5, label=chart.bound[0])
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    _whole_ticks(axes.xaxis)
    label_axes(axes, chart.title, chart.x, chart.unit)
    if chart.keys:
        figure.legend(loc='outside lower center', ncols=len(chart.keys), frameon=False)
    if chart.caption:
        axes.set_title(chart.caption, fontsize=9, loc='right')
    return figure


def draw_lines(axes: Axes, lines: Sequence[Line], window: int = 1, band: float = 0.0) -> None:
    """Draws lines with their intervals.

    Args:
      window: of the moving mean that is drawn over a line of ten points or more.
      band: opacity of the area between the ends of the intervals; 0 = the intervals are bars.
    """
    for line in lines:
        ys, marker = line.ys, MARKERS.get(line.marker, '.' if len(line.ys) <= MARKED else '')
        if window > 1 and smoothing_window(len(ys)) > 1:
            marker = ''
            axes.plot(line.xs, ys, color=line.color, linewidth=1, alpha=0.45)
            ys = moving_mean(ys, window)
        if len(line.lows) and band:
            axes.fill_between(line.xs, line.lows, line.highs, color=line.color, alpha=band, linewidth=0)
        elif len(line.lows):
            axes.vlines(line.xs, line.lows, line.highs, color=line.color, linewidth=1.5)
        axes.plot(
            line.xs, ys, color=line.color, linewidth=1.8, linestyle=_STYLES[line.style % len(_STYLES)], marker=marker,
            markersize=5, label=line.label or None,
        )  # fmt: skip


def draw_cells(charts: Sequence[Chart]) -> Figure:
    """Draws charts of cells below each other, with one legend."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure = make_figure(0.8 + 2.6 * len(charts))
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        (cells,) = (mark for mark in chart.marks if isinstance(mark, Cells))
        colors = ListedColormap(LEVELS).with_extremes(bad=cells.none_color, under='none')
        axes.imshow(
            cells.level_of, colors, vmin=-0.5, vmax=len(LEVELS) - 0.5, aspect='auto', origin='lower',
            interpolation='nearest', extent=(cells.left, cells.right, -0.5, len(cells.values) - 0.5),
        )  # fmt: skip
        _whole_ticks(axes.xaxis)
        _whole_ticks(axes.yaxis)
        label_axes(axes, chart.title, chart.x, chart.unit)
        axes.set_title(chart.caption, fontsize=9, loc='right')
    patches = [Patch(color=key.color, label=key.label) for key in charts[0].keys]
    figure.legend(handles=patches, loc='outside lower center', ncols=len(patches), frameon=False)
    return figure


def draw_slots(timeline: SlotTimeline, trained: Sequence[LaneInterval]) -> Figure:
    """Draws requests in the slots over time, coloured by policy version, after Figure 3 of arXiv 2505.24298.

    Lines show publications; `trained` are the updates on the learner's lane, which are below the slots. Of a long run
    only the middle is shown.
    """
    start, end = first_view(timeline)
    rows = {slot: row for row, slot in enumerate(timeline.slots[:_MOST_SLOTS])}
    figure = make_figure(2.2 + 0.24 * max(8, len(rows)))
    axes = figure.add_subplot()
    shown = [i for i in timeline.intervals if i.slot in rows and i.end > start and i.start < end]
    _draw_decoding(figure, axes, [i for i in shown if i.work == 'decode'], rows, version_colors(timeline))
    for time, version in timeline.publications:
        if start <= time <= end:
            axes.axvline(time, color='black', linestyle='--', linewidth=1, zorder=4)
            axes.text(time, -0.9, f'v{version}', ha='center', fontsize=9)
    marks = [mark for mark in timeline.marks if mark.what == 'interrupt' and mark.slot in rows]
    axes.plot(
        [mark.time for mark in marks], [rows[mark.slot] for mark in marks], 'D', color=KEYS['interrupt'].color,
        markeredgecolor='white', markersize=6, zorder=5, label=KEYS['interrupt'].label,
    )  # fmt: skip
    _draw_updates(axes, trained, len(rows))
    names = [f'{engine} slot {slot}' for engine, slot in rows] + [lanes.LEARNER] * bool(trained)
    axes.set(xlim=(start, end), ylim=(len(names) - 0.4, -0.8))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    of = f', {len(rows)} of {len(timeline.slots)} slots' if len(rows) < len(timeline.slots) else ''
    label_axes(axes, f'Requests in the decoding slots{of}', 'clock time (s)', '', pad=26)
    if marks:
        figure.legend(loc='outside lower center', frameon=False)
    return figure


def _draw_decoding(
    figure: Figure, axes: Axes, decoding: Sequence[Interval], rows: Mapping[Slot, int], colors: Mapping[int, str]
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    axes.barh(
        [rows[interval.slot] for interval in decoding],
        [interval.end - interval.start for interval in decoding],
        left=[interval.start for interval in decoding],
        height=0.78,
        color=[colors[interval.version] for interval in decoding],
        edgecolor='white',
    )
    scale = ScalarMappable(Normalize(min(colors) - 0.5, max(colors) + 0.5), ListedColormap(list(colors.values())))
    figure.colorbar(scale, ax=axes, label='policy version of the tokens', pad=0.02)


def _draw_updates(axes: Axes, trained: Sequence[LaneInterval], row: int) -> None:
    """Draws the learner's updates, each with the version that it makes."""
    for index, interval in enumerate(trained):
        color = (GREY, '#A8A8A8')[index % 2]
        axes.barh(row, interval.end - interval.start, left=interval.start, height=0.78, color=color)
        if 'update' in interval.detail:
            middle, name = (interval.start + interval.end) / 2, f'v{interval.detail["update"]}'
            axes.text(middle, row, name, ha='center', va='center', fontsize=8, color='white', clip_on=True)


def make_figure(height: float, width: float = 12) -> Figure:
    """Returns a figure, sizes in inches of 100 px; without pyplot, which keeps global state and may need a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def label_axes(axes: Axes, title: str, x: str, y: str, pad: float = 8) -> None:
    """Sets title and labels, and hides the top and right edges of the frame."""
    axes.set_title(title, fontsize=13, pad=pad)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.spines[['top', 'right']].set_visible(False)


def _whole_ticks(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    """Writes the figure as PNG, atomically."""
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI, format='png')
    files.write_bytes(path, png.getvalue())
