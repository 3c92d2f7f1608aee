"""The results of a sweep: read from its arms, as tables, plots and a page."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_jax import files
from areal_jax.app.sweep.arms import Arm, ArmState, Group, group_arms, read_state
from areal_jax.app.sweep.endpoints import (
    ENDPOINTS,
    LEAST_R,
    ArmRecord,
    Bounds,
    Curve,
    Endpoint,
    PairedDifference,
    Pairing,
    Values,
    common_horizon,
    describe_pairing,
    endpoint_values,
    holm,
    paired_difference,
    read_record,
)
from areal_jax.errors import UserError
from areal_jax.installation import find_command
from areal_jax.report.pages.blocks import Block, Items, Line, Section, Table, Text, render_markdown, show_pictures
from areal_jax.report.pages.colors import Look, choose_looks
from areal_jax.report.pages.curves import moving_mean, smoothing_window
from areal_jax.report.pages.pictures import DIRECTORY, MARKERS, draw_lines, label_axes, make_figure, save_figure
from areal_jax.report.report import FILE as REPORT
from areal_jax.report.statistics import Interval, cluster_interval
from areal_jax.telemetry.metrics import FILE as METRICS
from areal_jax.telemetry.metrics import read_metrics
from areal_jax.telemetry.progress import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One arm: its state, and its endpoints if it has finished."""

    arm: Arm
    state: ArmState
    values: Values
    weights: str  # SHA-256 of the last version; '' if it has not finished
    record: ArmRecord | None  # None: not finished


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """Arms that differ only in seed, finished or not, and means over the finished seeds."""

    name: str
    arms: tuple[ArmResult, ...]
    means: Mapping[str, Interval]  # Student's 95% interval, by the name of an endpoint

    @property
    def finished(self) -> list[ArmResult]:
        return [result for result in self.arms if result.state.is_finished]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A group compared with the first one, over the seeds that have finished in both."""

    endpoint: str
    baseline: str  # the first group
    group: str
    difference: PairedDifference
    holm_p: float | None  # over the groups that are compared by this endpoint


@dataclasses.dataclass(frozen=True)
class Results:
    """The contents of the tables and the page."""

    source: str  # --config
    groups: tuple[GroupResult, ...]
    comparisons: tuple[Comparison, ...]

    @property
    def arms(self) -> list[ArmResult]:
        return [result for group in self.groups for result in group.arms]

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints that at least one finished arm has."""
        return [endpoint for endpoint in ENDPOINTS if any(endpoint.name in result.values for result in self.arms)]

    @property
    def outcomes(self) -> list[Endpoint]:
        """The endpoints by which arms are compared, of those that a finished arm has."""
        return [endpoint for endpoint in self.endpoints if endpoint.is_outcome]


def build_results(source: str, arms: Sequence[Arm]) -> Results:
    """Reads the workdirs of all arms. A damaged file makes its arm unfinished, with the reason."""
    read = {arm.name: _read_arm(arm) for arm in arms}
    records = [record for _, record in read.values() if record]
    horizon = common_horizon(records)

    def result(arm: Arm) -> ArmResult:
        state, record = read[arm.name]
        values = endpoint_values(record, horizon) if record else {}
        weights = str(record.report.get('weights_sha256') or '') if record else ''
        return ArmResult(arm, state, values, weights, record)

    groups = tuple(_group_result(group, [result(arm) for arm in group.arms]) for group in group_arms(arms))
    return Results(source, groups, tuple(_compare(groups)))


def _read_arm(arm: Arm) -> tuple[ArmState, ArmRecord | None]:
    state = read_state(arm)
    if not state.is_finished:
        return state, None
    try:
        report = files.read_json(arm.workdir / REPORT)
        return state, read_record(read_metrics(arm.workdir / METRICS), report)
    except UserError as error:
        return dataclasses.replace(state, is_finished=False, reason=str(error)), None


def _group_result(group: Group, results: Sequence[ArmResult]) -> GroupResult:
    means = {}
    for endpoint in ENDPOINTS:
        values = [result.values[endpoint.name] for result in results if endpoint.name in result.values]
        if values:
            means[endpoint.name] = cluster_interval([[value] for value in values])
    return GroupResult(group.name, tuple(results), means)


def _compare(groups: Sequence[GroupResult]) -> list[Comparison]:
    found = []
    for endpoint in ENDPOINTS:
        if not endpoint.is_outcome:
            continue
        differences = {
            group.name: paired_difference(*pairs)
            for group in groups[1:]
            if (pairs := _pair(endpoint, groups[0], group))
        }
        tested = {name: difference.p for name, difference in differences.items() if difference.p is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        found += [
            Comparison(endpoint.name, groups[0].name, name, difference, adjusted.get(name))
            for name, difference in differences.items()
        ]
    return found


def _pair(endpoint: Endpoint, first: GroupResult, second: GroupResult) -> tuple[list[float], list[float]] | None:
    """Returns the values of the seeds that both groups have, by ascending seed; None if they share no seed."""
    values = [
        {result.arm.seed: result.values[endpoint.name] for result in group.arms if endpoint.name in result.values}
        for group in (first, second)
    ]
    seeds = sorted(values[0].keys() & values[1].keys())
    return ([values[0][seed] for seed in seeds], [values[1][seed] for seed in seeds]) if seeds else None


# The tables of a sweep as files for other programs: results.csv and differences.csv.
#
# results.csv has a row for each arm, unfinished ones included, and the rows mean, low and high for each group. Numbers
# have all their digits; unknown values are empty.


RESULTS, DIFFERENCES = 'results.csv', 'differences.csv'
_HEAD = ('row', 'group', 'arm', 'seed', 'seeds', 'state', 'updates', 'planned_updates', 'reason')
_PAIRING = ('r', 'seeds_factor', 'error_factor', 'paired_error', 'unpaired_error')  # attributes of Pairing
_DIFFERENCE_HEAD = (
    *('endpoint', 'baseline', 'group', 'seeds', 'difference', 't_low', 't_high', 'bootstrap_low', 'bootstrap_high'),
    *('p', 'p_holm', *_PAIRING),
)


def write_tables(results: Results, workdir: pathlib.Path) -> None:
    """Writes both files, each whole or not at all."""
    fields = dict.fromkeys(path for result in results.arms for path in result.arm.overrides)
    head = [*_HEAD, *fields, *(endpoint.name for endpoint in results.endpoints), 'weights_sha256']
    rows = [row for group in results.groups for row in _group_rows(group)]
    files.write_text(workdir / RESULTS, _render(head, rows))
    files.write_text(workdir / DIFFERENCES, _render(_DIFFERENCE_HEAD, [*map(_row_of, results.comparisons)]))


def _group_rows(group: GroupResult) -> Iterator[Mapping[str, object]]:
    for result in group.arms:
        arm, state = result.arm, result.state
        values = (
            'arm',
            group.name,
            arm.name,
            arm.seed,
            '',
            state.word,
            state.updates,
            arm.config.run.steps,
            state.reason,
        )
        head = dict(zip(_HEAD, values, strict=True))
        yield {**head, **arm.overrides, **result.values, 'weights_sha256': result.weights}
    for row in ('mean', 'low', 'high'):
        means = {name: getattr(mean, row) for name, mean in group.means.items()}
        yield {'row': row, 'group': group.name, 'seeds': len(group.finished), **means}


def _row_of(comparison: Comparison) -> Mapping[str, object]:
    found, pairing = comparison.difference, comparison.difference.pairing
    bounds = (found.t, found.bootstrap)
    ends = [end for one in bounds for end in ((one.low, one.high) if one else (None, None))]
    gains = [getattr(pairing, name, None) for name in _PAIRING]
    values = (comparison.endpoint, comparison.baseline, comparison.group, found.n, found.mean, *ends)
    return dict(zip(_DIFFERENCE_HEAD, (*values, found.p, comparison.holm_p, *gains), strict=True))


def _render(head: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, head, extrasaction='ignore', lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)  # None and what a row lacks are empty cells
    return text.getvalue()


# Plots of a sweep: curves with bands over seeds, and every endpoint with its seeds.


_WIDTH = 13  # inches
_MARKERS = tuple(MARKERS.values())  # by the number of a look
_PLACES = 200  # along an axis, at which a band is drawn
_PANELS = 3  # of endpoints in a row
_FEW = 4  # groups; with more, bands are fainter
_AXES = {'updates': 'update', 'tokens': 'trained tokens', 'seconds': 'seconds of the clock'}


def write_plots(results: Results, workdir: pathlib.Path) -> list[str]:
    """Writes WORKDIR/plots/*.png; returns the paths of the plots with data, relative to the work directory."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    rewards = [len(result.record.reward.values) for result in results.arms if result.record]
    window = smoothing_window(max(rewards, default=0))
    drawn = {
        'reward.png': _plot_curves(
            results, directory / 'reward.png', lambda record: record.reward, window,
            f'mean reward of the batch, last {window} updates' if window > 1 else 'mean reward of the batch',
        ),
        'evaluation.png': _plot_curves(
            results, directory / 'evaluation.png', lambda record: record.evaluation, 1, 'held-out score'
        ),
        'endpoints.png': _plot_endpoints(results, directory / 'endpoints.png'),
    }  # fmt: skip
    return [f'{DIRECTORY}/{name}' for name, has_data in drawn.items() if has_data]


def band(curves: Sequence[Curve], axis: str, smoothing: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns (places, mean, lowest, highest) of several seeds along an axis, over the range that all of them cover.

    Each curve is first smoothed by the mean of its last `smoothing` points, then interpolated linearly between its
    points.
    """
    lines = [(np.array(curve.axis(axis)), np.array(moving_mean(curve.values, smoothing))) for curve in curves]
    places = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), _PLACES)
    values = np.stack([np.interp(places, x, y) for x, y in lines])
    return places, values.mean(0), values.min(0), values.max(0)


def _plot_curves(
    results: Results, path: pathlib.Path, take: Callable[[ArmRecord], Curve], smoothing: int, label: str
) -> bool:
    """Draws one panel for each of _AXES. Returns False if there is no data, and so no file."""
    records = {group.name: [result.record for result in group.finished if result.record] for group in results.groups}
    field, looks = group_looks(results)
    curves = {name: [curve for curve in map(take, records[name]) if len(curve.values) > 1] for name in looks}
    curves = {name: found for name, found in curves.items() if found}
    if not curves:
        return False
    figure = make_figure(5.2, _WIDTH)
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for axes, (axis, x) in zip(panels, _AXES.items(), strict=True):
        lines = []
        for name, found in curves.items():
            places, mean, low, high = (values.tolist() for values in band(found, axis, smoothing))
            lines.append(Line(f'{name} ({len(found)})', places, mean, *looks[name], lows=low, highs=high))
        draw_lines(axes, lines, band=0.15 if len(curves) <= _FEW else 0.06)
        axes.locator_params(axis='x', nbins=5)
        label_axes(axes, f'over {axis}', x, label if axis == 'updates' else '')
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc='outside right upper',
        title=f'colours: {field}' if field else None, frameon=False, fontsize=9, title_fontsize=9,
    )  # fmt: skip
    figure.suptitle('Mean over the seeds (their number in brackets); band: lowest to highest seed', fontsize=12)
    save_figure(figure, path)
    return True


def _plot_endpoints(results: Results, path: pathlib.Path) -> bool:
    """Draws a panel per outcome; thin lines join the points of one seed. False: no data, no file."""
    if not results.outcomes:
        return False
    rows = -(-len(results.outcomes) // _PANELS)
    _, looks = group_looks(results)
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


def group_looks(results: Results) -> tuple[str, dict[str, Look]]:
    """Returns the config field that the groups' colours follow ('' if none does), and the look of each group."""
    return choose_looks({group.name: group.arms[0].arm.values() for group in results.groups})


# The page of a sweep, results.md: unfinished arms first, then means over seeds, paired differences, and every arm.


FILE = 'results.md'
_SHOWN = 12  # characters of a hash
_MOST_GROUPS = 12  # on the last screen


def render_page(results: Results, pictures: Sequence[str]) -> str:
    """Renders the page as Markdown; `pictures` are paths relative to the page."""
    names = [endpoint.name for endpoint in results.endpoints]
    arms = Table(('arm', 'seed', 'state', *names, 'weights'), [_arm_row(results, result) for result in results.arms])
    meanings = Items([f'`{endpoint.name}`: {endpoint.meaning}' for endpoint in results.endpoints])
    note = Text('Means with 95% intervals (Student), over the seeds that have finished.')
    first = f'Differences to {results.groups[0].name if results.groups else "the first group"}, paired by seed'
    sections = [
        Section('unfinished', 'Arms that have not finished, or trained nothing', _unfinished(results)),
        Section('means', 'Means over seeds', [_means(results), note]),
        Section('differences', first, _differences(results)),
        show_pictures(pictures),
        Section('arms', 'Arms', [arms, meanings]),
    ]
    return render_markdown('Results of a sweep', [_what_ran(results)], sections)


def summarize_sweep(results: Results, workdir: pathlib.Path) -> list[str]:
    """Returns the last screen's lines: what has finished, the first outcome by group, the page, the next command."""
    finished = [result for result in results.arms if result.state.is_finished]
    lines = [f'arms      {len(finished)} of {len(results.arms)} finished']
    if results.outcomes:
        outcome = results.outcomes[0].name
        compared = {one.group: one.difference for one in results.comparisons if one.endpoint == outcome}
        lines.append(f'outcome   {outcome}, mean and 95% interval; difference to {results.groups[0].name}')
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


def _differences(results: Results) -> list[Block]:
    if not results.comparisons:
        return []
    first = results.groups[0].name
    head = ('group', 'seeds', 'difference', 't', 'BCa', 'p', 'p (Holm)', 'r', 'standard error smaller by')
    text = (
        f'Group minus {first} on the same seeds, which have prompts, initial weights and sampling noise in common. t: '
        '95% interval of Student; BCa: of the bias-corrected and accelerated bootstrap, from 5 seeds on; p: Student, '
        'two-sided, and after Holm over the groups. r: correlation over seeds; the standard error is smaller than with '
        'seeds of its own for each arm by the factor in the last column.'
    )
    blocks: list[Block] = [Text(text)]
    for endpoint in results.outcomes:
        found = [comparison for comparison in results.comparisons if comparison.endpoint == endpoint.name]
        if found:
            blocks += [Text(f'### {endpoint.name}'), Table(head, [_difference_row(comparison) for comparison in found])]
            blocks.append(Text(describe_pairing([c.difference.pairing for c in found if c.difference.pairing])))
    return blocks


def _difference_row(comparison: Comparison) -> tuple[str, ...]:
    found = comparison.difference
    return (
        *(comparison.group, str(found.n), _signed(found.mean), _bounds(found.t), _bounds(found.bootstrap)),
        *(_probability(found.p), _probability(comparison.holm_p)),
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
