"""What a sweep compares between its arms: curves over updates, tokens and seconds, and one number per endpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from areal_jax import files
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, number

LAST_SHARE = 0.1  # of the updates, over which the last reward is a mean


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity at some updates of a run; all tuples have the same length."""

    updates: tuple[float, ...]  # policy versions
    tokens: tuple[float, ...]  # trained until then
    seconds: tuple[float, ...]  # of the clock until then
    values: tuple[float, ...]

    def axis(self, name: str) -> tuple[float, ...]:
        """One of updates, tokens, seconds."""
        return {'updates': self.updates, 'tokens': self.tokens, 'seconds': self.seconds}[name]


@dataclasses.dataclass(frozen=True)
class ArmRecord:
    """What an arm left: its curves, and its report.json (empty where it has not finished)."""

    reward: Curve  # mean of each batch
    evaluation: Curve  # held-out score; before training, beside it, after it
    tokens: float  # trained
    seconds: float  # of the clock, to the last update
    report: files.JsonObject
    metrics: Sequence[Line]


@dataclasses.dataclass(frozen=True)
class Horizon:
    """How far every finished arm came: areas end there, so that they are over the same range."""

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
    """The record of one arm, from the lines of metrics.jsonl and from report.json."""
    tokens = list(itertools.accumulate(number(line, names.TOKENS_TRAINED) or 0.0 for line in metrics))
    seconds = [number(line, names.TIME) or 0.0 for line in metrics]
    rewards = [number(line, names.REWARD_MEAN) for line in metrics]
    rows = [
        (float(update), trained, second, reward)
        for update, (trained, second, reward) in enumerate(zip(tokens, seconds, rewards, strict=True), start=1)
        if reward is not None
    ]
    at = {0: (0.0, 0.0)} | dict(enumerate(zip(tokens, seconds, strict=True), start=1))
    scored = [(version, *at[version], score) for version, score in _scores(report) if version in at]
    return ArmRecord(
        _curve(rows), _curve(scored), tokens[-1] if tokens else 0.0, seconds[-1] if seconds else 0.0, report, metrics
    )


def common_horizon(records: Sequence[ArmRecord]) -> Horizon:
    """The least tokens and seconds of the finished arms; zeros without any."""
    return Horizon(
        min((record.tokens for record in records), default=0.0),
        min((record.seconds for record in records), default=0.0),
    )


def mean_of_steps(ends: Sequence[float], values: Sequence[float], until: float) -> float | None:
    """Mean over [0, until] of the function that is values[k] on (ends[k - 1], ends[k]]; None for nothing to average.

    The last value holds on where `until` is beyond the last end.
    """
    if not values or until <= 0:
        return None
    area, before = 0.0, 0.0
    for index, (end, value) in enumerate(zip(ends, values, strict=True)):
        stop = until if index == len(values) - 1 else min(end, until)
        area += max(0.0, stop - before) * value
        before = max(before, stop)
    return area / until


def mean_of_line(places: Sequence[float], values: Sequence[float], until: float) -> float | None:
    """Mean over [first place, until] of the straight lines through the points; None for fewer than two points."""
    if len(values) < 2 or until <= places[0]:
        return None
    area = 0.0
    for (left, low), (right, high) in itertools.pairwise(zip(places, values, strict=True)):
        stop = min(right, until)
        if stop > left:
            area += (stop - left) * (low + (low + (high - low) * (stop - left) / (right - left))) / 2
    return area / (min(until, places[-1]) - places[0])


def endpoint_values(record: ArmRecord, horizon: Horizon) -> dict[str, float]:
    """Those endpoints of a finished arm that it has."""
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


def _token_age(record: ArmRecord, horizon: Horizon) -> float | None:
    return record.report.get('token_age', {}).get('mean')


def _mean_of_evaluations(axis: str) -> Callable[[ArmRecord, Horizon], float | None]:
    def read(record: ArmRecord, horizon: Horizon) -> float | None:
        if len(record.evaluation.values) < 3:
            return None  # only before and after: no curve
        until = horizon.tokens if axis == 'tokens' else horizon.seconds
        return mean_of_line(record.evaluation.axis(axis), record.evaluation.values, until)

    return read


def _scores(report: files.JsonObject) -> list[tuple[int, float]]:
    """(version, held-out score), sampled answers where there are any, else greedy; ends included."""
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
    Endpoint('token_age', 'mean age of the trained tokens, in versions', _token_age, is_outcome=False),
    Endpoint('tokens', 'trained', lambda record, horizon: record.tokens, is_outcome=False),
    Endpoint('seconds', 'of the clock, to the last update', lambda record, horizon: record.seconds, is_outcome=False),
)
