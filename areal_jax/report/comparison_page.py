"""Several runs on one page of HTML (compare.html): differences, numbers side by side, curves and ages overlaid.

Used by main_report.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.report import figures
from areal_jax.report.comparison import Comparison
from areal_jax.report.metric_curves import CURVES, SPLIT, Curve, curve_points
from areal_jax.report.parts import Table, Text
from areal_jax.report.web_page import Absent, Block, Grid, Section, Wide, render_web_page


def render_comparison_page(comparison: Comparison) -> str:
    """The page; needs Bokeh."""
    what_ran = Table(
        ('run', 'what ran'), [(name, of.what_ran.text.replace('`', '')) for name, of in comparison.parts.items()]
    )
    sections = [
        Section('warnings', 'Caveats and failed checks', [comparison.caveats or Absent('No run has a caveat.')]),
        Section('config', 'Config fields that differ', [comparison.differences]),
        Section('curves', 'Curves', list(_curves(comparison))),
        Section('ages', 'Age of the trained tokens', list(_ages(comparison))),
        Section('ledger', 'Token ledger', list(_ledger(comparison))),
        Section('numbers', 'Numbers', [block for title, table in comparison.tables for block in _titled(title, table)]),
    ]
    return render_web_page(f'Comparison of {len(comparison.runs)} runs', [what_ran], sections)


def _titled(title: str, table: Table) -> tuple[Block, Block]:
    return Text(f'{title}:'), table


def _curves(comparison: Comparison) -> Iterator[Block]:
    updates = figures.new_updates()
    drawn, missing = {}, []
    for curve in (*CURVES, *_parts_of(SPLIT)):
        label, metric = curve.metrics[0]
        points = [(name, *curve_points(run.metrics, metric)) for name, run in comparison.runs.items()]
        known = [line for line in points if any(value > 0 or not curve.logarithmic for value in line[2])]
        if not known:
            missing.append(curve.title)
            continue
        titled = Curve(curve.title, ', '.join(filter(None, (label, curve.unit))), curve.metrics, curve.logarithmic)
        # a run without the metric keeps its place, so that each run has one colour in all figures
        drawn[titled.name] = figures.draw_curve(titled, points, updates)
    yield Grid(drawn) if drawn else Absent('No run has published an update.')
    if missing and drawn:
        yield Absent(f'Measured in none of the runs: {", ".join(missing)}.')


def _parts_of(split: Curve) -> Iterator[Curve]:
    for part, name in split.metrics:
        yield Curve(f'Importance ratio, {part}', split.unit, (('RMS', name),), split.logarithmic)


def _ages(comparison: Comparison) -> Iterator[Block]:
    for name, unit, key in (
        ('publications', 'versions', 'publications'),
        ('optimizer steps', 'steps before their own update', 'steps'),
    ):
        runs = {of: dict(run.report['token_age_histograms'][key]) for of, run in comparison.runs.items()}  # type: ignore[literal-required]
        if any(runs.values()):
            figure = figures.draw_histogram(f'In {name}', unit, list(runs.items()))
            yield Wide(f'age_in_{key}', figure)
        else:
            yield Absent(f'No run has ages in {name}.')


def _ledger(comparison: Comparison) -> Iterator[Block]:
    known = {name: fates for name, run in comparison.runs.items() if (fates := run.report['token_fates'])}
    if known:
        yield Wide('fates', figures.draw_fate_shares(known))
    if missing := [name for name in comparison.runs if name not in known]:
        yield Absent(f'Without a ledger, because an earlier program wrote a part of the log: {", ".join(missing)}.')
