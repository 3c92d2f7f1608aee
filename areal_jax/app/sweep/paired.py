"""Statistics of arms that share seeds: paired differences, corrections for several arms, what the pairing buys.

A seed is the unit: the runs of one seed have prompts, initial weights and sampling noise in common, so the difference
between two arms is taken seed by seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from areal_jax.report.statistics import CONFIDENCE, cluster_interval

LEAST_R = 0.3  # below it, the page says that pairing buys nothing
BOOTSTRAP_SEEDS = 5  # with fewer, a bootstrap interval is hardly more than the range of the differences
_RESAMPLES = 9999
_SAME = 1 - 1e-12  # from here on, differences are equal but for rounding
_CORRELATION_SEEDS = 3  # with fewer, the differences say nothing about a correlation


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Ends of a 95% interval."""

    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Pairing:
    """What common random numbers buy, from n seeds.

        r = 2 cov(a, b) / (var a + var b),   var(b - a) = (var a + var b) (1 - r)

    r is Pearson's correlation where the two variances agree; in this form the second equation is exact.
    """

    n: int
    r: float
    paired_error: float  # standard error of the mean of the differences
    unpaired_error: float  # the same for arms with seeds of their own, as many each

    @property
    def seeds_factor(self) -> float:
        """1 / (1 - r): how many times as many seeds arms without common random numbers need."""
        return 1 / (1 - self.r) if self.r < _SAME else math.inf

    @property
    def error_factor(self) -> float:
        """1 / sqrt(1 - r): by which factor the standard error of a difference is smaller than without pairing."""
        return math.sqrt(self.seeds_factor)


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Second arm minus first over the seeds that both have; None where there are too few seeds."""

    n: int  # seeds
    mean: float
    t: Bounds | None  # Student's
    bootstrap: Bounds | None  # bias-corrected and accelerated
    p: float | None  # two-sided, Student's t
    pairing: Pairing | None


def paired_difference(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compares two arms; the values at one position are of one seed.

        d_s = second_s - first_s,   t = mean(d) sqrt(n) / std(d)

    Raises ValueError for no seeds, or different numbers of them.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f'{len(first)} and {len(second)} seeds cannot be paired: give both values of each seed')
    differences = [b - a for a, b in zip(first, second, strict=True)]
    interval = cluster_interval([[difference] for difference in differences])
    bounds = None if interval.low is None or interval.high is None else Bounds(interval.low, interval.high)
    return PairedDifference(
        n=len(differences),
        mean=interval.mean,
        t=bounds,
        bootstrap=bootstrap_bounds(differences),
        p=t_probability(differences),
        pairing=pairing_gain(first, second),
    )


def t_probability(differences: Sequence[float]) -> float | None:
    """Two-sided p of Student's test that the mean difference is 0; None for fewer than 2 differences.

    Differences that are all the same have p 1 where they are 0, and p 0 elsewhere.
    """
    n = len(differences)
    if n < 2:
        return None
    mean, spread = math.fsum(differences) / n, float(np.std(differences, ddof=1))
    if _is_constant(differences):
        return 0.0 if differences[0] else 1.0
    from scipy.special import stdtr

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
    """What pairing buys for these arms; None for fewer than 3 seeds, and where no value differs between seeds."""
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
