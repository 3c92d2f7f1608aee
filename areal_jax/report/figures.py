"""Bokeh figures of the pages: curves over updates, histograms of ages, bars of fates, and the split of the ratio.

Used by html_page.py and comparison_page.py. Bokeh is imported where a figure is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from areal_jax.report.aggregates import Metrics
from areal_jax.report.contents import Interval, RatioRow, Report, TokenFates
from areal_jax.report.metric_curves import Curve, curve_points
from areal_jax.telemetry.token_ledger import DROPPED

if TYPE_CHECKING:
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure as Figure

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart
PALETTE = ('#0072B2', '#D55E00', '#009E73', '#E69F00', '#CC79A7', '#56B4E9', '#777777', '#000000')
_DASHES = ('solid', 'dashed', 'dotted', 'dotdash')  # of the first eight lines, of the next eight, ...
_FATES = {
    'trained': '#009E73',
    'filtered': '#999999',
    'masked': '#E69F00',
    'unused': '#F0E442',
    'unfinished': '#56B4E9',
}
_DROPS = ('#D55E00', '#CC79A7', '#8C510A', '#7B3294', '#B2182B')
_MARKED = 60  # points up to which each has a marker
_TOOLS = 'xpan,xwheel_zoom,box_zoom,reset,save'

Line = tuple[str, Sequence[float], Sequence[float]]  # label, x, y
Series = tuple[str, Mapping[float, float]]  # label, share or tokens by age or version


def plain_text(text: str) -> str:
    """A text of a run that Bokeh does not take for TeX, whose fonts it would fetch."""
    for opening in ('$$', '\\(', '\\['):
        text = text.replace(opening, f'{opening[0]}\u200b{opening[1]}')
    return text


def new_figure(title: str, x: str, y: str, *, height: int = 250, **options: object) -> Figure:
    """An empty figure as wide as its place."""
    from bokeh.plotting import figure

    made = figure(
        title=title, x_axis_label=x, y_axis_label=y, height=height, sizing_mode='stretch_width',
        **{'tools': _TOOLS, 'active_drag': None, 'active_scroll': None, **options},
    )  # fmt: skip
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.min_border_right = 12
    made.xgrid.grid_line_color = None
    made.axis.minor_tick_line_color = None
    return made


def draw_curve(curve: Curve, lines: Sequence[Line], updates: DataRange1d) -> Figure:
    """Lines over the updates, which all figures with the same range show together."""
    scale = 'log' if curve.logarithmic else 'linear'
    made = new_figure(curve.title, 'update', curve.unit, x_range=updates, y_axis_type=scale)
    _draw_lines(made, lines, positive=curve.logarithmic)
    return made


def draw_metrics(curve: Curve, metrics: Metrics, updates: DataRange1d) -> Figure:
    """The metrics of a curve of one run."""
    found = ((label, *curve_points(metrics, name)) for label, name in curve.metrics)
    return draw_curve(curve, [line for line in found if line[1]], updates)


def new_updates() -> DataRange1d:
    """A range that figures share, so that they pan and zoom together."""
    from bokeh.models import DataRange1d

    return DataRange1d(range_padding=0.02)


def draw_histogram(title: str, unit: str, series: Sequence[Series]) -> Figure:
    """Shares of the trained tokens by age: a bar an age, several runs beside each other."""
    made = new_figure(title, unit, 'share of the trained tokens')
    width = 0.9 / max(1, len(series))
    for index, (label, tokens) in enumerate(series):
        total = sum(tokens.values()) or 1
        ages = sorted(tokens)
        data = {
            'x': [age + (index - (len(series) - 1) / 2) * width for age in ages],
            'top': [tokens[age] / total for age in ages],
            'age': ages,
            'tokens': [tokens[age] for age in ages],
            'run': [label] * len(ages),
        }
        legend = {'legend_label': plain_text(label)} if label else {}
        made.vbar('x', width * 0.94, 'top', source=data, color=PALETTE[index % len(PALETTE)], **legend)
    _add_hover(
        made,
        [('age', '@age'), ('share', '@top{0.0%}'), ('tokens', '@tokens'), *([('run', '@run')] * (len(series) > 1))],
    )
    made.y_range.start = 0
    _whole_ticks(made)
    place_legend(made)
    return made


def draw_fates(title: str, x: str, fates: Mapping[str, Sequence[int]]) -> Figure:
    """Tokens by age or by version, the fates on top of each other."""
    shown = {fate: tokens for fate, tokens in fates.items() if any(tokens)}
    size = max(map(len, shown.values()), default=0)
    data: dict[str, list[int]] = {fate: [*tokens, *[0] * (size - len(tokens))] for fate, tokens in shown.items()}
    made = new_figure(title, x, 'tokens')
    bottom = [0] * size
    for fate, tokens in data.items():
        top = [low + count for low, count in zip(bottom, tokens, strict=True)]
        source = {'x': list(range(size)), 'bottom': bottom, 'top': top, 'tokens': tokens, 'fate': [fate] * size}
        made.vbar(
            'x', 0.9, 'top', 'bottom', source=source, color=fate_color(fate, shown), legend_label=plain_text(fate)
        )
        bottom = top
    _add_hover(made, [(x, '@x'), ('fate', '@fate'), ('tokens', '@tokens')])
    made.y_range.start = 0
    _whole_ticks(made)
    place_legend(made)
    return made


def draw_fate_shares(runs: Mapping[str, TokenFates]) -> Figure:
    """A bar a run: what share of the generated tokens met which fate."""
    names = list(runs)
    every = list(dict.fromkeys(fate for fates in runs.values() for fate in fates['fates']))
    shown = [fate for fate in every if any(fates['fates'].get(fate) for fates in runs.values())]
    made = new_figure(
        '',
        'share of the generated tokens',
        '',
        height=110 + 34 * len(names),
        x_range=(0, 1),
        y_range=(len(names) - 0.5, -0.5),
    )
    left = [0.0] * len(names)
    for fate in shown:
        tokens = [runs[name]['fates'].get(fate, 0) for name in names]
        shares = [count / (runs[name]['generated'] or 1) for name, count in zip(names, tokens, strict=True)]
        right = [low + share for low, share in zip(left, shares, strict=True)]
        source = {
            'y': list(range(len(names))), 'left': left, 'right': right, 'share': shares, 'tokens': tokens,
            'run': names, 'fate': [fate] * len(names),
        }  # fmt: skip
        made.hbar(
            'y', 0.8, 'right', 'left', source=source, color=fate_color(fate, shown), legend_label=plain_text(fate)
        )
        left = right
    made.yaxis.visible = any(names)
    made.yaxis.ticker = list(range(len(names)))
    made.yaxis.major_label_overrides = {index: plain_text(name) for index, name in enumerate(names)}
    _add_hover(made, [('run', '@run'), ('fate', '@fate'), ('share', '@share{0.0%}'), ('tokens', '@tokens')])
    place_legend(made, columns=6)
    return made


def draw_ratio_rows(title: str, x: str, rows: Sequence[RatioRow]) -> Figure:
    """RMS of the parts of the importance ratio by range of ages, updates back, or engine."""
    made = new_figure(title, x, 'RMS, nats', x_range=[plain_text(row['of']) for row in rows])
    parts = list(dict.fromkeys(part for row in rows for part in row['parts']))
    for part, color in zip(parts, PALETTE, strict=False):
        known = [
            (plain_text(row['of']), row['parts'][part]['rms'], row['tokens']) for row in rows if part in row['parts']
        ]
        points = [point for point in known if point[1] is not None]
        source = dict(zip(('x', 'y', 'tokens'), map(list, zip(*points, strict=True)), strict=True)) if points else {}
        if source:
            data = source | {'part': [part] * len(points)}
            made.line('x', 'y', source=data, color=color, line_width=2)
            made.scatter('x', 'y', source=data, color=color, size=7, legend_label=part)
    _add_hover(made, [(x, '@x'), ('part', '@part'), ('RMS', '@y{0.000e} nats'), ('tokens', '@tokens')])
    made.y_range.start = 0
    place_legend(made)
    return made


def draw_evaluation(report: Report, updates: DataRange1d) -> Figure:
    """Held-out accuracy by version with 95% intervals, before and after training at the ends."""
    made = new_figure('Held-out accuracy, 95% intervals', 'policy version', 'mean score', x_range=updates)
    curve, ends = report['evaluation_curve'], report['evaluation_curve_ends']
    assert ends is not None
    greedy = {0: ends['greedy']['before'], **{row['version']: row['greedy'] for row in curve}}
    sampled = {0: ends['sampled']['before'], **{row['version']: row['sampled'] for row in curve}}
    greedy[report['steps']], sampled[report['steps']] = ends['greedy']['after'], ends['sampled']['after']
    for label, color, scores in (('greedy', PALETTE[2], greedy), ('sampled', PALETTE[0], sampled)):
        points = [(version, found) for version, found in sorted(scores.items()) if found]
        if points:
            _draw_intervals(made, label, color, points)
    _add_hover(made, [('version', '@x'), ('score', '@y{0.000}'), ('interval', '@low{0.000} to @high{0.000}')])
    place_legend(made)
    return made


def fate_color(fate: str, among: Iterable[str]) -> str:
    """The same for a fate on every page; reasons of drops differ from each other."""
    if fate in _FATES:
        return _FATES[fate]
    drops = sorted(other for other in among if other.startswith(DROPPED))
    return _DROPS[drops.index(fate) % len(_DROPS)]


def _draw_lines(made: Figure, lines: Sequence[Line], *, positive: bool) -> None:
    styles = itertools.cycle(itertools.product(_DASHES, PALETTE))
    for (label, xs, ys), (dash, color) in zip(lines, styles, strict=False):
        kept = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0 or not positive]
        if not kept:
            continue
        data = {'x': [x for x, _ in kept], 'y': [y for _, y in kept], 'line': [label] * len(kept)}
        legend = {'legend_label': plain_text(label)} if len(lines) > 1 else {}
        made.line('x', 'y', source=data, color=color, line_dash=dash, line_width=1.8, **legend)
        if len(kept) <= _MARKED:
            made.scatter('x', 'y', source=data, color=color, size=4, **legend)
    values = [y for _, _, ys in lines for y in ys]
    if not positive and min(values, default=-1) >= 0:  # shares, ages, norms: their axis begins at 0
        made.y_range.start = 0
        if not max(values):
            made.y_range.end = 1
    named = [('line', '@line')] if len(lines) > 1 else []
    _add_hover(made, [('update', '@x'), ('value', '@y{0.000 a}'), *named])
    _whole_ticks(made)
    place_legend(made)


def _draw_intervals(made: Figure, label: str, color: str, points: Sequence[tuple[int, Interval]]) -> None:
    means = [found['mean'] for _, found in points]
    data = {
        'x': [version for version, _ in points],
        'y': means,
        'low': [found['mean'] if found['low'] is None else found['low'] for _, found in points],
        'high': [found['mean'] if found['high'] is None else found['high'] for _, found in points],
    }
    made.segment('x', 'low', 'x', 'high', source=data, color=color, line_width=1.5)
    made.line('x', 'y', source=data, color=color, line_width=1.5)
    made.scatter('x', 'y', source=data, color=color, size=7, legend_label=label)


def _add_hover(made: Figure, tooltips: Sequence[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    made.add_tools(HoverTool(tooltips=list(tooltips), mode='mouse'))


def _whole_ticks(made: Figure) -> None:
    """Updates, ages and versions are whole numbers."""
    from bokeh.models import BasicTicker, NumeralTickFormatter

    made.xaxis.ticker = BasicTicker(min_interval=1)
    made.xaxis.formatter = NumeralTickFormatter(format='0')


def place_legend(made: Figure, columns: int = 2) -> None:
    """Under the figure, so that it hides nothing; none where no line has a label."""
    if not made.legend:
        return
    legend = made.legend[0]
    made.add_layout(legend, 'below')
    legend.orientation = 'horizontal'
    legend.ncols = min(len(legend.items), columns)
    legend.click_policy = 'hide'
    legend.label_text_font_size = '12px'
    legend.border_line_color = None
    legend.location = 'left'
    legend.margin, legend.padding, legend.spacing = 0, 2, 12
