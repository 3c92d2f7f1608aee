"""Several runs on one page of HTML (compare.html): headlines and differences, numbers, curves and ages overlaid."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from areal_jax.report.pages import charts as figures
from areal_jax.report.pages.colors import Look, choose_looks
from areal_jax.report.pages.comparison_page import Comparison
from areal_jax.report.pages.report_texts import Table, Text
from areal_jax.report.pages.run_plots import CURVES, SPLIT, Curve, curve_points
from areal_jax.report.pages.web_page import Absent, Block, Grid, Section, render_web_page
from areal_jax.report.run_record import read_fields
from areal_jax.telemetry.progress import format_number


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
