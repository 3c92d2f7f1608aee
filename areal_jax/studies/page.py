"""The page of a study, study.md: controls, statements reproduced or not, tables in the paper's form, figures."""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from areal_jax.app.sweep.endpoints import (
    Bounds,
    PairedDifference,
    Pairing,
    holm,
    paired_difference,
    pairing_gain,
    student_bounds,
)
from areal_jax.report.pages.blocks import Block, Section, Table, Text, render_markdown, show_pictures
from areal_jax.studies.plan import Margins, Plan
from areal_jax.studies.stages import (
    CONTROLS,
    KNEE,
    KNOWN,
    LOCK_STEP,
    NATURAL,
    PILOT,
    SAME_A,
    SAME_B,
    SHUFFLED,
    ZERO_RATE,
    Record,
    Records,
    by_seed,
    select,
)

WORSE, BETTER, EQUAL, UNDECIDED = 'worse', 'better', 'equal', 'not decided'


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of two arms, paired by seed."""

    label: float  # lag or eta
    difference: PairedDifference | None  # None: no seed has both
    inner: Bounds | None  # the interval of two one-sided tests, with twice the error probability
    holm_p: float | None = None

    def verdict(self, margins: Margins) -> str:
        """One of WORSE, BETTER, EQUAL, UNDECIDED."""
        if self.difference is None:
            return UNDECIDED
        if self.inner and -margins.score < self.inner.low and self.inner.high < margins.score:
            return EQUAL
        if self.holm_p is None or self.holm_p >= 1 - margins.confidence:
            return UNDECIDED
        return WORSE if self.difference.mean < 0 else BETTER


class Spread(NamedTuple):
    """The spread of a difference over seeds."""

    deviation: float  # standard deviation of the paired differences
    pairing: Pairing | None  # the gain from common random numbers; None if it cannot be measured


def find_rates(plan: Plan, records: Records) -> dict[str, float]:
    """The knee of every method that has one: the largest rate whose mean score is within the slack of the best."""
    part, knees = plan.lock_step, {}
    for method in dict.fromkeys(part.rate_from.values()):
        means = rate_means(plan, records, method)
        if means:
            best = max(means.values())
            knees[method] = max(rate for rate, mean in means.items() if mean >= best - part.knee_slack)
    return {method: knees[source] for method, source in part.rate_from.items() if source in knees}


def rate_means(plan: Plan, records: Records, method: str) -> dict[float, float]:
    """Mean score of each rate of the sweep."""
    at = lambda rate: by_seed(select(records, stage=KNEE, method=method, rate=rate), _score)
    found = {rate: at(rate) for rate in plan.lock_step.rates}
    return {rate: statistics.fmean(scores.values()) for rate, scores in found.items() if scores}


def lag_records(records: Records, method: str, lag: int, factor: float = 1.0, stage: str = LOCK_STEP) -> list[Record]:
    return select(records, stage=stage, method=method, lag=lag, factor=factor)


def eta_records(records: Records, method: str, eta: float, variant: str = '') -> list[Record]:
    return select(records, stage=NATURAL, method=method, eta=eta, variant=variant)


def compare_lags(plan: Plan, records: Records, method: str, factor: float = 1.0) -> list[Comparison]:
    """Compares every lag with the first, for one method; differences are lag minus first."""
    first, *others = plan.lock_step.lags
    base = lag_records(records, method, first, factor)
    return _compare({float(lag): (base, lag_records(records, method, lag, factor)) for lag in others})


def compare_methods(plan: Plan, records: Records, first: str, second: str) -> list[Comparison]:
    """Compares two methods at each lag; differences are second minus first."""
    at = lambda method, lag: lag_records(records, method, lag)
    return _compare({float(lag): (at(first, lag), at(second, lag)) for lag in plan.lock_step.lags})


def compare_etas(plan: Plan, records: Records, method: str) -> list[Comparison]:
    """Compares every eta with the first, for one method; differences are eta minus first."""
    first, *others = plan.natural.etas
    base = eta_records(records, method, first)
    return _compare({eta: (base, eta_records(records, method, eta)) for eta in others})


def _compare(pairs: Mapping[float, tuple[Records, Records]]) -> list[Comparison]:
    found = [_compare_one(label, *pair) for label, pair in pairs.items()]
    tested = [comparison for comparison in found if comparison.difference and comparison.difference.p is not None]
    raised = holm([comparison.difference.p or 0.0 for comparison in tested if comparison.difference])
    adjusted = {comparison.label: p for comparison, p in zip(tested, raised, strict=True)}
    return [dataclasses.replace(one, holm_p=adjusted.get(one.label)) for one in found]


def _compare_one(label: float, first: Records, second: Records) -> Comparison:
    a, b = by_seed(first, _score), by_seed(second, _score)
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return Comparison(label, None, None)
    differences = [b[seed] - a[seed] for seed in seeds]
    difference = paired_difference([a[seed] for seed in seeds], [b[seed] for seed in seeds])
    return Comparison(label, difference, student_bounds(differences, 0.9))


def smallest_difference(spread: float, seeds: int, margins: Margins) -> float:
    """The smallest difference that a two-sided paired t-test of `seeds` seeds finds with the plan's power.

    (t_(n-1, (1+confidence)/2) + t_(n-1, power)) * SD / sqrt(n)
    """
    from scipy.special import stdtrit

    quantiles = stdtrit(seeds - 1, (1 + margins.confidence) / 2) + stdtrit(seeds - 1, margins.power)
    return float(quantiles) * spread / math.sqrt(seeds)


def pilot_spreads(plan: Plan, records: Records) -> dict[str, Spread]:
    """The spreads over the pilot's seeds, of the lag's cost to each method and of the first two methods' difference."""
    part = plan.lock_step
    scores = {
        (method, lag): by_seed(lag_records(records, method, lag, stage=PILOT), _score)
        for method in part.methods
        for lag in (part.lags[0], part.pilot_lag)
    }
    pairs = {
        f'{method}: lag {part.pilot_lag} against {part.lags[0]}': ((method, part.lags[0]), (method, part.pilot_lag))
        for method in part.methods
    }
    first, second = list(part.methods)[:2]
    pairs[f'{second} against {first} at lag {part.pilot_lag}'] = ((first, part.pilot_lag), (second, part.pilot_lag))
    found = {}
    for name, (a, b) in pairs.items():
        seeds = sorted(scores[a].keys() & scores[b].keys())
        if len(seeds) > 1:
            first_scores, second_scores = ([scores[side][seed] for seed in seeds] for side in (a, b))
            deviation = statistics.stdev(map(operator.sub, second_scores, first_scores))
            found[name] = Spread(deviation, pairing_gain(first_scores, second_scores))
    return found


def dose_slope(plan: Plan, records: Records, method: str) -> tuple[float, Bounds | None] | None:
    """Slope of the score over log2(1 + lag): the mean over seeds with its 95% interval; None without seeds."""
    lags = plan.lock_step.lags
    scores = [by_seed(lag_records(records, method, lag), _score) for lag in lags]
    doses = [math.log2(1 + lag) for lag in lags]
    seeds = set.intersection(*(set(found) for found in scores))
    slopes = [statistics.linear_regression(doses, [found[seed] for found in scores]).slope for seed in sorted(seeds)]
    return (statistics.fmean(slopes), student_bounds(slopes, 0.95)) if slopes else None


def throughput(records: Records, eta: float) -> float | None:
    """Trained tokens a second, mean over the arms of an eta."""
    found = [record.tokens_per_second for record in select(records, stage=NATURAL, eta=eta, variant='')]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def _score(record: Record) -> float | None:
    return record.score


# The statements that a study decides: its controls, and the paper's findings at this scale. docs/study.md has them.


HELD, FAILED, MISSING = 'held', 'failed', 'not finished'
REPRODUCED, NOT_REPRODUCED = 'reproduced', 'not reproduced'
_OPPOSITE = {WORSE: (EQUAL, BETTER), BETTER: (EQUAL, WORSE), EQUAL: (WORSE, BETTER)}
_WORSE_AT, _EQUAL_UP_TO, _BETTER_AT = (4, 8), 8, (4, 8, 16)  # lags of the statements


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A statement, its outcome, and the reason."""

    text: str
    outcome: str
    because: str


def check_controls(plan: Plan, records: Records) -> list[Outcome]:
    """Checks the controls of the plan; failed ones come first, then unfinished ones."""
    own = [record for record in records if record.factors.stage == CONTROLS]
    found = [*_known(plan, own), _zero_rate(plan, own), *_same(own), _shuffled(plan, own)]
    return sorted(found, key=lambda control: (FAILED, MISSING, HELD).index(control.outcome))


def decide_statements(plan: Plan, records: Records) -> list[Outcome]:
    """Decides the statements of the plan, in their order."""
    lags = plan.lock_step.lags
    plain, decoupled = (compare_lags(plan, records, method) for method in ('plain', 'decoupled'))
    between = compare_methods(plan, records, 'plain', 'decoupled')
    worse, better = ([lag for lag in wanted if lag in lags] for wanted in (_WORSE_AT, _BETTER_AT))
    low = [lag for lag in lags[1:] if lag <= _EQUAL_UP_TO]
    return [
        _decide(plan, f'plain PPO is worse than without lag at {_lags(worse)}', plain, worse, WORSE),
        _decide(plan, f'decoupled PPO is as good as without lag at {_lags(low)}', decoupled, low, EQUAL),
        _decide(plan, f'decoupled is better than plain PPO at {_lags(better)}', between, better, BETTER),
        _decide(plan, f'at {_lags(lags[-1:])} both are worse than without', [*plain, *decoupled], lags[-1:], WORSE),
        _decide_throughput(plan, records),
    ]


def _decide(plan: Plan, text: str, comparisons: Sequence[Comparison], labels: Sequence[float], wanted: str) -> Outcome:
    verdicts = [(one.label, one.verdict(plan.margins)) for one in comparisons if one.label in labels]
    said = ', '.join(f'lag {label:g}: {verdict}' for label, verdict in verdicts)
    if verdicts and all(verdict == wanted for _, verdict in verdicts):
        return Outcome(text, REPRODUCED, said)
    if any(verdict in _OPPOSITE[wanted] for _, verdict in verdicts):
        return Outcome(text, NOT_REPRODUCED, said)
    return Outcome(text, UNDECIDED, said or 'no arm of it has finished')


def _decide_throughput(plan: Plan, records: Records) -> Outcome:
    first, second, *_ = etas = plan.natural.etas
    margins = plan.margins
    text = f'eta {second:g} is faster than eta {first:g}, and beyond eta {margins.flat_from:g} little is gained'
    rates = {eta: throughput(records, eta) for eta in (first, second, margins.flat_from, etas[-1])}
    known = {eta: rate for eta, rate in rates.items() if rate is not None}
    if len(known) < len(rates):
        return Outcome(text, UNDECIDED, 'an arm of it has not finished')
    slow, flat = known[first] / known[second], known[etas[-1]] / known[margins.flat_from] - 1
    said = (
        f'eta {first:g} has {slow:.2f} of the throughput of eta {second:g}; from eta {margins.flat_from:g} to '
        f'{etas[-1]:g} it changes by {flat:+.1%}'
    )
    holds = slow <= margins.slow and abs(flat) <= margins.flat
    return Outcome(text, REPRODUCED if holds else NOT_REPRODUCED, said)


def _known(plan: Plan, records: Records) -> list[Outcome]:
    part, found = plan.controls, []
    first, end = part.known_window
    for lag, bounds in part.known_bounds.items():
        arms = _of(records, KNOWN, lag=lag)
        text = (
            f'{part.known_method} at lag {lag} in the set-up of a known curve: share of right symbols over updates '
            f'{first} to {end} from {bounds.low:g} to {bounds.high:g}, median of the seeds'
        )
        windows = {record.factors.seed: record.window(first, end) for record in arms}
        values = {seed: value for seed, value in windows.items() if value is not None}
        median = statistics.median(values.values()) if values else None
        each = ', '.join(f'seed {seed}: {value:.3f}' for seed, value in values.items())
        holds = [bounds.hold(median)] if len(values) >= len(part.known_seeds) else []
        found.append(Outcome(text, _outcome(holds, 1), '' if median is None else f'{median:.3f}; {each}'))
    return found


def _zero_rate(plan: Plan, records: Records) -> Outcome:
    lag = plan.controls.same_lag
    arms = _of(records, ZERO_RATE)
    holds = [record.weights == record.initial_weights and record.oldest == lag for record in arms]
    said = ', '.join(
        f'weights {"equal" if record.weights == record.initial_weights else "differ"}, oldest token {record.oldest:g}'
        for record in arms
        if record.oldest is not None
    )
    text = f'learning rate 0 at lag {lag}: the weights stay bit for bit, the age is the lag'
    return Outcome(text, _outcome(holds, 1), said)


def _same(records: Records) -> list[Outcome]:
    found = []
    for where, is_one in (
        ('in one program', lambda record: record.factors.lag is not None),
        ('as two runs', lambda record: record.factors.lag is None),
    ):
        pair = [record for name in (SAME_A, SAME_B) for record in _of(records, name) if is_one(record)]
        hashes = [record.weights for record in pair]
        holds = [len(set(hashes)) == 1 and bool(hashes[0])] if len(pair) == 2 else []
        said = ' and '.join(f'{text[:12]}' for text in hashes)
        found.append(Outcome(f'the same arm twice, {where}: equal weights', _outcome(holds, 1), said))
    return found


def _shuffled(plan: Plan, records: Records) -> Outcome:
    limit = plan.controls.shuffled_below
    scores = [record.score for record in _of(records, SHUFFLED) if record.score is not None]
    said = ', '.join(f'score {score:.3f}' for score in scores)
    text = f'rewards of other answers: the score stays below {limit:g}'
    return Outcome(text, _outcome([score < limit for score in scores], 1), said)


def _of(records: Records, variant: str, **wanted: object) -> list[Record]:
    """The finished arms of a control; also without a score, because some controls compare weights alone."""
    has = lambda record: all(getattr(record.factors, name) == value for name, value in wanted.items())
    return [
        record for record in records if record.factors.variant == variant and record.state.is_finished and has(record)
    ]


def _outcome(holds: Sequence[bool], wanted: int) -> str:
    if not all(holds):
        return FAILED
    return HELD if len(holds) >= wanted else MISSING


def _lags(lags: Sequence[float]) -> str:
    """Lists lags in words: 'lag 4', 'lags 4 and 8'."""
    texts = [f'{lag:g}' for lag in lags]
    joined = ' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1] if texts else '')))
    return f'lag{"s" if len(texts) > 1 else ""} {joined}'


FILE = 'study.md'


def render_page(source: str, form: str, plan: Plan, records: Records, pictures: Sequence[str], facts: str) -> str:
    """Renders the page as Markdown.

    `form`: 'full' or 'quick'; `pictures` are paths relative to the page; `facts` describes the machine.
    """
    controls = [(one.text, f'**{one.outcome}**', one.because) for one in check_controls(plan, records)]
    statements = [(one.text, f'**{one.outcome}**', one.because) for one in decide_statements(plan, records)]
    sections = [
        Section('controls', 'Controls', [Table(('control', 'outcome', 'found'), controls)]),
        Section('unfinished', 'Arms that have not finished', _unfinished(records)),
        Section(
            'statements',
            'Statements of the paper, at this scale',
            [Table(('statement', 'outcome', 'verdicts'), statements)],
        ),
        Section('lock_step', 'Imposed age: score after training', _lock_step(plan, records)),
        Section('natural', 'Age by eta: score, realised age and throughput', _natural(plan, records)),
        show_pictures(pictures),
        Section('rates', 'Rates and seeds', [*_rates(plan, records), *_pilot(plan, records)]),
    ]
    return render_markdown('Staleness study', [_what_ran(source, form, plan, records, facts)], sections)


def _what_ran(source: str, form: str, plan: Plan, records: Records, facts: str) -> Text:
    finished = sum(record.state.is_finished for record in records)
    short = ' The quick form shows that every part works; it has too few seeds and updates to settle a question.'
    return Text(
        f'`{source}`, {form} form, plan `{plan.digest()[:12]}`: {finished} of {len(records)} arms have finished. '
        f'{facts}{short if form == "quick" else ""} Scores are shares of right places in sampled '
        'answers of the final weights to all training prompts; chance among the two symbols is 0.5. The protocol is in '
        'docs/study.md.'
    )


def _unfinished(records: Records) -> list[Block]:
    rows = [
        (f'{record.factors.stage}/{record.factors.name}', record.state.word, record.state.reason)
        for record in records
        if not record.state.is_finished
    ]
    if not rows:
        return []
    return [Table(('arm', 'state', 'why'), rows), Text('No number has one in it.')]


def _lock_step(plan: Plan, records: Records) -> list[Block]:
    part = plan.lock_step
    others = [method for method in part.methods if method not in ('plain', 'decoupled')]
    blocks: list[Block] = [
        Text(
            "Without → with the decoupled objective, in the form of the paper's Table 2; mean over the seeds, SD in "
            'brackets.'
        )
    ]
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
        blocks += [Text(f'### {factor:.3g} of the knee, {len(seeds)} seeds'), Table(head, rows)]
    return [*blocks, *_differences(plan, records), _slopes(plan, records)]


def _differences(plan: Plan, records: Records) -> list[Block]:
    first = plan.lock_step.lags[0]
    compared = {
        **{f'{method}, minus lag {first}': compare_lags(plan, records, method) for method in plan.lock_step.methods},
        'decoupled minus plain': compare_methods(plan, records, 'plain', 'decoupled'),
    }
    rows = []
    for lag in plan.lock_step.lags:
        at = {name: next((one for one in found if one.label == lag), None) for name, found in compared.items()}
        rows.append((str(lag), *(_difference(plan, one) if one else '' for one in at.values())))
    note = (
        f"Student's 95% interval. Equal: the 90% interval lies within ±{plan.margins.score:g}; worse or better: p "
        'below 0.05 after Holm over the lags of a column.'
    )
    return [Text('### Differences at the knee, paired by seed'), Table(('lag', *compared), rows), Text(note)]


def _difference(plan: Plan, one: Comparison) -> str:
    if one.difference is None:
        return '-'
    bounds = one.difference.t
    interval = f' [{bounds.low:+.3f}, {bounds.high:+.3f}]' if bounds else ''
    return f'{one.difference.mean:+.3f}{interval}, {one.verdict(plan.margins)}'


def _slopes(plan: Plan, records: Records) -> Text:
    said = []
    for method in plan.lock_step.methods:
        if found := dose_slope(plan, records, method):
            mean, bounds = found
            interval = f' [{bounds.low:+.4f}, {bounds.high:+.4f}]' if bounds else ''
            said.append(f'{method} {mean:+.4f}{interval}')
    return Text(f'Slope of the score over log2(1 + lag): {"; ".join(said)}.' if said else '')


def _natural(plan: Plan, records: Records) -> list[Block]:
    part = plan.natural
    rows = []
    for eta in part.etas:
        arms = {method: eta_records(records, method, eta) for method in part.methods}
        every = [record for found in arms.values() for record in found]
        rate = throughput(records, eta)
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
    note = (
        f'{len(part.seeds)} seeds; age in versions, mean over the trained tokens; tokens/s: trained, per second of the '
        'virtual clock; mismatch and drift: root mean square of the two causes of the importance ratio, in nats; cost '
        "of the split: share of the updates' seconds that went into telling them apart."
    )
    differences = [
        (f'{one.label:g}', method, _difference(plan, one))
        for method in part.methods
        for one in compare_etas(plan, records, method)
    ]
    means = Table((*head, 'mismatch', 'drift', 'cost of the split'), rows)
    compared = Table(('eta', 'method', f'score minus eta {part.etas[0]:g}'), differences)
    return [Text(note), means, compared, *_variants(plan, records)]


def _variants(plan: Plan, records: Records) -> list[Block]:
    part = plan.natural
    rows = []
    for variant in ('', *part.variants):
        arms = eta_records(records, part.variant_method, part.variant_eta, variant)
        names = ('age', 'oldest', 'tokens_per_second', 'mismatch', 'drift')
        rows.append((variant or 'interrupted, cache recomputed', _mean(arms), *(_number(arms, name) for name in names)))
    head = ('variant', 'score', 'token age', 'oldest token', 'tokens/s', 'mismatch', 'drift')
    return [Text(f'### Ways to interrupt, {part.variant_method} at eta {part.variant_eta:g}'), Table(head, rows)]


def _rates(plan: Plan, records: Records) -> list[Block]:
    part, knees = plan.lock_step, find_rates(plan, records)
    methods = list(dict.fromkeys(part.rate_from.values()))
    means = {method: rate_means(plan, records, method) for method in methods}
    rows = [
        (f'{rate:g}', *(f'{means[method][rate]:.3f}' if rate in means[method] else '-' for method in methods))
        for rate in part.rates
    ]
    chosen = ', '.join(f'{method} {rate:g}' for method, rate in knees.items())
    note = (
        f'Mean score at lag {part.lags[0]} over the seeds {", ".join(map(str, part.knee_seeds))}. The knee, the '
        f'largest rate at most {part.knee_slack:g} below the best: {chosen or "not known yet"}.'
    )
    return [Text(note), Table(('learning rate', *methods), rows)]


def _pilot(plan: Plan, records: Records) -> list[Block]:
    spreads, count = pilot_spreads(plan, records), len(plan.lock_step.seeds)
    rows = [
        (
            name,
            f'{spread.deviation:.4f}',
            f'{smallest_difference(spread.deviation, count, plan.margins):.4f}',
            f'{spread.pairing.error_factor:.2f}' if spread.pairing else '-',
        )
        for name, spread in spreads.items()
    ]
    note = (
        f'Pilot of {len(plan.lock_step.pilot_seeds)} other seeds: the smallest difference that {count} seeds show with '
        f'power {plan.margins.power:g}; and by which factor common random numbers make the standard error of the '
        'difference smaller than seeds of their own would (below 1: larger).'
    )
    return [Text(note), Table(('difference', 'SD over seeds', 'smallest difference', 'error smaller by'), rows)]


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
