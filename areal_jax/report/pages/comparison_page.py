"""Several runs on one page of HTML (compare.html): headlines and differences, numbers, curves and ages overlaid."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.report.pages import charts
from areal_jax.report.pages.blocks import Absent, Block, Grid, Items, Section, Table, Text, render_markdown
from areal_jax.report.pages.colors import Look, choose_looks
from areal_jax.report.pages.curves import CURVES, EXPERTS, SPLIT, Curve, curve_points
from areal_jax.report.pages.headline import tell_headline
from areal_jax.report.pages.run_page import Charts, tell_sections, tell_what_ran
from areal_jax.report.pages.web_page import render_web_page
from areal_jax.report.run_record import Run, read_fields
from areal_jax.telemetry.progress import format_number

MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Comparison:
    runs: Mapping[str, Run]  # by distinguishing name
    headline: Table
    caveats: Items
    differences: Table | Text  # of the configs
    tables: Sequence[Table]  # without empty ones


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
    return Comparison(
        runs=runs,
        headline=join_tables({name: _headline(run) for name, run in runs.items()}),
        caveats=Items([f'{name}: {caveat}' for name, run in runs.items() for caveat in run.report['warnings']]),
        differences=_differences({name: read_fields(run.workdir) for name, run in runs.items()}),
        tables=_join_all([_tables(run) for run in runs.values()], list(runs)),
    )


def render_comparison(comparison: Comparison) -> str:
    """Returns Markdown for the terminal."""
    return render_markdown(_title(comparison), [], _tell_sections(comparison)).rstrip()


def render_comparison_page(comparison: Comparison) -> str:
    """Returns the page; needs Bokeh."""
    texts = [(name, tell_what_ran(run.report).text.replace('`', '')) for name, run in comparison.runs.items()]
    field, looks = choose_looks({name: read_fields(run.workdir) for name, run in comparison.runs.items()})

    def draw(section: str) -> Iterator[Block]:
        if section == 'curves':
            yield Text(f'The colours of the runs follow `{field}`, from dark to light.' if field else '')
            yield from _curves(comparison, looks)
        else:
            yield from _ages(comparison, looks) if section == 'ages' else _ledger(comparison)

    sections = _tell_sections(comparison, draw)
    return render_web_page(_title(comparison), [Table(('run', 'what ran'), texts)], sections)


def _title(comparison: Comparison) -> str:
    return f'Comparison of {len(comparison.runs)} runs'


def _tell_sections(comparison: Comparison, charts: Charts = lambda section: ()) -> list[Section]:
    numbers = [block for table in comparison.tables for block in (Text(f'{table.title}:'), table)]
    return [
        Section('headline', 'At a glance', [comparison.headline]),
        Section('warnings', 'Caveats', [comparison.caveats or Absent('No run has a caveat.')]),
        Section('config', 'Config fields that differ', [comparison.differences]),
        Section('curves', 'Curves', [*charts('curves')]),
        Section('ages', 'Age of the trained tokens', [*charts('ages')]),
        Section('ledger', 'Token ledger', [*charts('ledger')]),
        Section('numbers', 'Numbers', numbers),
    ]


def join_tables(tables: Mapping[str, Table]) -> Table:
    """One column per run, one row per cell of the tables; with several columns, a label names row and column."""
    cells = {name: _cells(table) for name, table in tables.items()}
    labels = _in_order([list(of) for of in cells.values()])
    return Table(('', *tables), [(label, *(of.get(label, MISSING) for of in cells.values())) for label in labels])


def _headline(run: Run) -> Table:
    return Table(('', ''), [(tile.question, tile.answer) for tile in tell_headline(run.report)])


def _tables(run: Run) -> dict[str, Table]:
    """Returns the tables of a run that are compared, by title."""
    blocks = (block for section in tell_sections(run.report) for block in section.blocks)
    return {block.title: block for block in blocks if isinstance(block, Table) and block.title and block}


def _join_all(tables: Sequence[Mapping[str, Table]], names: Sequence[str]) -> list[Table]:
    nothing = Table((), ())
    return [
        dataclasses.replace(
            join_tables({name: own.get(title, nothing) for name, own in zip(names, tables, strict=True)}), title=title
        )
        for title in _in_order([list(own) for own in tables])
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


def _curves(comparison: Comparison, looks: Mapping[str, Look]) -> Iterator[Block]:
    drawn, missing, equal = {}, [], []
    has_experts = any(run.report['experts'] for run in comparison.runs.values())
    curves = [curve for curve in CURVES if has_experts or curve.group != EXPERTS]
    for curve in (*curves, *_parts_of(SPLIT)):
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
            drawn[curve.name] = charts.build_curve(dataclasses.replace(curve, unit=unit), points, looks)
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
            chart = charts.build_histogram(f'Age in {name}', unit, list(runs.items()), looks)
            yield Grid({f'age_in_{key}': chart})
        else:
            yield Absent(f'No run has ages in {name}.')


def _ledger(comparison: Comparison) -> Iterator[Block]:
    known = {name: fates for name, run in comparison.runs.items() if (fates := run.report['token_fates'])}
    if known:
        yield Grid({'fates': charts.build_fate_shares(known)})
    if missing := [name for name in comparison.runs if name not in known]:
        yield Absent(f'Without a ledger, because an earlier program wrote a part of the log: {", ".join(missing)}.')
