"""What a model scores on a set of problems: pass@k, maj@k, and intervals by bootstrap over the problems.

Numbers only: nothing here knows of prompts, engines or files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from areal_jax.report.statistics import CONFIDENCE, Interval

RESAMPLES = 2000  # of the bootstrap
_STREAM = 0xB0075  # second half of the Philox key: keeps the resamples apart from other uses of a seed


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """The expected best reward of k answers, estimated without bias from the n >= k answers to one problem.

        pass@k = Σᵢ r₍ᵢ₎ C(i-1, k-1) / C(n, k),   r₍₁₎ <= ... <= r₍ₙ₎

    is the mean of the best reward over all subsets of k answers. For rewards of 0 and 1, c of them 1, it equals
    1 - C(n-c, k) / C(n, k), Eq. 1 of Chen et al., "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374. pass@1 is the mean.

    Raises:
        ValueError: k outside 1..n.
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f'pass@{k} needs at least {k} answers, there are {len(rewards)}')
    return math.fsum(reward * weight for reward, weight in zip(sorted(rewards), _shares(len(rewards), k), strict=True))


def majority_score(answers: Sequence[str], rewards: Sequence[float]) -> float:
    """The expected reward of the answer that most of the `answers` agree on; each of n tied answers counts 1/n.

    Equal answers may have different rewards, for example if one of them was cut off: the mean of theirs counts.

    Raises:
        ValueError: no answers.
    """
    if not answers:
        raise ValueError('a vote needs at least one answer')
    votes: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        votes.setdefault(answer, []).append(reward)
    most = max(map(len, votes.values()))
    tied = [math.fsum(found) / most for found in votes.values() if len(found) == most]
    return math.fsum(tied) / len(tied)


def sizes_of_k(samples: int) -> list[int]:
    """The k of pass@k that `samples` answers allow: 1, 2, 4, ... and `samples` itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples else []


def bootstrap_intervals(scores: np.ndarray, seed: int, resamples: int = RESAMPLES) -> list[Interval]:
    """The mean of each column with its percentile interval; rows are problems, which are drawn with replacement.

    All columns are resampled together. B. Efron and R. Tibshirani, "An Introduction to the Bootstrap" (1993), chapter
    13. A single problem has no interval. Takes O(resamples * problems) time and O(problems) memory; 100,000 problems
    take a few seconds.

    Args:
      scores: float64 [problems, columns].

    Raises:
        ValueError: no problem.
    """
    n = len(scores)
    if not n:
        raise ValueError('no problem was scored; a mean needs one')
    means = scores.mean(axis=0)
    if n == 1:
        return [Interval(float(mean), None, None, n) for mean in means]
    # raw Philox output is the same in every version of numpy; the bias of the remainder is below n / 2^64
    noise = np.random.Philox(key=np.array([seed % 2**64, _STREAM], np.uint64))
    resampled = np.empty((resamples, scores.shape[1]))
    for row in resampled:
        drawn = (noise.random_raw(n) % np.uint64(n)).astype(np.int64)
        row[:] = np.bincount(drawn, minlength=n) @ scores / n
    tail = (1 - CONFIDENCE) / 2
    lows, highs = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return [
        Interval(float(mean), float(low), float(high), n) for mean, low, high in zip(means, lows, highs, strict=True)
    ]


@functools.cache
def _shares(n: int, k: int) -> tuple[float, ...]:
    """Of all subsets of k out of n, the share whose last element is i, for i = 1..n."""
    return tuple(math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1))
