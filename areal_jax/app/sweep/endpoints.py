"""The numbers by which arms are compared, and the comparison of arms in pairs of equal seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from areal_jax import files
from areal_jax.report.statistics import CONFIDENCE, t_quantile
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number

LAST_SHARE = 0.1  # of the updates; the last reward is the mean over them


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity at some updates of a run; all tuples have the same length."""

    updates: tuple[float, ...]  # policy versions
    tokens: tuple[float, ...]  # trained until then
    seconds: tuple[float, ...]  # of the clock until then
    values: tuple[float, ...]

    def axis(self, name: str) -> tuple[float, ...]:
        """Returns the values of one axis: updates, tokens or seconds."""
        return {'updates': self.updates, 'tokens': self.tokens, 'seconds': self.seconds}[name]


@dataclasses.dataclass(frozen=True)
class ArmRecord:
    """The results of an arm: its curves, and its report.json (empty if it has not finished)."""

    reward: Curve  # mean of each batch
    evaluation: Curve  # held-out score before, during and after training
    age: Curve  # mean age of the trained tokens of each batch, in versions
    tokens: float  # trained
    seconds: float  # of the clock, to the last update
    report: files.JsonObject
    metrics: Sequence[Line]


@dataclasses.dataclass(frozen=True)
class Horizon:
    """The progress that every finished arm reached: areas end there, so that all cover the same range."""

    tokens: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """One number of a finished arm."""

    name: str  # a column of the table
    meaning: str
    read: Callable[[ArmRecord, Horizon], float | None]
    is_outcome: bool = True  # compared between arms; the others describe an arm


Values: TypeAlias = Mapping[str, float]  # by the name of an endpoint


def read_record(metrics: Sequence[Line], report: files.JsonObject) -> ArmRecord:
    """Returns the record of one arm, from the lines of metrics.jsonl and from report.json."""
    tokens = list(itertools.accumulate(number(line, names.TOKENS_TRAINED) or 0.0 for line in metrics))
    seconds = [number(line, names.TIME) or 0.0 for line in metrics]
    at = {0: (0.0, 0.0)} | dict(enumerate(zip(tokens, seconds, strict=True), start=1))

    def curve(metric: str) -> Curve:
        known = ((update, number(line, metric)) for update, line in enumerate(metrics, start=1))
        return _curve([(update, *at[update], value) for update, value in known if value is not None])

    return ArmRecord(
        reward=curve(names.REWARD_MEAN),
        evaluation=_curve([(version, *at[version], score) for version, score in _scores(report) if version in at]),
        age=curve(names.TOKEN_AGE_MEAN),
        tokens=tokens[-1] if tokens else 0.0,
        seconds=seconds[-1] if seconds else 0.0,
        report=report,
        metrics=metrics,
    )


def common_horizon(records: Sequence[ArmRecord]) -> Horizon:
    """Returns the least tokens and seconds of the finished arms; zeros without a finished arm."""
    return Horizon(
        min((record.tokens for record in records), default=0.0),
        min((record.seconds for record in records), default=0.0),
    )


def mean_of_steps(ends: Sequence[float], values: Sequence[float], until: float) -> float | None:
    """Mean over [0, until] of the function that is values[k] on (ends[k - 1], ends[k]]; None for nothing to average.

    If `until` is beyond the last end, the last value continues.
    """
    if not values or until <= 0:
        return None
    stops = np.minimum([0.0, *ends[:-1], until], until)
    return float(np.diff(np.maximum.accumulate(stops)) @ np.asarray(values)) / until


def mean_of_line(places: Sequence[float], values: Sequence[float], until: float) -> float | None:
    """Mean over [first place, until] of the straight lines through the points; None for fewer than two points."""
    if len(values) < 2 or until <= places[0]:
        return None
    stops = np.minimum(places, until)
    heights = np.where(stops < places, np.interp(until, places, values), values)
    return float(np.trapezoid(heights, stops) / (stops[-1] - stops[0]))


def endpoint_values(record: ArmRecord, horizon: Horizon) -> dict[str, float]:
    """Returns the endpoints that a finished arm has, by name."""
    found = {endpoint.name: endpoint.read(record, horizon) for endpoint in ENDPOINTS}
    return {name: value for name, value in found.items() if value is not None}


def _last_reward(record: ArmRecord, horizon: Horizon) -> float | None:
    rewards = record.reward.values
    last = rewards[len(rewards) - max(1, int(len(rewards) * LAST_SHARE)) :]
    return sum(last) / len(last) if rewards else None


def _accuracy(kind: str) -> Callable[[ArmRecord, Horizon], float | None]:
    def read(record: ArmRecord, horizon: Horizon) -> float | None:
        accuracy = record.report.get('accuracy')
        after = accuracy[kind]['after'] if accuracy else None
        return after['mean'] if after else None

    return read


def _held_out_nll(record: ArmRecord, horizon: Horizon) -> float | None:
    measured = record.report.get('held_out_nll', {})
    return measured[max(measured, key=int)] if measured else None


def _of_report(section: str, key: str) -> Callable[[ArmRecord, Horizon], float | None]:
    return lambda record, horizon: (record.report.get(section) or {}).get(key)


def _mean_of_evaluations(axis: str) -> Callable[[ArmRecord, Horizon], float | None]:
    def read(record: ArmRecord, horizon: Horizon) -> float | None:
        if len(record.evaluation.values) < 3:
            return None  # only before and after: no curve
        until = horizon.tokens if axis == 'tokens' else horizon.seconds
        return mean_of_line(record.evaluation.axis(axis), record.evaluation.values, until)

    return read


def _scores(report: files.JsonObject) -> list[tuple[int, float]]:
    """Returns (version, held-out score), of sampled answers if there are any, else greedy; both ends included."""
    curve, ends = report.get('evaluation_curve') or [], report.get('evaluation_curve_ends')
    if not curve or not ends:
        return []
    kind = 'sampled' if any(row['sampled'] for row in curve) else 'greedy'
    between = {row['version']: row[kind] for row in curve}
    found = {0: ends[kind]['before'], report['steps']: ends[kind]['after']} | between
    return [(version, interval['mean']) for version, interval in sorted(found.items()) if interval]


def _curve(rows: Sequence[tuple[float, float, float, float]]) -> Curve:
    updates, tokens, seconds, values = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Curve(updates, tokens, seconds, values)


ENDPOINTS = (
    Endpoint('reward_last', 'mean reward over the last tenth of the updates', _last_reward),
    Endpoint(
        'reward_per_token',
        'area under the reward over trained tokens, by their number, up to the tokens that every arm trained',
        lambda record, horizon: mean_of_steps(record.reward.tokens, record.reward.values, horizon.tokens),
    ),
    Endpoint(
        'reward_per_second',
        'area under the reward over clock seconds, by their number, up to the time that every arm took',
        lambda record, horizon: mean_of_steps(record.reward.seconds, record.reward.values, horizon.seconds),
    ),
    Endpoint('accuracy_greedy', 'held-out score of greedy answers after training', _accuracy('greedy')),
    Endpoint('accuracy_sampled', 'held-out score of sampled answers after training', _accuracy('sampled')),
    Endpoint(
        'evaluation_per_token',
        'area under the held-out score over trained tokens, likewise',
        _mean_of_evaluations('tokens'),
    ),
    Endpoint(
        'evaluation_per_second',
        'area under the held-out score over clock seconds, likewise',
        _mean_of_evaluations('seconds'),
    ),
    Endpoint('held_out_nll', 'nats per held-out answer token (supervised training)', _held_out_nll),
    Endpoint('token_age', 'mean age of the trained tokens, in versions', _of_report('token_age', 'mean'), False),
    Endpoint('token_age_max', 'age of the oldest trained token', _of_report('token_age', 'max'), False),
    Endpoint(
        'tokens_per_second',
        'trained tokens by seconds of the clock, without evaluations',
        _of_report('throughput', 'train_tokens_per_second'),
    ),
    Endpoint('tokens', 'trained', lambda record, horizon: record.tokens, is_outcome=False),
    Endpoint('seconds', 'of the clock, to the last update', lambda record, horizon: record.seconds, is_outcome=False),
)


# Statistics of arms that share seeds: paired differences, corrections for several arms, the gain from pairing.
#
# A seed is the unit: the runs of one seed share prompts, initial weights and sampling noise, so the difference between
# two arms is taken seed by seed.


LEAST_R = 0.3  # below it, the page says that pairing buys nothing
BOOTSTRAP_SEEDS = 5  # with fewer, a bootstrap interval is hardly more than the range of the differences
_RESAMPLES = 9999
_SAME = 1 - 1e-12  # from this r on, differences are equal up to rounding
_CORRELATION_SEEDS = 3  # with fewer, the differences do not determine a correlation


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Ends of a 95% interval."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Pairing:
    """The gain from common random numbers, from n seeds.

        r = 2 cov(a, b) / (var a + var b),   var(b - a) = (var a + var b) (1 - r)

    r is Pearson's correlation if the two variances are equal; in this form the second equation is exact.
    """

    n: int
    r: float
    paired_error: float  # standard error of the mean of the differences
    unpaired_error: float  # the same for arms with different seeds, equally many each

    @property
    def seeds_factor(self) -> float:
        """1 / (1 - r): the factor by which arms without common random numbers need more seeds."""
        return 1 / (1 - self.r) if self.r < _SAME else math.inf

    @property
    def error_factor(self) -> float:
        """1 / sqrt(1 - r): the factor by which pairing reduces the standard error of a difference."""
        return math.sqrt(self.seeds_factor)


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Second arm minus first over the seeds that both have; None if there are too few seeds."""

    n: int  # seeds
    mean: float
    t: Bounds | None  # Student's
    bootstrap: Bounds | None  # bias-corrected and accelerated
    p: float | None  # two-sided, Student's t
    pairing: Pairing | None


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compares two arms; the values at one position belong to one seed.

        d_s = second_s - first_s,   t = mean(d) sqrt(n) / std(d)

    Raises ValueError for no seeds, or different numbers of them.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f'{len(first)} and {len(second)} seeds cannot be paired: give both values of each seed')
    differences = [b - a for a, b in zip(first, second, strict=True)]
    return PairedDifference(
        n=len(differences),
        mean=statistics.fmean(differences),
        t=student_bounds(differences),
        bootstrap=bootstrap_bounds(differences),
        p=t_probability(differences),
        pairing=pairing_gain(first, second),
    )


def student_bounds(values: Sequence[float], confidence: float = CONFIDENCE) -> Bounds | None:
    """Student's interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half = t_quantile(len(values) - 1, confidence) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Bounds(mean - half, mean + half)


def t_probability(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's test that the mean difference is 0; None for fewer than 2 differences.

    If all differences are equal, p is 1 if they are 0, and 0 otherwise.
    """
    n = len(differences)
    if n < 2:
        return None
    if _is_constant(differences):
        return 0.0 if differences[0] else 1.0
    from scipy.special import stdtr

    mean, spread = statistics.fmean(differences), float(np.std(differences, ddof=1))
    return float(2 * stdtr(n - 1, -abs(mean) * math.sqrt(n) / spread))


def bootstrap_bounds(differences: Sequence[float]) -> Bounds | None:
    """BCa interval of the mean, the same at every call; None for fewer than BOOTSTRAP_SEEDS differences.

    B. Efron, "Better Bootstrap Confidence Intervals", JASA 82 (1987) 171-185.
    """
    if len(differences) < BOOTSTRAP_SEEDS:
        return None
    if _is_constant(differences):
        return Bounds(differences[0], differences[0])
    from scipy.stats import bootstrap

    found = bootstrap(
        (np.asarray(differences),), np.mean, method='BCa', n_resamples=_RESAMPLES, confidence_level=CONFIDENCE,
        random_state=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    bounds = Bounds(float(found.low), float(found.high))
    return bounds if math.isfinite(bounds.low) and math.isfinite(bounds.high) else None


def pairing_gain(first: Sequence[float], second: Sequence[float]) -> Pairing | None:
    """Returns the gain from pairing these arms; None for fewer than 3 seeds, or if no value differs between seeds."""
    n = len(first)
    if n < _CORRELATION_SEEDS:
        return None
    separate = float(np.var(first, ddof=1) + np.var(second, ddof=1))
    together = float(np.var(np.subtract(second, first), ddof=1))
    if not np.ptp(first) and not np.ptp(second):
        return None
    return Pairing(n, 1 - together / separate, math.sqrt(together / n), math.sqrt(separate / n))


def holm(probabilities: Sequence[float]) -> list[float]:
    """p-values of several tests, raised so that any false rejection among them has at most the stated probability.

        p'_(i) = max over j <= i of min(1, (m - j + 1) p_(j)),   p_(1) <= ... <= p_(m)

    S. Holm, "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6 (1979) 65-70.
    """
    adjusted, largest = [0.0] * len(probabilities), 0.0
    order = sorted(range(len(probabilities)), key=lambda index: probabilities[index])
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * probabilities[index]))
        adjusted[index] = largest
    return adjusted


def describe_pairing(pairings: Sequence[Pairing]) -> str:
    """One sentence on all comparisons of one metric; '' without any."""
    if not pairings:
        return ''
    ordered = sorted(pairings, key=lambda pairing: pairing.r)
    least, most, middle = ordered[0], ordered[-1], ordered[len(ordered) // 2]
    seeds = min(pairing.n for pairing in pairings)
    span = f'{least.r:.2f}' if len(ordered) == 1 else f'{least.r:.2f} to {most.r:.2f}, median {middle.r:.2f}'
    few = '' if seeds >= 8 else f'; from {seeds} seeds r is rough: 8 or more make it reliable'
    if middle.r < LEAST_R:
        where = 'is' if len(ordered) == 1 else 'of which the median is'
        return f'Pairing buys nothing here: r {span}, {where} below {LEAST_R}{few}.'
    if math.isinf(middle.error_factor):
        return f'Pairing: r {span}; the difference is the same for every seed, so its standard error is 0{few}.'
    return (
        f'Pairing: r {span}; the standard error of a difference is {middle.error_factor:.3g} times smaller than with '
        f'seeds of its own for each arm, which would need 1/(1 - r) = {middle.seeds_factor:.3g} times as many seeds '
        f'for the same error{few}.'
    )


def _is_constant(differences: Sequence[float]) -> bool:
    return all(difference == differences[0] for difference in differences)
