"""The plan of a study, its comparisons and criteria, which a config file fixes before any arm has run.

`get_study()` of the file returns {'full': Plan, 'quick': Plan}. Overrides are {'section.field': value}, on top of
get_config() of the same file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TypeAlias

from areal_jax.config.fields import Value

Overrides: TypeAlias = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class LockStep:
    """Arms whose batches all have one age: they measure the effect of a given age on learning."""

    common: Overrides  # of all arms of this part
    methods: Mapping[str, Overrides]  # by name, the compared losses
    rate_from: Mapping[str, str]  # method -> the method whose sweep of the learning rate gives its rate
    lags: tuple[int, ...]  # versions, the first is the baseline
    rates: tuple[float, ...]  # ascending, of the sweep at the first lag
    knee_slack: float  # the knee is the largest rate whose mean score is at most this far below the best
    knee_seeds: tuple[int, ...]
    seeds: tuple[int, ...]  # at the knee
    side_factors: tuple[float, ...]  # of the knee
    side_seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    pilot_lag: int


@dataclasses.dataclass(frozen=True)
class Natural:
    """Asynchronous runs under the virtual clock: they measure the ages that an eta causes, and their effect."""

    common: Overrides
    methods: tuple[str, ...]  # of LockStep.methods
    etas: tuple[float, ...]  # the first is the baseline
    seeds: tuple[int, ...]
    variants: Mapping[str, Overrides]  # other ways to interrupt
    variant_eta: float
    variant_method: str
    jobs: int  # runs at a time


@dataclasses.dataclass(frozen=True)
class Bounds:
    """A range for a number, ends included."""

    low: float
    high: float

    def hold(self, value: float | None) -> bool:
        return value is not None and self.low <= value <= self.high


@dataclasses.dataclass(frozen=True)
class Controls:
    """Arms whose result is known beforehand."""

    known: Overrides  # set-up of the known curve, on top of LockStep.common
    known_method: str
    known_seeds: tuple[int, ...]
    known_bounds: Mapping[int, Bounds]  # lag -> share of right symbols over `known_window`, median of seeds
    known_window: tuple[int, int]  # first update, and the one after the last
    same_lag: int  # of the arm that runs twice, and of the arm with a learning rate of 0
    same_eta: float
    shuffled: Overrides  # of the run whose rewards belong to other answers
    shuffled_below: float  # score


@dataclasses.dataclass(frozen=True)
class Margins:
    """The margins that decide whether there is a difference. Scores are shares of right symbols."""

    score: float  # two scores are equal if the 90% interval of their difference is within +- this
    confidence: float  # of intervals of differences; Holm over the lags of a comparison
    power: float  # of the smallest difference that the seeds show
    slow: float  # throughput at the baseline eta is at most this share of the throughput at the next eta
    flat: float  # throughput beyond `flat_from` changes by at most this share
    flat_from: float  # eta


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole study."""

    lock_step: LockStep
    natural: Natural
    controls: Controls
    margins: Margins
    jobs: int  # programs of arms at a time

    def as_dict(self) -> dict[str, object]:
        """The plan as plain values, as in study.json."""
        return json.loads(json.dumps(_plain(self), sort_keys=True))

    def digest(self) -> str:
        """The SHA-256 of the plan, equal for equal plans."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    """Turns dataclasses, mappings and tuples into dicts and lists, and numbers that are not finite into text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
