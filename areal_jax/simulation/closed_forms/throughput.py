"""Pace of a run as the slowest of its stations, the best split of devices, and what new weights cost engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


def slowest(seconds: Mapping[str, float]) -> str:
    """The station that sets the pace, of those that take so many seconds for an update; the first of equal ones."""
    return max(seconds, key=lambda station: seconds[station])


def idle_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of each station, where the slowest is always busy: 1 - its load."""
    period_s = max(seconds.values())
    return {station: 1 - taken_s / period_s for station, taken_s in seconds.items()}


@dataclasses.dataclass(frozen=True)
class Split:
    """Of n devices."""

    generating: float
    training: float
    period_s: float  # of an update


def best_split(devices: int, generation_s: float, train_s: float) -> Split:
    """Where both sides take equally long: x / n = W_g / (W_g + W_t), P = (W_g + W_t) / n.

    W_g and W_t are device-seconds of an update; neither side loses anything when it is cut.
    """
    total_s = generation_s + train_s
    generating = devices * generation_s / total_s
    return Split(generating, devices - generating, total_s / devices)


def best_whole_split(devices: int, generation_s: float, train_s: float) -> Split:
    """Of whole devices, at least one on each side; of two splits as fast the one with more devices that train."""
    splits = (
        Split(count, devices - count, max(generation_s / count, train_s / (devices - count)))
        for count in range(1, devices)
    )
    return min(splits, key=lambda split: split.period_s)


def shared_period_s(devices: int, generation_s: float, train_s: float, switch_s: float = 0.0) -> float:
    """Seconds an update where all devices generate, then all train: colocated and synchronous, without a tail."""
    return (generation_s + train_s) / devices + switch_s


def useful_share_of_interrupted(load_s: float, live_tokens: float, prefill_token_s: float, period_s: float) -> float:
    """Of an engine's time, where new weights interrupt it once a period: it loads them and rebuilds all its caches.

    With the caches kept, `live_tokens` is 0.
    """
    return 1 - (load_s + live_tokens * prefill_token_s) / period_s


def useful_share_of_waiting(answer_s: float, longest_rest: float, mean_rest: float, period_s: float) -> float:
    """Of an engine's time, where new weights wait for all its answers: 1 - g (E[max R] - E[R]) / P.

    Args:
      answer_s: g, the mean time of an answer.
      longest_rest, mean_rest: E[max R] and E[R] of what is left of the running answers, in mean answers
        (`group_moments.rests`).
    """
    return 1 - answer_s * (longest_rest - mean_rest) / period_s


def age_of_sawtooth(updates: int) -> float:
    """Versions that publication every so many updates adds to the mean age: (K - 1) / 2."""
    return (updates - 1) / 2


def stale_share(updates: int, allowance: int) -> float:
    """Of the groups, dropped as too old where every K-th version is published: A / (K + A), for an allowance A < K.

    Inferred from ledgers of marin (issue 8955): 32 of 96 groups with K = 2, A = 1.
    """
    return allowance / (updates + allowance)
