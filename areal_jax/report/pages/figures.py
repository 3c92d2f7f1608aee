"""Draws the declared charts of a page with Bokeh, which is imported only when a chart is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from areal_jax.report.pages.blocks import UPDATE, Bars, Cells, Chart, Line
from areal_jax.report.pages.colors import DASHES, GRID, INK, LEVELS, LINE, TEXT
from areal_jax.report.pages.curves import MARKED, moving_mean, smoothing_window

if TYPE_CHECKING:
    from bokeh.models import DataRange1d
    from bokeh.plotting import figure as Figure

_TOOLS = 'xpan,xwheel_zoom,box_zoom,reset,save'
_FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif'
_HEIGHT, _WIDE_HEIGHT = 230, 290  # pixels
_ROOM = 1.18  # of a horizontal chart, for the texts behind its bars


def plain_text(text: str) -> str:
    """Returns the text so marked that Bokeh does not read it as TeX, whose fonts it would fetch."""
    for opening in ('$$', '\\(', '\\['):
        text = text.replace(opening, f'{opening[0]}\u200b{opening[1]}')
    return text


def new_figure(x: str, *, height: int = _HEIGHT, **options: object) -> Figure:
    """Returns an empty figure as wide as its container; the page's background shows through it."""
    from bokeh.plotting import figure

    made = figure(
        x_axis_label=x, height=height, sizing_mode='stretch_width', min_width=200,
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


def new_updates() -> DataRange1d:
    """Returns a range for charts that pan and zoom together."""
    from bokeh.models import DataRange1d

    return DataRange1d(range_padding=0.02)


def draw_chart(chart: Chart, updates: DataRange1d) -> Figure:
    """Draws the chart; `updates` is the range of all charts of its grid that are over the updates."""
    from bokeh.models import HoverTool, Span

    made = _new_horizontal(chart) if chart.horizontal else _new_upright(chart, updates)
    for mark in chart.marks:
        name = chart.name_glyphs(mark)
        if isinstance(mark, Line):
            _draw_line(made, mark, chart, name)
        elif isinstance(mark, Cells):
            _draw_cells(made, mark, name)
        else:
            _draw_bars(made, mark, chart.horizontal, name)
    if chart.bound:
        look = {'line_color': INK, 'line_dash': 'dashed', 'line_width': 1.5}
        made.add_layout(Span(location=chart.bound[1], dimension='width', **look))
    if chart.hover:
        made.add_tools(HoverTool(tooltips=list(chart.hover), mode='mouse'))
    return made


def _new_upright(chart: Chart, updates: DataRange1d) -> Figure:
    """Returns a figure whose values go upwards; shares, ages and norms begin at 0."""
    from bokeh.models import BasicTicker, NumeralTickFormatter

    scale, height = 'log' if chart.logarithmic else 'linear', _WIDE_HEIGHT if chart.wide else _HEIGHT
    linked = {'x_range': updates} if chart.x == UPDATE else {}
    made = new_figure(chart.x, y_axis_type=scale, height=height, **linked)
    lines = [mark for mark in chart.marks if not isinstance(mark, Cells)]
    values = [value for mark in lines for value in (mark.ys if isinstance(mark, Line) else mark.ends)]
    if not chart.logarithmic and min(values, default=-1) >= 0:
        made.y_range.start = 0
        if not max(values):
            made.y_range.end = 1
    if chart.percent:
        made.yaxis[0].formatter = NumeralTickFormatter(format='0%')
    if chart.names:
        _name_places(made.xaxis, chart.names)
    else:  # x is an update, an age or a version
        made.xaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=5)
        made.xaxis.formatter = NumeralTickFormatter(format='0')
    return made


def _new_horizontal(chart: Chart) -> Figure:
    from bokeh.models import NumeralTickFormatter

    rows, ends = len(chart.names), [end for mark in chart.marks if isinstance(mark, Bars) for end in mark.ends]
    longest = 1 if chart.percent else _ROOM * max(ends, default=1)
    made = new_figure(chart.x, height=80 + 32 * rows, x_range=(0, longest), y_range=(rows - 0.5, -0.5))
    made.ygrid.grid_line_color = None
    made.yaxis.visible = any(chart.names)
    _name_places(made.yaxis, chart.names)
    if chart.percent:
        made.xaxis[0].formatter = NumeralTickFormatter(format='0%')
    return made


def _name_places(axis: object, names: Sequence[str]) -> None:
    axis.ticker = list(range(len(names)))  # type: ignore[attr-defined]
    labels = {place: plain_text(name) for place, name in enumerate(names)}
    axis.major_label_overrides = labels  # type: ignore[attr-defined]


def _draw_line(made: Figure, line: Line, chart: Chart, name: str) -> None:
    """Draws a long line faint with its moving mean over it, a short one with markers."""
    if not line.xs:
        return
    source = {'x': line.xs, 'y': line.ys, **_columns(line, len(line.xs))}
    look = {'color': line.color, 'name': name}
    smoothed = chart.window > 1 and smoothing_window(len(line.xs)) > 1
    if smoothed:
        made.line('x', 'y', source=source, line_alpha=0.45, line_width=1, **look)
        source = source | {'y': moving_mean(line.ys, chart.window)}
    if line.lows:
        source |= {'low': line.lows, 'high': line.highs}
        if chart.band:
            made.varea('x', 'low', 'high', source=source, fill_alpha=chart.band, **look)
        else:
            made.segment('x', 'low', 'x', 'high', source=source, line_width=2, **look)
    dash = DASHES[line.style % len(DASHES)]
    made.line('x', 'y', source=source, line_width=2.4 if smoothed else 1.8, line_dash=dash, **look)
    if line.marker:
        made.scatter('x', 'y', source=source, size=8, marker=line.marker, **look)
    elif not smoothed and len(line.xs) <= MARKED:
        made.scatter('x', 'y', source=source, size=4, **look)


def _draw_bars(made: Figure, bars: Bars, horizontal: bool, name: str) -> None:
    source = {'x': bars.places, 'start': bars.starts, 'y': bars.ends, **_columns(bars, len(bars.places))}
    look = {'color': bars.color, 'line_color': None, 'name': name}
    (made.hbar if horizontal else made.vbar)('x', bars.width, 'y', 'start', source=source, **look)
    if bars.texts:
        text = {'text_baseline': 'middle', 'text_font_size': '12px', 'text_color': INK}
        made.text('y', 'x', 'text', source=source | {'text': bars.texts}, **text)


def _draw_cells(made: Figure, cells: Cells, name: str) -> None:
    from bokeh.models import BasicTicker, LinearColorMapper, NumeralTickFormatter

    ends = {'low': -0.5, 'high': len(LEVELS) - 0.5}
    colors = LinearColorMapper(list(LEVELS), low_color='#00000000', nan_color=cells.none_color, **ends)
    source = {'image': [cells.level_of], 'value': [cells.values.astype('float32')]}
    place = {'x': cells.left, 'y': -0.5, 'dw': cells.right - cells.left, 'dh': len(cells.values)}
    made.image('image', source=source, color_mapper=colors, name=name, **place)
    made.y_range.range_padding = 0
    made.yaxis.ticker = BasicTicker(min_interval=1, desired_num_ticks=5)
    made.yaxis.formatter = NumeralTickFormatter(format='0')
    made.grid.grid_line_color = None


def _columns(mark: Line | Bars, count: int) -> Mapping[str, object]:
    return {'label': [mark.label] * count, **mark.details}
