"""Confidence intervals: of shares, of means of clustered scores, of paired gains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; `low` and `high` are None if n is too small for one."""

    mean: float
    low: float | None
    high: float | None
    n: int  # of independent units: answers, or problems where answers of a problem form a cluster


def wilson_interval(successes: int, n: int) -> Interval:
    """Interval of a share of independent successes; never leaves [0, 1] and is not empty at 0 or n successes.

        center = (p + z²/2n) / (1 + z²/n),   half = z √(p(1-p)/n + z²/4n²) / (1 + z²/n),   p = successes / n

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927) 209-212.

    Raises:
        ValueError: n < 1, or successes outside 0..n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f'{successes} successes of n={n}: need n >= 1 and 0 <= successes <= n')
    return Interval(successes / n, *_wilson_ends(successes / n, n, NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)), n)


def _wilson_ends(share: float, n: float, z: float) -> tuple[float, float]:
    shrink = 1 + z * z / n
    center = (share + z * z / (2 * n)) / shrink
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / shrink
    # At shares of 0 and 1 an end is the share itself, which rounding must not pass.
    return min(share, max(0.0, center - half)), max(share, min(1.0, center + half))


def mean_interval(scores: Sequence[float]) -> Interval:
    """Interval of the mean of one score per problem: Wilson if every score is 0 or 1, else `score_interval`.

    Raises:
        ValueError: no scores.
    """
    if len(scores) and all(score in (0, 1) for score in scores):
        return wilson_interval(int(sum(scores)), len(scores))
    return score_interval([[score] for score in scores])


def score_interval(clusters: Sequence[Sequence[float]]) -> Interval:
    """`clustered_share_interval` if every score is in [0, 1], else `cluster_interval`, as for penalties below 0.

    Raises:
        ValueError: no scores.
    """
    is_share = all(0 <= score <= 1 for cluster in clusters for score in cluster)
    return clustered_share_interval(clusters) if is_share else cluster_interval(clusters)


def cluster_interval(clusters: Sequence[Sequence[float]]) -> Interval:
    """Interval of the mean of all scores, where only the clusters (problems) are independent of each other.

        m = Σ_c Σ_i s_ci / N,   SE² = k/(k-1) Σ_c (Σ_i (s_ci - m))² / N²,   m ± t_{k-1} SE

    with k clusters and N scores. For clusters of one score this is Student's interval of the mean. Ratio estimator of
    W. G. Cochran, "Sampling Techniques" (3rd ed. 1977), section 3.12; as clustered standard errors for evaluations in
    E. Miller, "Adding Error Bars to Evals", arXiv:2411.00640.

    Raises:
        ValueError: no scores.
    """
    sizes = np.array([len(cluster) for cluster in clusters], np.float64)
    return ratio_interval(np.array([math.fsum(cluster) for cluster in clusters]), sizes)


def clustered_share_interval(clusters: Sequence[Sequence[float]]) -> Interval:
    """Interval of the mean of scores in [0, 1] if only the clusters are independent; never leaves [0, 1].

    Wilson's interval with the effective number of scores in place of n, and the quantile of Student's t for k clusters:

        n' = min(N, m (1 - m) / SE²),   SE as in `cluster_interval`;   n' = k where no cluster differs from another

    Student's interval, m ± t SE, passes 0 or 1 if few scores differ from 0 or 1, and is empty if none does. N. Dean
    and M. Pagano, "Evaluating Confidence Interval Methods for Binomial Proportions in Clustered Surveys", Journal of
    Survey Statistics and Methodology 3 (2015) 484-503.

    Raises:
        ValueError: no scores, or one outside [0, 1].
    """
    if wrong := [score for cluster in clusters for score in cluster if not 0 <= score <= 1]:
        raise ValueError(f'a score is {wrong[0]}, and a share is a mean of scores in [0, 1]: use cluster_interval')
    student = cluster_interval(clusters)
    if student.high is None:
        return student
    mean, quantile = student.mean, t_quantile(student.n - 1)
    error, scores = (student.high - mean) / quantile, sum(map(len, clusters))
    effective = min(scores, mean * (1 - mean) / error**2) if error else student.n
    return Interval(mean, *_wilson_ends(mean, effective, quantile), student.n)


def ratio_interval(sums: np.ndarray, sizes: np.ndarray) -> Interval:
    """The interval of `cluster_interval`, from the sum and the number of the scores of each cluster: [clusters].

    Raises:
        ValueError: no scores.
    """
    total = float(sizes.sum())
    if not total:
        raise ValueError(f'{len(sizes)} clusters hold no score; a mean needs one')
    mean, k = math.fsum(sums) / total, int((sizes > 0).sum())
    if k < 2:
        return Interval(mean, None, None, k)
    residuals = sums - sizes * mean
    half = t_quantile(k - 1) * math.sqrt(k / (k - 1) * float(residuals @ residuals)) / total
    return Interval(mean, mean - half, mean + half, k)


def paired_interval(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Interval:
    """Interval of the gain on the same problems: Student's t on the differences of the problems' mean scores.

        d_p = mean_i after_pi - mean_i before_pi,   mean(d) ± t_{n-1} std(d) / √n

    Pairing removes the spread of difficulty between problems (E. Miller, arXiv:2411.00640).

    Raises:
        ValueError: different numbers of problems, none at all, or a problem without a score.
    """
    if len(before) != len(after):
        raise ValueError(
            f'{len(before)} problems before and {len(after)} after cannot be paired: use the same problems'
        )
    if not all(len(scores) for scores in (*before, *after)):
        raise ValueError('a problem without a score has no mean; leave it out before and after')
    differences = [float(np.mean(new) - np.mean(scores)) for scores, new in zip(before, after, strict=True)]
    return cluster_interval([[difference] for difference in differences])


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Half width of the central interval of Student's t in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + confidence / 2))
