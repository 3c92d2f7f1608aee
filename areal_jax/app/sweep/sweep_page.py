"""The pages and pictures of a sweep: results.md, results.html with charts, and plots/*.png."""

from __future__ import annotations

import collections
import itertools
import math
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from areal_jax.app.sweep.endpoints import (
    LEAST_R,
    ArmRecord,
    Bounds,
    Curve,
    Endpoint,
    PairedDifference,
    Pairing,
    describe_pairing,
)
from areal_jax.app.sweep.sweep_results import (
    HIGHER,
    LOWER,
    NO_DIFFERENCE,
    ArmResult,
    Comparison,
    GroupResult,
    Results,
    group_looks,
    split_series,
)
from areal_jax.installation import find_command
from areal_jax.report.pages.blocks import (
    UPDATE,
    Absent,
    Block,
    Chart,
    Grid,
    Items,
    Line,
    Section,
    Table,
    Text,
    render_markdown,
    show_pictures,
)
from areal_jax.report.pages.colors import PALETTE, Look
from areal_jax.report.pages.curves import moving_mean, smoothing_window
from areal_jax.report.pages.pictures import DIRECTORY, MARKERS, draw_lines, label_axes, make_figure, save_figure
from areal_jax.report.pages.web_page import render_web_page
from areal_jax.report.statistics import Interval
from areal_jax.telemetry.progress import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 13  # inches
_MARKERS = tuple(MARKERS.values())  # by the number of a look
_PLACES = 200  # along an axis, at which a band is drawn
_PANELS = 3  # of endpoints in a row
_FEW = 4  # groups; with more, bands are fainter
_AXES = {'updates': UPDATE, 'tokens': 'trained tokens', 'seconds': 'seconds of the clock'}
_Take: TypeAlias = Callable[[ArmRecord], Curve]
# charts over an axis, by name: title, unit, whether they are smoothed, curve
_CURVES: Mapping[str, tuple[str, str, bool, _Take]] = {
    'reward': ('Reward', 'mean of the batch', True, lambda record: record.reward),
    'evaluation': ('Held-out score', 'mean score', False, lambda record: record.evaluation),
    'age': ('Age of the trained tokens', 'mean of the batch, versions', False, lambda record: record.age),
}
_BY_VALUE = {  # charts over the values of a field, by name: title, unit, endpoints
    'ages': ('Age of the trained tokens', 'versions', ('token_age', 'token_age_max')),
    'throughput': ('Trained tokens per second of the clock', 'tokens/s', ('tokens_per_second',)),
    'reward_last': ('Reward at the end', 'last tenth of the updates', ('reward_last',)),
    'reward_per_second': ('Reward over equal time', 'mean over the time', ('reward_per_second',)),
}
_OVERVIEW = (('reward', 'updates'), ('reward', 'seconds'), 'ages', 'throughput')  # panels of its picture


# Charts of a sweep: curves with bands over seeds; and, if a numeric field orders the groups, endpoints by its values.


def build_curve_chart(results: Results, name: str, axis: str) -> Chart | None:
    """Returns a chart of `_CURVES` over one of `_AXES`, a line for each group; None without data."""
    title, unit, is_smoothed, take = _CURVES[name]
    _, looks = group_looks(results.groups)
    records = {group.name: [result.record for result in group.finished if result.record] for group in results.groups}
    curves = {of: [curve for curve in map(take, records[of]) if len(curve.values) > 1] for of in looks}
    curves = {of: found for of, found in curves.items() if found}  # in the order of the legend
    if not curves:
        return None
    window = smoothing_window(max(len(curve.values) for found in curves.values() for curve in found))
    window = window if is_smoothed else 1
    lines = []
    for of, found in curves.items():
        places, mean, low, high = (values.tolist() for values in band(found, axis, window))
        lines.append(Line(f'{of} ({len(found)})', places, mean, *looks[of], lows=low, highs=high))
    ends = '; '.join(f'{line.label} ends at {format_number(line.ys[-1])}' for line in lines)
    smoothed = f', each smoothed over {window} updates' if window > 1 else ''
    return Chart(
        title=f'{title} over {axis}',
        unit=unit,
        x=_AXES[axis],
        marks=lines,
        alt=f'Lines over {_AXES[axis]}: {ends}.',
        caption=f'Mean over the seeds (their number in brackets){smoothed}; band: lowest to highest seed.',
        hover=[(_AXES[axis], '@x{0.0}'), ('value', '@y{0.000}'), ('group', '@label')],
        band=0.15 if len(curves) <= _FEW else 0.06,
    )


def build_value_chart(results: Results, name: str) -> Chart | None:
    """Returns a chart of `_BY_VALUE`: means with 95% intervals, a line for each series and endpoint; None: no data."""
    title, unit, endpoints = _BY_VALUE[name]
    field, _ = group_looks(results.groups)
    series = split_series(results.groups)
    values = sorted({value for one in series for value in one.groups.values()})
    means = {group.name: group.means for group in results.groups}
    lines = []
    for (endpoint, one), color, style in zip(
        itertools.product(endpoints, series), itertools.cycle(PALETTE), itertools.count()
    ):
        found = [(value, means[group][endpoint]) for group, value in one.groups.items() if endpoint in means[group]]
        label = ', '.join(filter(None, (endpoint if len(endpoints) > 1 else '', one.label)))
        if found:
            marker = tuple(MARKERS)[style % len(MARKERS)]
            lines.append(_line_of_means(label, [(values.index(value), mean) for value, mean in found], color, marker))
    if not lines:
        return None
    said = '; '.join(f'{line.label or endpoints[0]} {_list_numbers(line.ys)}' for line in lines)
    return Chart(
        title=f'{title} by {field}',
        unit=unit,
        x=field,
        marks=lines,
        alt=f'Points with intervals by {field}, {_list_numbers(values)}: {said}.',
        caption='Mean over the seeds with its 95% interval.',
        hover=[('value', '@y{0.000 a}'), ('interval', '@low{0.000 a} to @high{0.000 a}')],
        legend=len(lines) > 1,
        names=[f'{value:g}' for value in values],
    )


def band(curves: Sequence[Curve], axis: str, smoothing: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (places, mean, lowest, highest) of several seeds along an axis, over the range that all of them cover.

    Each curve is first smoothed by the mean of its last `smoothing` points, then interpolated linearly between its
    points.
    """
    lines = [(np.array(curve.axis(axis)), np.array(moving_mean(curve.values, smoothing))) for curve in curves]
    places = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), _PLACES)
    values = np.stack([np.interp(places, x, y) for x, y in lines])
    return places, values.mean(0), values.min(0), values.max(0)


def _line_of_means(label: str, points: Sequence[tuple[int, Interval]], color: str, marker: str) -> Line:
    return Line(
        label,
        [place for place, _ in points],
        [mean.mean for _, mean in points],
        color,
        marker=marker,
        lows=[mean.mean if mean.low is None else mean.low for _, mean in points],
        highs=[mean.mean if mean.high is None else mean.high for _, mean in points],
    )


def _list_numbers(values: Sequence[float]) -> str:
    return ', '.join(format_number(value) if math.isfinite(value) else f'{value:g}' for value in values)


# Plots of a sweep.


def write_plots(results: Results, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths of the plots with data, relative to the work directory."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    drawn = {
        'overview.png': _plot_overview(results, directory / 'overview.png'),
        'reward.png': _plot_curves(results, directory / 'reward.png', 'reward'),
        'evaluation.png': _plot_curves(results, directory / 'evaluation.png', 'evaluation'),
        'endpoints.png': _plot_endpoints(results, directory / 'endpoints.png'),
    }
    return [f'{DIRECTORY}/{name}' for name, has_data in drawn.items() if has_data]


def _plot_overview(results: Results, path: pathlib.Path) -> bool:
    """Draws the panels of _OVERVIEW. Returns False, and draws none, if no numeric field orders the groups."""
    charts = [
        build_value_chart(results, panel) if isinstance(panel, str) else build_curve_chart(results, *panel)
        for panel in _OVERVIEW
    ]
    if not split_series(results.groups) or not all(charts):
        return False
    figure = make_figure(8.4, _WIDTH)
    panels = figure.subplots(2, 2).flatten()
    for axes, chart in zip(panels, charts, strict=True):
        if chart:
            _draw_panel(axes, chart)
    handles, labels = panels[0].get_legend_handles_labels()
    field, _ = group_looks(results.groups)
    figure.legend(handles, labels, loc='outside right upper', title=field, frameon=False, fontsize=10)
    for axes, chart in zip(panels, charts, strict=True):
        if chart and chart.names and chart.legend:
            axes.legend(frameon=False, fontsize=9)
    figure.suptitle(
        'Curves: mean over the seeds, band from the lowest to the highest; points: mean with its 95% interval',
        fontsize=11,
    )
    save_figure(figure, path)
    return True


def _draw_panel(axes: Axes, chart: Chart) -> None:
    lines = [mark for mark in chart.marks if isinstance(mark, Line)]
    draw_lines(axes, lines, band=chart.band)
    if chart.names:
        axes.set_xticks(range(len(chart.names)), chart.names)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        *below, _ = lines
        for line in lines:
            for place, value in zip(line.xs, line.ys, strict=True):
                axes.annotate(
                    format_number(value), (place, value), xytext=(0, -14 if line in below else 5),
                    textcoords='offset points', ha='center', fontsize=9, color=line.color,
                    bbox={'color': 'white', 'alpha': 0.75, 'pad': 0.5},
                )  # fmt: skip
    label_axes(axes, chart.title, chart.x, chart.unit)


def _plot_curves(results: Results, path: pathlib.Path, name: str) -> bool:
    """Draws one panel for each of _AXES. Returns False if there is no data, and so no file."""
    charts = [chart for axis in _AXES if (chart := build_curve_chart(results, name, axis))]
    if not charts:
        return False
    field, _ = group_looks(results.groups)
    figure = make_figure(5.2, _WIDTH)
    panels = figure.subplots(1, len(charts), sharey=True)
    for axes, chart in zip(panels, charts, strict=True):
        _draw_panel(axes, chart)
        axes.locator_params(axis='x', nbins=5)
    for axes in panels[1:]:
        axes.set_ylabel('')
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc='outside right upper',
        title=f'colours: {field}' if field else None, frameon=False, fontsize=9, title_fontsize=9,
    )  # fmt: skip
    figure.suptitle(charts[0].caption, fontsize=12)
    save_figure(figure, path)
    return True


def _plot_endpoints(results: Results, path: pathlib.Path) -> bool:
    """Draws a panel per outcome; thin lines join the points of one seed. False: no data, no file."""
    if not results.outcomes:
        return False
    rows = -(-len(results.outcomes) // _PANELS)
    _, looks = group_looks(results.groups)
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
    """Draws one row per group, so that names of any length fit."""
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


# The pages of a sweep: unfinished arms first, then means over seeds, paired differences, and every arm.


FILE, PAGE = 'results.md', 'results.html'
_TITLE = 'Results of a sweep'
_SHOWN = 12  # characters of a hash
_MOST_GROUPS = 12  # on the last screen


def render_page(results: Results, pictures: Sequence[str]) -> str:
    """Renders the page as Markdown; `pictures` are paths relative to the page."""
    return render_markdown(_TITLE, [_what_ran(results)], _tell_sections(results, show_pictures(pictures)))


def render_html(results: Results) -> str:
    """Renders the page as HTML with charts; needs Bokeh."""
    by_value = {f'{name}_by_value': build_value_chart(results, name) for name in _BY_VALUE}
    over = {f'{name}_over_{axis}': build_curve_chart(results, name, axis) for name in _CURVES for axis in _AXES}
    drawn = {name: chart for name, chart in {**over, **by_value}.items() if chart}
    charts = Section('charts', 'Charts', [Grid(drawn) if drawn else Absent('No arm has finished.')])
    return render_web_page(_TITLE, [_what_ran(results)], _tell_sections(results, charts))


def _tell_sections(results: Results, shown: Section) -> list[Section]:
    """Returns the sections of both pages; `shown` is the section of pictures or charts."""
    names = [endpoint.name for endpoint in results.endpoints]
    arms = Table(('arm', 'seed', 'state', *names, 'weights'), [_arm_row(results, result) for result in results.arms])
    meanings = Items([f'`{endpoint.name}`: {endpoint.meaning}' for endpoint in results.endpoints])
    note = Text('Means with 95% intervals (Student), over the seeds that have finished.')
    return [
        Section('unfinished', 'Arms that have not finished, or trained nothing', _unfinished(results)),
        Section('means', 'Means over seeds', [_means(results), note]),
        shown,
        *_differences(results),
        Section('arms', 'Arms', [arms, meanings]),
    ]


def summarize_sweep(results: Results, workdir: pathlib.Path) -> list[str]:
    """Returns the last screen's lines: what has finished, the first outcome by group, the page, the next command."""
    finished = [result for result in results.arms if result.state.is_finished]
    lines = [f'arms      {len(finished)} of {len(results.arms)} finished']
    if results.outcomes:
        outcome = results.outcomes[0].name
        first = results.groups[0].name
        compared = {
            one.group: one.difference for one in results.comparisons if (one.endpoint, one.baseline) == (outcome, first)
        }
        lines.append(f'outcome   {outcome}, mean and 95% interval; difference to {first}')
        for group in results.groups[:_MOST_GROUPS]:
            difference = compared.get(group.name)
            told = '' if difference is None else f'; {_signed(difference.mean)} {_bounds(difference.t)}'
            lines.append(f'          {group.name}: {_interval(group.means.get(outcome))}{told}')
        if (rest := len(results.groups) - _MOST_GROUPS) > 0:
            lines.append(f'          and {rest} groups more')
    lines.append(f'report    {workdir / FILE}')
    if len(finished) < len(results.arms):
        lines.append('next      the same command goes on')
    elif len(finished) > 1:
        named = ' '.join(shlex.quote(str(result.arm.workdir)) for result in _pick_ends(finished))
        lines.append(f'next      {find_command("areal-report")} --compare {named}')
    return lines


def _pick_ends(finished: Sequence[ArmResult]) -> tuple[ArmResult, ArmResult]:
    return finished[0], finished[-1]


def describe_missing(results: Sequence[ArmResult]) -> str:
    """Returns '2 of 6 arms have not finished: a (with code 2: ...), b (it was stopped)'; '' if all have finished."""
    missing = [result for result in results if not result.state.is_finished]
    if not missing:
        return ''
    named = ', '.join(f'{result.arm.name} ({result.state.reason or "not started"})' for result in missing)
    return f'{len(missing)} of {len(results)} arms {"has" if len(missing) == 1 else "have"} not finished: {named}'


def _what_ran(results: Results) -> Text:
    finished = sum(result.state.is_finished for result in results.arms)
    seeds = len({result.arm.seed for result in results.arms})
    return Text(
        f'`{results.source}`: {len(results.arms)} arms, of which {finished} have finished; {len(results.groups)} '
        f'groups of arms that differ in seed only, {seeds} seeds.'
    )


def _unfinished(results: Results) -> list[Block]:
    """Lists the arms that have not finished, and finished arms that lack something."""
    rows = [
        (
            result.arm.name,
            result.state.word,
            f'{result.state.updates} of {result.arm.config.run.steps}',
            result.state.reason,
        )
        for result in results.arms
        if result.state.reason or not result.state.is_finished
    ]
    if not rows:
        return []
    table = Table(('arm', 'state', 'updates', 'why'), rows)
    return [table, Text('No mean and no difference below has an unfinished arm in it.')]


def _means(results: Results) -> Table:
    rows = [
        (group.name, _seeds(group), *(_interval(group.means.get(e.name)) for e in results.endpoints))
        for group in results.groups
    ]
    return Table(('group', 'seeds', *(e.name for e in results.endpoints)), rows)


def _differences(results: Results) -> list[Section]:
    """Returns a section that explains the tables, and one with a table for each outcome."""
    head = (
        *('group', 'minus', 'seeds', 'difference', 't', 'BCa', 'p', 'p (Holm)', 'verdict'),
        *('r', 'standard error smaller by'),
    )
    text = (
        'Group minus another group on the same seeds, which have prompts, initial weights and sampling noise in '
        'common. t: 95% interval of Student; BCa: of the bias-corrected and accelerated bootstrap, from 5 seeds on; p: '
        f'Student, two-sided, and after Holm over the pairs of the table. Verdict: "{NO_DIFFERENCE}" if t contains 0; '
        '"by this interval alone" if p after Holm is 0.05 or more. r: correlation over seeds; the standard error is '
        'smaller than with seeds of its own for each arm by the factor in the last column.'
    )
    sections = [Section('differences', 'Differences, paired by seed', [Text(text)])] if results.comparisons else []
    for endpoint in results.outcomes:
        found = [comparison for comparison in results.comparisons if comparison.endpoint == endpoint.name]
        if found:
            rows = [_difference_row(comparison) for comparison in found]
            pairing = describe_pairing([c.difference.pairing for c in found if c.difference.pairing])
            blocks: list[Block] = [Text(_count_verdicts(found)), Table(head, rows), Text(pairing)]
            sections.append(Section(endpoint.name, f'Differences in {endpoint.name}', blocks))
    return sections


def _count_verdicts(comparisons: Sequence[Comparison]) -> str:
    """Returns 'no difference shown: 13 of 15 pairs; eta8 is lower than eta0', for example."""
    counts = collections.Counter(one.verdict for one in comparisons if one.verdict not in (HIGHER, LOWER))
    decided = [f'{one.group} is {one.verdict} than {one.baseline}' for one in comparisons if one.verdict not in counts]
    undecided = [f'{verdict}: {count} of {len(comparisons)} pairs' for verdict, count in counts.items()]
    return '; '.join([*undecided, *decided])


def _difference_row(comparison: Comparison) -> tuple[str, ...]:
    found = comparison.difference
    return (
        *(comparison.group, comparison.baseline, str(found.n)),
        *(_signed(found.mean), _bounds(found.t), _bounds(found.bootstrap)),
        *(_probability(found.p), _probability(comparison.holm_p), comparison.verdict),
        *_pairing_cells(found),
    )


def _pairing_cells(found: PairedDifference) -> tuple[str, str]:
    pairing = found.pairing
    return ('-', '-') if pairing is None else (f'{pairing.r:.2f}', _gain(pairing))


def _gain(pairing: Pairing) -> str:
    if pairing.r < LEAST_R:
        return 'pairing buys nothing'
    return 'equal differences' if math.isinf(pairing.error_factor) else f'{pairing.error_factor:.3g} times'


def _arm_row(results: Results, result: ArmResult) -> tuple[str, ...]:
    values = (result.values.get(endpoint.name) for endpoint in results.endpoints)
    weights = f'`{result.weights[:_SHOWN]}`' if result.weights else '-'
    return result.arm.name, str(result.arm.seed), result.state.word, *(_number(value) for value in values), weights


def _seeds(group: GroupResult) -> str:
    finished, all_ = len(group.finished), len(group.arms)
    return str(all_) if finished == all_ else f'{finished} of {all_}'


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return '-'
    if interval.low is None or interval.high is None:
        return _number(interval.mean)
    return f'{_number(interval.mean)} [{_number(interval.low)}, {_number(interval.high)}]'


def _bounds(bounds: Bounds | None) -> str:
    return '-' if bounds is None else f'[{_signed(bounds.low)}, {_signed(bounds.high)}]'


def _probability(p: float | None) -> str:
    return '-' if p is None else '< 0.001' if p < 0.001 else f'{p:.3f}'


def _number(value: float | None) -> str:
    """Formats a value with three decimals below 10, as rewards and scores need."""
    return f'{value:.3f}' if value is not None and abs(value) < 10 else format_number(value)


def _signed(value: float) -> str:
    return f'{value:+.3f}' if abs(value) < 10 else f'{value:+.4g}'
