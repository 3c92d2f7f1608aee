"""Closed forms: the pace of a run by its slowest station, the cost of new weights, ages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def idle_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The idle share of each station, 1 - its load, if the slowest is always busy."""
    period_s = max(seconds.values())
    return {station: 1 - taken_s / period_s for station, taken_s in seconds.items()}


def useful_share_of_interrupted(load_s: float, live_tokens: float, prefill_token_s: float, period_s: float) -> float:
    """The useful share of an engine's time if new weights interrupt it once a period.

    It then loads them and rebuilds all its caches; if the caches are kept, `live_tokens` is 0.
    """
    return 1 - (load_s + live_tokens * prefill_token_s) / period_s


def useful_share_of_waiting(answer_s: float, longest_rest: float, mean_rest: float, period_s: float) -> float:
    """The useful share of an engine's time if new weights wait for all its answers: 1 - g (E[max R] - E[R]) / P.

    Args:
      answer_s: g, the mean time of an answer.
      longest_rest, mean_rest: E[max R] and E[R] of the remaining lengths of the running answers, in mean lengths
        (`drawn_answers.rests`, which returns tokens).
    """
    return 1 - answer_s * (longest_rest - mean_rest) / period_s


def age_of_sawtooth(updates: int) -> float:
    """Versions that publication every K = `updates` updates adds to the mean age: (K - 1) / 2."""
    return (updates - 1) / 2


def stale_share(updates: int, allowance: int) -> float:
    """The share of groups dropped as too old if every K-th version is published: A / (K + A), for an allowance A < K.

    Inferred from ledgers of marin (issue 8955): 32 of 96 groups with K = 2, A = 1.
    """
    return allowance / (updates + allowance)


# Runs under the staleness gate, N <= (version + eta + 1) B: periods and ages if every batch takes equally long.
#
# A batch takes G seconds to generate if slots are free, and T to train; the gate learns of an update after p seconds.
# Derived from the rule (arXiv 2505.24298, equation 3) and checked event by event.


def period_s(generation_s: float, train_s: float, publish_s: float, eta: float, work_s: float = 0.0) -> float:
    """Seconds an update: max(T, W, (G + T + p) / (eta + 1)), exact if G is constant, else a lower bound.

    `work_s` is W, the engines' seconds for the tokens of a batch with all slots full; `eta` may be inf.
    """
    return max(train_s, work_s, (generation_s + train_s + publish_s) / (eta + 1))


def update_ends_s(generation_s: Sequence[float], train_s: float, publish_s: float, eta: int) -> list[float]:
    """The end of each update: e_k = max(e_{k-1}, e_{k-eta-1} + p + G_k) + T; terms before the start are 0.

    `generation_s` has the G of each batch; slots are never short.
    """
    ends: list[float] = []
    for k, generated_s in enumerate(generation_s):
        admitted_s = ends[k - eta - 1] + publish_s if k > eta else 0.0
        ends.append(max(ends[-1] if ends else 0.0, admitted_s + generated_s) + train_s)
    return ends


def group_age(eta: int, batch: int) -> int:
    """Versions from the admission of a group to its training, in batch 0, 1, ...: eta, and less in the first batches.

    True also if generation limits the pace. With long tails a straggler may be older: the rule bounds counts, not ages.
    """
    return min(batch, eta)


def mean_token_age(eta: int, generation_s: float, train_s: float) -> float:
    """The mean token age in versions if engines take new weights at once and the learner limits the pace.

    eta - the mean of floor(u G / T) over u in [0, 1), which is eta - (g - 1) / 2 for a whole g = G / T.
    """
    ratio = generation_s / train_s
    return eta - _sum_of_floor(ratio) / ratio


def _sum_of_floor(end: float) -> float:
    """The integral of floor(x) from 0 to `end`."""
    whole = math.floor(end)
    return whole * (whole - 1) / 2 + whole * (end - whole)


# Staleness without a gate: engines are always full, and a full queue drops its oldest groups.
#
# Formulas of 'Predicting and Controlling Staleness in Fully Asynchronous RL Training' (Applied Compute, 2026-07-03).
# Letters: C sampling slots, B trajectories of a batch, q capacity of the queue in batches, rho the rollout rate over
# the trainer rate, M_tail = E[L_max] / E[L] of a group (`group_moments`). Staleness is in versions, from the first
# token to training.


def pre_queue_staleness(slots: float, batch: float, tail: float, rho: float) -> float:
    """Staleness gained while a group is generated: C M_tail / (B max(1, rho))."""
    return slots * tail / (batch * max(1.0, rho))


def in_queue_staleness(capacity: float, rho: float) -> float:
    """Staleness gained while a group waits in the queue: rho if rho < 1, else (2 q + rho - 1) / (2 rho)."""
    return rho if rho < 1 else (2 * capacity + rho - 1) / (2 * rho)


def staleness(slots: float, batch: float, capacity: float, rho: float, tail: float) -> float:
    """The sum of pre-queue and in-queue staleness."""
    return pre_queue_staleness(slots, batch, tail, rho) + in_queue_staleness(capacity, rho)


def token_age(slots: float, batch: float, capacity: float, rho: float, token_tail: float) -> float:
    """The mean age of a token: `staleness` with kappa = (E[L L_max] - E[L^2] / 2) / E[L]^2 in place of M_tail."""
    return staleness(slots, batch, capacity, rho, token_tail)
