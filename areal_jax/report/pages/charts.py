"""Charts of the pages: curves over updates, histograms of ages, bars of fates and of lane seconds, the ratio's split.

Bokeh is imported only when a figure is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from areal_jax.report.aggregates import Metrics
from areal_jax.report.limit import evaluation_points
from areal_jax.report.pages.report_texts import Table, format_interval
from areal_jax.report.pages.run_plots import Curve, curve_points, moving_mean, smoothing_window
from areal_jax.report.pages.web_page import (
    BLUE,
    DROPS,
    FATES,
    GREEN,
    GREY,
    GRID,
    INK,
    LINE,
    PALETTE,
    TEXT,
    VERMILION,
    Chart,
    Key,
    Look,
)
from areal_jax.report.report_keys import Interval, RatioRow, Report, Time, TokenFates
from areal_jax.telemetry.progress import format_number, format_percent
from areal_jax.telemetry.token_ledger import DROPPED

if TYPE_CHECKING:
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure as Figure

_DASHES = ('solid', 'dashed', 'dotted', 'dotdash')  # by the number of a line's style
_MARKED = 60  # a line of at most this many points has a marker at each
_TOOLS = 'xpan,xwheel_zoom,box_zoom,reset,save'
_FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'
_MOST_ROWS = 40  # of the table below a chart
HEIGHT, WIDE_HEIGHT = 230, 290  # pixels

Line = tuple[str, Sequence[float], Sequence[float]]  # label, x, y
Series = tuple[str, Mapping[float, float]]  # label, share or tokens by age or version


def plain_text(text: str) -> str:
    """Returns the text so marked that Bokeh does not read it as TeX, whose fonts it would fetch."""
    for opening in ('$$', '\\(', '\\['):
        text = text.replace(opening, f'{opening[0]}\u200b{opening[1]}')
    return text


def new_figure(x: str, y: str = '', *, height: int = HEIGHT, **options: object) -> Figure:
    """An empty figure as wide as its container; it has no background, so the page's background shows."""
    from bokeh.plotting import figure

    made = figure(
        x_axis_label=x, y_axis_label=y, height=height, sizing_mode='stretch_width', min_width=200,
        background_fill_color=None, border_fill_color=None, outline_line_color=None,
        **{'tools': _TOOLS, 'active_drag': None, 'active_scroll': None, **options},
    )  # fmt: skip
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.min_border_right = 12
    made.xgrid.grid_line_color = None
    made.ygrid.grid_line_color = GRID
    axis = made.axis
    axis.minor_tick_line_color = None
    axis.axis_line_color = axis.major_tick_line_color = LINE
    axis.axis_label_text_color = axis.major_label_text_color = TEXT
    axis.axis_label_text_font = axis.major_label_text_font = _FONT
    axis.axis_label_text_font_style = 'normal'
    axis.axis_label_text_font_size = '12px'
    axis.axis_label_standoff = 4
    return made


def draw_curve(
    curve: Curve, lines: Sequence[Line], updates: DataRange1d, looks: Mapping[str, Look] | None = None
) -> Chart:
    """Lines over the updates; figures with the same range pan and zoom together.

    If the curve is smoothed, a line of ten points or more is drawn faint with its moving mean over it. `looks` maps
    labels to looks; by default lines have the colours of the palette.
    """
    scale = 'log' if curve.logarithmic else 'linear'
    height = WIDE_HEIGHT if curve.wide else HEIGHT
    made = new_figure('update', x_range=updates, y_axis_type=scale, height=height)
    window = smoothing_window(max((len(xs) for _, xs, _ in lines), default=0)) if curve.smooth else 1
    keys = _draw_lines(made, curve, lines, window, looks or _palette_looks([label for label, _, _ in lines]))
    said = '; '.join(
        f'{label} from {format_number(ys[0])} at update {format_number(xs[0])} to {format_number(ys[-1])} at update '
        f'{format_number(xs[-1])}'
        for label, xs, ys in lines
        if ys
    )
    caption = f'Faint: each update; strong: mean of the last {window} updates.' if window > 1 else ''
    alt = f'Lines over the updates: {said}.'
    return Chart(made, curve.title, curve.unit, alt, _curve_table(lines), caption, curve.wide, keys)


def draw_metrics(curve: Curve, metrics: Metrics, updates: DataRange1d) -> Chart:
    """Draws the metrics of a curve for one run."""
    found = ((label, *curve_points(metrics, name)) for label, name in curve.metrics)
    return draw_curve(curve, [line for line in found if line[1]], updates)


def new_updates() -> DataRange1d:
    """A range for figures that pan and zoom together."""
    from bokeh.models import DataRange1d

    return DataRange1d(range_padding=0.02)


def add_bound(chart: Chart, label: str, value: float) -> Chart:
    """The chart with a dashed line over the whole width."""
    from bokeh.models import Span

    look = {'line_color': INK, 'line_dash': 'dashed', 'line_width': 1.5}
    chart.figure.add_layout(Span(location=value, dimension='width', **look))  # type: ignore[attr-defined]
    return dataclasses.replace(chart, keys=(*chart.keys, Key(label, INK, 'dashed')))


def draw_histogram(title: str, unit: str, series: Sequence[Series], looks: Mapping[str, Look] | None = None) -> Chart:
    """Shares of the trained tokens by age: one bar per age; the bars of several runs are next to each other."""
    made = new_figure(f'age ({unit})')
    width, keys = 0.9 / max(1, len(series)), list[Key]()
    chosen = looks or _palette_looks([label for label, _ in series])
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
        keys += [Key(label, chosen[label][0], name=f'{title}/{label}')] if label else []
        look = {'color': chosen[label][0], 'line_color': None, 'name': f'{title}/{label}'}
        made.vbar('x', width * 0.94, 'top', source=data, **look)
    _add_hover(
        made,
        [('age', '@age'), ('share', '@top{0.0%}'), ('tokens', '@tokens'), *([('run', '@run')] * (len(series) > 1))],
    )
    made.y_range.start = 0
    _show_percent(made.yaxis)
    _whole_ticks(made)
    totals = {label: sum(tokens.values()) or 1 for label, tokens in series}
    ages = sorted({age for _, tokens in series for age in tokens})
    rows = [
        (format_number(age), *(format_percent(tokens.get(age, 0) / totals[label]) for label, tokens in series))
        for age in ages
    ]
    table = Table(('age', *(label or 'share' for label, _ in series)), rows[:_MOST_ROWS])
    first, last = (format_number(ages[0]), format_number(ages[-1])) if ages else ('-', '-')
    alt = f'Bars by age, from {first} to {last} {unit}.'
    return Chart(made, title, 'share of the trained tokens', alt, table, keys=keys)


def draw_fates(title: str, x: str, fates: Mapping[str, Sequence[int]]) -> Chart:
    """Tokens by age or by version, the fates on top of each other."""
    shown = {fate: tokens for fate, tokens in fates.items() if any(tokens)}
    size = max(map(len, shown.values()), default=0)
    data: dict[str, list[int]] = {fate: [*tokens, *[0] * (size - len(tokens))] for fate, tokens in shown.items()}
    made = new_figure(x)
    bottom = [0] * size
    for fate, tokens in data.items():
        top = [low + count for low, count in zip(bottom, tokens, strict=True)]
        source = {'x': list(range(size)), 'bottom': bottom, 'top': top, 'tokens': tokens, 'fate': [fate] * size}
        made.vbar('x', 0.9, 'top', 'bottom', source=source, color=fate_color(fate, shown), line_color=None)
        bottom = top
    _add_hover(made, [(x, '@x'), ('fate', '@fate'), ('tokens', '@tokens')])
    made.y_range.start = 0
    _whole_ticks(made)
    rows = [(str(index), *(str(tokens[index]) for tokens in data.values())) for index in _thinned(size)]
    alt = f'Stacked bars by {x}: {", ".join(data)}.'
    return Chart(made, title, 'tokens', alt, Table((x, *data), rows), keys=_fate_keys(data))


def draw_fate_shares(runs: Mapping[str, TokenFates]) -> Chart:
    """One bar per run, divided into the shares of the generated tokens by fate."""
    names = list(runs)
    every = list(dict.fromkeys(fate for fates in runs.values() for fate in fates['fates']))
    shown = [fate for fate in every if any(fates['fates'].get(fate) for fates in runs.values())]
    y_range = (len(names) - 0.5, -0.5)
    made = new_figure('', height=100 + 34 * len(names), x_range=(0, 1), y_range=y_range)
    left = [0.0] * len(names)
    for fate in shown:
        tokens = [runs[name]['fates'].get(fate, 0) for name in names]
        shares = [count / (runs[name]['generated'] or 1) for name, count in zip(names, tokens, strict=True)]
        right = [low + share for low, share in zip(left, shares, strict=True)]
        source = {
            'y': list(range(len(names))), 'left': left, 'right': right, 'share': shares, 'tokens': tokens,
            'run': names, 'fate': [fate] * len(names),
        }  # fmt: skip
        made.hbar('y', 0.8, 'right', 'left', source=source, color=fate_color(fate, shown), line_color=None)
        left = right
    made.yaxis.visible = any(names)
    made.yaxis.ticker = list(range(len(names)))
    made.yaxis.major_label_overrides = {index: plain_text(name) for index, name in enumerate(names)}
    _show_percent(made.xaxis)
    _add_hover(made, [('run', '@run'), ('fate', '@fate'), ('share', '@share{0.0%}'), ('tokens', '@tokens')])
    rows = [
        (fate, *(format_percent(of['fates'].get(fate, 0) / (of['generated'] or 1)) for of in runs.values()))
        for fate in shown
    ]
    table = Table(('fate', *(name or 'share' for name in names)), rows)
    keys, alt = _fate_keys(shown), 'A bar a run, divided by fate.'
    return Chart(made, 'Fates', 'share of the generated tokens', alt, table, keys=keys)


def draw_time(time: Time) -> Chart:
    """Seconds of an update: achieved, the limit, and each lane; the table parts.time has the numbers."""
    known = {
        'achieved': (time['achieved'], BLUE),
        'limit (ideal)': (time['ideal'], VERMILION),
        'generate': (time['generate'], GREY),
        'train': (time['train'], GREY),
        'publish': (time['publish'], GREY),
    }
    bars = {name: (seconds, color) for name, (seconds, color) in known.items() if seconds is not None}
    values = [seconds for seconds, _ in bars.values()]
    texts = [f' {format_number(seconds)} s' for seconds in values]
    data = {'name': list(bars), 'seconds': values, 'color': [color for _, color in bars.values()], 'text': texts}
    made = new_figure('', y_range=list(reversed(bars)), height=60 + 30 * len(bars), tools='')
    made.hbar('name', 0.72, 'seconds', source=data, color='color', line_color=None)
    made.text('seconds', 'name', 'text', source=data, text_baseline='middle', text_font_size='12px', text_color=INK)
    made.x_range.start, made.x_range.end = 0, 1.18 * max(values, default=1)  # room for the numbers
    made.ygrid.grid_line_color = None
    alt = f'Bars: {", ".join(name + text for name, text in zip(bars, texts, strict=True))}.'
    caption = 'Grey: seconds in which a lane was occupied.'
    return Chart(made, 'Where the time of an update went', 's', alt, Table((), ()), caption)


def draw_ratio_rows(title: str, x: str, rows: Sequence[RatioRow]) -> Chart:
    """RMS of the parts of the importance ratio by range of ages, updates back, or engine."""
    made = new_figure(x, x_range=[plain_text(row['of']) for row in rows])
    parts, keys = list(dict.fromkeys(part for row in rows for part in row['parts'])), list[Key]()
    for part, color in zip(parts, PALETTE, strict=False):
        known = [
            (plain_text(row['of']), row['parts'][part]['rms'], row['tokens']) for row in rows if part in row['parts']
        ]
        points = [point for point in known if point[1] is not None]
        source = dict(zip(('x', 'y', 'tokens'), map(list, zip(*points, strict=True)), strict=True)) if points else {}
        if source:
            data = source | {'part': [part] * len(points)}
            name = f'{title}/{part}'
            made.line('x', 'y', source=data, color=color, line_width=2, name=name)
            made.scatter('x', 'y', source=data, color=color, size=7, name=name)
            keys.append(Key(part, color, 'solid', name))
    _add_hover(made, [(x, '@x'), ('part', '@part'), ('RMS', '@y{0.000e} nats'), ('tokens', '@tokens')])
    made.y_range.start = 0
    cells = [
        (row['of'], *(format_number(row['parts'][part]['rms']) if part in row['parts'] else '-' for part in parts))
        for row in rows[:_MOST_ROWS]
    ]
    alt = f'Points by {x}: {", ".join(parts)}.'
    return Chart(made, title, 'RMS, nats', alt, Table((x, *parts), cells), keys=keys)


def draw_evaluation(report: Report) -> Chart | None:
    """Held-out accuracy by version with 95% intervals, before and after training at the ends; None without any."""
    points = evaluation_points(report)
    if not points:
        return None
    made = new_figure('policy version', height=WIDE_HEIGHT)
    colors = {'greedy': GREEN, 'sampled': BLUE}
    for kind, own in points.items():
        _draw_intervals(made, kind, colors[kind], own)
    keys = [Key(kind, colors[kind], 'solid', kind) for kind in points]
    _add_hover(made, [('version', '@x'), ('score', '@y{0.000}'), ('interval', '@low{0.000} to @high{0.000}')])
    made.y_range.start = 0
    _whole_ticks(made)
    found = {kind: dict(own) for kind, own in points.items()}
    versions = sorted({version for own in found.values() for version in own})
    rows = [(str(version), *(format_interval(own.get(version)) for own in found.values())) for version in versions]
    said = '; '.join(
        f'{kind} {format_interval(own[0][1])} at version {own[0][0]}, {format_interval(own[-1][1])} at version '
        f'{own[-1][0]}'
        for kind, own in points.items()
    )
    alt, caption = f'Points with intervals by version: {said}.', 'Points with their 95% intervals.'
    table = Table(('version', *found), rows)
    return Chart(made, 'Held-out accuracy', 'mean score', alt, table, caption, wide=True, keys=keys)


def fate_color(fate: str, among: Iterable[str]) -> str:
    """The colour of a fate, the same on every page; reasons of drops have different colours."""
    if fate in FATES:
        return FATES[fate]
    drops = sorted(other for other in among if other.startswith(DROPPED))
    return DROPS[drops.index(fate) % len(DROPS)]


def _palette_looks(labels: Sequence[str]) -> dict[str, Look]:
    return {label: (PALETTE[index % len(PALETTE)], index // len(PALETTE)) for index, label in enumerate(labels)}


def _fate_keys(fates: Iterable[str]) -> list[Key]:
    """Legend without names, so that no fate can be hidden: the rest of the stack would hang in the air."""
    among = list(fates)
    return [Key(fate, fate_color(fate, among)) for fate in among]


def _draw_lines(made: Figure, curve: Curve, lines: Sequence[Line], window: int, looks: Mapping[str, Look]) -> list[Key]:
    named, keys = [('line', '@line')] if len(lines) > 1 else [], []
    for label, xs, ys in lines:
        kept = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0 or not curve.logarithmic]
        if not kept:
            continue
        color, dash = looks[label][0], _DASHES[looks[label][1] % len(_DASHES)]
        smoothed = window > 1 and smoothing_window(len(kept)) > 1
        data = {'x': [x for x, _ in kept], 'y': [y for _, y in kept], 'line': [label] * len(kept)}
        look = {'color': color, 'name': f'{curve.title}/{label}'}
        if smoothed:
            made.line('x', 'y', source=data, line_alpha=0.45, line_width=1, **look)
            data = data | {'y': moving_mean([y for _, y in kept], window)}
        made.line('x', 'y', source=data, line_width=2.4 if smoothed else 1.8, line_dash=dash, **look)
        if not smoothed and len(kept) <= _MARKED:
            made.scatter('x', 'y', source=data, size=4, **look)
        keys += [Key(label, color, dash, look['name'])] if len(lines) > 1 else []
    values = [y for _, _, ys in lines for y in ys]
    if not curve.logarithmic and min(values, default=-1) >= 0:  # shares, ages, norms: their axis begins at 0
        made.y_range.start = 0
        if not max(values):
            made.y_range.end = 1
    _add_hover(made, [('update', '@x'), ('value', '@y{0.000 a}'), *named])
    _whole_ticks(made)
    return keys


def _curve_table(lines: Sequence[Line]) -> Table:
    """The table of the updates; for a long run only some updates, evenly spaced, including the last."""
    values = {label: dict(zip(xs, ys, strict=True)) for label, xs, ys in lines}
    updates = sorted({x for own in values.values() for x in own})
    rows = [
        (format_number(updates[index]), *(format_number(own.get(updates[index])) for own in values.values()))
        for index in _thinned(len(updates))
    ]
    return Table(('update', *values), rows)


def _thinned(count: int) -> list[int]:
    """At most _MOST_ROWS + 1 of the indices 0 to `count` - 1, evenly spaced, including the last."""
    step = max(1, -(-count // _MOST_ROWS))
    return sorted({*range(0, count, step), *range(max(0, count - 1), count)})


def _draw_intervals(made: Figure, label: str, color: str, points: Sequence[tuple[int, Interval]]) -> None:
    means = [found['mean'] for _, found in points]
    data = {
        'x': [version for version, _ in points],
        'y': means,
        'low': [found['mean'] if found['low'] is None else found['low'] for _, found in points],
        'high': [found['mean'] if found['high'] is None else found['high'] for _, found in points],
    }
    marker = {'greedy': 'circle', 'sampled': 'square'}[label]
    made.segment('x', 'low', 'x', 'high', source=data, color=color, line_width=2, name=label)
    made.line('x', 'y', source=data, color=color, line_width=1.5, name=label)
    made.scatter('x', 'y', source=data, color=color, size=9, marker=marker, name=label)


def _add_hover(made: Figure, tooltips: Sequence[tuple[str, str]]) -> None:
    from bokeh.models import HoverTool

    made.add_tools(HoverTool(tooltips=list(tooltips), mode='mouse'))


def _whole_ticks(made: Figure) -> None:
    """Puts ticks at whole numbers: x is an update, an age or a version."""
    from bokeh.models import BasicTicker, NumeralTickFormatter

    made.xaxis.ticker = BasicTicker(min_interval=1)
    made.xaxis.formatter = NumeralTickFormatter(format='0')


def _show_percent(axis: Iterable[object]) -> None:
    from bokeh.models import NumeralTickFormatter

    for one in axis:
        one.formatter = NumeralTickFormatter(format='0%')  # type: ignore[attr-defined]
