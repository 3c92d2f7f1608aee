"""Plots of a run: reward, accuracy while training, age of the trained tokens, requests in slots."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from areal_jax import files, lanes
from areal_jax.events.schema import Event
from areal_jax.report.aggregates import Metrics
from areal_jax.report.event_log import lane_intervals, outside_evaluation
from areal_jax.report.limit import evaluation_points
from areal_jax.report.pages.web_page import BLUE, GREEN, GREY, VERMILION
from areal_jax.report.report_keys import Accuracy, GreedyAccuracy, Report
from areal_jax.report.timeline import SlotSpan, slot_spans
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import counts, number
from areal_jax.telemetry.progress import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import BoundaryNorm, Colormap
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Curve:
    """Metrics of one unit in one figure; a comparison of runs shows only the first."""

    title: str
    unit: str
    metrics: Sequence[tuple[str, str]]  # label, name
    group: str  # the section of the page that it belongs to
    logarithmic: bool = False
    smooth: bool = True  # the updates are drawn faint, with their moving mean
    wide: bool = False

    @property
    def name(self) -> str:
        """The name of the figure."""
        return self.title.lower().replace(', ', '_').replace(' ', '_')


LEARNING, SPEED, STALENESS, AGREEMENT, OPTIMISATION = 'learning', 'speed', 'staleness', 'agreement', 'optimisation'
CURVES = (
    Curve('Reward', 'mean of the batch', (('mean', names.REWARD_MEAN),), LEARNING, wide=True),
    Curve('Reward, standard deviation', 'reward', (('standard deviation', names.REWARD_STD),), LEARNING),
    Curve(
        'Unread answers and filtered groups',
        'share',
        (('answers not read', names.REWARD_UNPARSED), ('groups filtered', names.FILTERED_RATE)),
        LEARNING,
    ),
    Curve(
        'Throughput',
        'tokens/s',
        (('generated', names.GENERATE_RATE), ('trained', names.TRAIN_RATE)),
        SPEED,
        wide=True,
    ),
    Curve(
        'Pauses for new weights',
        's',
        (('longest of an engine', names.PUBLISH_PAUSE), ('of a request, p50', names.REQUEST_PAUSE_MEDIAN)),
        SPEED,
        smooth=False,
    ),
    Curve(
        'Groups in the buffer',
        'groups',
        (('at publication', names.BUFFER_GROUPS),),
        SPEED,
        smooth=False,
    ),
    Curve(
        'Token age',
        'versions',
        (('mean', names.TOKEN_AGE_MEAN), ('oldest', names.TOKEN_AGE_MAX)),
        STALENESS,
        smooth=False,
        wide=True,
    ),
    Curve(
        'Token age in steps',
        'optimizer steps',
        (('mean', names.STEP_AGE_MEAN), ('largest', names.STEP_AGE_MAX)),
        STALENESS,
        smooth=False,
    ),
    Curve(
        'Versions in a trajectory',
        'versions',
        (('mean', names.VERSIONS_MEAN), ('largest', names.VERSIONS_MAX)),
        STALENESS,
        smooth=False,
    ),
    Curve(
        'Mismatch of engine and learner',
        'nats',
        (('mean', names.MISMATCH_MEAN), ('largest', names.MISMATCH_MAX)),
        AGREEMENT,
        logarithmic=True,
        smooth=False,
    ),
    Curve('Loss', '', (('value', 'loss/value'),), OPTIMISATION),
    Curve('Gradient norm', 'before clipping', (('gradient norm', 'update/grad_norm'),), OPTIMISATION),
    Curve('Entropy', 'nats a token', (('of the policy', 'loss/entropy'),), OPTIMISATION),
    Curve(
        'KL',
        'nats a token',
        (('behavior to policy', 'loss/approx_kl'), ('policy to reference', 'loss/reference_kl')),
        OPTIMISATION,
    ),
    Curve('Clipped tokens', 'share', (('clip fraction', 'loss/clip_fraction'),), OPTIMISATION),
    Curve(
        'Effective sample size',
        'share',
        (('of the behavior weights', 'loss/effective_sample_size'),),
        OPTIMISATION,
    ),
    Curve(
        'Behavior weights',
        'weight',
        (('mean', 'loss/behavior_weight_mean'), ('largest', 'loss/behavior_weight_max')),
        OPTIMISATION,
    ),
)
SPLIT = Curve(
    'RMS of the parts of the importance ratio',
    'nats',
    tuple((part, f'{names.RATIO}{part}_rms') for part in ('total', 'mismatch', 'drift', 'inside')),
    AGREEMENT,
    logarithmic=True,
    smooth=False,
)
_LEAST_SMOOTHED, _SHARE = 10, 20  # fewest points of a smoothed curve; window of a long one: 1/20
_LEAST_WINDOW = 5


def curve_points(metrics: Metrics, name: str) -> tuple[list[int], list[float]]:
    """The updates that have the metric, and its values."""
    updates: list[int] = []
    values: list[float] = []
    for line in metrics:
        if isinstance(value := line.get(name), int | float):
            updates.append(int(number(line, names.STEP) or 0))
            values.append(value)
    return updates, values


def describe_undrawn(metrics: Metrics, curve: Curve) -> str:
    """The reason not to draw the curve (no data, one point, constant), with its numbers; '' if it is worth drawing."""
    found = {label: curve_points(metrics, name) for label, name in curve.metrics}
    found = {label: points for label, points in found.items() if points[1]}
    if not found:
        return f'{curve.title}: not measured.'
    if curve.logarithmic and not any(value > 0 for _, values in found.values() for value in values):
        return f'{curve.title}: never above 0.'
    unit = f' ({curve.unit})' if curve.unit else ''
    first = ', '.join(f'{label} {format_number(values[0])}' for label, (_, values) in found.items())
    updates = {update for own, _ in found.values() for update in own}
    if len(updates) == 1:
        return f'{curve.title}{unit}: measured at update {updates.pop()} only, {first}.'
    if all(len(set(values)) == 1 for _, values in found.values()):
        return f'{curve.title}{unit}: the same in all {len(updates)} updates that measured it, {first}.'
    return ''


def smoothing_window(points: int) -> int:
    """The window of the moving mean of a curve of `points` points; 1 if it is too short to smooth."""
    return 1 if points < _LEAST_SMOOTHED else max(_LEAST_WINDOW, points // _SHARE)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Means of each value with the values before it, at most `window` values in all."""
    sums = [0.0, *itertools.accumulate(values)]
    starts = (max(0, end - window) for end in range(1, len(sums)))
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


DIRECTORY = 'plots'
DPI = 100
MAX_VERSIONS = 8  # shown in slots.png: more colours are hard to tell apart
MAX_SLOTS = 32  # rows in slots.png


def write_plots(events: Sequence[Event], metrics: Metrics, report: Report, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths of the plots that have data, relative to the work directory."""
    directory = workdir / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    drawn = {
        'reward.png': plot_reward(metrics, report['accuracy'], directory / 'reward.png'),
        'evaluation.png': plot_evaluation(report, directory / 'evaluation.png'),
        'token_age.png': plot_token_age(metrics, report['eta'], directory / 'token_age.png'),
        'slots.png': plot_slots(events, directory / 'slots.png'),
    }
    return [f'{DIRECTORY}/{name}' for name, has_data in drawn.items() if has_data]


def plot_reward(metrics: Metrics, accuracy: Accuracy | None, path: pathlib.Path) -> bool:
    """Plots the mean reward of each batch and the held-out accuracy before and after. False: no data, no file."""
    rewarded = [(number(line, names.STEP), number(line, names.REWARD_MEAN)) for line in metrics]
    points = [(step, reward) for step, reward in rewarded if step is not None and reward is not None]
    if not points:
        return False
    figure = make_figure(4.8)
    grid = figure.add_gridspec(1, 3)
    axes = figure.add_subplot(grid[0, :2] if accuracy else grid[0, :])
    steps, rewards = zip(*points, strict=True)
    axes.plot(steps, rewards, 'o-', color=BLUE, markersize=4, linewidth=1, alpha=0.55, label='one update')
    if (width := smoothing_window(len(points))) > 1:
        smoothed = moving_mean(rewards, width)
        axes.plot(steps, smoothed, color=VERMILION, linewidth=2.2, label=f'mean of the last {width} updates')
        axes.legend(frameon=False)
    label_axes(axes, 'Reward while training', 'update', 'mean reward of the batch')
    _whole_ticks(axes.xaxis)
    if accuracy:
        _draw_accuracy(figure.add_subplot(grid[0, 2]), accuracy)
    save_figure(figure, path)
    return True


def plot_evaluation(report: Report, path: pathlib.Path) -> bool:
    """Plots held-out accuracy before, during and after training. False: no evaluation during training, no file."""
    points = evaluation_points(report)
    if not report['evaluation_curve'] or not points:
        return False
    figure = make_figure(4.8)
    axes = figure.add_subplot()
    for shift, (kind, own) in enumerate(points.items()):
        color, marker = {'greedy': (GREEN, 'o'), 'sampled': (BLUE, 's')}[kind]
        at = [version + 0.06 * shift for version, _ in own]
        means = [interval['mean'] for _, interval in own]
        low = [max(0.0, i['mean'] - i['low']) if i['low'] is not None else 0.0 for _, i in own]
        high = [max(0.0, i['high'] - i['mean']) if i['high'] is not None else 0.0 for _, i in own]
        axes.errorbar(
            at, means, [low, high], color=color, marker=marker, markersize=6, capsize=4, linewidth=1.5, label=kind
        )
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.legend(frameon=False)
    title = 'Held-out accuracy while training, 95% intervals (ends: before and after)'
    label_axes(axes, title, 'policy version', 'mean score of the problems')
    _whole_ticks(axes.xaxis)
    save_figure(figure, path)
    return True


def plot_token_age(metrics: Metrics, eta: float | None, path: pathlib.Path) -> bool:
    """Plots the share of the trained tokens by age, one column per update, with the mean. False: no data, no file."""
    rows = [line for line in metrics if sum(counts(line, names.TOKEN_AGE_HISTOGRAM))]
    if not rows:
        return False
    import numpy as np

    ages = max(len(counts(row, names.TOKEN_AGE_HISTOGRAM)) for row in rows)
    share = np.zeros((ages, len(rows)))
    for column, row in enumerate(rows):
        tokens = np.asarray(counts(row, names.TOKEN_AGE_HISTOGRAM), float)
        share[: len(tokens), column] = tokens / tokens.sum()
    steps = np.array([number(row, names.STEP) for row in rows])
    figure = make_figure(4.8)
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(
        np.append(steps, steps[-1] + 1) - 0.5, np.arange(ages + 1) - 0.5, np.ma.masked_equal(share, 0),
        cmap='Blues', vmin=0, vmax=1, edgecolors='white', linewidth=0.5,
    )  # fmt: skip
    mean = (share * np.arange(ages)[:, None]).sum(0)
    axes.plot(steps, mean, 'o-', color=VERMILION, markersize=4, linewidth=1.5, label='mean age')
    if eta is not None and math.isfinite(eta) and eta <= ages + 1:
        label = f'above: more than eta = {eta:g} versions behind'
        axes.axhline(int(eta) + 0.5, color='black', linestyle='--', linewidth=1.5, label=label)
        axes.set_ylim(-0.5, max(ages - 0.5, int(eta) + 0.6))
    figure.colorbar(mesh, ax=axes, label="share of the update's tokens", pad=0.02)
    axes.legend(loc='lower right', bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    label_axes(axes, 'Age of the trained tokens', 'update', 'age (versions behind)', side='left')
    _whole_ticks(axes.xaxis)
    _whole_ticks(axes.yaxis)
    save_figure(figure, path)
    return True


def plot_slots(events: Sequence[Event], path: pathlib.Path) -> bool:
    """Plots requests in the engines' slots over time, coloured by policy version, after Figure 3 of arXiv 2505.24298.

    Below them are the updates on the learner's lane; lines show when the engines had loaded new weights. Of a long
    run only the middle is shown (MAX_VERSIONS versions). False: no decoding in the log, no file.
    """
    spans = slot_spans(list(outside_evaluation(events)))
    if not spans:
        return False
    start, end = shown_span(spans, events)
    spans = [span for span in spans if span.end > start and span.start < end]
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    keys = sorted({(span.engine, span.slot) for span in spans})
    rows = {key: row for row, key in enumerate(keys[:MAX_SLOTS])}
    versions = range(min(span.version for span in spans), max(span.version for span in spans) + 1)
    colormap = colormaps['viridis'].resampled(len(versions))
    norm = BoundaryNorm([version - 0.5 for version in (*versions, versions[-1] + 1)], len(versions))
    figure = make_figure(2.2 + 0.24 * max(8, len(rows)))
    axes = figure.add_subplot()
    _draw_spans(axes, [span for span in spans if (span.engine, span.slot) in rows], rows, colormap, norm)
    _draw_loads(axes, events, start, end)
    _draw_interruptions(axes, spans, rows)
    names = [f'{engine} slot {slot}' for engine, slot in rows]
    if _draw_updates(axes, events, len(rows)):
        names.append(lanes.LEARNER)
    axes.set(xlim=(start, end), ylim=(len(names) - 0.4, -0.6))
    axes.set_yticks(range(len(names)), names, fontsize=8)
    part = '' if start == min(span.start for span in spans) else ', middle of the run'
    part += f', {MAX_SLOTS} of {len(keys)} slots' if len(keys) > MAX_SLOTS else ''
    label_axes(axes, f'Requests in the decoding slots{part}', 'clock time (s)', '', pad=26)
    figure.colorbar(
        ScalarMappable(norm, colormap), ax=axes, ticks=list(versions), label='policy version of the tokens', pad=0.02
    )
    if axes.get_legend_handles_labels()[0]:  # no legend if neither a load nor an interruption is shown
        figure.legend(loc='outside lower center', ncols=2, frameon=False)
    save_figure(figure, path)
    return True


def shown_span(spans: Sequence[SlotSpan], events: Sequence[Event]) -> tuple[float, float]:
    """Clock seconds that slots.png shows: all, or a span between two publications in the middle of a long run."""
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    times = [event['time'] for event in events if event['kind'] == 'publish' and start < event['time'] < end]
    if len(times) >= MAX_VERSIONS:
        first = (len(times) - MAX_VERSIONS) // 2
        return times[first], times[first + MAX_VERSIONS - 1]
    return start, end


def _draw_spans(
    axes: Axes, spans: list[SlotSpan], rows: Mapping[tuple[str, int], int], colormap: Colormap, norm: BoundaryNorm
) -> None:
    axes.barh(
        [rows[span.engine, span.slot] for span in spans],
        [span.end - span.start for span in spans],
        left=[span.start for span in spans],
        height=0.78,
        color=[colormap(norm(span.version)) for span in spans],
    )
    first: dict[tuple[str, int, str], float] = {}
    for span in spans:
        first.setdefault((span.engine, span.slot, span.request), span.start)
    axes.vlines(
        list(first.values()),
        [rows[engine, slot] - 0.39 for engine, slot, _ in first],
        [rows[engine, slot] + 0.39 for engine, slot, _ in first],
        color='white', linewidth=1.6, zorder=3,
    )  # fmt: skip


def _draw_loads(axes: Axes, events: Sequence[Event], start: float, end: float) -> None:
    """Draws a line where the first engine loaded each version."""
    loaded: dict[int, float] = {}
    for event in events:
        if event['kind'] == 'load' and start <= event['time'] <= end:
            loaded.setdefault(event['version'], event['time'])
    for index, (version, time_s) in enumerate(loaded.items()):
        label = 'weights loaded' if index == 0 else None
        axes.axvline(time_s, color='black', linestyle='--', linewidth=1, label=label, zorder=4)
        axes.annotate(
            f'v{version}', (time_s, 1), (0, 4), xycoords=('data', 'axes fraction'),
            textcoords='offset points', ha='center', fontsize=9,
        )  # fmt: skip


def _draw_updates(axes: Axes, events: Sequence[Event], row: int) -> bool:
    """Draws the learner's updates in a separate row, each with the version that it makes. False: no updates."""
    trained = [interval for interval in lane_intervals(events) if interval.work == 'train']
    for index, interval in enumerate(trained):
        axes.barh(
            row, interval.end - interval.start, left=interval.start, height=0.78,
            color=(GREY, '#A8A8A8')[index % 2],
        )  # fmt: skip
        if 'update' in interval.detail:
            middle = (interval.start + interval.end) / 2
            name = f'v{interval.detail["update"]}'
            axes.text(middle, row, name, ha='center', va='center', fontsize=8, color='white', clip_on=True)
    return bool(trained)


def _draw_interruptions(axes: Axes, spans: list[SlotSpan], rows: Mapping[tuple[str, int], int]) -> None:
    """Marks where a request continued under another version."""
    marks = []
    last: dict[str, SlotSpan] = {}
    for span in sorted(spans, key=lambda span: span.start):
        before = last.get(span.request)
        if before and before.version != span.version and (span.engine, span.slot) in rows:
            marks.append((span.start, rows[span.engine, span.slot]))
        last[span.request] = span
    if marks:
        times, places = zip(*marks, strict=True)
        axes.plot(
            times, places, 'D', color=VERMILION, markeredgecolor='white', markersize=6, zorder=5,
            label='request interrupted, goes on under the new version',
        )  # fmt: skip


def _draw_accuracy(axes: Axes, accuracy: Accuracy) -> None:
    kinds: tuple[GreedyAccuracy, ...] = (accuracy['greedy'], accuracy['sampled'])
    for column, scores in enumerate(kinds):
        for shift, when, color, interval in (
            (-0.17, 'before', GREY, scores['before']),
            (0.17, 'after', GREEN, scores['after']),
        ):
            if not interval:
                continue
            mean, low, high = interval['mean'], interval['low'], interval['high']
            axes.bar(column + shift, mean, 0.3, color=color, label=when if column == 0 else None)
            if low is not None and high is not None:
                error = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
                axes.errorbar(column + shift, mean, error, color='black', capsize=4, linewidth=1.2)
    axes.set_xticks([0, 1], ['greedy', 'sampled'])
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.legend(frameon=False)
    label_axes(axes, 'Held-out accuracy, 95% intervals', '', 'mean score of the problems')


def make_figure(height: float, width: float = 12) -> Figure:
    """A figure, sizes in inches of 100 px; made without pyplot, which keeps global state and may need a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def label_axes(
    axes: Axes, title: str, x: str, y: str, pad: float = 8, side: Literal['left', 'center'] = 'center'
) -> None:
    """Sets title and labels, and hides the top and right edges of the frame."""
    axes.set_title(title, fontsize=13, loc=side, pad=pad)
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.spines[['top', 'right']].set_visible(False)


def _whole_ticks(axis: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def save_figure(figure: Figure, path: pathlib.Path) -> None:
    """Writes the figure as PNG, atomically."""
    png = io.BytesIO()
    figure.savefig(png, dpi=DPI, format='png')
    files.write_bytes(path, png.getvalue())
