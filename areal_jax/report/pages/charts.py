"""The charts of a run, declared for its page and its pictures: curves, ages, fates, seconds, ratios, scores, loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from areal_jax.report.aggregates import Metrics
from areal_jax.report.expert_balance import fullest_layers, loads_of_ages, loads_of_layers, relative_loads
from areal_jax.report.limit import evaluation_points, format_interval
from areal_jax.report.pages.blocks import UPDATE, Bars, Cells, Chart, Line, Table
from areal_jax.report.pages.colors import BLUE, DROPS, FATES, GREEN, GREY, PALETTE, VERMILION, Look, spread_looks
from areal_jax.report.pages.curves import TOKEN_AGE, Curve, curve_points, smoothing_window
from areal_jax.report.report_keys import RatioRow, Report, Time, TokenFates
from areal_jax.telemetry.progress import format_number, format_percent
from areal_jax.telemetry.token_ledger import DROPPED

_MOST_LAYERS, _MOST_COLUMNS = 4, 120  # of the pictures of loads; updates of a longer run are summed into columns
_LOAD_BOUNDS = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the mean of the layer
_LOAD_LEVELS = ('below ¼', '¼ to ½', '½ to 1', '1 to 2', '2 to 4', '4 and more')
_MOST_ROWS = 40  # of the table below a chart
_BOUND_IN_VIEW = 3  # eta is drawn up to this multiple of the oldest age
_KINDS = {'greedy': (GREEN, 'circle'), 'sampled': (BLUE, 'square')}

Points = tuple[str, Sequence[float], Sequence[float]]  # label, x, y
Series = tuple[str, Mapping[float, float]]  # label, tokens by age


def build_curve(curve: Curve, lines: Sequence[Points], looks: Mapping[str, Look] | None = None) -> Chart:
    """Returns lines over the updates.

    If the curve is smoothed, a line of ten points or more is drawn faint with its moving mean over it. `looks` maps
    labels to looks; by default lines have the colours of the palette.
    """
    chosen = looks or spread_looks([label for label, _, _ in lines])
    window = smoothing_window(max((len(xs) for _, xs, _ in lines), default=0)) if curve.smooth else 1
    said = '; '.join(
        f'{label} from {format_number(ys[0])} at update {format_number(xs[0])} to {format_number(ys[-1])} at update '
        f'{format_number(xs[-1])}'
        for label, xs, ys in lines
        if ys
    )
    values = {label: dict(zip(xs, ys, strict=True)) for label, xs, ys in lines}
    updates = sorted({x for own in values.values() for x in own})
    return Chart(
        title=curve.title,
        unit=curve.unit,
        x=UPDATE,
        marks=[_line(curve, *points, *chosen[points[0]]) for points in lines],
        alt=f'Lines over the updates: {said}.',
        table=_tabulate('update', values, [updates[index] for index in _thinned(len(updates))]),
        caption=f'Faint: each update; strong: mean of the last {window} updates.' if window > 1 else '',
        hover=[('update', '@x'), ('value', '@y{0.000 a}'), *([('line', '@label')] if len(lines) > 1 else [])],
        wide=curve.wide,
        legend=len(lines) > 1,
        logarithmic=curve.logarithmic,
        window=window,
    )


def build_metrics(curve: Curve, metrics: Metrics, report: Report) -> Chart:
    """Returns the metrics of a curve for one run; the age also with eta, if it is near."""
    found = ((label, *curve_points(metrics, name)) for label, name in curve.metrics)
    chart = build_curve(curve, [line for line in found if line[1]])
    eta, oldest = report['eta'], report['token_age']['max']
    if curve is TOKEN_AGE and eta is not None and oldest is not None and eta <= _BOUND_IN_VIEW * max(1, oldest):
        return dataclasses.replace(chart, bound=(f'eta = {eta:g}', eta))
    return chart


def build_histogram(title: str, unit: str, series: Sequence[Series], looks: Mapping[str, Look] | None = None) -> Chart:
    """Returns shares of the trained tokens by age: one bar per age; the bars of several runs are next to each other."""
    chosen, width = looks or spread_looks([label for label, _ in series]), 0.9 / max(1, len(series))
    ages = sorted({age for _, tokens in series for age in tokens})
    shares = {label: _shares(tokens) for label, tokens in series}
    marks = []
    for index, (label, tokens) in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        details = {'age': sorted(tokens), 'tokens': [tokens[age] for age in sorted(tokens)]}
        ends = [shares[label][age] for age in sorted(tokens)]
        places = [age + shift for age in sorted(tokens)]
        marks.append(Bars(label, chosen[label][0], places, [0.0] * len(ends), ends, width * 0.94, details=details))
    first, last = (format_number(ages[0]), format_number(ages[-1])) if ages else ('-', '-')
    rows = [(format_number(age), *(format_percent(own.get(age, 0)) for own in shares.values())) for age in ages]
    hover = [('age', '@age'), ('share', '@y{0.0%}'), ('tokens', '@tokens')]
    return Chart(
        title=title,
        unit='share of the trained tokens',
        x=f'age ({unit})',
        marks=marks,
        alt=f'Bars by age, from {first} to {last} {unit}.',
        table=Table(('age', *(label or 'share' for label in shares)), rows[:_MOST_ROWS]),
        hover=[*hover, ('run', '@label')] if len(series) > 1 else hover,
        percent=True,
    )


def build_fates(title: str, x: str, fates: Mapping[str, Sequence[int]]) -> Chart:
    """Returns tokens by age or by version, the fates on top of each other."""
    shown = {fate: tokens for fate, tokens in fates.items() if any(tokens)}
    size = max(map(len, shown.values()), default=0)
    filled = {fate: [*tokens, *[0] * (size - len(tokens))] for fate, tokens in shown.items()}
    rows = [(str(index), *(str(tokens[index]) for tokens in filled.values())) for index in _thinned(size)]
    return Chart(
        title=title,
        unit='tokens',
        x=x,
        marks=_stack(filled, {fate: {'tokens': tokens} for fate, tokens in filled.items()}),
        alt=f'Stacked bars by {x}: {", ".join(filled)}.',
        table=Table((x, *filled), rows),
        hover=[(x, '@x'), ('fate', '@label'), ('tokens', '@tokens')],
        stacked=True,
    )


def build_fate_shares(runs: Mapping[str, TokenFates]) -> Chart:
    """Returns one bar per run, divided into the shares of the generated tokens by fate."""
    every = dict.fromkeys(fate for fates in runs.values() for fate in fates['fates'])
    tokens = {fate: [own['fates'].get(fate, 0) for own in runs.values()] for fate in every}
    tokens = {fate: counts for fate, counts in tokens.items() if any(counts)}
    generated = [own['generated'] or 1 for own in runs.values()]
    shares = {fate: [n / of for n, of in zip(counts, generated, strict=True)] for fate, counts in tokens.items()}
    details: dict[str, dict[str, Sequence[object]]]
    details = {fate: {'run': list(runs), 'share': shares[fate], 'tokens': tokens[fate]} for fate in tokens}
    return Chart(
        title='Fates',
        unit='share of the generated tokens',
        marks=_stack(shares, details),
        alt='A bar a run, divided by fate.',
        table=Table(
            ('fate', *(name or 'share' for name in runs)),
            [(fate, *map(format_percent, own)) for fate, own in shares.items()],
        ),
        hover=[('run', '@run'), ('fate', '@label'), ('share', '@share{0.0%}'), ('tokens', '@tokens')],
        stacked=True,
        horizontal=True,
        names=list(runs),
        percent=True,
    )


def build_time(time: Time) -> Chart:
    """Returns seconds of an update: achieved, the limit, and each lane; another table of the page has the numbers."""
    known = {
        'achieved': (time['achieved'], BLUE),
        'limit (ideal)': (time['ideal'], VERMILION),
        'generate': (time['generate'], GREY),
        'train': (time['train'], GREY),
        'publish': (time['publish'], GREY),
    }
    bars = [(name, seconds, color) for name, (seconds, color) in known.items() if seconds is not None]
    return Chart(
        title='Where the time of an update went',
        unit='s',
        marks=[
            Bars(name, color, [place], [0.0], [seconds], 0.72, texts=[f' {format_number(seconds)} s'])
            for place, (name, seconds, color) in enumerate(bars)
        ],
        alt=f'Bars: {", ".join(f"{name} {format_number(seconds)} s" for name, seconds, _ in bars)}.',
        caption='Grey: seconds in which a lane was occupied.',
        legend=False,
        horizontal=True,
        names=[name for name, _, _ in bars],
    )


def build_ratio_rows(title: str, x: str, rows: Sequence[RatioRow]) -> Chart:
    """Returns the RMS of the parts of the importance ratio by range of ages, updates back, or engine."""
    marks = []
    parts = list(dict.fromkeys(part for row in rows for part in row['parts']))
    for part, color in zip(parts, PALETTE, strict=False):
        found = ((place, row['parts'].get(part, {'rms': None})['rms'], row) for place, row in enumerate(rows))
        known = [(place, rms, row) for place, rms, row in found if rms is not None]
        if known:
            details: dict[str, Sequence[object]] = {'of': [row['of'] for *_, row in known]}
            details['tokens'] = [row['tokens'] for *_, row in known]
            places, values = [place for place, *_ in known], [rms for _, rms, _ in known]
            marks.append(Line(part, places, values, color, marker='circle', details=details))
    cells = [
        (row['of'], *(format_number(row['parts'][part]['rms']) if part in row['parts'] else '-' for part in parts))
        for row in rows[:_MOST_ROWS]
    ]
    return Chart(
        title=title,
        unit='RMS, nats',
        x=x,
        marks=marks,
        alt=f'Points by {x}: {", ".join(parts)}.',
        table=Table((x, *parts), cells),
        hover=[(x, '@of'), ('part', '@label'), ('RMS', '@y{0.000e} nats'), ('tokens', '@tokens')],
        names=[row['of'] for row in rows],
    )


def build_evaluation(report: Report) -> Chart | None:
    """Returns held-out accuracy by version with 95% intervals, from before training to after it; None without any."""
    points = evaluation_points(report)
    if not points:
        return None
    marks = []
    for kind, own in points.items():
        means = [found['mean'] for _, found in own]
        lows = [found['mean'] if found['low'] is None else found['low'] for _, found in own]
        highs = [found['mean'] if found['high'] is None else found['high'] for _, found in own]
        color, marker = _KINDS[kind]
        marks.append(Line(kind, [version for version, _ in own], means, color, 0, marker, lows, highs))
    by_kind = {kind: dict(own) for kind, own in points.items()}
    versions = sorted({version for own in by_kind.values() for version in own})
    rows = [(str(version), *(format_interval(own.get(version)) for own in by_kind.values())) for version in versions]
    said = '; '.join(
        f'{kind} {format_interval(own[0][1])} at version {own[0][0]}, {format_interval(own[-1][1])} at version '
        f'{own[-1][0]}'
        for kind, own in points.items()
    )
    return Chart(
        title='Held-out accuracy',
        unit='mean score',
        x='policy version',
        marks=marks,
        alt=f'Points with intervals by version: {said}.',
        table=Table(('version', *by_kind), rows),
        caption='Points with their 95% intervals.',
        hover=[('version', '@x'), ('score', '@y{0.000}'), ('interval', '@low{0.000} to @high{0.000}')],
        wide=True,
    )


def build_loads(loads: Metrics, report: Report) -> dict[str, Chart]:
    """Returns the load of each expert over the updates and by age, two pictures for each of the fullest layers."""
    (updates, tokens), (ages, of_ages) = loads_of_layers(loads), loads_of_ages(loads)
    drawn = {}
    for row in fullest_layers(report['experts']['layers'] if report['experts'] else [], _MOST_LAYERS):
        layer = row['layer']
        drawn[f'loads_of_layer_{layer}'] = _picture_loads(layer, updates, tokens[layer])
        if len(ages) > 1:
            drawn[f'loads_by_age_of_layer_{layer}'] = _picture_ages(layer, ages, of_ages[layer])
    return drawn


def _picture_loads(layer: int, updates: Sequence[int], tokens: np.ndarray) -> Chart:
    span = updates[-1] - updates[0] + 1
    width = -(-span // _MOST_COLUMNS)
    sums = np.zeros((-(-span // width), tokens.shape[1]))
    np.add.at(sums, (np.array(updates) - updates[0]) // width, tokens)
    trained = sums.any(axis=1)
    ends, mean = relative_loads(tokens[[0, -1]]), relative_loads(tokens.sum(axis=0))
    order = np.argsort(-mean, kind='stable')[:_MOST_ROWS].tolist()
    fullest, dead = order[0], int((tokens[-1] == 0).sum())
    left = updates[0] - 0.5
    cells = Cells(
        f'layer {layer}', np.where(trained, relative_loads(sums).T, np.nan), left, left + width * len(sums),
        _LOAD_BOUNDS, _LOAD_LEVELS, 'no token', VERMILION,
    )  # fmt: skip
    notes = ['Times the mean of the layer.'] + [f'A column has {width} updates.'] * (width > 1)
    notes += ['Empty where no update trained a token.'] * (not trained.all())
    numbers = np.stack([mean, *ends], axis=1)[order]
    return Chart(
        title=f'Load of experts, layer {layer}',
        unit='expert',
        x=UPDATE,
        marks=[cells],
        alt=f'Cells by expert and update, from {updates[0]} to {updates[-1]}: expert {fullest} has most tokens, '
        f'{format_number(mean[fullest])} times the mean; {dead} experts have none in the last update.',
        table=Table(
            ('expert', 'run', 'first update', 'last update'),
            [(str(expert), *map(format_number, own)) for expert, own in zip(order, numbers.tolist(), strict=True)],
        ),
        caption=' '.join(notes),
        hover=[('expert', '$y{0}'), ('update', '$x{0}'), ('times the mean', '@value{0.00}')],
        wide=True,
    )


def _picture_ages(layer: int, ages: Sequence[str], tokens: np.ndarray) -> Chart:
    values = relative_loads(tokens)
    order = np.argsort(-values.sum(axis=0), kind='stable')[:_MOST_ROWS].tolist()
    said = (f'expert {own.argmax()} has most of age {age}' for age, own in zip(ages, values, strict=True))
    cells = Cells(f'layer {layer}', values.T, -0.5, len(ages) - 0.5, _LOAD_BOUNDS, _LOAD_LEVELS, 'no token', VERMILION)
    return Chart(
        title=f'By age, layer {layer}',
        unit='expert',
        x='age of the trained tokens (versions)',
        marks=[cells],
        alt=f'Cells by expert and age: {", ".join(said)}.',
        table=Table(
            ('expert', *(f'age {age}' for age in ages)),
            [(str(expert), *map(format_number, values[:, expert].tolist())) for expert in order],
        ),
        caption="Times the mean of the layer, by the engines' record.",
        hover=[('expert', '$y{0}'), ('times the mean', '@value{0.00}')],
        names=ages,
    )


def fate_color(fate: str, among: Iterable[str]) -> str:
    """Returns the colour of a fate, the same on every page; reasons of drops have different colours."""
    if fate in FATES:
        return FATES[fate]
    drops = sorted(other for other in among if other.startswith(DROPPED))
    return DROPS[drops.index(fate) % len(DROPS)]


def _line(curve: Curve, label: str, xs: Sequence[float], ys: Sequence[float], color: str, style: int) -> Line:
    kept = [(x, y) for x, y in zip(xs, ys, strict=True) if y > 0 or not curve.logarithmic]
    return Line(label, [x for x, _ in kept], [y for _, y in kept], color, style)


def _shares(tokens: Mapping[float, float]) -> dict[float, float]:
    total = sum(tokens.values()) or 1
    return {age: count / total for age, count in tokens.items()}


def _stack(values: Mapping[str, Sequence[float]], details: Mapping[str, Mapping[str, Sequence[object]]]) -> list[Bars]:
    """Bars at the places 0, 1, ..., those of each fate where the previous fate's end."""
    marks: list[Bars] = []
    for fate, own in values.items():
        starts = marks[-1].ends if marks else [0.0] * len(own)
        ends = [start + value for start, value in zip(starts, own, strict=True)]
        color = fate_color(fate, values)
        marks.append(Bars(fate, color, list(range(len(own))), starts, ends, details=details[fate]))
    return marks


def _tabulate(x: str, values: Mapping[str, Mapping[float, float]], places: Sequence[float]) -> Table:
    rows = [(format_number(at), *(format_number(own.get(at)) for own in values.values())) for at in places]
    return Table((x, *values), rows)


def _thinned(count: int) -> list[int]:
    """At most _MOST_ROWS + 1 of the indices 0 to `count` - 1, evenly spaced, including the last."""
    step = max(1, -(-count // _MOST_ROWS))
    return sorted({*range(0, count, step), *range(max(0, count - 1), count)})
