"""Runs under the staleness gate, N <= (version + eta + 1) B: periods and ages where every batch takes equally long.

G seconds generate a batch where slots are free, T train on it, p pass from an update to the gate's knowledge of it.
Derived from the rule (arXiv 2505.24298, equation 3) and checked event by event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def period_s(generation_s: float, train_s: float, publish_s: float, eta: float, work_s: float = 0.0) -> float:
    """Seconds an update: max(T, W, (G + T + p) / (eta + 1)), exact where G is constant, else a lower bound.

    `work_s` is W, what the engines need for the tokens of a batch with all slots full; `eta` may be inf.
    """
    return max(train_s, work_s, (generation_s + train_s + publish_s) / (eta + 1))


def saturating_eta(generation_s: float, train_s: float, publish_s: float) -> int:
    """The least eta with which the learner never waits: ceil((G + p) / T)."""
    return math.ceil((generation_s + publish_s) / train_s)


def update_ends_s(generation_s: Sequence[float], train_s: float, publish_s: float, eta: int) -> list[float]:
    """When each update ends: e_k = max(e_{k-1}, e_{k-eta-1} + p + G_k) + T, with time 0 in place of what is before it.

    `generation_s` is that of each batch; slots are never short.
    """
    ends: list[float] = []
    for k, generated_s in enumerate(generation_s):
        admitted_s = ends[k - eta - 1] + publish_s if k > eta else 0.0
        ends.append(max(ends[-1] if ends else 0.0, admitted_s + generated_s) + train_s)
    return ends


def group_age(eta: int, batch: int) -> int:
    """Versions from the admission of a group to its training, in batch 0, 1, ...: eta, and less in the first batches.

    Also where generation limits the pace. With long tails a straggler may be older: the rule bounds counts, not ages.
    """
    return min(batch, eta)


def mean_token_age(eta: int, generation_s: float, train_s: float) -> float:
    """In versions, of tokens whose engine takes new weights at once, where the learner limits the pace.

    eta - the mean of floor(u G / T) over u in [0, 1), which is eta - (g - 1) / 2 for a whole g = G / T.
    """
    ratio = generation_s / train_s
    return eta - _sum_of_floor(ratio) / ratio


def mean_floor(low: float, high: float) -> float:
    """The mean of floor(x) over x in [low, high), which are not negative."""
    return (_sum_of_floor(high) - _sum_of_floor(low)) / (high - low)


def _sum_of_floor(end: float) -> float:
    """The integral of floor(x) from 0 to `end`."""
    whole = math.floor(end)
    return whole * (whole - 1) / 2 + whole * (end - whole)
