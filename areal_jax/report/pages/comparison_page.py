"""Several runs on one page of HTML (compare.html): headlines and differences, numbers, curves and ages overlaid."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.report.pages import charts as figures
from areal_jax.report.pages.markdown_page import render_part, tell_headline
from areal_jax.report.pages.report_texts import Items, Parts, Table, Text, tell_parts
from areal_jax.report.pages.run_plots import CURVES, SPLIT, Curve, curve_points
from areal_jax.report.pages.web_page import Absent, Block, Grid, Look, Section, choose_looks, render_web_page
from areal_jax.report.run_record import Run, read_fields
from areal_jax.telemetry.progress import format_number

MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Comparison:
    runs: Mapping[str, Run]  # by distinguishing name
    parts: Mapping[str, Parts]
    headline: Table
    caveats: Items
    differences: Table | Text  # of the configs
    tables: Sequence[tuple[str, Table]]  # title and table; empty tables are left out


def name_runs(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """Names each workdir by the shortest unique end of its path; raises UserError for a duplicate or a single one."""
    if len(workdirs) < 2:
        raise UserError(f'--compare got {len(workdirs)} run; give the workdirs of two or more')
    paths = [workdir.resolve() for workdir in workdirs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f'--compare got the run {workdirs[index]} twice; give each run once')
    return [_shortest(path, paths) for path in paths]


def compare(runs: Mapping[str, Run]) -> Comparison:
    """Compares runs. Raises UserError if versions of their event logs differ: they do not count the same things."""
    versions = {name: run.log_version for name, run in runs.items()}
    (first, version), *others = versions.items()
    for name, other in others:
        if other != version:
            raise UserError(
                f'--compare got the run {first} with version {version} of the event log and {name} with version '
                f'{other}, which do not count the same things; compare runs of one version'
            )
    parts = {name: tell_parts(run.report) for name, run in runs.items()}
    return Comparison(
        runs=runs,
        parts=parts,
        headline=join_tables({name: _headline(run) for name, run in runs.items()}),
        caveats=Items([f'{name}: {caveat}' for name, of in parts.items() for caveat in of.warnings.items]),
        differences=_differences({name: read_fields(run.workdir) for name, run in runs.items()}),
        tables=[(title, table) for title, table in _tables(parts) if table],
    )


def render_comparison(comparison: Comparison) -> str:
    """Markdown for the terminal."""
    sections = [
        '## At a glance',
        render_part(comparison.headline),
        *(['## Caveats', render_part(comparison.caveats)] if comparison.caveats else []),
        '## Config',
        render_part(comparison.differences),
        *(text for title, table in comparison.tables for text in (f'## {title}', render_part(table))),
    ]
    return '\n\n'.join(sections)


def join_tables(tables: Mapping[str, Table]) -> Table:
    """One column per run, one row per cell of the tables; with several columns, a label names row and column."""
    cells = {name: _cells(table) for name, table in tables.items()}
    labels = _in_order([list(of) for of in cells.values()])
    return Table(('', *tables), [(label, *(of.get(label, MISSING) for of in cells.values())) for label in labels])


def _headline(run: Run) -> Table:
    return Table(('', ''), [(tile.question, tile.answer) for tile in tell_headline(run.report)])


def _tables(parts: Mapping[str, Parts]) -> list[tuple[str, Table]]:
    titled = {
        'Held-out accuracy': 'accuracy', 'Evaluation beside training': 'evaluation', 'Learning': 'learning',
        'Staleness and interruption': 'staleness', 'Ratios by age': 'ratios', 'Token ledger': 'fates',
        'Importance ratio by cause (nats)': 'split', 'Censoring': 'answers', 'Lane seconds an update': 'time',
        'Experts': 'routes',
        'Work of the engines': 'work', 'Rates': 'rates', 'Memory': 'memory', 'Groups': 'groups',
    }  # fmt: skip
    return [
        (title, join_tables({name: getattr(of, field) for name, of in parts.items()}))
        for title, field in titled.items()
    ]


def _cells(table: Table) -> dict[str, str]:
    """The cells by label, such as 'trained, share', without empty cells."""
    several = len(table.head) > 2
    return {
        f'{row[0]}, {head}' if several else row[0]: cell
        for row in table.rows
        for head, cell in zip(table.head[1:], row[1:], strict=True)
        if cell
    }


def _in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """Merges the lists, each label once; a label new in a later list comes after the label that it follows there."""
    merged: list[str] = []
    for labels in lists:
        place = 0
        for label in labels:
            if label in merged:
                place = merged.index(label) + 1
            else:
                merged.insert(place, label)
                place += 1
    return merged


def _differences(fields: Mapping[str, Mapping[str, str]]) -> Table | Text:
    labels = _in_order([list(of) for of in fields.values()])
    rows = [(label, *(of.get(label, MISSING) for of in fields.values())) for label in labels]
    different = [row for row in rows if len(set(row[1:])) > 1]
    return Table(('config field', *fields), different) if different else Text('The configs are equal.')


def _shortest(path: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
    for length in range(1, len(path.parts) + 1):
        end = path.parts[-length:]
        if sum(other.parts[-length:] == end for other in paths) == 1:
            return str(pathlib.PurePath(*end))
    return str(path)


def render_comparison_page(comparison: Comparison) -> str:
    """The page; needs Bokeh."""
    what_ran = Table(
        ('run', 'what ran'), [(name, of.what_ran.text.replace('`', '')) for name, of in comparison.parts.items()]
    )
    field, looks = choose_looks({name: read_fields(run.workdir) for name, run in comparison.runs.items()})
    ordered = [Text(f'The colours of the runs follow `{field}`, from dark to light.')] if field else []
    sections = [
        Section('headline', 'At a glance', [comparison.headline]),
        Section('warnings', 'Caveats', [comparison.caveats or Absent('No run has a caveat.')]),
        Section('config', 'Config fields that differ', [comparison.differences]),
        Section('curves', 'Curves', [*ordered, *_curves(comparison, looks)]),
        Section('ages', 'Age of the trained tokens', list(_ages(comparison, looks))),
        Section('ledger', 'Token ledger', list(_ledger(comparison))),
        Section('numbers', 'Numbers', [block for title, table in comparison.tables for block in _titled(title, table)]),
    ]
    return render_web_page(f'Comparison of {len(comparison.runs)} runs', [what_ran], sections)


def _titled(title: str, table: Table) -> tuple[Block, Block]:
    return Text(f'{title}:'), table


def _curves(comparison: Comparison, looks: Mapping[str, Look]) -> Iterator[Block]:
    updates = figures.new_updates()
    drawn, missing, equal = {}, [], []
    for curve in (*CURVES, *_parts_of(SPLIT)):
        label, metric = curve.metrics[0]
        # in the order of the looks, so that the legend of ordered runs is ordered
        points = [(name, *curve_points(comparison.runs[name].metrics, metric)) for name in looks]
        known = [value for line in points for value in line[2] if value > 0 or not curve.logarithmic]
        if not known:
            missing.append(curve.title)
        elif len(set(known)) == 1:
            equal.append(f'{curve.title} ({format_number(known[0])})')
        else:
            unit = ', '.join(filter(None, (label, curve.unit)))
            drawn[curve.name] = figures.draw_curve(dataclasses.replace(curve, unit=unit), points, updates, looks)
    yield Grid(drawn) if drawn else Absent('No run has published an update.')
    if equal:
        yield Absent(f'The same in all runs and updates: {", ".join(equal)}.')
    if missing and drawn:
        yield Absent(f'Measured in none of the runs: {", ".join(missing)}.')


def _parts_of(split: Curve) -> Iterator[Curve]:
    for part, name in split.metrics:
        yield dataclasses.replace(split, title=f'Importance ratio, {part}', metrics=(('RMS', name),))


def _ages(comparison: Comparison, looks: Mapping[str, Look]) -> Iterator[Block]:
    for name, unit, key in (
        ('publications', 'versions', 'publications'),
        ('optimizer steps', 'steps before their own update', 'steps'),
    ):
        histograms = {of: comparison.runs[of].report['token_age_histograms'] for of in looks}
        runs = {of: dict(histogram[key]) for of, histogram in histograms.items()}  # type: ignore[literal-required]
        if any(runs.values()):
            chart = figures.draw_histogram(f'Age in {name}', unit, list(runs.items()), looks)
            yield Grid({f'age_in_{key}': chart})
        else:
            yield Absent(f'No run has ages in {name}.')


def _ledger(comparison: Comparison) -> Iterator[Block]:
    known = {name: fates for name, run in comparison.runs.items() if (fates := run.report['token_fates'])}
    if known:
        yield Grid({'fates': figures.draw_fate_shares(known)})
    if missing := [name for name in comparison.runs if name not in known]:
        yield Absent(f'Without a ledger, because an earlier program wrote a part of the log: {", ".join(missing)}.')
