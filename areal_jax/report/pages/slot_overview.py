"""The whole run as a strip above the timeline of the slots, with a box on it to move.

The strip is one picture, so that its cost does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from areal_jax.report.pages.charts import new_figure
from areal_jax.report.pages.colors import SHADES, channels, shade_at
from areal_jax.report.pages.slot_figure import SlotTimeline

if TYPE_CHECKING:
    from bokeh.models import Range1d
    from bokeh.plotting import figure as Figure

PAUSE = '#E69F00'
_COLUMNS, _HEIGHT = 1600, 64  # of the picture; of the strip in pixels


def version_colors(timeline: SlotTimeline) -> Mapping[int, str]:
    """Returns the color of each version that is decoded with, '#rrggbb': one scale from the first to the last one."""
    versions = {interval.version for interval in timeline.intervals if interval.work == 'decode'}
    first, last = min(versions, default=0), max(versions, default=0)
    steps = max(len(SHADES) - 1, last - first)
    return {version: shade_at((version - first) / steps) for version in versions}


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
    """uint32 RGBA [slots, columns], the last slot first: with which version each slot decoded when, 0 for nothing."""
    rows = {slot: row for row, slot in enumerate(reversed(timeline.slots))}
    colors = {version: _rgba(*channels(color)) for version, color in version_colors(timeline).items()}
    pause = _rgba(*channels(PAUSE))
    picture = np.zeros((len(rows), _COLUMNS), np.uint32)
    for interval in timeline.intervals:
        first = int((interval.start - start) / (end - start) * _COLUMNS)
        last = int((interval.end - start) / (end - start) * _COLUMNS)
        columns = slice(max(0, first), max(first + 1, last))
        if interval.work == 'decode':
            picture[rows[interval.slot], columns] = colors[interval.version]
        elif interval.work == 'swap' and last > first:  # shorter ones would cover what is longer
            for row in (row for (engine, _), row in rows.items() if engine == interval.slot[0]):
                picture[row, columns] = pause
    return picture


def _rgba(red: int, green: int, blue: int) -> int:
    """In the byte order of a canvas."""
    return 0xFF << 24 | blue << 16 | green << 8 | red
