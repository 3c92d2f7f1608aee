"""What the records of a study say: the knee of the learning rate, differences, slopes, throughput.

A seed is the unit. Nothing here reads a file.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from areal_jax.app.sweep.endpoints import Bounds, PairedDifference, Pairing, holm, paired_difference, pairing_gain
from areal_jax.studies.arm_records import Record, Records, by_seed, select
from areal_jax.studies.plan import Margins, Plan
from areal_jax.studies.stages import KNEE, LOCK_STEP, NATURAL, PILOT

WORSE, BETTER, EQUAL, UNDECIDED = 'worse', 'better', 'equal', 'not decided'


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An arm against another, paired by seed."""

    label: float  # lag or eta
    difference: PairedDifference | None  # None: no seed has both
    inner: Bounds | None  # the interval of two one-sided tests, of twice the error
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
    """Of a difference over seeds."""

    deviation: float  # standard deviation of the paired differences
    pairing: Pairing | None  # what common random numbers bought; None where it cannot be told


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
    """Every lag minus the first, of one method."""
    first, *others = plan.lock_step.lags
    base = lag_records(records, method, first, factor)
    return _compare({float(lag): (base, lag_records(records, method, lag, factor)) for lag in others})


def compare_methods(plan: Plan, records: Records, first: str, second: str) -> list[Comparison]:
    """The second method minus the first, at each lag."""
    at = lambda method, lag: lag_records(records, method, lag)
    return _compare({float(lag): (at(first, lag), at(second, lag)) for lag in plan.lock_step.lags})


def compare_etas(plan: Plan, records: Records, method: str) -> list[Comparison]:
    """Every eta minus the first, of one method."""
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
    return Comparison(label, difference, _student_bounds(differences, 0.9))


def _student_bounds(values: Sequence[float], confidence: float) -> Bounds | None:
    """Student's interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    half = stdtrit(len(values) - 1, 0.5 + confidence / 2) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return Bounds(mean - float(half), mean + float(half))


def smallest_difference(spread: float, seeds: int, margins: Margins) -> float:
    """The difference that a two-sided paired t-test of so many seeds finds with the plan's power.

    (t_(n-1, (1+confidence)/2) + t_(n-1, power)) * SD / sqrt(n)
    """
    from scipy.special import stdtrit

    quantiles = stdtrit(seeds - 1, (1 + margins.confidence) / 2) + stdtrit(seeds - 1, margins.power)
    return float(quantiles) * spread / math.sqrt(seeds)


def pilot_spreads(plan: Plan, records: Records) -> dict[str, Spread]:
    """Over the pilot's seeds: of what a lag costs each method, and of the difference of the first two methods."""
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
    return (statistics.fmean(slopes), _student_bounds(slopes, 0.95)) if slopes else None


def throughput(records: Records, eta: float) -> float | None:
    """Trained tokens a second, mean over the arms of an eta."""
    found = [record.tokens_per_second for record in select(records, stage=NATURAL, eta=eta, variant='')]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def _score(record: Record) -> float | None:
    return record.score
