"""The timeline of the slots as Bokeh figures to zoom and pan, drawn with WebGL if available.

The strip above it is one picture, so its cost does not grow with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.lanes import short_name
from areal_jax.report.pages.colors import INK, channels
from areal_jax.report.pages.figures import new_figure, plain_text
from areal_jax.report.pages.slot_timeline import (
    KEYS,
    Interval,
    Mark,
    Slot,
    SlotTimeline,
    find_ends,
    first_view,
    version_colors,
    widest_view,
)

if TYPE_CHECKING:
    from bokeh.models import Column, GlyphRenderer, Range1d
    from bokeh.plotting import figure as Figure

NAME = 'slots'
_COLUMNS, _HEIGHT = 1600, 64  # of the picture; of the strip in pixels
_LABELLED = 25  # publications with a label, in the widest view
_ROW_HEIGHTS = (10, 24)  # pixels of a slot, at least and at most
_HEIGHTS = (180, 760)  # pixels of all slots
_BORDERS = 48, 12  # pixels left and right of both figures, which aligns them
_TOOLTIPS = [
    ('work', '@work'),
    ('request', '@request'),
    ('policy version', '@version'),
    ('from', '@left{0.000} s'),
    ('to', '@right{0.000} s'),
    ('', '@detail'),
]


def draw_slots(timeline: SlotTimeline) -> Column:
    """The whole run as a strip; below it, one row per slot for the part chosen on the strip."""
    from bokeh.layouts import column
    from bokeh.models import Range1d

    start, end = find_ends(timeline)
    shown = Range1d(*first_view(timeline), bounds=(start, end), max_interval=widest_view(timeline))
    figures = [draw_overview(timeline, shown, start, end), _draw_rows(timeline, shown)]
    for figure in figures:
        figure.min_border_left, figure.min_border_right = _BORDERS
    return column(*figures, sizing_mode='stretch_width')


def draw_overview(timeline: SlotTimeline, shown: Range1d, start: float, end: float) -> Figure:
    """The strip; `shown` is the range of the timeline below."""
    from bokeh.models import Range1d, RangeTool

    rows = len(timeline.slots)
    made = new_figure(
        '', height=_HEIGHT, tools='', toolbar_location=None, x_range=Range1d(start, end),
        y_range=Range1d(-0.5, rows - 0.5),
    )  # fmt: skip
    picture = paint(timeline, start, end)
    made.image_rgba(image=[picture], x=start, y=-0.5, dw=end - start, dh=rows)
    box = RangeTool(x_range=shown)
    box.overlay.fill_color, box.overlay.fill_alpha = 'white', 0.5
    box.overlay.line_color, box.overlay.line_alpha, box.overlay.line_width = 'black', 1.0, 1.5
    made.add_tools(box)
    made.yaxis.visible = False
    made.grid.grid_line_color = None
    return made


def paint(timeline: SlotTimeline, start: float, end: float) -> np.ndarray:
    """uint32 RGBA [slots, columns], last slot first: the color of the version that the slot decoded with; 0 = none."""
    rows = {slot: row for row, slot in enumerate(reversed(timeline.slots))}
    colors = {version: _rgba(*channels(color)) for version, color in version_colors(timeline).items()}
    pause = _rgba(*channels(KEYS['swap'].color))
    picture = np.zeros((len(rows), _COLUMNS), np.uint32)
    for interval in timeline.intervals:
        first = int((interval.start - start) / (end - start) * _COLUMNS)
        last = int((interval.end - start) / (end - start) * _COLUMNS)
        columns = slice(max(0, first), max(first + 1, last))
        if interval.work == 'decode':
            picture[rows[interval.slot], columns] = colors[interval.version]
        elif interval.work == 'swap' and last > first:  # a shorter pause would be drawn too wide
            for row in (row for (engine, _), row in rows.items() if engine == interval.slot[0]):
                picture[row, columns] = pause
    return picture


def _rgba(red: int, green: int, blue: int) -> int:
    """Packs a color in the byte order of a canvas."""
    return 0xFF << 24 | blue << 16 | green << 8 | red


def _draw_rows(timeline: SlotTimeline, shown: Range1d) -> Figure:
    """Draws intervals, coloured by policy version, and marks at interruptions and preemptions."""
    from bokeh.models import BoxZoomTool, HoverTool, PanTool, Range1d, WheelZoomTool

    rows = {slot: row for row, slot in enumerate(timeline.slots)}
    height = min(max(_HEIGHTS[0], len(rows) * _ROW_HEIGHTS[1]), max(_HEIGHTS[1], len(rows) * _ROW_HEIGHTS[0]))
    made = new_figure(
        'clock time (s)', height=70 + height, tools='reset,save', output_backend='webgl', name=NAME, x_range=shown,
        y_range=Range1d(len(rows) - 0.4, -1.2), toolbar_location='above',
    )  # fmt: skip
    made.toolbar.autohide = False
    wheel, pan = WheelZoomTool(dimensions='width', maintain_focus=False), PanTool()
    made.add_tools(pan, wheel, BoxZoomTool(), WheelZoomTool(dimensions='height'))
    made.toolbar.active_scroll, made.toolbar.active_drag = wheel, pan
    drawn = _draw_intervals(made, timeline, rows)
    _draw_publications(made, timeline, len(rows))
    _draw_marks(made, timeline.marks, rows)
    made.add_tools(HoverTool(renderers=drawn, tooltips=_TOOLTIPS))
    made.yaxis.ticker = list(rows.values())
    made.yaxis.major_label_overrides = {
        row: plain_text(f'{short_name(engine)}/{slot}') for (engine, slot), row in rows.items()
    }
    made.ygrid.grid_line_color = None
    return made


def _draw_intervals(made: Figure, timeline: SlotTimeline, rows: dict[Slot, int]) -> list[GlyphRenderer]:
    """Draws a pause over all slots of its engine, decoding on it, prefills as thin bars on both."""
    colors = version_colors(timeline)
    looks: dict[str, tuple[float, dict[str, object]]] = {
        'swap': (0.5, {'fill_color': KEYS['swap'].color, 'fill_alpha': 0.3, 'line_color': None}),
        'decode': (0.4, {'fill_color': 'color', 'line_color': 'white', 'line_width': 0.4}),
        'prefill': (0.2, {'fill_color': KEYS['prefill'].color, 'line_color': None}),
        'rebuild': (0.2, {'fill_color': KEYS['rebuild'].color, 'line_color': None}),
    }
    drawn = []
    for work, (half, look) in looks.items():
        own = [interval for interval in timeline.intervals if interval.work == work]
        source = _columns(own, rows, half)
        if work == 'decode':
            source['color'] = [colors[interval.version] for interval in own]
        name = KEYS[work].name if work in KEYS else None
        drawn.append(made.quad('left', 'right', 'top', 'bottom', source=source, name=name, **look))
    return drawn


def _columns(intervals: Sequence[Interval], rows: dict[Slot, int], half: float) -> dict[str, object]:
    first = {engine: row for (engine, _), row in reversed(rows.items())}
    last = {engine: row for (engine, _), row in rows.items()}
    top = [rows.get(interval.slot, first[interval.slot[0]]) - half for interval in intervals]
    bottom = [rows.get(interval.slot, last[interval.slot[0]]) + half for interval in intervals]
    return {
        'left': np.array([interval.start for interval in intervals], np.float64),
        'right': np.array([interval.end for interval in intervals], np.float64),
        'bottom': np.array(bottom, np.float64),
        'top': np.array(top, np.float64),
        'work': [interval.work for interval in intervals],
        'request': [interval.request for interval in intervals],
        'version': np.array([interval.version for interval in intervals], np.int32),
        'detail': [interval.detail for interval in intervals],
    }


def _draw_publications(made: Figure, timeline: SlotTimeline, rows: int) -> None:
    times = [time for time, _ in timeline.publications]
    if not times:
        return
    low, high = [-0.6] * len(times), [rows - 0.4] * len(times)
    made.segment(
        'x', 'low', 'x', 'high', source={'x': times, 'low': low, 'high': high}, line_color=KEYS['publish'].color,
        line_dash='dashed', line_width=1, name=KEYS['publish'].name,
    )  # fmt: skip
    start, end = find_ends(timeline)
    in_view = len(times) * widest_view(timeline) / (end - start)
    labelled = timeline.publications[:: max(1, math.ceil(in_view / _LABELLED))]
    data = {
        'x': [time for time, _ in labelled],
        'y': [-0.7] * len(labelled),
        'text': [f'v{version}' for _, version in labelled],
    }
    made.text('x', 'y', 'text', source=data, text_font_size='11px', text_align='center', text_color=INK)


def _draw_marks(made: Figure, marks: Sequence[Mark], rows: Mapping[Slot, int]) -> None:
    from bokeh.models import HoverTool

    cross = KEYS['preempt'].color
    looks: dict[str, dict[str, object]] = {
        'interrupt': {'marker': 'diamond', 'fill_color': KEYS['interrupt'].color, 'line_color': 'white'},
        'preempt': {'marker': 'x', 'fill_color': cross, 'line_color': cross, 'line_width': 2.5},
    }
    drawn = []
    for what, look in looks.items():
        own = [mark for mark in marks if mark.what == what]
        source = {
            'x': [mark.time for mark in own],
            'y': [rows[mark.slot] for mark in own],
            'what': [KEYS[what].label.removeprefix('request ')] * len(own),
            'request': [mark.request for mark in own],
            'detail': [mark.detail for mark in own],
        }
        if own:
            drawn.append(made.scatter('x', 'y', source=source, size=9, name=KEYS[what].name, **look))
    tooltips = [('', '@what'), ('request', '@request'), ('at', '@x{0.000} s'), ('', '@detail')]
    if drawn:
        made.add_tools(HoverTool(renderers=drawn, tooltips=tooltips))
