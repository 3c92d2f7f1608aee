"""The report of a run as an interactive HTML page (report.html): the sections of report.md with charts and answers."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

from areal_jax.files import JsonObject
from areal_jax.report.pages import charts, token_page
from areal_jax.report.pages.blocks import Absent, Block, Chart, Folded, Grid, Table, Text
from areal_jax.report.pages.curves import CURVES, SPLIT, curve_points, describe_undrawn
from areal_jax.report.pages.headline import describe_state
from areal_jax.report.pages.run_page import tell_sections, tell_what_ran
from areal_jax.report.pages.slot_timeline import MOST_INTERVALS, build_slot_chart, build_slot_timeline
from areal_jax.report.pages.web_page import render_web_page
from areal_jax.report.report_keys import Report
from areal_jax.report.run_record import Run, read_fields
from areal_jax.telemetry import names, rollout_views
from areal_jax.telemetry.progress import format_number
from areal_jax.telemetry.rollout_views import GivenAnswer, read_rollouts

_HEAD = ('Update, draw, answer', 'End of the prompt', 'Answer', 'Reward', 'Verdict', 'Advantage', 'Age', 'Tokens')
_PROMPT, _ANSWER = 160, 400  # characters of each that are shown
_TO_TRACKER = Absent(
    'Answers are left out of a page that goes to a tracker, unless telemetry.tracker_answers is set: '
    '`areal-rollouts RUN` shows them.'
)
_NONE = Absent("No answer is kept: telemetry.rollouts is '0', or no update is finished.")


def tell_answers(workdir: pathlib.Path) -> Iterator[Block]:
    """Blocks of the section of answers. A page that goes to a tracker shows answers only if the config allows it."""
    fields = read_fields(workdir)
    if fields.get('telemetry.tracker', 'none') != 'none' and fields.get('telemetry.tracker_answers') != 'true':
        yield _TO_TRACKER
    elif records := read_rollouts(workdir):
        yield Text(
            'The best and the worst of the kept answers of three updates. `areal-rollouts RUN` shows all of them, and '
            f'{_describe_page(workdir)} with tokens coloured by version, age, ratio, clip or advantage.'
        )
        yield Table(_HEAD, [_make_row(one) for one in choose_samples(records)])
    else:
        yield _NONE


def _describe_page(workdir: pathlib.Path) -> str:
    """The page of coloured tokens, as a link if it was written."""
    if (workdir / token_page.FILE).exists():
        return f'[{token_page.FILE}]({token_page.FILE}) has them'
    return '`areal-rollouts RUN --page` writes a page of them'


def choose_samples(records: Sequence[JsonObject]) -> list[GivenAnswer]:
    """The best and the worst answer of the first, the middle and the last update, each answer once."""
    updates = sorted({record['update'] for record in records})
    chosen = dict.fromkeys((updates[0], updates[len(updates) // 2], updates[-1]))
    found = []
    for update in chosen:
        answers = rollout_views.sort_answers(rollout_views.select_groups(records, update, None), 'reward')
        found += [answers[0], *answers[1:][-1:]]
    return found


def _make_row(one: GivenAnswer) -> tuple[str, ...]:
    group, answer = one
    prompt = group['prompt']['text']
    return (
        f'{group["update"]}, {group["draw"]}, {rollout_views.name_of(answer)}',
        ('...' if len(prompt) > _PROMPT else '') + _on_one_line(prompt[-_PROMPT:]),
        rollout_views.cut_text(_on_one_line(answer['text'][: _ANSWER + 1]), _ANSWER),
        rollout_views.show_number(answer['reward']),
        rollout_views.verdict_of(answer),
        rollout_views.show_number(one.advantage),
        '-' if one.age is None else str(one.age),
        str(one.length),
    )


def _on_one_line(text: str) -> str:
    return rollout_views.escape(text.replace('\n', ' ⏎ '))


FILE = 'report.html'


def render_html(run: Run) -> str:
    """Returns the page; needs Bokeh."""
    sections = tell_sections(run.report, lambda section: _charts(run, section))
    return render_web_page(f'Run {run.name}', [tell_what_ran(run.report)], sections, describe_state(run.report))


def _charts(run: Run, section: str) -> Iterator[Block]:
    """Yields what a section has in addition to its texts and tables."""
    if section == 'answers':
        yield from tell_answers(run.workdir)
    elif section == 'slots':
        yield from _slots(run)
    elif section == 'ledger':
        yield from _ledger(run)
    elif section == 'config':
        fields = Table(('field', 'value'), sorted(read_fields(run.workdir).items()))
        missing = Absent('There is no config.json in the workdir.')
        yield Folded('Every field of the config', fields) if fields else missing
    else:
        own = {'learning': _evaluation, 'speed': _time, 'staleness': _ages, 'agreement': _split, 'experts': _loads}
        first = own.get(section)
        yield from _curves(run, section, first(run) if first else {})
    if section == 'staleness':
        yield from _note_steps(run.report)


def _note_steps(report: Report) -> Iterator[Block]:
    """Yields what the histograms of ages do not show."""
    histograms, steps = report['token_age_histograms'], report['token_age_steps']
    if not histograms['publications'] and not histograms['steps']:
        yield Absent('No update trained a token, so there are no ages to draw.')
        return
    if histograms['publications'] == histograms['steps']:
        yield Absent('Each update made one optimizer step, so the ages in steps are those in publications.')
    if not histograms['steps']:
        yield Absent('The metrics do not tell how many optimizer steps each update made.')
        return
    yield Text(
        "The steps of a token's own update that come before the one that trains it are not in the histogram: "
        f'{format_number(steps["inside_mean"])} on average, {format_number(steps["inside_max"])} at most.'
    )


def _evaluation(run: Run) -> dict[str, Chart]:
    chart = charts.build_evaluation(run.report)
    return {'evaluation': chart} if chart else {}


def _time(run: Run) -> dict[str, Chart]:
    time = run.report['time']
    known = (time['achieved'], time['generate'], time['train'])
    return {} if known == (None, None, None) else {'time': charts.build_time(time)}


def _ages(run: Run) -> dict[str, Chart]:
    histograms = run.report['token_age_histograms']
    series = {'publications': ('versions', histograms['publications'])}
    if histograms['steps'] != histograms['publications']:
        series['optimizer steps'] = ('steps before their own update', histograms['steps'])
    drawn = {}
    for name, (unit, pairs) in series.items():
        if pairs:
            tokens = {float(age): float(count) for age, count in pairs}
            drawn[f'age_in_{name.replace(" ", "_")}'] = charts.build_histogram(f'Age in {name}', unit, [('', tokens)])
    return drawn


def _split(run: Run) -> dict[str, Chart]:
    split = run.report['ratio_split']
    if split is None:
        return {}
    drawn = {}
    if not describe_undrawn(run.metrics, SPLIT):
        drawn['split_by_step'] = charts.build_metrics(SPLIT, run.metrics, run.report)
    rows = (
        ('split_by_age', 'By age', 'age', split['by_age']),
        ('split_by_update', 'Drift by update', 'updates back', split['by_update']),
        ('split_by_engine', 'Mismatch by engine', 'engine', split['by_engine']),
    )
    return drawn | {name: charts.build_ratio_rows(title, x, found) for name, title, x, found in rows if found}


def _loads(run: Run) -> dict[str, Chart]:
    return charts.build_loads(run.loads, run.report)


def _curves(run: Run, group: str, first: dict[str, Chart]) -> Iterator[Block]:
    """Yields the charts `first`, then those of the section; then lists curves not worth drawing, with reasons."""
    drawn = dict(first)
    own = [curve for curve in CURVES if curve.group == group]
    undrawn = {curve.name: describe_undrawn(run.metrics, curve) for curve in own}
    _drop_repeated(run, undrawn)
    for curve in own:
        if not undrawn[curve.name]:
            drawn[curve.name] = charts.build_metrics(curve, run.metrics, run.report)
    if drawn:
        yield Grid(drawn)
    if not run.metrics:
        yield Absent('No update was published, so there are no metrics to draw.')
    elif told := [reason for reason in undrawn.values() if reason]:
        yield Absent('Not drawn:', told)


def _drop_repeated(run: Run, undrawn: dict[str, str]) -> None:
    """Marks the age in optimizer steps as undrawn if it equals the age in versions."""
    pairs = ((names.STEP_AGE_MEAN, names.TOKEN_AGE_MEAN), (names.STEP_AGE_MAX, names.TOKEN_AGE_MAX))
    same = all(curve_points(run.metrics, steps) == curve_points(run.metrics, versions) for steps, versions in pairs)
    if undrawn.get('token_age_in_steps') == '' and same:
        undrawn['token_age_in_steps'] = 'Token age in steps: the same as in versions.'


def _slots(run: Run) -> Iterator[Block]:
    timeline = build_slot_timeline(run.events, MOST_INTERVALS)
    if not timeline.slots:
        yield Absent('The log has no dispatch of decoding: nothing was generated, or servers that do not tell did it.')
        return
    yield Grid({'slots': build_slot_chart(timeline)})


def _ledger(run: Run) -> Iterator[Block]:
    fates = run.report['token_fates']
    if fates is None:
        return
    by_version, by_age = fates['by_version'], fates['by_age']
    drawn = {}
    if fates['generated']:
        drawn['fates'] = charts.build_fate_shares({'': fates})
    if any(map(any, by_age.values())):
        drawn['fates_by_age'] = charts.build_fates('Tokens by age', 'age when the fate was decided', by_age)
    if by_version and any(map(any, by_version.values())):
        drawn['fates_by_version'] = charts.build_fates('Tokens by policy version', 'policy version', by_version)
    yield Grid(drawn) if drawn else Absent('No generated token has met its fate.')
    if by_version is None:
        yield Absent('Servers do not tell how many tokens of each version a call brought: there is no figure of it.')
