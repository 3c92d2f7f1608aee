"""The report of a run as an interactive HTML page (report.html): a headline, then details in the same order.

Texts and tables are the same as in report.md; the charts are drawn from the same report, metrics and events.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence

from areal_jax.files import JsonObject
from areal_jax.report.pages import charts as figures
from areal_jax.report.pages.markdown_page import describe_state, lacks_evaluation, tell_headline
from areal_jax.report.pages.report_texts import Items, Parts, Table, Text, tell_parts
from areal_jax.report.pages.run_plots import (
    AGREEMENT,
    CURVES,
    LEARNING,
    OPTIMISATION,
    SPEED,
    SPLIT,
    STALENESS,
    curve_points,
    describe_undrawn,
)
from areal_jax.report.pages.slot_figure import (
    MOST_INTERVALS,
    build_slot_timeline,
    describe_slots,
    draw_slots,
    slot_keys,
)
from areal_jax.report.pages.web_page import Absent, Block, Chart, Folded, Grid, Section, Tiles, render_web_page
from areal_jax.report.run_record import Run, read_fields
from areal_jax.report.token_fates import describe_censoring
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
            'The best and the worst of the kept answers of three updates. `areal-rollouts RUN` shows all of them.'
        )
        yield Table(_HEAD, [_make_row(one) for one in choose_samples(records)])
    else:
        yield _NONE


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
    """The page; needs Bokeh."""
    parts = tell_parts(run.report)
    sections = [
        Section('headline', 'At a glance', [Tiles(tell_headline(run.report))]),
        Section('warnings', 'Caveats', [parts.warnings or _NO_CAVEAT]),
        Section('learning', 'Learning', list(_learning(run, parts))),
        Section('answers', 'Answers', list(tell_answers(run.workdir))),
        Section('speed', 'Speed and limit', list(_speed(run, parts))),
        *([Section('energy', 'Energy', [parts.energy, parts.energy_sources])] if parts.energy_sources else []),
        Section('slots', 'Slots', list(_slots(run))),
        Section('staleness', 'Staleness', list(_staleness(run, parts))),
        Section('agreement', 'Engine and learner', list(_agreement(run, parts))),
        Section('optimisation', 'Optimisation', list(_curves(run, OPTIMISATION))),
        Section('ledger', 'Token ledger', list(_ledger(run, parts))),
        Section('censoring', 'Censoring', list(_censoring(run, parts))),
        Section('groups', 'Groups', [parts.groups, parts.problems]),
        Section('config', 'Config', list(_config(run, parts))),
    ]
    return render_web_page(f'Run {run.name}', [parts.what_ran], sections, describe_state(run.report))


_NO_CAVEAT = Absent('No check failed, and nothing in the numbers calls for a caveat.')
_NO_LENGTHS = Absent(
    'The log does not tell which tokens were trained and which were left out, or no answer has a fate.'
)
_BOUND_IN_VIEW = 3  # eta is drawn up to this multiple of the oldest age


def _learning(run: Run, parts: Parts) -> Iterator[Block]:
    evaluation = figures.draw_evaluation(run.report)
    yield from _curves(run, LEARNING, {'evaluation': evaluation} if evaluation else {})
    if parts.accuracy:
        yield parts.accuracy
        yield parts.intervals
    elif lacks_evaluation(run.report):
        yield Absent('No evaluation before or after training has finished yet.')
    else:
        yield Absent('The run was not evaluated on held-out problems (evaluation.problems).')
    yield parts.evaluation
    yield parts.evaluation_cost
    yield parts.learning
    yield parts.code


def _curves(run: Run, group: str, first: dict[str, Chart] | None = None) -> Iterator[Block]:
    """Yields the charts of a section after the charts `first`; then lists curves not worth drawing, with reasons."""
    drawn = dict(first or {})
    own = [curve for curve in CURVES if curve.group == group]
    updates = figures.new_updates()
    undrawn = {curve.name: describe_undrawn(run.metrics, curve) for curve in own}
    _drop_repeated(run, undrawn)
    for curve in own:
        if not undrawn[curve.name]:
            drawn[curve.name] = figures.draw_metrics(curve, run.metrics, updates)
    if 'token_age' in drawn:
        drawn['token_age'] = _add_eta(run, drawn['token_age'])
    if drawn:
        yield Grid(drawn)
    if not run.metrics:
        yield Absent('No update was published, so there are no metrics to draw.')
    elif told := [reason for reason in undrawn.values() if reason]:
        yield Absent('Not drawn:')
        yield Items(told)


def _drop_repeated(run: Run, undrawn: dict[str, str]) -> None:
    """Marks the age in optimizer steps as undrawn if it equals the age in versions."""
    pairs = ((names.STEP_AGE_MEAN, names.TOKEN_AGE_MEAN), (names.STEP_AGE_MAX, names.TOKEN_AGE_MAX))
    same = all(curve_points(run.metrics, steps) == curve_points(run.metrics, versions) for steps, versions in pairs)
    if undrawn.get('token_age_in_steps') == '' and same:
        undrawn['token_age_in_steps'] = 'Token age in steps: the same as in versions.'


def _add_eta(run: Run, chart: Chart) -> Chart:
    eta, oldest = run.report['eta'], run.report['token_age']['max']
    if eta is not None and math.isfinite(eta) and oldest is not None and eta <= _BOUND_IN_VIEW * max(1, oldest):
        return figures.add_bound(chart, f'eta = {eta:g}', eta)
    return chart


def _speed(run: Run, parts: Parts) -> Iterator[Block]:
    yield parts.cause_of_gap
    yield parts.ideal_rule
    time = run.report['time']
    known = any(time[name] is not None for name in ('achieved', 'generate', 'train'))  # type: ignore[literal-required]
    yield from _curves(run, SPEED, {'time': figures.draw_time(time)} if known else {})
    yield parts.time
    yield parts.work
    yield parts.rates
    yield parts.classes
    yield parts.left_out
    yield parts.publications
    yield parts.agents
    yield parts.memory
    yield parts.servers


def _staleness(run: Run, parts: Parts) -> Iterator[Block]:
    histograms, steps = run.report['token_age_histograms'], run.report['token_age_steps']
    series = {
        name: (unit, {float(pair[0]): float(pair[1]) for pair in pairs})
        for name, unit, pairs in (
            ('publications', 'versions', histograms['publications']),
            ('optimizer steps', 'steps before their own update', histograms['steps']),
        )
        if pairs
    }
    if same := len(series) == 2 and histograms['publications'] == histograms['steps']:
        del series['optimizer steps']
    drawn = {
        f'age_in_{name.replace(" ", "_")}': figures.draw_histogram(f'Age in {name}', unit, [('', tokens)])
        for name, (unit, tokens) in series.items()
    }
    yield from _curves(run, STALENESS, drawn)
    if same:
        yield Absent('Each update made one optimizer step, so the ages in steps are those in publications.')
    if not drawn:
        yield Absent('No update trained a token, so there are no ages to draw.')
    if histograms['publications'] and not histograms['steps']:
        yield Absent('The metrics do not tell how many optimizer steps each update made.')
    elif drawn:
        yield Text(
            "The steps of a token's own update that come before the one that trains it are not in the histogram: "
            f'{format_number(steps["inside_mean"])} on average, {format_number(steps["inside_max"])} at most.'
        )
    yield parts.staleness
    yield parts.ratios


def _slots(run: Run) -> Iterator[Block]:
    timeline = build_slot_timeline(run.events, MOST_INTERVALS)
    if not timeline.slots:
        yield Absent('The log has no dispatch of decoding: nothing was generated, or servers that do not tell did it.')
        return
    alt = f'A timeline of {len(timeline.slots)} slots with {len(timeline.intervals)} intervals; timeline.json has them.'
    title, unit = 'Requests in the decoding slots', 'coloured by policy version'
    caption, keys = describe_slots(timeline), slot_keys(timeline)
    yield Grid({'slots': Chart(draw_slots(timeline), title, unit, alt, Table((), ()), caption, keys=keys)})


def _ledger(run: Run, parts: Parts) -> Iterator[Block]:
    fates = run.report['token_fates']
    if fates is None:
        yield Absent('There is no ledger: an earlier program, which did not log lengths of segments, wrote the log.')
        return
    yield Text(f'The ledger does not close: {fates["fault"]}.' if fates['fault'] else 'The ledger closes.')
    by_version, by_age = fates['by_version'], fates['by_age']
    drawn = {}
    if fates['generated']:
        drawn['fates'] = figures.draw_fate_shares({'': fates})
    if any(map(any, by_age.values())):
        drawn['fates_by_age'] = figures.draw_fates('Tokens by age', 'age when the fate was decided', by_age)
    if by_version and any(map(any, by_version.values())):
        drawn['fates_by_version'] = figures.draw_fates('Tokens by policy version', 'policy version', by_version)
    yield Grid(drawn) if drawn else Absent('No generated token has met its fate.')
    if by_version is None:
        yield Absent('Servers do not tell how many tokens of each version a call brought: there is no figure of it.')
    yield parts.fates


def _censoring(run: Run, parts: Parts) -> Iterator[Block]:
    yield parts.answers or _NO_LENGTHS
    yield Text(describe_censoring(run.report['censoring']))


def _agreement(run: Run, parts: Parts) -> Iterator[Block]:
    split = run.report['ratio_split']
    drawn = {}
    if split is not None:
        rows = (
            ('split_by_age', 'By age', 'age', split['by_age']),
            ('split_by_update', 'Drift by update', 'updates back', split['by_update']),
            ('split_by_engine', 'Mismatch by engine', 'engine', split['by_engine']),
        )
        if not describe_undrawn(run.metrics, SPLIT):
            drawn['split_by_step'] = figures.draw_metrics(SPLIT, run.metrics, figures.new_updates())
        drawn |= {name: figures.draw_ratio_rows(title, x, found) for name, title, x, found in rows if found}
    yield from _curves(run, AGREEMENT, drawn)
    yield parts.experts
    yield parts.routes
    if split is None:
        yield Absent('The run did not split the importance ratio by cause (diagnostics.ratio_sample).')
        return
    yield parts.split_cost
    yield parts.split


def _config(run: Run, parts: Parts) -> Iterator[Block]:
    yield parts.which_config
    yield Text(f'Versions: {parts.versions.text}.')
    fields = Table(('field', 'value'), sorted(read_fields(run.workdir).items()))
    yield Folded('Every field of the config', fields) if fields else Absent('There is no config.json in the workdir.')
