"""The timeline of the slots as Bokeh figures to zoom and pan, drawn with WebGL if available."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from areal_jax.events.schema import DecodeEvent, Event, PrefillEvent
from areal_jax.lanes import short_name
from areal_jax.report.event_log import event_intervals, outside_evaluation
from areal_jax.report.pages.charts import new_figure, plain_text
from areal_jax.report.pages.web_page import INK, SHADES, VERMILION, Key, channels, shade_at
from areal_jax.report.timeline import slot_spans

if TYPE_CHECKING:
    from bokeh.models import Column, GlyphRenderer, Range1d
    from bokeh.plotting import figure as Figure


Slot = tuple[str, int]  # engine, slot; slots for evaluation during training belong to 'ENGINE, evaluation'
_KINDS: tuple[tuple[Literal['decode', 'evaluation_decode'], str, str], ...] = (
    ('decode', 'prefill', ''),
    ('evaluation_decode', 'evaluation_prefill', ', evaluation'),
)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A request in a slot, or the pause of an engine."""

    slot: Slot  # (engine, -1) for a pause
    work: Literal['decode', 'prefill', 'rebuild', 'swap']
    start: float  # clock seconds
    end: float
    request: str  # '' for a swap
    version: int  # of the weights; for a prefill, of the weights of the decoding that follows
    detail: str


@dataclasses.dataclass(frozen=True)
class Mark:
    """An instant of a request in a slot."""

    slot: Slot
    what: Literal['interrupt', 'preempt']
    time: float
    request: str
    detail: str


@dataclasses.dataclass(frozen=True)
class SlotTimeline:
    slots: Sequence[Slot]  # ascending
    intervals: Sequence[Interval]  # by start
    marks: Sequence[Mark]
    publications: Sequence[tuple[float, int]]  # clock seconds, version
    left_out: int  # number of earlier intervals beyond `most`


def build_slot_timeline(events: Sequence[Event], most: int) -> SlotTimeline:
    """The slots in training and in evaluations during it; of a long run only the last `most` intervals."""
    training = list(outside_evaluation(events))
    intervals = sorted([*_decoding(training), *_prefills(training)], key=lambda interval: interval.start)
    left_out = max(0, len(intervals) - most)
    shown = intervals[left_out:]
    start = shown[0].start if shown else 0.0
    slots = sorted({interval.slot for interval in shown})
    engines = {engine for engine, _ in slots}
    pauses = [pause for pause in _pauses(training) if pause.slot[0] in engines and pause.end >= start]
    return SlotTimeline(
        slots=slots,
        intervals=sorted([*shown, *pauses], key=lambda interval: interval.start),
        marks=[mark for mark in _marks(training) if mark.time >= start and mark.slot in slots],
        publications=[(e['time'], e['version']) for e in training if e['kind'] == 'publish' and e['time'] >= start],
        left_out=left_out,
    )


def _decoding(events: Sequence[Event]) -> Iterator[Interval]:
    for kind, _, suffix in _KINDS:
        for span in slot_spans(events, kind):
            detail = f'{span.dispatches} dispatch{"" if span.dispatches == 1 else "es"}'
            slot = (span.engine + suffix, span.slot)
            yield Interval(slot, 'decode', span.start, span.end, span.request, span.version, detail)


def _prefills(events: Sequence[Event]) -> Iterator[Interval]:
    for decode, prefill, suffix in _KINDS:
        slots = _next_slots(events, decode, prefill)
        for found, interval in event_intervals(events, prefill):
            event = cast(PrefillEvent, found)
            if not event['bucket']:  # all tokens of the requests were kept in the cache
                continue
            rebuilt = event.get('rebuilt', 0)
            detail = f'{event["tokens"]} tokens of {len(event["requests"])} requests, {rebuilt} of them rebuilt'
            work: Literal['prefill', 'rebuild'] = 'rebuild' if rebuilt else 'prefill'
            for request, (slot, version) in slots[event['seq']].items():
                place = (event['engine'] + suffix, slot)
                yield Interval(place, work, interval.start, interval.end, request, version, detail)


def _next_slots(events: Sequence[Event], decode: str, prefill: str) -> dict[int, dict[str, tuple[int, int]]]:
    """For each prefill, by seq: slot and version of the next decoding of each of its requests that has one."""
    upcoming: dict[str, dict[str, tuple[int, int]]] = collections.defaultdict(dict)  # by engine
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for event in reversed(events):
        if event['kind'] == decode:
            dispatch = cast(DecodeEvent, event)
            for slot, request in enumerate(dispatch['slots']):
                if request is not None:
                    upcoming[dispatch['engine']][request] = (slot, dispatch['version'])
        elif event['kind'] == prefill:
            prefilled = cast(PrefillEvent, event)
            known = upcoming[prefilled['engine']]
            found[event['seq']] = {name: known[name] for name in prefilled['requests'] if name in known}
    return found


def _pauses(events: Sequence[Event]) -> Iterator[Interval]:
    """Yields the engines' pauses for new weights. Version 0 is left out: it is loaded before anything runs."""
    for event in events:
        if event['kind'] == 'load' and event['version'] > 0 and event['pause_seconds'] > 0:
            start = event['time'] - event['pause_seconds']
            yield Interval((event['engine'], -1), 'swap', start, event['time'], '', event['version'], 'engine pauses')


def _marks(events: Sequence[Event]) -> Iterator[Mark]:
    last: dict[str, Slot] = {}  # by request
    for event in events:
        if event['kind'] == 'decode':
            last.update({r: (event['engine'], slot) for slot, r in enumerate(event['slots']) if r is not None})
        elif event['kind'] == 'interrupt':
            detail = f'version {event["from_version"]} to {event["to_version"]}'
            for request in event['requests']:
                if request in last:
                    yield Mark(last[request], 'interrupt', event['time'], request, detail)
        elif event['kind'] == 'preempt' and event['request'] in last:
            detail = f'{event["tokens"]} tokens to compute again'
            yield Mark(last[event['request']], 'preempt', event['time'], event['request'], detail)


# The whole run as a strip above the timeline of the slots, with a box to move on it.
#
# The strip is one picture, so its cost does not grow with the run.


PAUSE = '#E69F00'
_COLUMNS, _HEIGHT = 1600, 64  # of the picture; of the strip in pixels


def version_colors(timeline: SlotTimeline) -> Mapping[int, str]:
    """The color ('#rrggbb') of each version that was decoded with, on one scale from the first to the last version."""
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
    """uint32 RGBA [slots, columns], last slot first: the color of the version that the slot decoded with; 0 = none."""
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
        elif interval.work == 'swap' and last > first:  # a shorter pause would be drawn too wide
            for row in (row for (engine, _), row in rows.items() if engine == interval.slot[0]):
                picture[row, columns] = pause
    return picture


def _rgba(red: int, green: int, blue: int) -> int:
    """Packs a color in the byte order of a canvas."""
    return 0xFF << 24 | blue << 16 | green << 8 | red


NAME = 'slots'
MOST_INTERVALS = 50_000  # in the page: some megabytes
_MOST_AT_ONCE = 3000  # intervals in view at full zoom-out; more take seconds a step without a GPU
_VERSIONS = 8  # versions of a long run in the first view
_LABELS = 25  # publications with a label, in the widest view
_ROW_HEIGHTS = (10, 24)  # pixels of a slot, at least and at most
_HEIGHTS = (180, 760)  # pixels of all slots
_BORDERS = 48, 12  # pixels left and right of both figures, which aligns them
_WEIGHTS, _INTERRUPT, _PREEMPT, _PREFILL = '#000000', VERMILION, '#B5578F', '#8A8F98'
_PAUSES, _PUBLISHED, _REBUILDS = 'pause for new weights (swap)', 'weights published', 'prefill that rebuilds answers'


def draw_slots(timeline: SlotTimeline) -> Column:
    """The whole run as a strip; below it, one row per slot for the part chosen on the strip."""
    from bokeh.layouts import column
    from bokeh.models import Range1d

    start, end = _span(timeline)
    shown = Range1d(*first_view(timeline), bounds=(start, end), max_interval=widest_view(timeline))
    figures = [draw_overview(timeline, shown, start, end), _draw_rows(timeline, shown)]
    for figure in figures:
        figure.min_border_left, figure.min_border_right = _BORDERS
    return column(*figures, sizing_mode='stretch_width')


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
    of_work = {
        work: [i for i in timeline.intervals if i.work == work] for work in ('swap', 'decode', 'prefill', 'rebuild')
    }
    colors = version_colors(timeline)
    drawn = [
        _draw_pauses(made, of_work['swap'], rows),
        _draw_decoding(made, of_work['decode'], rows, colors),
        _draw_thin(made, of_work['prefill'], rows, _PREFILL, 'prefill'),
        _draw_thin(made, of_work['rebuild'], rows, VERMILION, _REBUILDS),
    ]
    _draw_publications(made, timeline, len(rows))
    _draw_marks(made, timeline.marks, rows)
    made.add_tools(HoverTool(renderers=drawn, tooltips=_TOOLTIPS))
    made.yaxis.ticker = list(rows.values())
    made.yaxis.major_label_overrides = {
        row: plain_text(f'{short_name(engine)}/{slot}') for (engine, slot), row in rows.items()
    }
    made.ygrid.grid_line_color = None
    return made


def slot_keys(timeline: SlotTimeline) -> list[Key]:
    """The legend entries of the kinds that the timeline has."""
    works, marks = {interval.work for interval in timeline.intervals}, {mark.what for mark in timeline.marks}
    keys = (
        ('swap' in works, _PAUSES, PAUSE, 'box'),
        ('prefill' in works, 'prefill', _PREFILL, 'box'),
        ('rebuild' in works, _REBUILDS, VERMILION, 'box'),
        (bool(timeline.publications), _PUBLISHED, _WEIGHTS, 'dashed'),
        ('interrupt' in marks, 'request interrupted', _INTERRUPT, 'diamond'),
        ('preempt' in marks, 'request preempted', _PREEMPT, 'cross'),
    )
    return [Key(label, color, look, label) for known, label, color, look in keys if known]


def first_view(timeline: SlotTimeline) -> tuple[float, float]:
    """Clock seconds of the first view: all, or some versions in the middle of a long run."""
    start, end = _span(timeline)
    times = [time for time, _ in timeline.publications if start < time < end]
    if len(times) < 2 * _VERSIONS:
        return start, end
    first = (len(times) - _VERSIONS) // 2
    return times[first], min(times[first + _VERSIONS - 1], times[first] + widest_view(timeline))


def widest_view(timeline: SlotTimeline) -> float:
    """The width in clock seconds at which a quarter of the possible views hold more than _MOST_AT_ONCE intervals."""
    start, end = _span(timeline)
    starts = np.array([interval.start for interval in timeline.intervals])  # ascending
    if len(starts) <= _MOST_AT_ONCE:
        return end - start
    return float(np.quantile(starts[_MOST_AT_ONCE:] - starts[:-_MOST_AT_ONCE], 0.25)) or end - start


def describe_slots(timeline: SlotTimeline) -> str:
    """The text below the figure: how to read it, and the number of intervals left out."""
    left = (
        f' The {timeline.left_out} earlier intervals of the run are left out; `timeline.json` has them.'
        if timeline.left_out
        else ''
    )
    return (
        'Each row is a slot (engine/slot), each bar a request that is decoded in it, coloured by the policy version '
        'from the first of the run (dark) to the last (light). The strip above has the whole run in the same colours; '
        'drag the box on it, or the edges of the box. The wheel zooms in time, dragging moves; '
        'the tools above zoom a box or the rows, and go back. '
        f'{len(timeline.intervals)} intervals, {len(timeline.marks)} marks.{left}'
    )


_TOOLTIPS = [
    ('work', '@work'),
    ('request', '@request'),
    ('policy version', '@version'),
    ('from', '@left{0.000} s'),
    ('to', '@right{0.000} s'),
    ('', '@detail'),
]


def _span(timeline: SlotTimeline) -> tuple[float, float]:
    start = min(interval.start for interval in timeline.intervals)
    return start, max(max(interval.end for interval in timeline.intervals), start + 1e-6)


def _source(intervals: Sequence[Interval], rows: dict[Slot, int], half: float) -> dict[str, object]:
    row = np.array([rows[interval.slot] for interval in intervals], np.float64)
    return {
        'left': np.array([interval.start for interval in intervals], np.float64),
        'right': np.array([interval.end for interval in intervals], np.float64),
        'bottom': row + half,
        'top': row - half,
        **_texts(intervals),
    }


def _texts(intervals: Sequence[Interval]) -> dict[str, object]:
    return {
        'work': [interval.work for interval in intervals],
        'request': [interval.request for interval in intervals],
        'version': np.array([interval.version for interval in intervals], np.int32),
        'detail': [interval.detail for interval in intervals],
    }


def _draw_decoding(
    made: Figure, intervals: Sequence[Interval], rows: dict[Slot, int], colors: Mapping[int, str]
) -> GlyphRenderer:
    color = [colors[interval.version] for interval in intervals]
    source = _source(intervals, rows, 0.4) | {'color': color}
    return made.quad(
        'left', 'right', 'top', 'bottom', source=source, fill_color='color', line_color='white', line_width=0.4
    )


def _draw_thin(
    made: Figure, intervals: Sequence[Interval], rows: dict[Slot, int], color: str, label: str
) -> GlyphRenderer:
    look = {'fill_color': color, 'line_color': None, 'name': label}
    return made.quad('left', 'right', 'top', 'bottom', source=_source(intervals, rows, 0.2), **look)


def _draw_pauses(made: Figure, pauses: Sequence[Interval], rows: dict[Slot, int]) -> GlyphRenderer:
    """Draws each pause over all slots of its engine."""
    own = [[row for (engine, _), row in rows.items() if engine == pause.slot[0]] for pause in pauses]
    source = {
        'left': [pause.start for pause in pauses],
        'right': [pause.end for pause in pauses],
        'top': [min(of) - 0.5 for of in own],
        'bottom': [max(of) + 0.5 for of in own],
        **_texts(pauses),
    }
    return made.quad(
        'left', 'right', 'top', 'bottom', source=source, fill_color=PAUSE, fill_alpha=0.3, line_color=None,
        name=_PAUSES,
    )  # fmt: skip


def _draw_publications(made: Figure, timeline: SlotTimeline, rows: int) -> None:
    times = [time for time, _ in timeline.publications]
    if not times:
        return
    low, high = [-0.6] * len(times), [rows - 0.4] * len(times)
    made.segment(
        'x', 'low', 'x', 'high', source={'x': times, 'low': low, 'high': high}, line_color=_WEIGHTS,
        line_dash='dashed', line_width=1, name=_PUBLISHED,
    )  # fmt: skip
    start, end = _span(timeline)
    in_view = len(times) * widest_view(timeline) / (end - start)
    labelled = timeline.publications[:: max(1, math.ceil(in_view / _LABELS))]
    data = {
        'x': [time for time, _ in labelled],
        'y': [-0.7] * len(labelled),
        'text': [f'v{version}' for _, version in labelled],
    }
    made.text('x', 'y', 'text', source=data, text_font_size='11px', text_align='center', text_color=INK)


def _draw_marks(made: Figure, marks: Sequence[Mark], rows: dict[Slot, int]) -> None:
    from bokeh.models import HoverTool

    kinds = (('interrupt', 'diamond', _INTERRUPT, 'interrupted'), ('preempt', 'x', _PREEMPT, 'preempted'))
    drawn = []
    for what, marker, color, label in kinds:
        own = [mark for mark in marks if mark.what == what]
        if not own:
            continue
        source = {
            'x': [mark.time for mark in own],
            'y': [rows[mark.slot] for mark in own],
            'what': [label] * len(own),
            'request': [mark.request for mark in own],
            'detail': [mark.detail for mark in own],
        }
        drawn.append(
            made.scatter(
                'x', 'y', source=source, marker=marker, size=9, fill_color=color,
                line_color='white' if marker == 'diamond' else color, line_width=1 if marker == 'diamond' else 2.5,
                name=f'request {label}',
            )
        )  # fmt: skip
    tooltips = [('', '@what'), ('request', '@request'), ('at', '@x{0.000} s'), ('', '@detail')]
    if drawn:
        made.add_tools(HoverTool(renderers=drawn, tooltips=tooltips))
