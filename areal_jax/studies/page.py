"""The page of a study, study.md: failed controls, what reproduces, tables in the form of the paper, figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from areal_jax.app.sweep.sweep_results import render_table
from areal_jax.studies import page
from areal_jax.studies.arm_records import Record, Records
from areal_jax.studies.page import Comparison, check_controls, decide_statements, eta_records, lag_records
from areal_jax.studies.plan import Plan

FILE = 'study.md'


def render_page(source: str, form: str, plan: Plan, records: Records, pictures: Sequence[str], facts: str) -> str:
    """Markdown. `form`: 'full' or 'quick'; `pictures` are paths relative to the page; `facts` say what it ran on."""
    sections = [
        '# Staleness study',
        _what_ran(source, form, plan, records, facts),
        '## Controls',
        render_table(
            ('control', 'outcome', 'found'),
            [(control.text, f'**{control.outcome}**', control.because) for control in check_controls(plan, records)],
        ),
        *_unfinished(records),
        '## Statements of the paper, at this scale',
        render_table(
            ('statement', 'outcome', 'verdicts'),
            [(one.text, f'**{one.outcome}**', one.because) for one in decide_statements(plan, records)],
        ),
        *_lock_step(plan, records),
        *_natural(plan, records),
        '## Figures',
        *(f'![{picture}]({picture})' for picture in pictures),
        '## Rates and seeds',
        *_rates(plan, records),
        *_pilot(plan, records),
    ]
    return '\n\n'.join(section for section in sections if section) + '\n'


def _what_ran(source: str, form: str, plan: Plan, records: Records, facts: str) -> str:
    finished = sum(record.state.is_finished for record in records)
    short = ' The quick form shows that every part works; it has too few seeds and updates to settle a question.'
    return (
        f'`{source}`, {form} form, plan `{plan.digest()[:12]}`: {finished} of {len(records)} arms have finished. '
        f'{facts}{short if form == "quick" else ""} Scores are shares of right places in sampled '
        'answers of the final weights to all training prompts; chance among the two symbols is 0.5. The protocol is in '
        'docs/study.md.'
    )


def _unfinished(records: Records) -> list[str]:
    rows = [
        (f'{record.factors.stage}/{record.factors.name}', record.state.word, record.state.reason)
        for record in records
        if not record.state.is_finished
    ]
    if not rows:
        return []
    return ['## Arms that have not finished', render_table(('arm', 'state', 'why'), rows), 'No number has one in it.']


def _lock_step(plan: Plan, records: Records) -> list[str]:
    part = plan.lock_step
    others = [method for method in part.methods if method not in ('plain', 'decoupled')]
    sections = [
        '## Imposed age: score after training',
        'Without → with the decoupled objective, in the form of the paper\'s Table 2; mean over the seeds, SD in '
        'brackets.',
    ]  # fmt: skip
    for factor in sorted((1.0, *part.side_factors), key=lambda factor: abs(factor - 1)):
        rows = [
            (
                str(lag),
                f'{_mean(lag_records(records, "plain", lag, factor))} → '
                f'{_mean(lag_records(records, "decoupled", lag, factor))}',
                *(_mean(lag_records(records, method, lag, factor)) for method in others),
                *(_area(lag_records(records, method, lag, factor)) for method in part.methods),
            )
            for lag in part.lags
        ]
        seeds = part.seeds if factor == 1 else part.side_seeds
        head = ('lag', 'PPO, plain → decoupled', *others, *(f'over training: {method}' for method in part.methods))
        sections += [f'### {factor:.3g} of the knee, {len(seeds)} seeds', render_table(head, rows)]
    return [*sections, *_differences(plan, records), _slopes(plan, records)]


def _differences(plan: Plan, records: Records) -> list[str]:
    first = plan.lock_step.lags[0]
    compared = {
        **{
            f'{method}, minus lag {first}': page.compare_lags(plan, records, method)
            for method in plan.lock_step.methods
        },
        'decoupled minus plain': page.compare_methods(plan, records, 'plain', 'decoupled'),
    }
    rows = []
    for lag in plan.lock_step.lags:
        at = {name: next((one for one in found if one.label == lag), None) for name, found in compared.items()}
        rows.append((str(lag), *(_difference(plan, one) if one else '' for one in at.values())))
    return [
        '### Differences at the knee, paired by seed',
        render_table(('lag', *compared), rows),
        f"Student's 95% interval. Equal: the 90% interval lies within ±{plan.margins.score:g}; worse or better: p "
        'below 0.05 after Holm over the lags of a column.',
    ]


def _difference(plan: Plan, one: Comparison) -> str:
    if one.difference is None:
        return '-'
    bounds = one.difference.t
    interval = f' [{bounds.low:+.3f}, {bounds.high:+.3f}]' if bounds else ''
    return f'{one.difference.mean:+.3f}{interval}, {one.verdict(plan.margins)}'


def _slopes(plan: Plan, records: Records) -> str:
    said = []
    for method in plan.lock_step.methods:
        if found := page.dose_slope(plan, records, method):
            mean, bounds = found
            interval = f' [{bounds.low:+.4f}, {bounds.high:+.4f}]' if bounds else ''
            said.append(f'{method} {mean:+.4f}{interval}')
    return f'Slope of the score over log2(1 + lag): {"; ".join(said)}.' if said else ''


def _natural(plan: Plan, records: Records) -> list[str]:
    part = plan.natural
    rows = []
    for eta in part.etas:
        arms = {method: eta_records(records, method, eta) for method in part.methods}
        every = [record for found in arms.values() for record in found]
        rate = page.throughput(records, eta)
        rows.append(
            (
                f'{eta:g}',
                ' → '.join(_mean(found) for found in arms.values()),
                *(_number(every, name) for name in ('age', 'oldest')),
                '-' if rate is None else f'{rate:.0f}',
                *(_number(every, name) for name in ('mismatch', 'drift', 'split_cost')),
            )
        )
    head = ('eta', f'score, {" → ".join(part.methods)}', 'token age', 'oldest token', 'tokens/s')
    sections = [
        '## Age by eta: score, realised age and throughput',
        f'{len(part.seeds)} seeds; age in versions, mean over the trained tokens; tokens/s: trained, per second of the '
        'virtual clock; mismatch and drift: root mean square of the two causes of the importance ratio, in nats; cost '
        "of the split: share of the updates' seconds that went into telling them apart.",
        render_table((*head, 'mismatch', 'drift', 'cost of the split'), rows),
    ]
    differences = [
        (f'{one.label:g}', method, _difference(plan, one))
        for method in part.methods
        for one in page.compare_etas(plan, records, method)
    ]
    sections += [render_table(('eta', 'method', f'score minus eta {part.etas[0]:g}'), differences)]
    return [*sections, *_variants(plan, records)]


def _variants(plan: Plan, records: Records) -> list[str]:
    part = plan.natural
    rows = []
    for variant in ('', *part.variants):
        arms = eta_records(records, part.variant_method, part.variant_eta, variant)
        names = ('age', 'oldest', 'tokens_per_second', 'mismatch', 'drift')
        rows.append((variant or 'interrupted, cache recomputed', _mean(arms), *(_number(arms, name) for name in names)))
    return [
        f'### Ways to interrupt, {part.variant_method} at eta {part.variant_eta:g}',
        render_table(('variant', 'score', 'token age', 'oldest token', 'tokens/s', 'mismatch', 'drift'), rows),
    ]


def _rates(plan: Plan, records: Records) -> list[str]:
    part, knees = plan.lock_step, page.find_rates(plan, records)
    methods = list(dict.fromkeys(part.rate_from.values()))
    means = {method: page.rate_means(plan, records, method) for method in methods}
    rows = [
        (f'{rate:g}', *(f'{means[method][rate]:.3f}' if rate in means[method] else '-' for method in methods))
        for rate in part.rates
    ]
    chosen = ', '.join(f'{method} {rate:g}' for method, rate in knees.items())
    return [
        f'Mean score at lag {part.lags[0]} over the seeds {", ".join(map(str, part.knee_seeds))}. The knee, the '
        f'largest rate at most {part.knee_slack:g} below the best: {chosen or "not known yet"}.',
        render_table(('learning rate', *methods), rows),
    ]


def _pilot(plan: Plan, records: Records) -> list[str]:
    spreads, count = page.pilot_spreads(plan, records), len(plan.lock_step.seeds)
    rows = [
        (
            name,
            f'{spread.deviation:.4f}',
            f'{page.smallest_difference(spread.deviation, count, plan.margins):.4f}',
            f'{spread.pairing.error_factor:.2f}' if spread.pairing else '-',
        )
        for name, spread in spreads.items()
    ]
    return [
        f'Pilot of {len(plan.lock_step.pilot_seeds)} other seeds: the smallest difference that {count} seeds show with '
        f'power {plan.margins.power:g}; and by which factor common random numbers make the standard error of the '
        'difference smaller than seeds of their own would (below 1: larger).',
        render_table(('difference', 'SD over seeds', 'smallest difference', 'error smaller by'), rows),
    ]


def _mean(records: Sequence[Record]) -> str:
    scores = [record.score for record in records if record.score is not None]
    if not scores:
        return '-'
    spread = f' ({statistics.stdev(scores):.3f})' if len(scores) > 1 else ''
    return f'{statistics.fmean(scores):.3f}{spread}'


def _area(records: Sequence[Record]) -> str:
    return _number(records, 'area')


def _number(records: Sequence[Record], name: str) -> str:
    found = [value for record in records if (value := getattr(record, name)) is not None]
    if not found:
        return '-'
    mean = statistics.fmean(found)
    return f'{mean:.0f}' if abs(mean) >= 100 else f'{mean:.3g}'
