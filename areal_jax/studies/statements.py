"""The sentences that a study decides: its controls, and the paper's findings at this scale. docs/study.md has them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from areal_jax.studies import page
from areal_jax.studies.arm_records import Record, Records
from areal_jax.studies.page import BETTER, EQUAL, UNDECIDED, WORSE, Comparison
from areal_jax.studies.plan import Plan
from areal_jax.studies.stages import CONTROLS, KNOWN, SAME_A, SAME_B, SHUFFLED, ZERO_RATE

HELD, FAILED, MISSING = 'held', 'failed', 'not finished'
REPRODUCED, NOT_REPRODUCED = 'reproduced', 'not reproduced'
_OPPOSITE = {WORSE: (EQUAL, BETTER), BETTER: (EQUAL, WORSE), EQUAL: (WORSE, BETTER)}
_WORSE_AT, _EQUAL_UP_TO, _BETTER_AT = (4, 8), 8, (4, 8, 16)  # lags of the statements


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A sentence with what became of it."""

    text: str
    outcome: str
    because: str


def check_controls(plan: Plan, records: Records) -> list[Outcome]:
    """Failed ones first."""
    own = [record for record in records if record.factors.stage == CONTROLS]
    found = [*_known(plan, own), _zero_rate(plan, own), *_same(own), _shuffled(plan, own)]
    return sorted(found, key=lambda control: (FAILED, MISSING, HELD).index(control.outcome))


def decide_statements(plan: Plan, records: Records) -> list[Outcome]:
    """The statements of the plan, in their order."""
    lags = plan.lock_step.lags
    plain, decoupled = (page.compare_lags(plan, records, method) for method in ('plain', 'decoupled'))
    between = page.compare_methods(plan, records, 'plain', 'decoupled')
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
    rates = {eta: page.throughput(records, eta) for eta in (first, second, margins.flat_from, etas[-1])}
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
    """Finished ones of a control; a run needs no score for its weights."""
    has = lambda record: all(getattr(record.factors, name) == value for name, value in wanted.items())
    return [
        record for record in records if record.factors.variant == variant and record.state.is_finished and has(record)
    ]


def _outcome(holds: Sequence[bool], wanted: int) -> str:
    if not all(holds):
        return FAILED
    return HELD if len(holds) >= wanted else MISSING


def _lags(lags: Sequence[float]) -> str:
    """'lag 4', 'lags 4 and 8'."""
    texts = [f'{lag:g}' for lag in lags]
    joined = ' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1] if texts else '')))
    return f'lag{"s" if len(texts) > 1 else ""} {joined}'
