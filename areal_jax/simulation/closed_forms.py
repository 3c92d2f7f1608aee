"""Closed forms: the pace of a run by its slowest station, the best split of devices, the cost of new weights, ages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence


def erlang_c(servers: int, load: float) -> float:
    """The probability that a job waits in M/M/c; `load` is rho, the share of all servers that is busy, below 1."""
    offered = servers * load
    last = offered**servers / math.factorial(servers) / (1 - load)
    return last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)


def wait_s(servers: int, load: float, service_s: float) -> float:
    """Mean wait in M/M/c, with exponential service times of mean `service_s`."""
    return erlang_c(servers, load) * service_s / (servers * (1 - load))


def wait_for_one_s(load: float, service_s: float, variation: float) -> float:
    """Mean wait in M/G/1, lambda E[s^2] / (2 (1 - rho)).

    `variation` is the standard deviation of the service over its mean: 0 is M/D/1, 1 is M/M/1.
    """
    return load * service_s * (1 + variation**2) / (2 * (1 - load))


def longest_exponential(n: int) -> float:
    """E[max] of n exponential times over their mean: the harmonic number H_n."""
    return math.fsum(1 / k for k in range(1, n + 1))


def longest_uniform(n: int) -> float:
    """E[max] of n uniform numbers in [0, 1]."""
    return n / (n + 1)


def longest_lognormal(n: int, sigma: float) -> float:
    """E[max] of n lognormal lengths over their mean, asymptotically and loosely: exp(sigma sqrt(2 ln n) - sigma^2 / 2).

    For lengths that are not cut off; a cap bounds it by cap / mean. `group_moments` has exact values.
    """
    return math.exp(sigma * math.sqrt(2 * math.log(n)) - sigma**2 / 2)


def slowest(seconds: Mapping[str, float]) -> str:
    """The station that sets the pace: it takes the most seconds for an update. Of equal ones, the first."""
    return max(seconds, key=lambda station: seconds[station])


def idle_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The idle share of each station, 1 - its load, if the slowest is always busy."""
    period_s = max(seconds.values())
    return {station: 1 - taken_s / period_s for station, taken_s in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Split:
    """A split of n devices between generation and training."""

    generating: float
    training: float
    period_s: float  # of an update


def best_split(devices: int, generation_s: float, train_s: float) -> Split:
    """The split with which both sides take equally long: x / n = W_g / (W_g + W_t), P = (W_g + W_t) / n.

    W_g and W_t are device-seconds of an update; both sides are assumed to scale perfectly over devices.
    """
    total_s = generation_s + train_s
    generating = devices * generation_s / total_s
    return Split(generating, devices - generating, total_s / devices)


def best_whole_split(devices: int, generation_s: float, train_s: float) -> Split:
    """The best split into whole devices, at least one a side; of equally fast splits, the one that trains on more."""
    splits = (
        Split(count, devices - count, max(generation_s / count, train_s / (devices - count)))
        for count in range(1, devices)
    )
    return min(splits, key=lambda split: split.period_s)


def shared_period_s(devices: int, generation_s: float, train_s: float, switch_s: float = 0.0) -> float:
    """Seconds an update if all devices generate, then all train: colocated and synchronous, without a tail."""
    return (generation_s + train_s) / devices + switch_s


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


def saturating_eta(generation_s: float, train_s: float, publish_s: float) -> int:
    """The least eta with which the learner never waits: ceil((G + p) / T)."""
    return math.ceil((generation_s + publish_s) / train_s)


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


def mean_floor(low: float, high: float) -> float:
    """The mean of floor(x) over x in [low, high); both bounds are at least 0."""
    return (_sum_of_floor(high) - _sum_of_floor(low)) / (high - low)


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


def fluid_in_queue_staleness(capacity: float, rho: float) -> float:
    """In-queue staleness, exact for groups that come evenly and faster than they are used, rho > 1.

    The mean of floor(x) + 1 over x from (q - 1) / rho to q / rho.
    """
    return 1 + mean_floor((capacity - 1) / rho, capacity / rho)


def token_age(slots: float, batch: float, capacity: float, rho: float, token_tail: float) -> float:
    """The mean age of a token: `staleness` with kappa = (E[L L_max] - E[L^2] / 2) / E[L]^2 in place of M_tail."""
    return staleness(slots, batch, capacity, rho, token_tail)


def relative_period(trainer_rate: float, rollout_rate: float, rho: float) -> float:
    """Seconds an update times devices, up to a factor: (1 / c_T + rho / c_R) / min(1, rho).

    c_T and c_R are the tokens that one device trains and generates a second; devices are split so that the rollout rate
    is rho times the trainer rate.
    """
    return (1 / trainer_rate + rho / rollout_rate) / min(1.0, rho)
