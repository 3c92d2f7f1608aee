"""Runs side by side: the config fields that differ, and every number of their reports in one table."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from areal_jax.errors import UserError
from areal_jax.report.pages.markdown_page import render_part, tell_headline
from areal_jax.report.pages.report_texts import Items, Parts, Table, Text, tell_parts
from areal_jax.report.run_record import Run, read_fields

MISSING = '-'


@dataclasses.dataclass(frozen=True)
class Comparison:
    runs: Mapping[str, Run]  # by the name that tells it from the others
    parts: Mapping[str, Parts]
    headline: Table
    caveats: Items
    differences: Table | Text  # of the configs
    tables: Sequence[tuple[str, Table]]  # title and numbers, without numbers that no run has


def name_runs(workdirs: Sequence[pathlib.Path]) -> list[str]:
    """Of each workdir the shortest end of its path that no other has; raises UserError for one given twice or alone."""
    if len(workdirs) < 2:
        raise UserError(f'--compare got {len(workdirs)} run; give the workdirs of two or more')
    paths = [workdir.resolve() for workdir in workdirs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f'--compare got the run {workdirs[index]} twice; give each run once')
    return [_shortest(path, paths) for path in paths]


def compare(runs: Mapping[str, Run]) -> Comparison:
    """Raises UserError for runs whose event logs have different versions: they do not count the same things."""
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
    """A column a run; a row for each row and column of the tables, labelled with both heads where there are several."""
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
    """By label: 'trained, share'. Empty cells are left out."""
    several = len(table.head) > 2
    return {
        f'{row[0]}, {head}' if several else row[0]: cell
        for row in table.rows
        for head, cell in zip(table.head[1:], row[1:], strict=True)
        if cell
    }


def _in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """Every label once; one that only a later list has comes after the label that it follows there."""
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
