"""The report of a run as a page of HTML to look into (report.html). Used by report.py.

The texts and tables are those of report.md; the figures are drawn from the same report, metrics and events.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.report import figures
from areal_jax.report.censoring import describe_censoring
from areal_jax.report.metric_curves import CURVES, SPLIT, has_points
from areal_jax.report.parts import Parts, Table, Text, tell_parts
from areal_jax.report.run import Run, read_fields
from areal_jax.report.slot_figure import MOST_INTERVALS, describe_slots, draw_slots
from areal_jax.report.slot_timeline import build_slot_timeline
from areal_jax.report.web_page import Absent, Block, Folded, Grid, Section, Wide, render_web_page
from areal_jax.telemetry.numerals import format_number

FILE = 'report.html'


def render_html(run: Run) -> str:
    """The page; needs Bokeh."""
    parts = tell_parts(run.report)
    fields = Table(('field', 'value'), sorted(read_fields(run.workdir).items()))
    head = [
        parts.what_ran,
        parts.which_config,
        Text(f'Versions: {parts.versions.text}.'),
        Folded('Every field of the config', fields) if fields else Absent('There is no config.json in the workdir.'),
    ]
    sections = [
        Section('warnings', 'Caveats and failed checks', [parts.warnings or _NO_CAVEAT]),
        Section('results', 'Results', list(_results(run, parts))),
        Section('curves', 'Curves', list(_curves(run))),
        Section('staleness', 'Staleness and interruption', list(_staleness(run, parts))),
        Section('slots', 'Slots', list(_slots(run))),
        Section('ledger', 'Token ledger', list(_ledger(run, parts))),
        Section('split', 'Importance ratio by cause', list(_split(run, parts))),
        Section('censoring', 'Censoring', list(_censoring(run, parts))),
        Section('time', 'Time and limit', [
            parts.cause_of_gap, parts.time, parts.ideal_rule, parts.work, parts.rates, parts.servers,
        ]),
        Section('groups', 'Groups', [parts.groups, parts.problems]),
    ]  # fmt: skip
    return render_web_page(f'Run {run.name}', head, sections)


_NO_CAVEAT = Absent('No check failed, and nothing in the numbers calls for a caveat.')
_NO_LENGTHS = Absent(
    'The log does not tell which tokens were trained and which were left out, or no answer has a fate.'
)


def _results(run: Run, parts: Parts) -> Iterator[Block]:
    if parts.accuracy:
        yield parts.accuracy
        yield parts.intervals
    else:
        yield Absent('The run was not evaluated on held-out problems (evaluation.problems).')
    yield parts.evaluation
    yield parts.evaluation_cost
    if run.report['evaluation_curve'] and run.report['evaluation_curve_ends']:
        yield Grid({'evaluation': figures.draw_evaluation(run.report, figures.new_updates())})
    yield parts.learning


def _curves(run: Run) -> Iterator[Block]:
    if not run.metrics:
        yield Absent('No update was published, so there are no metrics to draw.')
        return
    updates = figures.new_updates()
    drawn = [curve for curve in CURVES if has_points(run.metrics, curve)]
    yield Grid({curve.name: figures.draw_metrics(curve, run.metrics, updates) for curve in drawn})
    if missing := [curve.title for curve in CURVES if curve not in drawn]:
        yield Absent(f'Not measured in this run, or never above 0 on a logarithmic axis: {", ".join(missing)}.')


def _staleness(run: Run, parts: Parts) -> Iterator[Block]:
    yield parts.staleness
    histograms, steps = run.report['token_age_histograms'], run.report['token_age_steps']
    drawn = {
        name: figures.draw_histogram(f'Age in {name}', unit, [('', {pair[0]: pair[1] for pair in pairs})])
        for name, unit, pairs in (
            ('publications', 'versions', histograms['publications']),
            ('optimizer steps', 'steps before their own update', histograms['steps']),
        )
        if pairs
    }
    if drawn:
        yield Grid({f'age_in_{name.replace(" ", "_")}': figure for name, figure in drawn.items()})
    else:
        yield Absent('No update trained a token, so there are no ages to draw.')
    if histograms['publications'] and not histograms['steps']:
        yield Absent('The metrics do not tell how many optimizer steps each update made.')
    elif drawn:
        yield Text(
            "The steps of a token's own update that come before the one that trains it are not in the histogram: "
            f'{format_number(steps["inside_mean"])} on average, {format_number(steps["inside_max"])} at most.'
        )
    yield parts.ratios


def _slots(run: Run) -> Iterator[Block]:
    timeline = build_slot_timeline(run.events, MOST_INTERVALS)
    if timeline.slots:
        yield Wide('slots', draw_slots(timeline), describe_slots(timeline))
    else:
        yield Absent('The log has no dispatch of decoding: nothing was generated, or servers that do not tell did it.')


def _ledger(run: Run, parts: Parts) -> Iterator[Block]:
    fates = run.report['token_fates']
    if fates is None:
        yield Absent('There is no ledger: an earlier program, which did not log lengths of segments, wrote the log.')
        return
    yield Text(f'The ledger does not close: {fates["fault"]}.' if fates['fault'] else 'The ledger closes.')
    yield parts.fates
    by_version, by_age = fates['by_version'], fates['by_age']
    drawn = {}
    if any(map(any, by_age.values())):
        drawn['fates_by_age'] = figures.draw_fates('Tokens by age', 'age when the fate was decided', by_age)
    if by_version and any(map(any, by_version.values())):
        drawn['fates_by_version'] = figures.draw_fates('Tokens by policy version', 'policy version', by_version)
    if fates['generated']:
        yield Wide('fates', figures.draw_fate_shares({'': fates}))
    yield Grid(drawn) if drawn else Absent('No generated token has met its fate.')
    if by_version is None:
        yield Absent('Servers do not tell how many tokens of each version a call brought: there is no figure of it.')


def _censoring(run: Run, parts: Parts) -> Iterator[Block]:
    yield parts.answers or _NO_LENGTHS
    yield Text(describe_censoring(run.report['censoring']))


def _split(run: Run, parts: Parts) -> Iterator[Block]:
    split = run.report['ratio_split']
    if split is None:
        yield Absent('The run did not split the importance ratio by cause (diagnostics.ratio_sample).')
        return
    yield parts.split_cost
    rows = (
        ('split_by_age', 'By age', 'age', split['by_age']),
        ('split_by_update', 'Drift by update', 'updates back', split['by_update']),
        ('split_by_engine', 'Mismatch by engine', 'engine', split['by_engine']),
    )
    drawn = {name: figures.draw_ratio_rows(title, x, found) for name, title, x, found in rows if found}
    if has_points(run.metrics, SPLIT):
        drawn = {'split_by_step': figures.draw_metrics(SPLIT, run.metrics, figures.new_updates()), **drawn}
    if drawn:
        yield Grid(drawn)
    yield parts.split
